"""Packs a job: pack.py @ARGUMENTS, one executable zip file that is the same for the same inputs."""

import argparse
import io
import json
import os
import pathlib
import stat
import zipfile

_DATE = (1980, 1, 1, 0, 0, 0)
_MAIN = """\
import pathlib, sys
if sys.version_info < (3, 10):
    sys.exit("the job needs Python 3.10 or later, this is " + sys.version.split()[0])
from job.cli import main
sys.exit(main(pathlib.Path(sys.argv[0]).resolve()))
"""


def revision(status_file: pathlib.Path) -> str:
    """What tools/job/revision.sh told Bazel."""
    status = dict(line.split(" ", 1) for line in status_file.read_text().splitlines() if " " in line)
    return status.get("STABLE_ATREX_REVISION", "unknown")


def write(out: pathlib.Path, entries: dict[str, bytes]) -> None:
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted(entries.items()):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.external_attr = 0o644 << 16
            # A wheel is compressed already.
            kind = zipfile.ZIP_STORED if name.endswith(".whl") else zipfile.ZIP_DEFLATED
            archive.writestr(entry, data, kind)
    out.write_bytes(buffer.getvalue())
    out.chmod(out.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def with_baseline(job: pathlib.Path, wheel: pathlib.Path, baseline: str, out: pathlib.Path) -> None:
    """A parity job out of the candidate's job and the baseline's wheel."""
    with zipfile.ZipFile(job) as opened:
        entries = {name: opened.read(name) for name in opened.namelist()}
    spec = json.loads(entries["payload/job.json"])
    entries["payload/job.json"] = json.dumps({**spec, "baseline": baseline}, sort_keys=True).encode()
    entries[f"payload/wheels/baseline/{wheel.name}"] = wheel.read_bytes()
    write(out, entries)


def main() -> None:
    parser = argparse.ArgumentParser(fromfile_prefix_chars="@")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--status", type=pathlib.Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--module", required=True)
    parser.add_argument("--wheel", type=pathlib.Path, required=True, help="folder with the atrex wheel")
    parser.add_argument("--carried", type=pathlib.Path, action="append", default=[], help="a library's wheel")
    parser.add_argument("--source", type=pathlib.Path, action="append", default=[], help="a module of the job")
    parser.add_argument("--file", nargs=2, action="append", default=[], metavar=("RUNFILE", "PATH"))
    args = parser.parse_args()
    spec = {"target": args.target, "module": args.module, "revision": revision(args.status)}
    entries = {"__main__.py": _MAIN.encode(), "payload/job.json": json.dumps(spec, sort_keys=True).encode()}
    for source in args.source:
        entries[f"job/{source.name}"] = source.read_bytes()
    for wheel in args.wheel.iterdir():
        entries[f"payload/wheels/candidate/{wheel.name}"] = wheel.read_bytes()
    for wheel in args.carried:
        entries[f"payload/wheels/carried/{os.path.basename(wheel)}"] = wheel.read_bytes()
    for runfile, path in args.file:
        entries[f"payload/runfiles/{runfile}"] = pathlib.Path(path).read_bytes()
    write(args.out, entries)


if __name__ == "__main__":
    main()
