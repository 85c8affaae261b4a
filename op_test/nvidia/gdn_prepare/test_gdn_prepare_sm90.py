"""gdn_prepare on an H200: the whole contract on every kernel, dispatch, profiler gate, speed.

Private modes, for child processes and by hand:
    --bench, --profile    as harness/modes.py describes them
    --table [--json FILE] the table of docs/performance/gdn_prepare_sm90.md, with the peers that can be imported
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
from harness import modes, poison
from harness.compare import assert_heads_close
from harness.prepare import CHOICES, Case
from harness.throughput import cold_sets, copy_bandwidth, graph_us, host_us

DEVICE = "cuda:0"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
prepare = atrex.gdn_prepare
can_use = atrex.can_use_gdn_prepare
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def kernel_or_error(monkeypatch):
    """No test passes on the fallback; those that want it say so."""
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")


def arguments_of(tokens, H=2, HV=4, **options):
    choices = {name: values[0] for name, values in CHOICES.items()}
    choices |= {"tokens": tokens, "H": H, "HV": HV, "K": 128, "V": 128, "dtype": BF16, "gate_dtype": BF16, "seed": 1}
    return Case(choices | options, DEVICE).arguments


# ---- correctness ----------------------------------------------------------------------------------------------------


HEADS = [(16, 32), (8, 16), (4, 8), (1, 1), (3, 9)]


def cases(count, heads, **fixed):
    """``count`` cases with options drawn at random, always the same ones."""
    draw = random.Random(str(fixed))
    for _ in range(count):
        choices = {name: draw.choice(values) for name, values in CHOICES.items()}
        H, HV = draw.choice(heads)
        choices |= {"H": H, "HV": HV, "K": 128, "V": draw.choice((128, 64)), "seed": draw.randrange(1 << 16)}
        yield Case(choices | fixed, DEVICE)


@dtypes
@pytest.mark.parametrize("apply_l2norm", [True, False])
@pytest.mark.parametrize("gate_dtype", CHOICES["gate_dtype"], ids=str)
def test_contract(gate_dtype, apply_l2norm, dtype):
    """Every option on every kernel, in memory that starts as NaN."""
    for case in cases(10, HEADS, dtype=dtype, gate_dtype=gate_dtype, apply_l2norm=apply_l2norm):
        assert can_use(**case.arguments)
        poison.fill_cached_memory(DEVICE)
        with poison.nan_empty():
            result = prepare(**case.arguments)
        try:
            case.check(*result)
        except AssertionError as error:
            raise AssertionError(f"{case.choices}: {error}") from error


def test_softplus_of_large_inputs():
    """Elsewhere exp of it overflowed from 89 on, and the state was multiplied by exp(-inf)."""
    zeros = torch.zeros(4, device=DEVICE)
    arguments = arguments_of([2, 5]) | {"A_log": zeros, "dt_bias": zeros}
    arguments["a"] = torch.tensor([19.0, 21.0, 89.0, 2e4], device=DEVICE).expand(2, 5, 4)
    g = prepare(**arguments)[3]
    torch.testing.assert_close(g[0, 0].cpu(), -torch.tensor([19.000000005602796, 21.0, 89.0, 2e4]))


def test_results_fit_the_delta_rules():
    """Prefill, decode, and decode that does all of this itself give the same."""
    arguments = arguments_of([2, 70])
    q, k, v, g, beta = prepare(**arguments)
    o, state = atrex.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    again, final = atrex.fused_recurrent_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    assert_heads_close("o", o, again, 2, 1e-2)
    assert_heads_close("state", state, final, 1, 1e-2)
    parts = [x.unflatten(-1, (-1, 128)) for x in arguments["conv_output"].split((256, 256, 512), -1)]
    gates = {name: arguments[name] for name in ("a", "b", "A_log", "dt_bias")}
    fused, _ = atrex.fused_recurrent_gated_delta_rule(*parts, **gates, use_qk_l2norm_in_kernel=True)
    assert_heads_close("o", fused, again, 2, 1e-2)


def test_tokens_beyond_two_giga_elements():
    tokens, pitch = 40, 1 << 26
    memory = torch.empty(tokens * pitch, dtype=BF16, device=DEVICE)
    arguments = arguments_of([tokens])
    want = prepare(**arguments)
    apart = memory.as_strided(arguments["conv_output"].shape, (pitch, 1))
    apart.copy_(arguments["conv_output"])
    assert apart[-1].storage_offset() >= 1 << 31
    assert all(map(torch.equal, prepare(**arguments | {"conv_output": apart}), want))


@dtypes
def test_a_token_and_a_head_stay_by_themselves(dtype):
    arguments = arguments_of([3], dtype=dtype)
    q, k, v, g, beta = (x.clone() for x in prepare(**arguments))
    arguments["conv_output"][1, 128] = float("nan")  # head 1 of q
    arguments["a"][1, 2] = float("nan")
    dirty = prepare(**arguments)
    assert dirty[0][1, 1].isnan().all() and dirty[3][1, 2].isnan()
    q[1, 1], g[1, 2] = dirty[0][1, 1], dirty[3][1, 2]
    for got, want in zip(dirty, (q, k, v, g, beta), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_the_kernel_is_eligible_and_loaded():
    arguments = arguments_of([1, 1])
    answer = can_use(**arguments)
    assert answer and answer.target == "nvidia/sm90" and answer.reason == ""
    prepare(**arguments)
    module = sys.modules["atrex.kernels.nvidia.gdn_prepare.sm90.runtime"]
    assert os.path.dirname(module.__file__).startswith(os.path.dirname(atrex.__file__))


REFUSED = {
    "float32": (lambda: arguments_of([2, 5], dtype=FP32), "conv_output must be bfloat16 or float16, got float32"),
    "K": (lambda: arguments_of([2, 5], K=64), "head_k_dim must be 128, got 64"),
    "grad": (
        lambda: arguments_of([2, 5]) | {"A_log": torch.zeros(4, device=DEVICE, requires_grad=True)},
        "no input may require grad in grad mode: the kernels have no backward",
    ),
    "layout": (
        lambda: arguments_of([2, 5]) | {"conv_output": torch.ones(2, 1024, 5, dtype=BF16, device=DEVICE).mT},
        "conv_output must have contiguous channels on the 16-byte grid, got strides (5120, 1, 5), offset 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_refuses_runs_on_the_fallback(name, monkeypatch, caplog):
    make, reason = REFUSED[name]
    arguments = make()
    answer = can_use(**arguments)
    assert not answer and answer.target == "nvidia/sm90" and answer.reason == reason
    with pytest.raises(RuntimeError, match="ATREX_REQUIRE_KERNEL=1 forbids the PyTorch fallback"):
        prepare(**arguments)
    monkeypatch.delenv("ATREX_REQUIRE_KERNEL")
    with caplog.at_level(logging.WARNING, "atrex"):
        (q, *_), _ = (prepare(**arguments) for _ in range(2))
    assert [x.getMessage() for x in caplog.records if reason in x.getMessage()] == [
        f"gdn_prepare runs on the slower PyTorch fallback: {reason}"
    ]
    torch.testing.assert_close(q.float().norm(dim=-1), torch.ones(2, 5, 2, device=DEVICE), rtol=4e-3, atol=0)


def test_rejected_before_any_launch():
    arguments = arguments_of([2, 5])
    with pytest.raises(ValueError, match="b must be on cuda:0 as conv_output, got cpu"):
        prepare(**arguments | {"b": arguments["b"].cpu()})
    with pytest.raises(ValueError, match=r"a must have shape \[B=2, T=5, HV=4\], got \[1, 5, 4\]"):
        prepare(**arguments | {"a": arguments["a"][:1]})


# ---- graphs, repeats, names of kernels ------------------------------------------------------------------------------


@dtypes
def test_capture_and_replay(dtype):
    steps = [arguments_of([1, 5], dtype=dtype, seed=seed) for seed in range(4)]
    static = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in steps[0].items()}
    prepare(**static)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = prepare(**static)
    for step in steps:
        for name, x in step.items():
            if isinstance(x, torch.Tensor):
                static[name].copy_(x)
        graph.replay()
        assert all(map(torch.equal, captured, prepare(**step)))


def test_repeats_are_bitwise_equal():
    arguments = arguments_of([1, 1000], 16, 32)
    first = prepare(**arguments)
    for _ in range(20):
        assert all(map(torch.equal, first, prepare(**arguments)))


def test_other_stream_waits_for_its_inputs():
    """The blocks are placed while the kernel before runs, and must not read before it has written."""
    arguments = arguments_of([1, 64], 16, 32)
    want = prepare(**arguments)
    late = torch.zeros_like(arguments["conv_output"])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late.copy_(arguments["conv_output"])
        got = prepare(**arguments | {"conv_output": late})
    stream.synchronize()
    assert all(map(torch.equal, got, want))


def test_profiler_sees_kernels_of_this_operator_alone():
    child = [sys.executable, os.path.abspath(__file__), "--profile"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    seen = json.loads(subprocess.run(child, check=True, env=env, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    for case in seen["cases"]:
        print(f"{case['case']}: {', '.join(case['operator'])}")
        assert case["problems"] == [] and case["framework"] == []
    names = {name for case in seen["cases"] for name in case["operator"]}
    assert len(names) == 2 and all(name.startswith("atrex_gdn_prepare_") for name in names)


def profiled(dtype):
    return lambda: functools.partial(prepare, **arguments_of([2, 3], dtype=dtype))


def sanitize():
    """Few launches: made on the GPU, judged on the CPU; each tensor is an allocation, so that memcheck sees its end."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for dtype in (BF16, FP16):
        for apply_l2norm in (True, False):
            for case in cases(6, [(1, 2)], dtype=dtype, apply_l2norm=apply_l2norm):
                result = [x.cpu() for x in prepare(**case.arguments)]
                case.arguments = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in case.arguments.items()}
                case.check(*result, views=False)  # copies are none
                print(dtype, case.choices["tokens"], flush=True)


