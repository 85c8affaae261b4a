"""The count that CI ends with: what is a pass, and what can never be one."""

import json
import subprocess
import sys

import pytest
from runfiles import Runfiles

COUNT = Runfiles.Create().Rlocation("_main/tools/ci/count.py")
PASS, FAIL = '<testcase name="a"/>', '<testcase name="b"><failure message="m"/></testcase>'
ERROR, SKIP = '<testcase name="c"><error message="m"/></testcase>', '<testcase name="d"><skipped/></testcase>'


@pytest.fixture
def count(tmp_path):
    """Counts [(status, cases or None for no XML)] and returns (exit status, last line, all output)."""

    def call(results: list[tuple[str, str | None]], bazel_status: int = 0, extra: tuple[dict, ...] = ()):
        events = list(extra)
        for number, (status, cases) in enumerate(results):
            xml = tmp_path / f"with blank {number}.xml"
            outputs = [{"name": "test.log", "uri": "file:///nowhere"}]
            if cases is not None:
                xml.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
                outputs.append({"name": "test.xml", "uri": xml.as_uri()})
            label = {"testResult": {"label": f"//:t{number}"}}
            events.append({"id": label, "testResult": {"status": status, "testActionOutput": outputs}})
        path = tmp_path / "events.json"
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        done = subprocess.run(
            [sys.executable, COUNT, str(path), str(bazel_status)], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout.splitlines()[-1], done.stdout

    return call


def test_cases_of_all_targets_are_added(count):
    assert count([("PASSED", PASS + PASS), ("PASSED", PASS)])[:2] == (0, "3 passed, 0 failed")


def test_failures_errors_and_skips_are_failed_cases(count):
    assert count([("FAILED", PASS + FAIL + ERROR + SKIP)], 3)[:2] == (1, "1 passed, 3 failed")


@pytest.mark.parametrize("cases", [None, PASS])
def test_target_that_failed_without_a_failed_case_counts(count, cases):
    status, line, _ = count([("TIMEOUT", cases)], 3)
    assert status == 1 and line.endswith(" 1 failed")


def test_broken_build_without_any_failed_test_fails(count):
    assert count([("PASSED", PASS)], 1)[:2] == (1, "1 passed, 1 failed")


def test_nothing_ran_is_no_success(count):
    assert count([])[0] == 1


def test_incompatible_target_is_named_and_not_counted(count):
    skipped = {"id": {"targetCompleted": {"label": "//gpu:t"}}, "aborted": {"reason": "SKIPPED"}}
    status, line, output = count([("PASSED", PASS)], extra=(skipped,))
    assert (status, line) == (0, "1 passed, 0 failed")
    assert "//gpu:t: not compatible with this machine" in output
