"""Holds the source tree to its house rules."""

import os
import sys
from pathlib import Path

from runfiles import Runfiles

import layout


def main() -> int:
    # Runfiles hold a link to the file in the source tree: globs would show neither empty folders nor what no package
    # lists, and those are what the rules are about. Hence `local` and `external` in BUILD.bazel.
    root = Path(os.path.realpath(Runfiles.Create().Rlocation(os.environ["MODULE_FILE"]))).parent
    found = layout.violations(root)
    for violation in found:
        print(violation)
    print(f"{len(layout.targets(root))} kernel targets in {root}, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
