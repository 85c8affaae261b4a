"""The profiler gate: the public call launches something, and all of it is named atrex_*."""

import json
import pathlib
import sys

from . import process
from .payload import Payload, environment

_LIMIT_S = 600


def run(payload: Payload, tree: pathlib.Path) -> dict:
    """The test file's own ``--profile`` in a child process. The children judge names, this judges evidence."""
    out = payload.scratch / "profile.json"
    command = [sys.executable, str(payload.module), "--profile", "--json", str(out)]
    status = process.run(command, env=environment(payload, tree), limit=_LIMIT_S)
    if status != "status 0" or not out.exists():
        return {"ok": False, "problems": [f"{payload.module.name} --profile ended with {status} and no evidence"]}
    return judge(json.loads(out.read_text()))


def judge(evidence: dict) -> dict:
    problems = [f"{case['case']}: {problem}" for case in evidence["cases"] for problem in case["problems"]]
    for case in evidence["cases"]:
        if not case["operator"] and not case["problems"]:
            problems.append(f"{case['case']}: an empty list of launches")
    if not evidence["cases"]:
        problems.append("no case was profiled")
    return {"ok": not problems, "problems": problems, **evidence}