# ---- speed ----------------------------------------------------------------------------------------------------------


def bytes_of(T, H, HV, gate=2):
    """q and k read and written, a and b read, g and beta written in float32."""
    return T * (4 * H * 128 * 2 + 2 * HV * (gate + 4))


def prepare_us(T, H, HV, call=prepare):
    sets = cold_sets(bytes_of(T, H, HV), most=128)
    made = arguments_of([T], H, HV)
    x = made["conv_output"].expand(sets, -1, -1).clone()
    return graph_us([functools.partial(call, **made | {"conv_output": x[i]}) for i in range(sets)])


@pytest.mark.parametrize("H, HV", [(16, 32), (4, 8)])
def test_80_percent_of_copy_bandwidth(H, HV):
    copy = copy_bandwidth()
    us = prepare_us(8192, H, HV)
    share = bytes_of(8192, H, HV) / (us * 1e-6) / copy
    print(f"{H}/{HV}: {us:.1f} us, {share:.0%} of a copy's {copy / 1e12:.2f} TB/s")
    assert share >= (0.8 if H == 16 else 0.6)


def test_one_token_under_5_us():
    us = prepare_us(1, 16, 32)
    print(f"one token: {us:.2f} us")
    assert us < 5


def test_host_cost_of_an_eager_call():
    arguments = arguments_of([1, 4], 4, 8)
    with torch.inference_mode():
        us = host_us(functools.partial(prepare, **arguments))
    print(f"eager call: {us:.1f} us")
    assert us < 25


