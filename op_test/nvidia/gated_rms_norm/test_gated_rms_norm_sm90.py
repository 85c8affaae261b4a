"""gated_rms_norm on an H200: the whole contract on every kernel, dispatch, profiler gate, speed.

Private modes, for child processes and by hand:
    --bench, --profile    as harness/modes.py describes them
    --table [--json FILE] the table of docs/performance/gated_rms_norm_sm90.md, with the peers that can be imported
    --sanitize            few launches of every kernel on small shapes, to be run under compute-sanitizer
"""

import functools
import json
import logging
import os
import pathlib
import random
import subprocess
import sys

import pytest
import torch

import atrex
from harness import gated_norm, modes, poison
from harness.compare import assert_heads_close
from harness.gated_norm import CHOICES, LIMITS, Case, differing, expected
from harness.throughput import cold_sets, copy_bandwidth, graph_us, host_us

DEVICE = "cuda:0"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
norm = atrex.gated_rms_norm
can_use = atrex.can_use_gated_rms_norm
make_tensors = functools.partial(gated_norm.make_tensors, D=128, device=DEVICE)
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def kernel_or_error(monkeypatch):
    """No test passes on the fallback; those that want it say so."""
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")


# ---- correctness ----------------------------------------------------------------------------------------------------


def cases(count, **fixed):
    """``count`` cases with options drawn at random, always the same ones."""
    draw = random.Random(str(fixed))
    for _ in range(count):
        choices = {name: draw.choice(values) for name, values in CHOICES.items()}
        yield Case(choices | fixed | {"D": 128, "seed": draw.randrange(1 << 16)}, DEVICE)


@dtypes
@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("activation", CHOICES["activation"])
@pytest.mark.parametrize("weight_dtype", CHOICES["weight_dtype"], ids=str)
def test_contract(dtype, weight_dtype, activation, cast):
    """Every option on every kernel, in memory that starts as NaN."""
    fixed = {"dtype": dtype, "weight_dtype": weight_dtype, "activation": activation, "cast_before_weight": cast}
    for case in cases(8, **fixed):
        assert can_use(**case.arguments)
        poison.fill_cached_memory(DEVICE)
        with poison.nan_empty():
            out = norm(**case.arguments)
        try:
            case.check(out)
        except AssertionError as error:
            raise AssertionError(f"{case.choices}: {error}") from error


@dtypes
def test_the_two_roundings_differ(dtype):
    x, weight, z = make_tensors([2, 50, 4], seed=1, dtype=dtype)
    for cast in (False, True):
        out = norm(x, weight, z, cast_before_weight=cast)
        assert differing(out, expected(x, weight, z, 1e-6, "silu", cast)) < 5e-3
        assert differing(out, expected(x, weight, z, 1e-6, "silu", not cast)) > 0.2


@dtypes
def test_sigmoid_is_not_run_as_silu(dtype):
    """Elsewhere a model whose output gate is a sigmoid got the silu. z = 0 tells them apart: 0.5 or 0."""
    x, weight = torch.full((1, 128), 3.0, dtype=dtype, device=DEVICE), torch.full((128,), 2.0, device=DEVICE)
    z = torch.tensor([0.0, 1.0, -1.0, 30.0, -30.0, 200.0, -200.0, 2.0], dtype=dtype, device=DEVICE).repeat(1, 16)
    assert norm(x, weight, z, activation="sigmoid")[0, 0] == 1 and norm(x, weight, z)[0, 0] == 0
    for activation in ("silu", "sigmoid"):
        out = norm(x, weight, z, activation=activation)
        torch.testing.assert_close(out.double(), expected(x, weight, z, 1e-6, activation, False), rtol=4e-3, atol=1e-6)


def test_rows_apart_from_each_other():
    """Every way in which two strides can find the rows; what lies between them is NaN."""
    memory = torch.full((1 << 16,), float("nan"), dtype=BF16, device=DEVICE)
    x, weight, _ = make_tensors([2, 3, 4], seed=2)
    for strides in ((1536, 512, 128), (2048, 512, 128), (3072, 1024, 128), (4896, 1632, 136), (128, 256, 768)):
        z = memory.as_strided((2, 3, 4, 128), (*strides, 1), 64)
        z.copy_(3 * torch.randn(2, 3, 4, 128, device=DEVICE))
        if not can_use(x, weight, z):  # three strides
            assert strides == (128, 256, 768)
            continue
        assert_heads_close("out", norm(x, weight, z), expected(x, weight, z, 1e-6, "silu", False), 1, LIMITS[BF16])
        assert torch.equal(norm(z, weight, x), norm(z.contiguous(), weight, x))
        memory.fill_(float("nan"))
    z = torch.randn(128, dtype=BF16, device=DEVICE).expand(2, 3, 4, 128)
    assert torch.equal(norm(x, weight, z), norm(x, weight, z.contiguous()))


