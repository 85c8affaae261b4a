"""Runs a target's test file on a card of another architecture that knows the same instructions.

``ATREX_STAND_IN=FILE`` in the environment: FILE is the extension of the sm120 target of chunk_gated_delta_rule, built
from the same sources for this machine's GPU. In this process it takes the place of the one in the wheel, and device 0
counts as an sm120. Nothing else knows of it: it is in no wheel, and dispatch never picks it.
"""

import importlib.util
import os
import sys

import torch

from atrex import _device

_NATIVE = "atrex.kernels.nvidia.chunk_gdn.sm120._native"


def activate():
    """To be called before the first call of atrex; does nothing without the variable."""
    file = os.environ.get("ATREX_STAND_IN")
    if file is None or _NATIVE in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(_NATIVE, file)
    sys.modules[_NATIVE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_NATIVE])
    _device._targets[torch.device("cuda", 0)] = _device.DeviceTarget("nvidia", "sm120")
    # A multiprocessor of a Hopper card has the shared memory for two blocks of the scan where one of sm_120 has it for
    # one: the plans are those of a card with twice as many.
    from atrex.kernels.nvidia.chunk_gdn.sm120 import runtime

    multiprocessors = runtime._multiprocessors
    runtime._multiprocessors = lambda device: 2 * multiprocessors(device)
