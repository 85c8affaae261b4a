"""Builds the atrex wheel into a directory: build_wheel.py @arguments, see `parse`.

The same files give the same bytes: entries are sorted, and neither clock, umask, time zone nor the files' own times
and modes reach the archive. A wheel with a shared object gets the tags of the running interpreter and the oldest
manylinux tag that auditwheel grants; a wheel without one is py3-none-any.
"""

import argparse
import ast
import json
import os
import pathlib
import stat
import subprocess
import sys
import tempfile
import zipfile

import packaging.tags
from wheel.wheelfile import WheelFile

EPOCH = (1980, 1, 1, 0, 0, 0)  # the zip format starts here
KERNELS = "atrex/kernels/"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--out", required=True, help="directory for the wheel")
    parser.add_argument("--version-file", required=True, help="Python file that assigns __version__")
    parser.add_argument("--license", required=True, help="file for the dist-info folder")
    parser.add_argument(
        "--file",
        nargs=2,
        action="append",
        default=[],
        metavar=("ENTRY", "PATH"),
        help="a file and its name in the wheel",
    )
    return parser.parse_args(argv)


def version_of(path: str) -> str:
    """The string literal that the file assigns to __version__; the file is not executed."""
    for node in ast.parse(pathlib.Path(path).read_text()).body:
        if isinstance(node, ast.Assign) and [getattr(t, "id", None) for t in node.targets] == ["__version__"]:
            return ast.literal_eval(node.value)
    raise SystemExit(f"{path} assigns no __version__")


def contents_of(files: list[list[str]]) -> dict[str, bytes]:
    """Entry name to bytes; every folder below atrex/kernels becomes a package."""
    contents: dict[str, bytes] = {}
    for entry, path in files:
        if entry in contents:
            raise SystemExit(f"two files for the wheel's entry {entry}, the second is {path}")
        contents[entry] = pathlib.Path(path).read_bytes()
    for entry in list(contents):
        folder = os.path.dirname(entry)
        while folder.startswith(KERNELS.rstrip("/")):
            contents.setdefault(f"{folder}/__init__.py", b"")
            folder = os.path.dirname(folder)
    return contents


def metadata(version: str) -> bytes:
    fields = (
        "Metadata-Version: 2.4",
        "Name: atrex",
        f"Version: {version}",
        "Summary: GPU operators for LLM inference: one public function an operator, one kernel a hardware target",
        "License-Expression: Apache-2.0",
        "License-File: LICENSE",
        "Requires-Python: >=3.10",
        "Requires-Dist: torch",
    )
    return ("\n".join(fields) + "\n").encode()


def write_wheel(folder: str, version: str, tag: str, contents: dict[str, bytes], license_text: bytes) -> str:
    """Writes folder/atrex-<version>-<tag>.whl and returns its path."""
    path = os.path.join(folder, f"atrex-{version}-{tag}.whl")
    pure = "true" if tag.endswith("-any") else "false"
    info = f"atrex-{version}.dist-info/"
    wheel_text = f"Wheel-Version: 1.0\nGenerator: atrex\nRoot-Is-Purelib: {pure}\nTag: {tag}\n\n"
    entries = sorted(contents.items()) + [
        (info + "METADATA", metadata(version)),
        (info + "WHEEL", wheel_text.encode()),
        (info + "licenses/LICENSE", license_text),
    ]
    with WheelFile(path, "w") as wheel:
        for name, data in entries:
            wheel.writestr(_entry(name), data)
    return path


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EPOCH)
    mode = 0o755 if name.endswith(".so") else 0o644
    entry.external_attr = (stat.S_IFREG | mode) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


def manylinux(wheel: str) -> str:
    """The oldest platform tag that the wheel's shared objects keep, as auditwheel sees them."""
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", wheel], capture_output=True, text=True, check=False
    )
    if shown.returncode:
        raise SystemExit(f"auditwheel cannot read the wheel:\n{shown.stdout}{shown.stderr}")
    report = json.loads(shown.stdout)
    if not report["overall_tag"].startswith("manylinux_"):
        raise SystemExit(f"the shared objects keep no manylinux tag; auditwheel says:\n{json.dumps(report, indent=1)}")
    return report["overall_tag"]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    # WheelFile stamps RECORD itself, with this variable or the clock.
    os.environ["SOURCE_DATE_EPOCH"] = "315532800"
    version = version_of(args.version_file)
    contents = contents_of(args.file)
    license_text = pathlib.Path(args.license).read_bytes()
    tag = "py3-none-any"
    if any(name.endswith(".so") for name in contents):
        python = next(packaging.tags.cpython_tags())
        prefix = f"{python.interpreter}-{python.abi}-"
        with tempfile.TemporaryDirectory() as draft:
            tag = prefix + manylinux(write_wheel(draft, version, prefix + "linux_x86_64", contents, license_text))
    write_wheel(args.out, version, tag, contents, license_text)


if __name__ == "__main__":
    main()