def test_rows_beyond_two_giga_elements():
    heads, D = 32, 128
    tokens, pitch = 40, 1 << 26
    memory = torch.empty(tokens * pitch, dtype=BF16, device=DEVICE)
    z = memory.as_strided((tokens, heads, D), (pitch, D, 1))
    x, weight, values = make_tensors([1, tokens, heads], seed=3)
    z.copy_(values[0])
    assert z[-1].storage_offset() >= 1 << 31
    assert torch.equal(norm(x[0], weight, z), norm(x, weight, values)[0])
    assert torch.equal(norm(z, weight, x[0]), norm(values[0], weight, x[0]))


@dtypes
def test_a_row_stays_by_itself(dtype):
    x, weight, z = make_tensors([1, 3, 2], seed=4, dtype=dtype)
    clean = norm(x, weight, z)
    x[0, 1, 0], z[0, 1, 1, 3] = float("inf"), float("nan")
    dirty = norm(x, weight, z)
    assert torch.equal(dirty[0, ::2], clean[0, ::2])
    assert dirty[0, 1, 0].isnan().any() and dirty[0, 1, 1].isnan().nonzero().tolist() == [[3]]


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_the_kernel_is_eligible_and_loaded():
    tensors = make_tensors([1, 1, 32], seed=5)
    answer = can_use(*tensors)
    assert answer and answer.target == "nvidia/sm90" and answer.reason == ""
    norm(*tensors)
    module = sys.modules["atrex.kernels.nvidia.gated_rms_norm.sm90.runtime"]
    assert os.path.dirname(module.__file__).startswith(os.path.dirname(atrex.__file__))


