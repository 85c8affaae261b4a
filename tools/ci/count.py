"""Counts what CI ran: count.py BUILD_EVENTS TEST_STATUS LINT_LOG LINT_STATUS ends with "N passed, N failed".

Test cases and linters count alike; the lint log has a line "lint: <linter>: ok" or "lint: <linter>: FAILED" for each.
The build event stream names the results of this run and no other, with their JUnit XML; bazel-testlogs may also hold
those of earlier runs. A target that failed without a failed case in its XML (a crash, a timeout) counts as one.
"""

import json
import pathlib
import re
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree


def count_cases(xml_path: str) -> tuple[int, int]:
    """(passed, failed) test cases of one JUnit XML file."""
    passed = failed = 0
    for case in ElementTree.parse(xml_path).iter("testcase"):
        # A skipped case has not shown anything, so it is no pass.
        if any(case.find(tag) is not None for tag in ("failure", "error", "skipped")):
            failed += 1
        else:
            passed += 1
    return passed, failed


def count_tests(events: str) -> tuple[int, int]:
    """(passed, failed) test cases of a build event stream; prints a line a target."""
    results: dict[str, tuple[str, int, int]] = {}
    incompatible: set[str] = set()
    for line in events.splitlines():
        event = json.loads(line)
        if "testResult" in event:
            label, result = event["id"]["testResult"]["label"], event["testResult"]
            xml = [output["uri"] for output in result.get("testActionOutput", []) if output["name"] == "test.xml"]
            passed, failed = count_cases(urllib.parse.unquote(urllib.parse.urlparse(xml[0]).path)) if xml else (0, 0)
            if result["status"] != "PASSED":
                failed = max(failed, 1)
            results[label] = (result["status"], passed, failed)
        elif event.get("aborted", {}).get("reason") == "SKIPPED" and "targetCompleted" in event["id"]:
            incompatible.add(event["id"]["targetCompleted"]["label"])
    for label, (status, passed, failed) in sorted(results.items()):
        print(f"{status:8} {label}: {passed} passed, {failed} failed")
    for label in sorted(incompatible):
        print(f"{'SKIPPED':8} {label}: not compatible with this machine")
    return sum(result[1] for result in results.values()), sum(result[2] for result in results.values())


def count_linters(log: str) -> tuple[int, int]:
    """(passed, failed) linters of the log."""
    verdicts = re.findall(r"^lint: .*: (ok|FAILED)$", log, re.MULTILINE)
    return verdicts.count("ok"), verdicts.count("FAILED")


def main(events_path: str, test_status: str, lint_path: str, lint_status: str) -> int:
    counts = {
        "test": (*count_tests(read(events_path)), test_status),
        "lint": (*count_linters(read(lint_path)), lint_status),
    }
    total_passed = total_failed = 0
    for step, (passed, failed, status) in counts.items():
        if status != "0" and not failed:
            print(f"{step} ended with status {status} and no failed case: see its errors above")
            failed = 1
        if not passed + failed:
            print(f"{step} ran nothing")
            failed = 1
        total_passed, total_failed = total_passed + passed, total_failed + failed
    print(f"{total_passed} passed, {total_failed} failed")
    return 1 if total_failed else 0


def read(path: str) -> str:
    """The file's text; nothing if Bazel stopped before it wrote the file."""
    file = pathlib.Path(path)
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
