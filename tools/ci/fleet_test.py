"""The check of what tests ask a fleet for."""

import json
import subprocess
import sys

import pytest
from runfiles import Runfiles

FLEET = Runfiles.Create().Rlocation("_main/tools/ci/fleet.py")
GPU, CPU = ("//op_test/nvidia/scan:sm90", "sm90"), ("//op_test/fallback/scan:fallback", None)


def check(*tests):
    targets = [{"id": number, "label": label} for number, (label, _) in enumerate(tests, 1)]
    actions = []
    for number, (_, arch) in enumerate(tests, 1):
        info = [{"key": "resources:gpu:1"}] + ([{"key": "gpu_arch", "value": arch}] if arch else [])
        actions.append({"targetId": number, "executionInfo": info})
    text = json.dumps({"targets": targets, "actions": actions}) if tests else ""
    done = subprocess.run([sys.executable, FLEET], input=text, capture_output=True, text=True)
    assert done.returncode == (0 if done.stdout.endswith("lint: fleet properties: ok\n") else 1), done.stderr
    return done.stdout


def test_each_test_on_its_own_hardware():
    assert check(GPU, CPU, ("//op_test/harness:harness_test", None)) == "lint: fleet properties: ok\n"


@pytest.mark.parametrize(
    "tests, words",
    [
        ([("//op_test/nvidia/scan:sm90", None), CPU], "sm90 asks for gpu_arch None, expected sm90"),
        ([("//op_test/nvidia/scan:sm90", "sm120"), CPU], "asks for gpu_arch sm120, expected sm90"),
        ([GPU, ("//op_test/package:import", "sm90")], "import asks for gpu_arch sm90, expected None"),
        ([GPU], "nothing was checked"),
        ([CPU], "nothing was checked"),
        ([], "aquery gave nothing"),
    ],
)
def test_everything_else_fails(tests, words):
    output = check(*tests)
    assert words in output and output.endswith("lint: fleet properties: FAILED\n")
