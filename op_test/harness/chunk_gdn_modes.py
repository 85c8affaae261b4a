"""A GPU target of chunk_gated_delta_rule to its tests, and the private modes of its test file.

The modes, for child processes and by hand:
    --bench, --profile   as modes.py describes them
    --sanitize           few launches on small shapes, to be run under compute-sanitizer
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable

import torch

import atrex
from harness import chunk_gdn, inputs, modes
from harness.chunk_gdn import Call, Case
from harness.chunk_gdn_cases import BF16, F32, FP16, MANY, RAGGED

DEVICE = torch.device("cuda", 0)


@dataclasses.dataclass(frozen=True)
class Target:
    """One implementation. A plan is how its kernels cut a problem, which it decides from the sizes."""

    arch: str
    plans: tuple[str, ...]
    plan_of: Callable[[Case], str]
    speed: tuple[tuple[int, int, float], ...]  # at 16/32 heads: tokens, sequences, limit in ms
    compiled_for: str

    def __str__(self):
        return f"nvidia/{self.arch}"

    @functools.cache  # noqa: B019
    def planned(self, plan, packed=True, **options):
        """The first and smallest of some shapes that the target serves with ``plan``: dense, or packed with short
        sequences beside a long one (most of their segments are empty) and, where the plan allows it, empty ones."""
        shorter = ((70, 0, 1), (70, 0), (70,)) if packed else (1, 2)
        for others in shorter:
            for T in (200, 700, 2048, 3072, 4096, 6144, 8192):
                for H, HV in ((1, 2), (2, 4), (1, 7), (4, 16), (16, 32), (16, 64)):
                    lengths = (T - 3 - sum(others), *others) if packed else (T - 3,) * (1 + others)
                    case = Case(lengths, H, HV, packed, tail=3 if packed else 0, **options)
                    if self.plan_of(case) == plan:
                        return case
        raise AssertionError(f"no shape is served with the plan {plan}")


MALFORMED = {
    "decreasing": [0, 100, 60, 200],
    "falls_to_zero": [0, 200, 0, 200],
    "negative": [-50, 100, 150, 200],
    "past_the_end": [0, 100, 300, 10**6],
    "starts_late": [30, 100, 150, 200],
    "all_past": [500, 600, 700, 800],
    "extremes": [-(2**31), 64, 2**31 - 1, -(2**31)],
    "int64": [-(2**63), 64, 2**32 + 5, 2**63 - 1],
}


def malformed_call(offsets, device=DEVICE):
    index_dtype = torch.int32 if max(map(abs, offsets)) <= 2**31 else torch.int64
    call = Call(Case((70, 70, 60), state=F32, pool=True, every=64, gap=32, index_dtype=index_dtype), device)
    call.options["cu_seqlens"] = torch.tensor(offsets, dtype=index_dtype, device=device)
    call.before = [chunk_gdn.memory(x).clone() for x in call._read_only()]
    return call


def profiled(target):
    """What the profiler shall see: a call with all its extras on every plan, and the launches beside the plans."""
    options = {"state": F32, "pool": True, "padding": True, "every": 64}
    makes = {plan: functools.partial(target.planned, plan, **options) for plan in target.plans}
    makes["pack"] = lambda: Case(RAGGED, layout="transposed", gate_dtype=BF16, gate_layout="split", l2norm=True)
    makes["nothing_to_do"] = lambda: Case((0, 0), state=F32)
    return {name: lambda make=make: Call(make(), DEVICE).run for name, make in makes.items()}


def benched(T, N=1, H=16, HV=32):
    """A case of the benchmark: N equal sequences of T tokens in all, states in and out, as a serving layer calls it."""

    def make():
        tensors = inputs.make_inputs(1, T, H, HV, seed=9, device=DEVICE)
        states = inputs.make_states(N, HV, seed=10, device=DEVICE)
        cu_seqlens = inputs.offsets([T // N] * N, DEVICE)
        return lambda: atrex.chunk_gated_delta_rule(*tensors, None, states, True, cu_seqlens=cu_seqlens)

    return make


def sanitize(target):
    """Few launches, an allocation for every tensor, so that memcheck knows where each ends, and no poison: initcheck
    must see what is read before it is written. For it, looking at the operator's kernels alone, a tensor is written by
    them or by a copy: so inputs are made on the CPU, as the references are, and results judged there. It does not see
    what the copy engine stores: so one of torch's kernels, unwatched, first moves results into memory that a copy has
    written."""

    def readable(x):
        return torch.mul(x, 1, out=torch.zeros(x.shape, dtype=x.dtype).to(DEVICE))

    def judge(call, want):
        result = call.to(DEVICE).run()
        result = [x if x is None or x is call.states else readable(x) for x in result]
        return call.verify(call.bring(result, "cpu"), want)

    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    torch.set_num_threads(1)  # a token's arithmetic is too little to share, least of all with other tools running
    options = {"state": F32, "pool": True, "padding": True, "every": 64}
    cases = {f"plan {plan}": target.planned(plan, **options) for plan in target.plans}
    cases["layouts"] = Case((65, 0, 1), 1, 5, dtype=FP16, layout="transposed", gate_dtype=BF16, gate_layout="split",
                            l2norm=True, tail=3, every=64)  # fmt: skip
    cases["split, bf16 states"] = Case((65, 65), packed=False, layout="split", v_layout="misaligned", state=BF16, gap=5,
                                       gate_layout="transposed", v_first=True)  # fmt: skip
    cases["several items a block"] = Case(MANY, 16, 32, tail=9, **options)
    cases["only padding"] = Case((0, 0), tail=70, state=F32)
    for name, case in cases.items():
        call = Call(case, "cpu")
        print(name, case.sizes, judge(call, call.expected()), flush=True)
    for name, offsets in MALFORMED.items():
        call = malformed_call(offsets, "cpu").to(DEVICE)
        call.run()  # what no sequence owns stays unwritten: only the memory around is looked at
        call.to("cpu").verify_memory()
        print("malformed", name, offsets, flush=True)
    case = Case((65, 1), state=F32, pool=True, padding=True, index_dtype=torch.int64)
    for seed in range(6):
        call = Call(dataclasses.replace(case, seed=seed), "cpu")
        print("slots", call.slots, judge(call, call.expected()), flush=True)
    torch.cuda.synchronize()


def main(target):
    """The command line of a target's test file; returns the exit status."""
    os.environ["ATREX_REQUIRE_KERNEL"] = "1"
    if sys.argv[1:] == ["--sanitize"]:
        return sanitize(target)
    return modes.main(
        api="chunk_gated_delta_rule",
        about={
            "dispatch": "q, k and v all bfloat16 or all float16, K=V=128, no gradients, states contiguous within a "
            "sequence or slot; else the PyTorch fallback with one warning a reason",
            "compile": f"none at run time: nvcc compiled for {target.compiled_for} with the wheel",
            "limits": "head sizes other than 128, float32 and gradients run on the fallback",
        },
        device="cuda",
        bench={
            "16/32 heads, 8192 tokens": benched(8192),
            "16/32 heads, 32768 tokens in 4": benched(32768, 4),
            "16/32 heads, 8192 tokens in 64": benched(8192, 64),
            "16/64 heads, 8192 tokens": benched(8192, H=16, HV=64),
            "2/8 heads, 8192 tokens": benched(8192, H=2, HV=8),
            "16/32 heads, 1024 tokens": benched(1024),
        },
        profile=profiled(target),
    )
