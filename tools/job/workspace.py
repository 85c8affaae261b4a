"""Builds with Bazel on behalf of a tool that `bazel run` started in the workspace."""

import os
import pathlib
import subprocess
import sys


class BuildError(Exception):
    """The build failed; Bazel has said why."""


def root() -> pathlib.Path:
    folder = os.environ.get("BUILD_WORKSPACE_DIRECTORY")
    if folder is None:
        sys.exit("start this with tools/bazelw run")
    return pathlib.Path(folder)


def here(path: pathlib.Path) -> pathlib.Path:
    """A path that the user gave, seen from the folder where they gave it."""
    return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ".")) / path


def job_label(target: str) -> str:
    """Label of the job of ``<vendor>/<operator>/<arch>`` or ``fallback/<operator>``."""
    parts = target.split("/")
    if parts[0] == "fallback" and len(parts) == 2:
        return f"//op_test/{target}:fallback_job"
    if len(parts) != 3:
        sys.exit(f"the target is {target!r}, expected <vendor>/<operator>/<arch> or fallback/<operator>")
    return f"//op_test/{parts[0]}/{parts[1]}:{parts[2]}_job"


def build(
    checkout: pathlib.Path, label: str, target: str, startup: tuple[str, ...] = (), **environment: str
) -> pathlib.Path:
    """Builds ``label``, with the kernels of ``target`` alone in the wheel, and returns its one output."""
    bazel = checkout / "tools/bazelw"
    if not bazel.is_file():
        raise BuildError(f"{checkout} has no tools/bazelw")
    flags = ["--//tools/targets=" + ("" if target.startswith("fallback/") else target), label]
    # The launcher's own settings are for this program, not for the Python of another build.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "RUNFILES_"))}
    options = {"cwd": checkout, "env": {**env, **environment}, "stdin": subprocess.DEVNULL}
    if subprocess.run([str(bazel), *startup, "build", *flags], **options).returncode:
        raise BuildError(f"{label} does not build in {checkout}")
    query = [str(bazel), *startup, "cquery", "--output=files", "--noshow_progress", "--ui_event_filters=-info", *flags]
    found = subprocess.run(query, stdout=subprocess.PIPE, text=True, **options)
    if found.returncode or len(found.stdout.split()) != 1:
        raise BuildError(f"{label} has no single output in {checkout}: {found.stdout!r}")
    return checkout / found.stdout.strip()
