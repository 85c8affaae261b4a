"""causal_conv1d_fn and causal_conv1d_update on an H200: the contract on every kernel, dispatch, profiler gate, speed.

Private modes, for child processes and by hand:
    --bench, --profile    as harness/modes.py describes them
    --table [--json FILE] the table of docs/performance/causal_conv1d_sm90.md, with the peers that can be imported
    --sanitize            few launches of every kernel on small shapes, to be run under compute-sanitizer
"""

import functools
import json
import logging
import os
import pathlib
import subprocess
import sys

import pytest
import torch

import atrex
from harness import modes, poison
from harness.causal_conv1d import PREFILL, UPDATE, PrefillCase, UpdateCase, assert_close, convolve, draw
from harness.throughput import cold_sets, copy_bandwidth, graph_us, host_us

DEVICE = "cuda:0"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
fn, update = atrex.causal_conv1d_fn, atrex.causal_conv1d_update
dtypes = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])


@pytest.fixture(autouse=True)
def kernel_or_error(monkeypatch):
    """No test passes on the fallback; those that want it say so."""
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def randn(*shape, seed, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def tokens(B, T, C, seed, dtype=BF16):
    """``[B, C, T]``, channels contiguous."""
    return randn(B, T, C, seed=seed, dtype=dtype).mT


# ---- correctness ----------------------------------------------------------------------------------------------------

CHANNELS = [72, 1032, 2048]  # part of a block, a block and a rest, whole blocks


@dtypes
@pytest.mark.parametrize("C", CHANNELS)
@pytest.mark.parametrize("mode", PREFILL["mode"])
def test_prefill_contract(mode, C, dtype):
    """Every mode on every kernel, in memory that starts as NaN."""
    for choices in draw(PREFILL, 12, mode=mode, dtype=dtype, C=C, W=4):
        case = PrefillCase(choices, DEVICE)
        poison.fill_cached_memory(DEVICE)
        with poison.nan_empty():
            result = fn(**case.arguments)
        case.check(result)


@dtypes
@pytest.mark.parametrize("C", CHANNELS)
@pytest.mark.parametrize("extra", UPDATE["extra"])
@pytest.mark.parametrize("mode", UPDATE["mode"])
def test_update_contract(mode, extra, C, dtype):
    # Of states with contiguous columns the kernel takes those of three and four, and none to verify with.
    fixed = {"states": "channels"} if extra > 1 or mode == "verify" else {}
    for choices in draw(UPDATE, 12, mode=mode, dtype=dtype, extra=extra, C=C, W=4, **fixed):
        case = UpdateCase(choices, DEVICE)
        poison.fill_cached_memory(DEVICE)
        with poison.nan_empty():
            result = update(**case.arguments)
        case.check(result)


@dtypes
@pytest.mark.parametrize("T", [5, 33, 300, 4099])
def test_tiles_of_every_length(T, dtype):
    """Few channels and tokens get short tiles, many get long ones; the outputs are the same."""
    x, weight, bias = (
        tokens(2, T, 1024, 1, dtype),
        randn(1024, 4, seed=2, dtype=dtype),
        randn(1024, seed=3, dtype=dtype),
    )
    out = fn(x, weight, bias, activation="silu")
    for b in range(2):
        want, magnitude = convolve(x[b].t(), x.new_zeros(3, 1024), weight, bias, True)
        assert_close(out[b].t(), want, magnitude)
    assert torch.equal(fn(x[:, :8], weight[:8], bias[:8], activation="silu"), out[:, :8])


@dtypes
@pytest.mark.parametrize("layout", ["channels", "columns"])
@pytest.mark.parametrize("columns", [3, 4])
def test_decode_after_prefill_equals_prefill_of_one_token_more(columns, layout, dtype):
    """Bit for bit."""
    x, weight, bias = (
        tokens(2, 70, 2048, 4, dtype),
        randn(2048, 4, seed=5, dtype=dtype),
        randn(2048, seed=6, dtype=dtype),
    )
    whole = fn(x, weight, bias, activation="silu")
    first, final = fn(x[..., :67], weight, bias, activation="silu", return_final_states=True)
    state = torch.full((2, 2048, columns), float("nan"), dtype=dtype, device=DEVICE)
    state = state if layout == "columns" else state.mT.contiguous().mT
    state[..., columns - 3 :] = final
    parts = [first] + [update(x[..., t : t + 1], state, weight, bias, "silu") for t in range(67, 70)]
    assert torch.equal(torch.cat(parts, -1), whole) and torch.equal(state[..., -3:], x[..., 67:])


@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_verify_with_k_accepted_equals_k_decode_steps(accepted):
    x, more, weight = tokens(3, 4, 1024, 7), tokens(3, 4, 1024, 8), randn(1024, 4, seed=9)
    stepped = randn(3, 3, 1024, seed=10).mT
    pool = torch.cat([stepped, torch.zeros_like(stepped)], -1).mT.contiguous().mT
    out = update(x, pool, weight, None, "silu", num_accepted_tokens=ints(1, 1, 1))
    after = update(more, pool, weight, None, "silu", num_accepted_tokens=ints(*[accepted] * 3))
    for t in range(accepted):
        assert torch.equal(update(x[..., t], stepped, weight, None, "silu"), out[..., t])
    assert torch.equal(update(more, stepped, weight, None, "silu"), after)


# ---- what went wrong elsewhere --------------------------------------------------------------------------------------


def test_prefill_without_states():
    x, weight = randn(1, 64, 1025, seed=11), randn(64, 4, seed=12)
    want, magnitude = convolve(x[0].t(), x.new_zeros(3, 64), weight, None, True)
    for out in (fn(x, weight, activation="silu")[0],
                fn(x[0], weight, activation="silu", query_start_loc=ints(0, 1025), conv_states=None)):  # fmt: skip
        assert_close(out.t(), want, magnitude)


def test_packed_sequences_with_initial_states_at_an_odd_length():
    """Sizes at which sequence ids were read out of bounds, and ids with initial states were refused."""
    C = 10240
    x, weight, states = tokens(1, 4099, C, 13), randn(C, 4, seed=14), randn(3, C, 3, seed=15)
    out = fn(x, weight, query_start_loc=ints(0, 4000, 4001, 4099), initial_states=states)
    for n, (start, end) in enumerate(((0, 4000), (4000, 4001), (4001, 4099))):
        want, magnitude = convolve(x[0, :, start:end].t(), states[n].t(), weight, None, False)
        assert_close(out[0, :, start:end].t(), want, magnitude)


def test_packed_sequences_do_not_leak_into_each_other():
    x, weight = tokens(1, 8, 128, 16), randn(128, 4, seed=17)
    out = fn(x, weight, query_start_loc=ints(0, 4, 8))
    assert torch.equal(out, torch.cat([fn(x[..., :4], weight), fn(x[..., 4:], weight)], -1))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_chunk_shorter_than_the_state_leaves_a_shared_source_slot_alone(length):
    x, before, weight = tokens(1, 2 * length, 64, 18), randn(4, 64, 3, seed=19), randn(64, 4, seed=20)
    pool = before.clone()
    fn(x, weight, query_start_loc=ints(0, length, 2 * length), conv_states=pool, cache_indices=ints(1, 2),
       initial_state_indices=ints(3, 3), has_initial_state=torch.ones(2, dtype=torch.bool, device=DEVICE))  # fmt: skip
    assert torch.equal(pool[[0, 3]], before[[0, 3]])
    for n in range(2):
        part = x[0, :, n * length : (n + 1) * length]
        assert torch.equal(pool[n + 1], torch.cat([before[3], part], 1)[:, -3:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_malformed_indices_counts_and_offsets_touch_nothing_else(dtype):
    """The pool lies between guards."""
    extremes = [-1, 4, 5, 1 << 20, (1 << 31) - 1, -(1 << 31)]
    extremes += [1 << 62, -(1 << 62)] if dtype is torch.int64 else []
    N, C = len(extremes) + 1, 64
    memory = torch.full((1 << 16,), 7.0, device=DEVICE, dtype=BF16)
    pool = memory[1 << 15 :][: 4 * 5 * C].view(4, 5, C).mT
    pool.copy_(randn(4, C, 5, seed=21))
    before = memory.clone()
    x, weight = tokens(N, 3, C, 22), randn(C, 4, seed=23)
    values = functools.partial(torch.tensor, dtype=dtype, device=DEVICE)
    out = update(x, pool, weight, conv_state_indices=values([*extremes, 0]))
    assert not out[:-1].any() and out[-1].any()
    counts = values([*extremes, 2])
    out = update(x, pool, weight, conv_state_indices=values([1] * N), num_accepted_tokens=counts)
    assert not out[:-1].any() and out[-1].any()
    narrow = pool[..., :3]
    for options in ({}, {"initial_state_indices": values([2] * N)}):
        packed = fn(tokens(1, N, C, 24)[0], weight, query_start_loc=values(range(N + 1)), conv_states=narrow,
                    cache_indices=values([*extremes, 0]), pad_slot_id=-7,
                    has_initial_state=torch.ones(N, dtype=torch.bool, device=DEVICE), **options)  # fmt: skip
        assert packed[:, :-1].any() == bool(options) and packed[:, -1].any()
    for offsets in ([-5, 2, 90, 3], [60, 0, 6, 1 << 30], [3, 3, 3, 3], [0, 50, 2, 60], [1 << 30, -9, 0, 0]):
        fn(tokens(1, 70, C, 25)[0], weight, query_start_loc=values(offsets), conv_states=narrow,
           cache_indices=values([0, 1, 3]))  # fmt: skip
        update(
            randn(70, C, seed=26), pool, weight, query_start_loc=values(offsets), conv_state_indices=values([0, 1, 3])
        )
    changed = before.clone()
    changed[1 << 15 :][: 4 * 5 * C] = memory[1 << 15 :][: 4 * 5 * C]
    slot = slice((1 << 15) + 2 * 5 * C, (1 << 15) + 3 * 5 * C)
    assert torch.equal(memory, changed) and torch.equal(memory[slot], before[slot])  # slot 2 is only read


def test_slots_beyond_two_giga_elements():
    C, P = 8192, 90000
    pool = torch.empty(P, 3, C, dtype=BF16, device=DEVICE).mT
    assert pool[89999:].storage_offset() >= 1 << 31
    slots, start = [89999, 87382, 0], randn(3, C, 3, seed=27)
    for slot, one in zip(slots, start, strict=True):
        pool[slot] = one
    x, weight = randn(3, C, seed=28), randn(C, 4, seed=29)
    out = update(x, pool, weight, conv_state_indices=ints(*slots))
    assert torch.equal(out, update(x, start, weight))
    assert all(torch.equal(pool[slot], start[i]) for i, slot in enumerate(slots))


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_the_kernel_is_eligible_and_loaded():
    x, weight = tokens(1, 2, 64, 30), randn(64, 4, seed=31)
    answer = atrex.can_use_causal_conv1d_fn(x, weight)
    assert answer and answer.target == "nvidia/sm90" and answer.reason == ""
    fn(x, weight)
    module = sys.modules["atrex.kernels.nvidia.causal_conv1d.sm90.runtime"]
    assert os.path.dirname(module.__file__).startswith(os.path.dirname(atrex.__file__))


def test_what_the_kernel_refuses_runs_on_the_fallback(monkeypatch, caplog):
    x, weight = tokens(1, 5, 64, 32), randn(64, 3, seed=33)
    with pytest.raises(RuntimeError, match=r"weight must be \[C, 4\], got W=3; ATREX_REQUIRE_KERNEL=1 forbids"):
        fn(x, weight)
    monkeypatch.delenv("ATREX_REQUIRE_KERNEL")
    with caplog.at_level(logging.WARNING, "atrex"):
        out, _ = fn(x, weight), fn(x, weight)
    assert [record.getMessage().partition(":")[2] for record in caplog.records] == [" weight must be [C, 4], got W=3"]
    assert_close(out[0].t(), *convolve(x[0].t(), x.new_zeros(2, 64), weight, None, False))


def test_rejected_before_any_launch():
    with pytest.raises(ValueError, match=r"weight must be on cuda:0 as x, got cpu"):
        fn(tokens(1, 2, 64, 34), torch.zeros(64, 4, dtype=BF16))
    with pytest.raises(ValueError, match=r"conv_state_indices must have shape \[N=8\], got \[5\]"):
        update(randn(8, 64, seed=35), randn(9, 64, 3, seed=36), randn(64, 4, seed=37),
               conv_state_indices=ints(1, 2, 3, 4, 5))  # fmt: skip


# ---- graphs, repeats, names of kernels ------------------------------------------------------------------------------


def test_capture_and_replay():
    """A captured chunk and verify step that are replayed with other tokens, slots, lengths and counts."""
    weight, pool = randn(256, 4, seed=38), randn(9, 5, 256, seed=39).mT
    x, slots, ends, counts = randn(12, 257, seed=40)[:, 1:], ints(0, 1, 2, 3), ints(0, 3, 6, 9, 12), ints(1, 1, 1, 1)
    has = torch.tensor([True, False, True, True], device=DEVICE)

    def call(pool):
        first = fn(x.t(), weight, query_start_loc=ends, conv_states=pool[..., :3], cache_indices=slots,
                   has_initial_state=has)  # fmt: skip
        return first, update(x, pool, weight, None, "silu", conv_state_indices=slots, query_start_loc=ends,
                             num_accepted_tokens=counts)  # fmt: skip

    captured_pool, eager_pool = pool.mT.clone().mT, pool.mT.clone().mT
    call(pool)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(captured_pool)
    for i in range(4):
        x.copy_(randn(12, 256, seed=41 + i))
        slots.copy_(torch.randperm(9, generator=torch.Generator().manual_seed(i))[:4])
        ends.copy_(torch.tensor([[0, 3, 6, 9, 12], [0, 1, 2, 2, 5], [0, 2, 5, 8, 9], [0, 3, 3, 4, 4]][i]))
        counts.copy_(torch.tensor([[1, 1, 1, 1], [3, 1, 0, 2], [1, 2, 3, 9], [2, 2, 2, 2]][i]))
        graph.replay()
        eager = call(eager_pool)
        assert all(map(torch.equal, captured, eager)) and torch.equal(captured_pool, eager_pool)


def test_repeats_are_bitwise_equal():
    x, weight = tokens(1, 5000, 2048, 45), randn(2048, 4, seed=46)
    options = {"query_start_loc": ints(0, 1, 33, 2000, 5000), "initial_states": randn(4, 2048, 3, seed=47)}
    first = fn(x, weight, activation="silu", return_final_states=True, **options)
    for _ in range(20):
        again = fn(x, weight, activation="silu", return_final_states=True, **options)
        assert all(map(torch.equal, first, again))


def test_other_stream():
    x, weight, state = randn(4, 256, seed=48), randn(256, 4, seed=49), randn(4, 256, 3, seed=50)
    other = state.clone()
    want = update(x, state, weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        out = update(x, other, weight)
    stream.synchronize()
    assert torch.equal(out, want) and torch.equal(other, state)


def test_profiler_sees_kernels_of_this_operator_alone():
    child = [sys.executable, os.path.abspath(__file__), "--profile"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    seen = json.loads(subprocess.run(child, check=True, env=env, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    for case in seen["cases"]:
        print(f"{case['case']}: {', '.join(case['operator'])}")
        assert case["problems"] == [] and case["framework"] == []
    names = {name for case in seen["cases"] for name in case["operator"]}
    assert len(names) == 8 and all(name.startswith("atrex_causal_conv1d_") for name in names)


def profiled():
    """A call for each kernel; those of x [B, C, T] with contiguous tokens are packed first."""

    def prefill(dtype, packed):
        x, weight = randn(1, 256, 40, seed=51, dtype=dtype), randn(256, 4, seed=52, dtype=dtype)
        return functools.partial(fn, x if packed else x.mT.contiguous().mT, weight)

    def decode(dtype):
        x, state, weight = (randn(2, *shape, seed=53, dtype=dtype) for shape in ((256,), (256, 4), (128, 4)))
        return functools.partial(update, x, state, weight.flatten(0, 1))

    return {
        f"{name}, {dtype}": functools.partial(make, dtype, *options)
        for dtype in (BF16, FP16, FP32)
        for name, make, options in (
            ("prefill", prefill, (False,)), ("packed", prefill, (True,)), ("decode", decode, ()),
        )
    }  # fmt: skip


def sanitize():
    """Few launches; each tensor is an allocation of its own, so that memcheck sees its end."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for case_of, call, choices in ((PrefillCase, fn, PREFILL), (UpdateCase, update, UPDATE)):
        for mode in choices["mode"]:
            fixed = {"states": "channels"} if mode == "verify" else {}
            extra = {"extra": 1} if call is update else {}
            for drawn in draw(choices, 4, mode=mode, dtype=BF16, C=72, W=4, page=False, **fixed, **extra):
                case = case_of(drawn, DEVICE)
                case.check(call(**case.arguments))
                print(call.__name__, mode, case.lengths, flush=True)


# ---- speed ----------------------------------------------------------------------------------------------------------


def prefill_us(T, C, call=fn):
    weight = randn(C, 4, seed=54)
    count = cold_sets(4 * T * C, most=16, least=2)
    return graph_us([functools.partial(call, tokens(1, T, C, 55 + i), weight, activation="silu") for i in range(count)])


def decode_us(B, C, columns, call=update):
    """transformers' layout for four columns, vLLM's for three."""
    weight = randn(C, 4, seed=75)
    count = cold_sets(2 * B * C * (2 + 2 * columns), most=256)
    states = [randn(B, C, columns, seed=76) for _ in range(count)]
    states = states if columns == 4 else [state.mT.contiguous().mT for state in states]
    xs = [randn(B, C, seed=77) for _ in range(count)]
    return graph_us([functools.partial(call, x, s, weight, None, "silu") for x, s in zip(xs, states, strict=True)])


def decode_bytes(B, C, columns):
    return 2 * B * C * (2 + 2 * columns)


def test_prefill_at_80_percent_of_copy_bandwidth():
    copy = copy_bandwidth()
    for C in (8192, 10240):
        us = prefill_us(8192, C)
        share = 4 * 8192 * C / (us * 1e-6) / copy
        print(f"C={C}, 8192 tokens: {us:.1f} us, {share:.0%} of a copy's {copy / 1e12:.2f} TB/s")
        assert share >= 0.8


def test_decode_bandwidth():
    """A launch of a few microseconds: bounded only where it is long enough for that."""
    copy = copy_bandwidth()
    for columns in (3, 4):
        us = decode_us(1024, 8192, columns)
        share = decode_bytes(1024, 8192, columns) / (us * 1e-6) / copy
        print(f"B=1024, {columns} columns: {us:.1f} us, {share:.0%} of a copy's {copy / 1e12:.2f} TB/s")
        assert share >= 0.7


def test_host_cost_of_an_eager_call():
    x, pool, weight = randn(4, 256, seed=78), randn(5, 256, 3, seed=79), randn(256, 4, seed=80)
    slots, ends = ints(0, 1, 2, 3), ints(0, 1, 2, 3, 4)
    calls = {
        "update": functools.partial(update, x, pool, weight, None, "silu", conv_state_indices=slots),
        "fn": functools.partial(
            fn, x.t(), weight, activation="silu", query_start_loc=ends, conv_states=pool, cache_indices=slots
        ),
    }
    for name, call in calls.items():
        with torch.inference_mode():
            us = host_us(call)
        print(f"eager {name}: {us:.1f} us")
        assert us < 25


def peers():
    """Of other libraries, those that can be imported: name -> (prefill, update), called like the public functions."""
    found = {}
    try:
        import causal_conv1d

        found["causal-conv1d"] = (causal_conv1d.causal_conv1d_fn, causal_conv1d.causal_conv1d_update)
    except Exception as error:  # whatever its import ends with
        print(f"causal-conv1d is left out: {error}")
    try:
        from fla.modules.convolution import causal_conv1d as fla
        from fla.modules.convolution import causal_conv1d_update as fla_update

        def fla_columns(x, state, weight, bias, activation):
            if state.shape[2] != 4:
                raise ValueError("FLA keeps states of four columns")
            return fla_update(x, state, weight=weight, bias=bias, activation=activation)

        found["FLA"] = (lambda x, weight, activation: fla(x.mT, weight, activation=activation), fla_columns)
    except Exception as error:
        print(f"FLA is left out: {error}")
    return found


def table():
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e12:.2f} TB/s read and written, {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    calls = {"atrex": (fn, update), **peers()}
    lines = []
    for C in (8192, 4096, 2048, 10240):
        rows = [(f"prefill, {T} tokens", 4 * T * C, 0, (T, C)) for T in (128, 1024, 4096, 8192, 32768)]
        rows += [
            (f"decode, B={B}, {columns} columns", decode_bytes(B, C, columns), 1, (B, C, columns))
            for columns in (3, 4)
            for B in (1, 32, 128, 512, 1024)
        ]
        for what, size, which, sizes in rows:
            us = {}
            for name, pair in calls.items():
                try:
                    with torch.no_grad():
                        us[name] = (prefill_us, decode_us)[which](*sizes, pair[which])
                except Exception as error:  # a peer that refuses a row does not end the table
                    if name == "atrex":
                        raise
                    print(f"{name} is left out of the next row: {str(error).splitlines()[:1]}")
            cells = ", ".join(f"{name} {x:.2f} us {size / (x * 1e-6) / copy:.0%}" for name, x in us.items())
            print(f"C={C} {what}: {cells}", flush=True)
            lines.append({"C": C, "case": what, "us": us})
    return {"copy_bytes_per_second": copy, "rows": lines}


def benched_prefill(T):
    def make():
        return functools.partial(fn, tokens(1, T, 8192, 81), randn(8192, 4, seed=82), activation="silu")

    return make


def benched_decode(B):
    def make():
        x, state = randn(B, 8192, seed=83), randn(B, 3, 8192, seed=84).mT
        return functools.partial(update, x, state, randn(8192, 4, seed=85), None, "silu")

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
        api="causal_conv1d_fn",
        about={
            "dispatch": "bfloat16, float16 or float32, W=4, C of whole 16-byte vectors, states on the 16-byte grid",
            "compile": "ahead of time, by nvcc for sm_90a",
            "limits": "x with contiguous tokens is copied first",
        },
        device="cuda",
        bench={f"prefill, {T} tokens": benched_prefill(T) for T in (128, 1024, 8192)}
        | {f"decode, {B} sequences": benched_decode(B) for B in (1, 128, 1024)},
        profile=profiled(),
    )


if __name__ == "__main__":
    sys.exit(main())
