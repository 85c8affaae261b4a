"""The job of the fallback, end to end: a fresh process without anything of Bazel, and what it leaves behind."""

import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from runfiles import Runfiles

JOB = Runfiles.Create().Rlocation("_main/op_test/fallback/chunk_gdn/fallback_job.pyz")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """(exit status, output, report folder, the folder for temporary files) of the one run."""
    report, temporary = tmp_path_factory.mktemp("report"), tmp_path_factory.mktemp("tmp")
    env = {"PATH": os.environ["PATH"], "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, JOB, "--report", str(report)], env=env, cwd="/", stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)
    return done.returncode, done.stdout, report, temporary


def test_all_gates_hold(job):
    status, output, folder, _ = job
    report = json.loads((folder / "report.json").read_text())
    assert status == 0 and report["ok"], output
    assert report["target"] == "fallback/chunk_gdn" and set(report["gates"]) == {"tests", "benchmark"}
    cases = list(ElementTree.parse(folder / "junit.xml").iter("testcase"))
    assert report["gates"]["tests"]["passed"] == len(cases) > 50
    assert all(case["median_ms"] > 0 for case in report["gates"]["benchmark"]["cases"])


def test_report_is_whole_and_names_no_machine(job):
    _, _, folder, _ = job
    assert sorted(file.name for file in folder.iterdir()) == ["junit.xml", "latency.png", "report.json", "report.md"]
    text = (folder / "report.md").read_text()
    report = json.loads((folder / "report.json").read_text())
    for words in (
        "atrex.chunk_gated_delta_rule(q",
        report["job"],
        report["revision"],
        report["gates"]["benchmark"]["cases"][0]["case"],
    ):
        assert words in text
    assert (folder / "latency.png").read_bytes().startswith(b"\x89PNG")
    for name in ("junit.xml", "report.json", "report.md"):
        assert not re.search(rf"(?<![\w-]){re.escape(platform.node())}(?![\w-])", (folder / name).read_text()), name


def test_nothing_is_left_behind(job):
    assert list(pathlib.Path(job[3]).glob("atrex-job-*")) == []


def test_machine_of_other_hardware_is_refused(tmp_path):
    """The same job, made one for hardware that no machine has."""
    import zipfile

    other = tmp_path / "other_job.pyz"
    with zipfile.ZipFile(JOB) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "payload/job.json":
                data = json.dumps({**json.loads(data), "target": "nvidia/chunk_gdn/sm00"}).encode()
            new.writestr(name, data)
    command = [sys.executable, str(other), "--report", str(tmp_path / "report")]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "this machine has " in done.stdout and "the job is for nvidia/chunk_gdn/sm00" in done.stdout
    assert list((tmp_path / "report").iterdir()) == []
