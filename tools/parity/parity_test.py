"""Parity from two commits to a verdict, on a toy package in a repository that the test makes.

Only Bazel is played by a script, which packs with the real wheel builder and the real packer; git, the worktree, the
job and the gate are those of the product. The toy's benchmark reads a clock of its own, so that the verdicts do not
depend on how busy this machine is.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest
from runfiles import Runfiles

import atrex

MAIN = pathlib.Path(Runfiles.Create().Rlocation("_main/tools/parity/parity.py")).parents[2]
sys.path[:0] = [str(MAIN / "tools/parity"), str(MAIN / "tools/job")]
import parity  # noqa: E402
import workspace  # noqa: E402

TARGET = "fallback/toy"
BENCH = """
import json, sys
import atrex
about = dict(contract=dict(signature="atrex.f()", summary="Toy."), about=dict(dispatch="d", compile="c", limits="l"))
print(json.dumps(dict(atrex=atrex.__file__, cases=["small", "large"], **about)), flush=True)
for line in sys.stdin:
    print(json.dumps(dict(case=line.strip(), ms=[atrex.LATENCY[line.strip()]() for _ in range(3)])), flush=True)
"""
BAZEL = """#!{python}
import pathlib, subprocess, sys
root = pathlib.Path(__file__).resolve().parents[1]
with open("{log}", "a") as log:
    print(root, *sys.argv[1:], file=log)
(root / "out").mkdir(exist_ok=True)
label = sys.argv[-1]
if "clean" in sys.argv:
    sys.exit()
if "cquery" in sys.argv:
    print("out/job.pyz" if label.endswith("_job") else "out")
    sys.exit()
if not (root / "atrex/__init__.py").exists():
    sys.exit("no such package")
package = [x for file in sorted(root.glob("atrex/*.py")) for x in ("--file", f"atrex/{{file.name}}", str(file))]
wheel = [sys.executable, "{main}/tools/wheel/build_wheel.py", "--out", str(root / "out"), *package]
wheel += ["--version-file", str(root / "atrex/_version.py"), "--license", str(root / "LICENSE")]
subprocess.run(wheel, check=True)
if label.endswith("_job"):
    carried = [x for file in sorted(pathlib.Path("{carried}").iterdir()) for x in ("--carried", str(file))]
    sources = [x for file in sorted(pathlib.Path("{sources}").iterdir()) for x in ("--source", str(file))]
    pack = [sys.executable, "{main}/tools/job/pack.py", "--out", str(root / "out/job.pyz"), "--target", "{target}"]
    pack += ["--module", "_main/bench.py", "--file", "_main/bench.py", str(root / "bench.py")]
    (root / "out/status").write_text("STABLE_ATREX_REVISION the-candidate\\n")
    (root / "out/wheel").mkdir(exist_ok=True)
    next(root.glob("out/*.whl")).rename(root / "out/wheel/atrex-0.1.0-py3-none-any.whl")
    pack += ["--wheel", str(root / "out/wheel"), "--status", str(root / "out/status")]
    subprocess.run([*pack, *carried, *sources], check=True)
