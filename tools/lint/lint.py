"""Lints the files that git tracks: `tools/bazelw run //tools/lint`, with `-- --fix` to mend what a tool can mend.

Not a test, so that the tests need neither Node nor git. ruff and clang-format come from the environment's locked
requirements, buildifier from the locked package.json beside this file; npm puts it below ~/.cache/atrex.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from runfiles import Runfiles

PYTHON = (".py", ".pyi")
CPLUSPLUS = (".cc", ".cu", ".cuh", ".h")
STARLARK = (".bazel", ".BUILD", ".bzl")


def tool(name: str) -> str:
    """A linter of the environment that runs this program, at its locked version."""
    path = shutil.which(name, path=sysconfig.get_path("scripts"))
    if path is None:
        sys.exit(f"lint: {name} is not in {sys.prefix}: unset ATREX_PYTHON, or install it there")
    return path


def buildifier() -> str:
    """buildifier, installed once for each version of the lock file."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("lint: npm is not on PATH, and buildifier is an npm package: install Node (Debian: apt install npm)")
    sources = [Path(Runfiles.Create().Rlocation(os.environ[name])) for name in ("PACKAGE", "PACKAGE_LOCK")]
    digest = hashlib.sha256(sources[1].read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "atrex", "lint", digest)
    program = folder / "node_modules/.bin/buildifier"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            shutil.copyfile(source, folder / source.name)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            sys.exit(f"lint: {' '.join(command)} failed")
    return str(program)


def commands(files: list[str], fix: bool) -> Iterator[tuple[str, list[str]]]:
    """A title and the command line of each linter."""

    def having(suffixes: tuple[str, ...]) -> list[str]:
        found = [file for file in files if file.endswith(suffixes)]
        if not found:
            sys.exit(f"lint: git tracks no file that ends with {' or '.join(suffixes)}: nothing was checked")
        return found

    ruff = tool("ruff")
    yield "ruff check", [ruff, "check", *(["--fix"] if fix else []), *having(PYTHON)]
    yield "ruff format", [ruff, "format", *([] if fix else ["--check", "--diff"]), *having(PYTHON)]
    yield "clang-format", [tool("clang-format"), *(["-i"] if fix else ["--dry-run", "-Werror"]), *having(CPLUSPLUS)]
    yield "buildifier", [buildifier(), "-mode=fix" if fix else "-mode=diff", "-lint=warn", *having(STARLARK)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="lint", description="Lints the files that git tracks.")
    parser.add_argument("--fix", action="store_true", help="mend what the tools can mend")
    fix = parser.parse_args().fix
    root = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if root is None:
        sys.exit("lint: run it with tools/bazelw run //tools/lint")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    files = [file for file in tracked.split("\0") if file and Path(root, file).is_file()]
    failed = []
    for title, command in commands(files, fix):
        if subprocess.run(command, cwd=root).returncode:
            failed.append(title)
        print(f"lint: {title}: {'FAILED' if title in failed else 'ok'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
