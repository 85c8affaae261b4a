"""Installs the atrex wheel of a directory into a tree: install_wheel.py WHEEL_DIR TREE.

Named by distribution and not by path, so that pip checks the tags and writes no path of this build into the tree;
bytecode is checked by nothing, because a copy of the tree has other file times.
"""

import compileall
import py_compile
import subprocess
import sys


def main(wheel_dir: str, tree: str) -> None:
    pip = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += [
        "--no-cache-dir",
        "--no-deps",
        "--no-index",
        "--find-links",
        wheel_dir,
        "--no-compile",
        "--target",
        tree,
        "atrex",
    ]
    subprocess.run(pip, check=True)
    if not compileall.compile_dir(
        tree, quiet=1, stripdir=tree, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
    ):
        sys.exit("a file of the wheel does not compile, see above")


if __name__ == "__main__":
    main(*sys.argv[1:])