REFUSED = {
    "float32": ({"dtype": FP32}, "x and z must be both bfloat16 or both float16, got float32, float32"),
    "D": ({"D": 64}, "x must have rows of D=128, got D=64"),
    "grad": ({"grad": True}, "no input may require grad in grad mode: the kernels have no backward"),
    "layout": (
        {"x_layout": "misaligned"},
        "x must have contiguous rows on the 16-byte grid, at most two strides from row to row, got shape "
        "[2, 1, 4, 128], strides (512, 512, 128, 1), offset 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_refuses_runs_on_the_fallback(name, monkeypatch, caplog):
    options, reason = REFUSED[name]
    grad = options.get("grad", False)
    shape = {x: value for x, value in options.items() if x != "grad"}
    x, weight, z = make_tensors([2, 1, 4], seed=6, **shape)
    x.requires_grad_(grad)
    answer = can_use(x, weight, z)
    assert not answer and answer.target == "nvidia/sm90" and answer.reason == reason
    with pytest.raises(RuntimeError, match="ATREX_REQUIRE_KERNEL=1 forbids the PyTorch fallback"):
        norm(x, weight, z)
    monkeypatch.delenv("ATREX_REQUIRE_KERNEL")
    with caplog.at_level(logging.WARNING, "atrex"):
        out, _ = (norm(x, weight, z) for _ in range(2))
    assert [x.getMessage() for x in caplog.records if reason in x.getMessage()] == [
        f"gated_rms_norm runs on the slower PyTorch fallback: {reason}"
    ]
    x = x.detach()
    assert_heads_close("out", out.detach(), expected(x, weight, z, 1e-6, "silu", False), 2, LIMITS[x.dtype])


def test_rejected_before_any_launch():
    x, weight, z = make_tensors([2, 1, 4], seed=7)
    with pytest.raises(ValueError, match="z must be on cuda:0 as x, got cpu"):
        norm(x, weight, z.cpu())
    with pytest.raises(ValueError, match=r"z must have shape \[\*, D=128\] with 8 rows as x, got \[1, 1, 4, 128\]"):
        norm(x, weight, z[:1])


# ---- graphs, repeats, names of kernels ------------------------------------------------------------------------------


@dtypes
def test_capture_and_replay(dtype):
    steps = [make_tensors([1, 5, 4], seed=10 + i, dtype=dtype) for i in range(4)]
    x, weight, z = (x.clone() for x in steps[0])
    norm(x, weight, z)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = norm(x, weight, z)
    for step in steps:
        for static, new in zip((x, weight, z), step, strict=True):
            static.copy_(new)
        graph.replay()
        assert torch.equal(captured, norm(*step))


def test_repeats_are_bitwise_equal():
    tensors = make_tensors([1, 1000, 32], seed=20)
    first = norm(*tensors)
    for _ in range(20):
        assert torch.equal(first, norm(*tensors))


def test_other_stream_waits_for_its_inputs():
    """The blocks are placed while the kernel before runs, and must not read before it has written."""
    x, weight, z = make_tensors([1, 64, 32], seed=21)
    want = norm(x, weight, z)
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late.copy_(x)
        out = norm(late, weight, z)
        again = norm(out, weight, z)
    stream.synchronize()
    assert torch.equal(out, want) and torch.equal(again, norm(want, weight, z))


def test_profiler_sees_kernels_of_this_operator_alone():
    child = [sys.executable, os.path.abspath(__file__), "--profile"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    seen = json.loads(subprocess.run(child, check=True, env=env, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    for case in seen["cases"]:
        print(f"{case['case']}: {', '.join(case['operator'])}")
        assert case["problems"] == [] and case["framework"] == []
    names = {name for case in seen["cases"] for name in case["operator"]}
    assert len(names) == 2 and all(name.startswith("atrex_gated_rms_norm_") for name in names)


def profiled(dtype):
    def make():
        return functools.partial(norm, *make_tensors([2, 2, 4], seed=22, dtype=dtype, z_layout="split"))

    return make


def sanitize():
    """Few launches: made on the GPU, judged on the CPU; each tensor is an allocation, so that memcheck sees its end."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for dtype in (BF16, FP16):
        for cast in (False, True):
            for case in cases(6, dtype=dtype, cast_before_weight=cast):
                out = norm(**case.arguments)
                case.arguments = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in case.arguments.items()}
                case.check(out.cpu())
                print(dtype, case.choices["shape"], flush=True)


# ---- speed ----------------------------------------------------------------------------------------------------------


def bytes_of(T, HV):
    return 3 * T * HV * 128 * 2


def norm_us(call, T, HV, apart=8):
    """``call(x, weight, z)`` on the rows of T tokens, where z is a part of a projection that is wider by ``apart``."""
    sets = cold_sets(bytes_of(T, HV), most=128)
    x = torch.randn(sets, T, HV, 128, dtype=BF16, device=DEVICE)
    z = torch.randn(sets, T, HV + apart, 128, dtype=BF16, device=DEVICE)[:, :, apart:]
    weight = torch.ones(128, dtype=BF16, device=DEVICE)
    return graph_us([functools.partial(call, x[i], weight, z[i]) for i in range(sets)])


@pytest.mark.parametrize("HV", [32, 8])
def test_80_percent_of_copy_bandwidth(HV):
    copy = copy_bandwidth()
    us = norm_us(norm, 8192, HV)
    share = bytes_of(8192, HV) / (us * 1e-6) / copy
    print(f"HV={HV}: {us:.1f} us, {share:.0%} of a copy's {copy / 1e12:.2f} TB/s")
    assert share >= (0.8 if HV == 32 else 0.7)


def test_one_token_under_5_us():
    us = norm_us(norm, 1, 32)
    print(f"one token: {us:.2f} us")
    assert us < 5


def test_host_cost_of_an_eager_call():
    x, weight, z = make_tensors([1, 4, 8], seed=23, z_layout="split")
    with torch.inference_mode():
        us = host_us(functools.partial(norm, x, weight, z))
    print(f"eager call: {us:.1f} us")
    assert us < 25


# ---- the table ------------------------------------------------------------------------------------------------------


def peers():
    """Norms of other libraries, for those that can be imported: name -> call(x, weight, z)."""
    found = {}
    try:
        from fla.modules.fused_norm_gate import rms_norm_gated as fla

        found["FLA"] = lambda x, weight, z: fla(x, z, weight, None, activation="swish", eps=1e-6)
    except Exception as error:  # whatever its import ends with
        print(f"FLA is left out: {error}")
    return found


def table():
    copy = copy_bandwidth()
    calls = {"atrex": norm, **peers()}
    print(f"copy: {copy / 1e12:.2f} TB/s read and written, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    print("HV tokens | us, % of copy | " + ", ".join(calls))
    lines = []
    for HV in (32, 16, 8):
        for T in (1, 32, 128, 1024, 8192):
            # z contiguous: peers that need it so would pay for a copy.
            times = {name: norm_us(call, T, HV, apart=0) for name, call in calls.items()}
            cells = [f"{us:8.2f} {bytes_of(T, HV) / (us * 1e-6) / copy:4.0%}" for us in times.values()]
            print(f"{HV:2} {T:5} | " + " | ".join(cells), flush=True)
            lines.append({"HV": HV, "T": T, "us": times})
    return {"copy_bytes_per_second": copy, "rows": lines}


def benched(T):
    """The norm of T tokens of a Qwen3-Next layer."""

    def make():
        return functools.partial(norm, *make_tensors([1, T, 32], seed=24, z_layout="split"))

    return make


def main():
    os.environ["ATREX_REQUIRE_KERNEL"] = "1"
    if sys.argv[1:2] == ["--sanitize"]:
        return sanitize()
    if sys.argv[1:2] == ["--table"]:
        result = table()
        if sys.argv[2:3] == ["--json"]:
            pathlib.Path(sys.argv[3]).write_text(json.dumps(result, indent=1))
        return None
    return modes.main(
        api="gated_rms_norm",
        about={
            "dispatch": "bfloat16 or float16 x and z with rows of 128 on the 16-byte grid, no gradients",
            "compile": "ahead of time, by nvcc for sm_90a",
            "limits": "rows of 128 alone; at most two strides from row to row",
        },
        device="cuda",
        bench={f"{T} tokens": benched(T) for T in (1, 128, 8192)},
        profile={"bfloat16": profiled(BF16), "float16": profiled(FP16)},
    )


if __name__ == "__main__":
    sys.exit(main())
