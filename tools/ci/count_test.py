"""The count that CI ends with: what is a pass, and what can never be one."""

import json
import subprocess
import sys

import pytest
from runfiles import Runfiles

COUNT = Runfiles.Create().Rlocation("_main/tools/ci/count.py")
PASS, FAIL = '<testcase name="a"/>', '<testcase name="b"><failure message="m"/></testcase>'
ERROR, SKIP = '<testcase name="c"><error message="m"/></testcase>', '<testcase name="d"><skipped/></testcase>'


LINT = "noise\nlint: ruff: ok\nlint: clang-format: ok\n"


@pytest.fixture
def count(tmp_path):
    """Counts [(status, cases or None for no XML)] and returns (exit status, last line, all output)."""

    def call(
        results: list[tuple[str, str | None]],
        test_status: int = 0,
        lint: str = LINT,
        lint_status: int = 0,
        extra: tuple[dict, ...] = (),
    ):
        events = list(extra)
        for number, (status, cases) in enumerate(results):
            xml = tmp_path / f"with blank {number}.xml"
            outputs = [{"name": "test.log", "uri": "file:///nowhere"}]
            if cases is not None:
                xml.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
                outputs.append({"name": "test.xml", "uri": xml.as_uri()})
            label = {"testResult": {"label": f"//:t{number}"}}
            events.append({"id": label, "testResult": {"status": status, "testActionOutput": outputs}})
        if events:
            (tmp_path / "events").write_text("".join(json.dumps(event) + "\n" for event in events))
        (tmp_path / "lint").write_text(lint)
        command = [sys.executable, COUNT, str(tmp_path / "events"), str(test_status), str(tmp_path / "lint")]
        done = subprocess.run([*command, str(lint_status)], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.splitlines()[-1], done.stdout

    return call


def test_cases_of_all_targets_and_linters_are_added(count):
    assert count([("PASSED", PASS + PASS), ("PASSED", PASS)])[:2] == (0, "5 passed, 0 failed")


def test_failures_errors_and_skips_are_failed_cases(count):
    assert count([("FAILED", PASS + FAIL + ERROR + SKIP)], 3)[:2] == (1, "3 passed, 3 failed")


def test_failed_linter_counts(count):
    lint = LINT + "lint: buildifier: FAILED\n"
    assert count([("PASSED", PASS)], lint=lint, lint_status=1)[:2] == (1, "3 passed, 1 failed")


def test_lint_that_stops_before_a_verdict_fails(count):
    assert count([("PASSED", PASS)], lint=LINT, lint_status=1)[:2] == (1, "3 passed, 1 failed")


@pytest.mark.parametrize("cases", [None, PASS])
def test_target_that_failed_without_a_failed_case_counts(count, cases):
    status, line, _ = count([("TIMEOUT", cases)], 3)
    assert status == 1 and line.endswith(" 1 failed")


def test_broken_build_without_any_failed_test_fails(count):
    assert count([("PASSED", PASS)], 1)[:2] == (1, "3 passed, 1 failed")


@pytest.mark.parametrize("status", [0, 2])
def test_no_test_ran_is_no_success(count, status):
    assert count([], status)[:2] == (1, "2 passed, 1 failed")


def test_incompatible_target_is_named_and_not_counted(count):
    skipped = {"id": {"targetCompleted": {"label": "//gpu:t"}}, "aborted": {"reason": "SKIPPED"}}
    status, line, output = count([("PASSED", PASS)], extra=(skipped,))
    assert (status, line) == (0, "3 passed, 0 failed")
    assert "//gpu:t: not compatible with this machine" in output
