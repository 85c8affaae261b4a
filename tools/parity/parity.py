"""Makes a parity job: `bazel run //tools/parity -- --baseline REV --target nvidia/chunk_gdn/sm90 --output parity.pyz`.

The file holds the wheels of both revisions and the candidate's test file. `python3 parity.pyz --report DIR` on a
machine of the target's hardware measures both in turns, and fails if a case became slower or cannot be told. The
candidate is this checkout as it stands, the baseline a clean worktree of its revision with a Bazel output of its own;
both are built with one interpreter.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pack
import workspace


def git(root: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)


def commit(root: pathlib.Path, revision: str) -> str:
    found = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", revision + "^{commit}")
    if found.returncode:
        raise workspace.BuildError(f"the baseline {revision!r} is no revision of this repository")
    return found.stdout.strip()


@contextlib.contextmanager
def worktree(root: pathlib.Path, sha: str, folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A clean checkout of ``sha`` that git forgets afterwards."""
    added = git(root, "worktree", "add", "--detach", str(folder), sha)
    if added.returncode:
        raise workspace.BuildError(f"git worktree add failed:\n{added.stderr}")
    try:
        yield folder
    finally:
        git(root, "worktree", "remove", "--force", str(folder))


def baseline_wheel(root: pathlib.Path, sha: str, target: str, folder: pathlib.Path) -> pathlib.Path:
    """The wheel of ``sha``, moved to ``folder`` before its build is thrown away."""
    startup = (f"--output_base={folder / 'bazel'}",)
    with worktree(root, sha, folder / "checkout") as checkout:
        try:
            built = workspace.build(checkout, "//python:wheel", target, startup, ATREX_PYTHON=sys.executable)
            (wheel,) = built.glob("*.whl")
            kept = folder / wheel.name
            kept.write_bytes(wheel.read_bytes())
            return kept
        finally:
            if (checkout / "tools/bazelw").is_file():  # a server that outlives its output would be left behind
                subprocess.run([checkout / "tools/bazelw", *startup, "clean", "--expunge"], cwd=checkout)


def make(root: pathlib.Path, baseline: str, target: str, output: pathlib.Path) -> None:
    sha = commit(root, baseline)
    job = workspace.build(root, workspace.job_label(target), target)
    with tempfile.TemporaryDirectory(prefix="atrex-parity-") as folder:
        wheel = baseline_wheel(root, sha, target, pathlib.Path(folder))
        pack.with_baseline(job, wheel, sha, output)


def main() -> None:
    parser = argparse.ArgumentParser(prog="parity", description="Makes a job that compares two revisions.")
    parser.add_argument("--baseline", required=True, metavar="REV", help="revision to compare with")
    parser.add_argument("--target", required=True, help="<vendor>/<operator>/<arch> or fallback/<operator>")
    parser.add_argument("--output", required=True, type=pathlib.Path, help="the job to write")
    options = parser.parse_args()
    output = workspace.here(options.output)
    try:
        make(workspace.root(), options.baseline, options.target, output)
    except workspace.BuildError as error:
        sys.exit(f"parity: {error}")
    print(f"parity: python3 {output} --report DIR    on a machine of {options.target}")


if __name__ == "__main__":
    main()
