"""chunk_gated_delta_rule on sm_120: the whole contract on every execution plan, dispatch, profiler gate, speed.

The tests are those of ``harness.chunk_gdn_suite``; the private modes are those of ``harness.chunk_gdn_modes``. With
``ATREX_STAND_IN`` in the environment (``harness.stand_in``) all of it runs on a Hopper card, on the same sources
compiled for that: evidence about the sources, none about sm_120.
"""

import sys

import pytest

pytest.register_assert_rewrite("harness.chunk_gdn_suite")

from harness import stand_in  # noqa: E402
from harness.chunk_gdn_modes import DEVICE, Target, main  # noqa: E402
from harness.chunk_gdn_suite import *  # noqa: E402, F403

stand_in.activate()


def plan_of(case):
    """Serial or in segments, and the value rows that a scan block serves."""
    from atrex.kernels.nvidia.chunk_gdn.sm120 import runtime

    B, T, N = case.sizes
    _, segments, warps, _ = runtime._plan(B, T, case.H, case.HV, N, case.packed, DEVICE.index)
    return f"{'segments ' if segments > 1 else ''}{16 * warps}"


TARGET = Target(
    arch="sm120",
    plans=("64", "128", "segments 64"),
    plan_of=plan_of,
    # Peers' published times on an RTX PRO 6000 and an RTX 5090: FLA .75 and 3.06, FlashQLA .45 and 1.19.
    speed=((8192, 1, 0.70), (32768, 4, 1.50)),
    compiled_for="sm_120",
)

if __name__ == "__main__":
    sys.exit(main(TARGET))
