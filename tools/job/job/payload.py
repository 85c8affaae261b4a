"""What the job carries, unpacked and installed into a private folder."""

import json
import os
import pathlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass

PREFIX = "payload/"


class JobError(Exception):
    """Something that the job needs is missing or broken; the message is for the person who started it."""


@dataclass(frozen=True)
class Payload:
    """The unpacked job.

    ``spec`` holds ``target`` (``<vendor>/<operator>/<arch>`` or ``fallback/<operator>``), ``module`` (the test file
    below ``runfiles``), ``revision``, and in a parity job ``baseline``, the revision compared with.
    """

    spec: dict
    folder: pathlib.Path

    @property
    def runfiles(self) -> pathlib.Path:
        return self.folder / "runfiles"

    @property
    def module(self) -> pathlib.Path:
        return self.runfiles / self.spec["module"]

    @property
    def scratch(self) -> pathlib.Path:
        return self.folder / "scratch"


def unpack(archive: pathlib.Path, folder: pathlib.Path) -> Payload:
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder, [name for name in opened.namelist() if name.startswith(PREFIX)])
    folder /= PREFIX
    (folder / "scratch").mkdir()
    return Payload(json.loads((folder / "job.json").read_text()), folder)


def install(payload: Payload, role: str) -> pathlib.Path:
    """Installs the wheel of ``role`` ("candidate" or "baseline") with the carried libraries into a tree of its own."""
    tree = payload.runfiles / role
    wheels = sorted(payload.folder.glob(f"wheels/{role}/*.whl")) + sorted(payload.folder.glob("wheels/carried/*.whl"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-cache-dir", "--no-deps", "--no-index", "--no-compile", "--target", str(tree), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        python = f"{sys.implementation.name} {sys.version.split()[0]} ({sys.executable})"
        raise JobError(
            f"pip of {python} cannot install the job's wheels; a wheel with kernels is for the Python that built it "
            f"(ATREX_PYTHON):\n{done.stdout}{done.stderr}"
        )
    return tree


def environment(payload: Payload, tree: pathlib.Path) -> dict[str, str]:
    """The environment of a child that imports atrex from ``tree`` and nothing of the user's."""
    scratch = payload.scratch / tree.name
    scratch.mkdir(exist_ok=True)
    return {
        **os.environ,
        "HOME": str(scratch),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": os.pathsep.join([str(tree), str(payload.runfiles / "_main/op_test")]),
        "PYTHONSAFEPATH": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TRITON_CACHE_DIR": str(scratch / "triton"),
    }