def peers():
    """What other libraries that can be imported have for it, chained: name -> call, which leaves v as it lies."""
    found = {}
    try:
        from fla.modules.l2norm import l2norm
        from fla.ops.gated_delta_rule.gate import fused_gdn_gate

        def fla(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, **_):
            columns = num_k_heads * head_k_dim
            q, k = (conv_output[..., i * columns : (i + 1) * columns].unflatten(-1, (num_k_heads, -1)) for i in (0, 1))
            return l2norm(q), l2norm(k), fused_gdn_gate(a, A_log, dt_bias), b.float().sigmoid()

        found["FLA"] = fla
    except Exception as error:  # whatever its import ends with
        print(f"FLA is left out: {error}")
    return found


def table():
    copy = copy_bandwidth()
    calls = {"atrex": prepare, **peers()}
    print(f"copy: {copy / 1e12:.2f} TB/s read and written, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    print("H/HV tokens | us, % of copy | " + ", ".join(calls))
    lines = []
    for H, HV in ((16, 32), (8, 16), (4, 8)):
        for T in (1, 128, 1024, 8192):
            with torch.no_grad():
                times = {name: prepare_us(T, H, HV, call) for name, call in calls.items()}
            cells = [f"{us:8.2f} {bytes_of(T, H, HV) / (us * 1e-6) / copy:4.0%}" for us in times.values()]
            print(f"{H:2}/{HV:2} {T:5} | " + " | ".join(cells), flush=True)
            lines.append({"H": H, "HV": HV, "T": T, "us": times})
    return {"copy_bytes_per_second": copy, "rows": lines}


def benched(T):
    """T tokens of a Qwen3-Next layer."""
    return lambda: functools.partial(prepare, **arguments_of([1, T], 16, 32))


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
        api="gdn_prepare",
        about={
            "dispatch": "bfloat16 or float16 channels in a row, on the 16-byte grid, K=128, no gradients",
            "compile": "ahead of time, by nvcc for sm_90a",
            "limits": "K=128 alone; v is a view of the input",
        },
        device="cuda",
        bench={f"{T} tokens": benched(T) for T in (1, 128, 8192)},
        profile={"bfloat16": profiled(BF16), "float16": profiled(FP16)},
    )


if __name__ == "__main__":
    sys.exit(main())