"""


class Repository:
    def __init__(self, folder: pathlib.Path):
        self.root, self.log = folder / "repository", folder / "log"
        job = MAIN / "op_test/fallback/chunk_gdn/fallback_job.pyz"
        with zipfile.ZipFile(job) as opened:
            for name in opened.namelist():
                if name.startswith(("job/", "payload/wheels/carried/")):
                    opened.extract(name, folder)
        (self.root / "atrex").mkdir(parents=True)
        (self.root / "tools").mkdir()
        device = pathlib.Path(atrex.__file__).with_name("_device.py")
        shutil.copyfile(device, self.root / "atrex/_device.py")
        (self.root / "atrex/_version.py").write_text('__version__ = "0.1.0"\n')
        (self.root / "LICENSE").write_text("toy\n")
        (self.root / "bench.py").write_text(BENCH)
        (self.root / ".gitignore").write_text("/out\n")
        script = BAZEL.format(
            python=sys.executable, main=MAIN, carried=folder / "payload/wheels/carried", sources=folder / "job",
            log=self.log, target=TARGET,
        )  # fmt: skip
        (self.root / "tools/bazelw").write_text(script)
        (self.root / "tools/bazelw").chmod(0o755)
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        identity = ["-c", "user.name=toy", "-c", "user.email=toy@example.invalid"]
        return subprocess.check_output(["git", *identity, *arguments], cwd=self.root, text=True).strip()

    def commit(self, latency: str) -> str:
        """A revision whose cases take what the expression says, in ms."""
        (self.root / "atrex/__init__.py").write_text(
            f"import itertools\nx = itertools.count()\nLATENCY = dict.fromkeys(['small', 'large'], lambda: {latency})\n"
        )
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", latency)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None:
        pytest.fail("git is not on PATH, and parity builds revisions with it (Debian: apt install git)")
    return Repository(tmp_path)


def compare(repository, tmp_path, baseline):
    parity.make(repository.root, baseline, TARGET, tmp_path / "parity.pyz")
    command = [sys.executable, str(tmp_path / "parity.pyz"), "--report", str(tmp_path / "report")]
    done = subprocess.run(command, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return done.returncode, json.loads((tmp_path / "report/report.json").read_text())


@pytest.mark.parametrize(
    "baseline, candidate, status, verdict",
    [("1.0", "1.04", 0, "pass"), ("1.0", "1.10", 1, "slower"), ("1.0", "1 + next(x) // 3 % 2", 1, "unstable")],
    ids=["equal", "slower", "unstable"],
)
def test_verdict(repository, tmp_path, baseline, candidate, status, verdict):
    before = repository.commit(baseline)
    repository.commit(candidate)
    got, report = compare(repository, tmp_path, before)
    assert (got, report["ok"]) == (status, status == 0)
    assert (report["baseline"], report["revision"]) == (before, "the-candidate")
    assert [(case["case"], case["verdict"]) for case in report["gates"]["parity"]["cases"]] == [
        ("small", verdict),
        ("large", verdict),
    ]
    text = (tmp_path / "report/report.md").read_text()
    assert before in text and report["job"] in text and verdict in text
    assert (tmp_path / "report/latency.png").stat().st_size > 0


def test_baseline_comes_from_a_clean_worktree_that_is_removed(repository, tmp_path):
    before = repository.commit("1.0")
    repository.commit("2.0")
    (repository.root / "atrex/__init__.py").write_text("changed, not committed\n")
    parity.make(repository.root, "HEAD~1", TARGET, tmp_path / "parity.pyz")
    with zipfile.ZipFile(tmp_path / "parity.pyz") as opened:
        assert json.loads(opened.read("payload/job.json"))["baseline"] == before
        code = {}
        for role in ("baseline", "candidate"):
            (name,) = [name for name in opened.namelist() if name.startswith(f"payload/wheels/{role}/")]
            with opened.open(name) as wheel, zipfile.ZipFile(wheel) as inner:
                code[role] = inner.read("atrex/__init__.py").decode()
    assert "lambda: 1.0" in code["baseline"] and code["candidate"] == "changed, not committed\n"
    own = [
        line.split() for line in repository.log.read_text().splitlines() if not line.startswith(str(repository.root))
    ]
    assert own and all(words[1].startswith("--output_base=") for words in own)
    assert [words[2] for words in own] == ["build", "cquery", "clean"]
    assert not pathlib.Path(own[0][0]).exists()
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_missing_baseline_fails(repository, tmp_path):
    repository.commit("1.0")
    with pytest.raises(workspace.BuildError, match="'no-such-revision' is no revision"):
        parity.make(repository.root, "no-such-revision", TARGET, tmp_path / "parity.pyz")
    assert not (tmp_path / "parity.pyz").exists()


def test_unbuildable_baseline_fails(repository, tmp_path):
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "without the package")
    repository.commit("1.0")
    with pytest.raises(workspace.BuildError, match="//python:wheel does not build"):
        parity.make(repository.root, "HEAD~1", TARGET, tmp_path / "parity.pyz")
    assert not (tmp_path / "parity.pyz").exists()
    assert len(repository.git("worktree", "list").splitlines()) == 1


def test_baseline_that_lacks_the_function_fails(repository, tmp_path):
    before = repository.commit("no_such_clock()")
    repository.commit("1.0")
    status, report = compare(repository, tmp_path, before)
    assert status == 1 and "the baseline's benchmark ended without an answer" in report["gates"]["parity"]["error"]


@pytest.mark.parametrize(
    "target, label",
    [
        ("nvidia/chunk_gdn/sm90", "//op_test/nvidia/chunk_gdn:sm90_job"),
        ("fallback/chunk_gdn", "//op_test/fallback/chunk_gdn:fallback_job"),
    ],
)
def test_job_of_a_target(target, label):
    assert workspace.job_label(target) == label


@pytest.mark.parametrize("target", ["sm90", "nvidia/chunk_gdn", "fallback"])
def test_other_names_are_refused(target):
    with pytest.raises(SystemExit, match="expected <vendor>/<operator>/<arch>"):
        workspace.job_label(target)
