"""Counts test cases: count.py BUILD_EVENTS BAZEL_STATUS prints a line a target, then "N passed, N failed".

The build event stream names the results of this run and no other, with their JUnit XML; bazel-testlogs may also hold
those of earlier runs. A target that failed without a failed case in its XML (a crash, a timeout) counts as one.
"""

import json
import pathlib
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


def main(events_path: str, bazel_status: str) -> int:
    results: dict[str, tuple[str, int, int]] = {}
    incompatible: list[str] = []
    for line in pathlib.Path(events_path).read_text().splitlines():
        event = json.loads(line)
        if "testResult" in event:
            label, result = event["id"]["testResult"]["label"], event["testResult"]
            xml = [output["uri"] for output in result.get("testActionOutput", []) if output["name"] == "test.xml"]
            passed, failed = count_cases(urllib.parse.unquote(urllib.parse.urlparse(xml[0]).path)) if xml else (0, 0)
            if result["status"] != "PASSED":
                failed = max(failed, 1)
            results[label] = (result["status"], passed, failed)
        elif event.get("aborted", {}).get("reason") == "SKIPPED" and "targetCompleted" in event["id"]:
            incompatible.append(event["id"]["targetCompleted"]["label"])
    for label, (status, passed, failed) in sorted(results.items()):
        print(f"{status:8} {label}: {passed} passed, {failed} failed")
    for label in sorted(set(incompatible)):
        print(f"{'SKIPPED':8} {label}: not compatible with this machine")
    passed = sum(result[1] for result in results.values())
    failed = sum(result[2] for result in results.values())
    broken = bazel_status != "0"
    if broken and not failed:
        print(f"bazel exited with status {bazel_status} and no failed test: see its errors above")
        failed = 1
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
