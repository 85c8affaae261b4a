"""The functional tests: the target's test file under the rules of an op_test, no skip allowed."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

from . import process, report
from .payload import Payload, environment

_LIMIT_S = 3600


def run(payload: Payload, tree: pathlib.Path, junit: pathlib.Path) -> dict:
    raw = payload.scratch / "junit.xml"
    scratch = payload.scratch / "tests"
    scratch.mkdir()
    env = {
        **environment(payload, tree),
        "OP_TEST_MODULE": payload.spec["module"],
        "OP_TEST_TREE": tree.name,
        "RUNFILES_DIR": str(payload.runfiles),
        "TEST_TMPDIR": str(scratch),
        "XML_OUTPUT_FILE": str(raw),
    }
    # The runner comes from the file system and its `runfiles` from the tree.
    command = [sys.executable, str(payload.runfiles / "_main/tools/op_test/pytest_main.py"), "--color=no"]
    status = process.run(command, env=env, limit=_LIMIT_S)
    if not raw.exists():
        return {"ok": False, "passed": 0, "failures": [f"pytest ended with {status} and no result"]}
    junit.write_text(report.public(without_host(raw.read_text()), payload.folder))
    return {**judge(junit.read_text(), status), "junit": junit.name}


def without_host(xml: str) -> str:
    root = ElementTree.fromstring(xml)
    for suite in root.iter("testsuite"):
        suite.attrib.pop("hostname", None)
    return ElementTree.tostring(root, encoding="unicode")


def judge(xml: str, status: str) -> dict:
    """The gate: every case passed, none was skipped, and there was at least one."""
    passed, failures = 0, []
    for case in ElementTree.fromstring(xml).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}::{case.get('name')}"
        if bad:
            message = (bad[0].get("message") or "no message").splitlines()[0]
            failures.append(f"{name}: {bad[0].tag}: {message}")
        else:
            passed += 1
    if not failures and status != "status 0":
        failures.append(f"pytest ended with {status}")
    if not passed and not failures:
        failures.append("no test ran")
    return {"ok": not failures, "passed": passed, "failures": failures}
