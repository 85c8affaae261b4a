"""Children that end: by themselves, or with all they started when their time is over."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator


def stop(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@contextlib.contextmanager
def start(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A child in a process group of its own, which is gone when the context ends."""
    child = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield child
    finally:
        stop(child)


def run(command: list[str], *, env: dict[str, str], limit: float) -> str:
    """Runs to the end; returns "status N", or "a timeout ..."."""
    with start(command, env=env, stdin=subprocess.DEVNULL) as child:
        try:
            return f"status {child.wait(limit)}"
        except subprocess.TimeoutExpired:
            return f"a timeout after {limit:g} s"
