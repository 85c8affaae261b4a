"""The job: the gates of one operator target in one file, for a GPU machine with Python and torch."""
