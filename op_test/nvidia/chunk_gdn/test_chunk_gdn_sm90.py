"""chunk_gated_delta_rule on an H200: the whole contract on every execution plan, dispatch, profiler gate, speed.

The tests are those of ``harness.chunk_gdn_suite``; the private modes are those of ``harness.chunk_gdn_modes``.
"""

import sys

import pytest

pytest.register_assert_rewrite("harness.chunk_gdn_suite")

from harness.chunk_gdn_modes import DEVICE, Target, main  # noqa: E402
from harness.chunk_gdn_suite import *  # noqa: E402, F403


def plan_of(case):
    """Serial or in segments, or serial beside the preparation; and the value rows that a scan block serves."""
    from atrex.kernels.nvidia.chunk_gdn.sm90 import runtime

    B, T, N = case.sizes
    _, segments, warpgroups, _, _, overlap, _ = runtime._plan(B, T, case.H, case.HV, N, case.packed, DEVICE.index)
    return f"{'segments ' if segments > 1 else 'overlap ' if overlap else ''}{warpgroups}x64"


TARGET = Target(
    arch="sm90",
    plans=("1x64", "2x64", "overlap 1x64", "segments 1x64", "segments 2x64"),
    plan_of=plan_of,
    speed=((8192, 1, 0.30), (32768, 4, 0.60)),
    compiled_for="sm_90a",
)

if __name__ == "__main__":
    sys.exit(main(TARGET))
