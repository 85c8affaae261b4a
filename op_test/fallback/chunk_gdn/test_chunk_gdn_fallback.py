"""The fallback of chunk_gated_delta_rule: the whole contract on a CPU, gradients, torch.compile, speed and memory."""

import os
import statistics
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import atrex
from harness import inputs, modes, poison, reference
from harness.compare import assert_heads_close
from harness.throughput import one_thread

CPU = "cpu"
# Relative L2 of a head: float32 arithmetic, and a result rounded to bfloat16 or float16.
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}


def states_error(got, want, v_first):
    return assert_heads_close("states", got.mT if v_first else got, want, 1, LIMITS[got.dtype])


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    length = st.one_of(st.sampled_from([0, 1, 63, 64, 65]), st.integers(0, 140))
    packed = draw(st.booleans())
    lengths = draw(st.lists(length, min_size=1, max_size=4))
    return {
        "lengths": lengths if packed else [lengths[0]] * draw(st.integers(1, 3)),
        "packed": packed,
        "tail": pick(0, 0, 1, 70) if packed else 0,
        "H": pick(1, 2, 3),
        "ratio": pick(1, 2, 3, 4),
        "K": pick(1, 3, 16, 32),
        "V": pick(1, 5, 16, 48),
        "dtype": pick(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        "gate_dtype": pick(torch.float32, torch.bfloat16, torch.float16),
        "gates": pick(*inputs.GATES),
        "layout": pick(*inputs.LAYOUTS),
        "correlated": draw(st.booleans()),
        "index_dtype": pick(torch.int32, torch.int64),
        "state": pick(None, torch.float32, torch.bfloat16),
        "pool": draw(st.booleans()),
        "v_first": draw(st.booleans()),
        "every": pick(0, 0, 64, 128),
        "l2norm": draw(st.booleans()),
        "scale": pick(None, 0.0, 0.3),
        "final": draw(st.booleans()),
        "seed": draw(st.integers(0, 1 << 16)),
    }


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_contract(case):
    lengths, v_first, every, seed = case["lengths"], case["v_first"], case["every"], case["seed"]
    H, HV, K, V, N = case["H"], case["H"] * case["ratio"], case["K"], case["V"], len(lengths)
    B, T = (1, sum(lengths) + case["tail"]) if case["packed"] else (N, lengths[0])
    tensors = inputs.make_inputs(
        B, T, H, HV, K, V, seed=seed, device=CPU, dtype=case["dtype"], gate_dtype=case["gate_dtype"],
        gates=case["gates"], layout=case["layout"], correlated=case["correlated"],
    )  # fmt: skip
    before = [x.clone() for x in tensors]
    states, options, live = None, {}, [True] * N
    if case["state"] is not None and case["pool"]:
        pool = inputs.make_states(N + 2, HV, K, V, seed=seed, device=CPU, dtype=case["state"], v_first=v_first)
        slots = torch.randperm(N + 2, generator=torch.Generator().manual_seed(seed))[:N]
        slots[seed % N] = (-1, N + 2, int(slots[seed % N]))[seed % 3]
        live = [0 <= slot < N + 2 for slot in slots.tolist()]
        options["state_indices"] = slots.to(case["index_dtype"])
        states, initial = pool.clone(), pool[slots.clamp(0, N + 1)]
    elif case["state"] is not None:
        states = inputs.make_states(N, HV, K, V, seed=seed, device=CPU, dtype=case["state"], v_first=v_first)
        initial = states.clone()
    if case["packed"]:
        options["cu_seqlens"] = inputs.offsets(lengths, CPU, case["index_dtype"])

    with poison.nan_empty():
        o, final, *rest = atrex.chunk_gated_delta_rule(
            *tensors, case["scale"], states, case["final"], use_qk_l2norm_in_kernel=case["l2norm"],
            state_v_first=v_first, checkpoint_every=every, **options,
        )  # fmt: skip

    scale = K**-0.5 if case["scale"] is None else case["scale"]
    ref_states = None if states is None else (initial.mT if v_first else initial)
    want_o, want_final, want_checkpoints = reference.gated_delta_rule(
        *tensors, scale, ref_states, lengths if case["packed"] else None, case["l2norm"], every
    )
    for n, alive in enumerate(live):
        if not alive:
            start = sum(lengths[:n])
            (want_o[0, start : start + lengths[n]] if case["packed"] else want_o[n]).zero_()
            if every:
                row = sum(length // every for length in lengths[:n])
                want_checkpoints[row : row + lengths[n] // every] = 0

    state_dtype = case["state"] or (torch.float64 if case["dtype"] is torch.float64 else torch.float32)
    assert o.dtype is case["dtype"] and o.is_contiguous()
    assert_heads_close("o", o, want_o, 2, LIMITS[o.dtype])
    if scale == 0:
        assert not o.any()
    assert not o.flatten(0, 1)[sum(lengths) :].any()
    if "state_indices" in options:
        assert final is (states if case["final"] else None)
        used = [slot for slot, alive in zip(slots.tolist(), live, strict=True) if alive]
        unused = [slot for slot in range(N + 2) if slot not in used]
        assert torch.equal(states[unused], pool[unused])
        if used:
            states_error(states[used], want_final[live], v_first)
    elif case["final"]:
        assert final.dtype is state_dtype and final.is_contiguous()
        assert states is None or (final.data_ptr() != states.data_ptr() and torch.equal(states, initial))
        states_error(final, want_final, v_first)
        for n, length in enumerate(lengths):
            if length == 0 and states is not None:
                assert torch.equal(final[n], initial[n])
    else:
        assert final is None
    assert len(rest) == bool(every)
    if every:
        assert rest[0].dtype is state_dtype and rest[0].is_contiguous()
        states_error(rest[0], want_checkpoints, v_first)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("correlated", [False, True], ids=["random_keys", "correlated_keys"])
@pytest.mark.parametrize("gates", inputs.GATES)
def test_float32_error_at_head_size_128(gates, correlated):
    tensors = inputs.make_inputs(
        1, 300, 2, 4, seed=5, device=CPU, dtype=torch.float32, gates=gates, correlated=correlated
    )
    states = inputs.make_states(2, 4, seed=6, device=CPU)
    o, final = atrex.chunk_gated_delta_rule(*tensors, None, states, True, cu_seqlens=inputs.offsets([190, 110], CPU))
    want_o, want_final, _ = reference.gated_delta_rule(*tensors, 128**-0.5, states, [190, 110])
    worst = assert_heads_close("o", o, want_o, 2, 1e-5), assert_heads_close("states", final, want_final, 1, 1e-5)
    print(f"worst head: outputs {worst[0]:.1e}, states {worst[1]:.1e}")


def test_resets_are_exact_and_everything_is_finite():
    q, k, v, g, beta = inputs.make_inputs(1, 130, 1, 2, 16, 16, seed=7, device=CPU, dtype=torch.float32)
    for decay in (float("-inf"), -1e4, -3e38):
        g[:, 70] = decay
        states = torch.full((1, 2, 16, 16), 1e30)
        o, final = atrex.chunk_gated_delta_rule(q, k, v, g, beta, None, states, True)
        later, later_final = atrex.chunk_gated_delta_rule(*(x[:, 70:] for x in (q, k, v, g, beta)), None, None, True)
        assert o.isfinite().all() and final.isfinite().all()
        assert_heads_close("o", o[:, 70:], later, 2, 1e-5)
        assert_heads_close("states", final, later_final, 1, 1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("where", range(6), ids=["q", "k", "v", "g", "beta", "state"])
def test_nan_and_inf_stay_in_their_sequence(where, packed, bad):
    shape = (1, 210) if packed else (3, 70)
    tensors = [*inputs.make_inputs(*shape, 2, 4, 8, 8, seed=8, device=CPU, dtype=torch.float32)]
    tensors.append(inputs.make_states(3, 4, 8, 8, seed=9, device=CPU))
    options = {"cu_seqlens": inputs.offsets([70, 70, 70], CPU)} if packed else {}

    def run():
        call = atrex.chunk_gated_delta_rule(*tensors[:5], None, tensors[5], True, checkpoint_every=64, **options)
        return [x.reshape(3, -1) for x in (call[0], call[1], call[2][:3])]

    clean = run()
    sequence = tensors[where][0, 70:140] if packed and where < 5 else tensors[where][1]
    sequence.fill_(bad)
    for dirty, expected in zip(run(), clean, strict=True):
        assert torch.equal(dirty[[0, 2]], expected[[0, 2]])
    assert not run()[0][1].isfinite().all() or (where == 3 and bad > 0)


def test_repeats_are_bitwise_equal_and_autocast_changes_nothing():
    tensors = inputs.make_inputs(2, 200, 2, 4, 32, 32, seed=10, device=CPU)
    first = atrex.chunk_gated_delta_rule(*tensors, output_final_state=True)
    for _ in range(5):
        assert all(map(torch.equal, first, atrex.chunk_gated_delta_rule(*tensors, output_final_state=True)))
    with torch.autocast(CPU, torch.bfloat16):
        assert all(map(torch.equal, first, atrex.chunk_gated_delta_rule(*tensors, output_final_state=True)))


def test_prefill_in_two_parts_equals_one():
    tensors = inputs.make_inputs(1, 300, 2, 4, 32, 32, seed=11, device=CPU, dtype=torch.float32)
    o, final = atrex.chunk_gated_delta_rule(*tensors, output_final_state=True)
    head, state = atrex.chunk_gated_delta_rule(*(x[:, :171] for x in tensors), output_final_state=True)
    tail, state = atrex.chunk_gated_delta_rule(*(x[:, 171:] for x in tensors), None, state, True)
    assert_heads_close("o", torch.cat([head, tail], 1), o, 2, 1e-5)
    assert_heads_close("states", state, final, 1, 1e-5)


def test_pool_with_padded_slots():
    """Slots of a larger page, as a cache that several kinds of layers share has them."""
    tensors = inputs.make_inputs(1, 100, 1, 2, 8, 8, seed=12, device=CPU, dtype=torch.float32)
    pages = torch.full((4, 2 * 8 * 8 + 32), 7.0)
    pool = pages[:, : 2 * 8 * 8].unflatten(1, (2, 8, 8))
    pool.copy_(inputs.make_states(4, 2, 8, 8, seed=13, device=CPU))
    expected = atrex.chunk_gated_delta_rule(*tensors, None, pool[2:3].clone(), True)
    o, final = atrex.chunk_gated_delta_rule(*tensors, None, pool, True, state_indices=torch.tensor([2]))
    assert final is pool and torch.equal(o, expected[0]) and torch.equal(pool[2:3], expected[1])
    assert (pages[:, 2 * 8 * 8 :] == 7).all()


@pytest.mark.parametrize("offsets", [[1, 8], [0, 9], [0, 5, 3, 8], [-1, 8], [0, 2**31]])
def test_malformed_offsets_are_an_error_on_a_cpu(offsets):
    tensors = inputs.make_inputs(1, 8, 1, 1, 4, 4, seed=14, device=CPU)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to at most T=8, got \["):
        atrex.chunk_gated_delta_rule(*tensors, cu_seqlens=torch.tensor(offsets))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 20), min_size=2), st.integers(0, 16))
def test_malformed_offsets_are_clamped_on_a_gpu(offsets, T):
    from atrex.fallback._chunks import sequence_spans

    starts, lengths = sequence_spans(offsets, T, strict=False)
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        assert start == min(max(offsets[i], 0), T)
        assert start + length == min(max(offsets[i + 1], start), T)


def gradient_inputs(T, dtype=torch.float64, gates="mixed"):
    tensors = inputs.make_inputs(1, T, 1, 2, 3, 2, seed=15, device=CPU, dtype=dtype, gates=gates)
    tensors = [x.to(dtype) for x in (*tensors, inputs.make_states(2, 2, 3, 2, seed=16, device=CPU))]
    return [x.clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("fast, T, split", [(False, 5, 3), (True, 140, 65)])
def test_gradcheck(fast, T, split):
    def run(q, k, v, g, beta, states):
        return atrex.chunk_gated_delta_rule(
            q, k, v, g, beta, None, states, True, use_qk_l2norm_in_kernel=True, checkpoint_every=64,
            cu_seqlens=inputs.offsets([split, T - split - 1], CPU),
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, gradient_inputs(T), fast_mode=fast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gates", inputs.GATES)
def test_gradients_equal_those_of_the_recurrence(gates, dtype):
    tensors = gradient_inputs(150, dtype, gates)
    weights = torch.randn(150, 2, generator=torch.Generator().manual_seed(17), dtype=dtype)
    offsets = inputs.offsets([80, 70], CPU)
    o, final = atrex.chunk_gated_delta_rule(*tensors[:5], None, tensors[5], True, cu_seqlens=offsets)
    ((o * weights[:, :, None]).sum() + final.square().sum()).backward()
    got = [x.grad for x in tensors]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    o, final, _ = reference.gated_delta_rule(*doubles[:5], 3**-0.5, doubles[5], [80, 70])
    ((o * weights[:, :, None]).sum() + final.square().sum()).backward()
    for name, x, y in zip(("q", "k", "v", "g", "beta", "initial_state"), got, doubles, strict=True):
        assert_heads_close(f"gradient of {name}", x, y.grad, 0 if name == "initial_state" else 2, LIMITS[dtype] * 10)


def test_gradients_beside_a_pool():
    """The pool is state, not a variable: it is written, and nothing is recorded for it."""
    *tensors, states = gradient_inputs(70)
    pool = states.detach()[:1].clone()
    o, _ = atrex.chunk_gated_delta_rule(*tensors, None, pool, state_indices=torch.tensor([0]))
    o.sum().backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in tensors)
    assert not pool.requires_grad and not torch.equal(pool, states[:1])


@pytest.mark.parametrize("offsets", [None, [0, 0, 0]], ids=["batch", "packed"])
def test_gradients_without_tokens(offsets):
    *tensors, states = gradient_inputs(0)
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets)}
    N = 1 if offsets is None else 2
    o, final = atrex.chunk_gated_delta_rule(*tensors, None, states[:N], True, **options)
    (o.sum() + final.sum()).backward()
    assert torch.equal(final, states[:N]) and (states.grad[:N] == 1).all()


def compiled_cases():
    tensors = inputs.make_inputs(1, 200, 2, 4, 16, 24, seed=18, device=CPU, dtype=torch.float32)
    return *tensors, inputs.make_states(4, 4, 16, 24, seed=19, device=CPU), inputs.offsets([70, 100], CPU)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("pool", [False, True], ids=["new_states", "pool"])
def test_compile_without_graph_breaks(backend, pool):
    *tensors, states, offsets = compiled_cases()

    def layer(q, k, v, g, beta, states, offsets):
        options = {"state_indices": offsets[:2] // 64} if pool else {}  # slots 0 and 1
        o, final, checkpoints = atrex.chunk_gated_delta_rule(
            q * 1.5, k, v, g, beta, None, states if pool else states[:2], True,
            cu_seqlens=offsets, checkpoint_every=64, **options,
        )  # fmt: skip
        return o + 1, final.sum(), checkpoints

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for length in (200, 190):  # the second makes T dynamic
        call = [x[:, :length] for x in tensors]
        mine, theirs = states.clone(), states.clone()
        expected = layer(*call, mine, offsets)
        assert all(map(torch.equal, compiled(*call, theirs, offsets), expected))
        assert torch.equal(mine, theirs) and torch.equal(mine, states) != pool


def test_compile_as_the_first_call_of_a_process():
    """The lazy proxy itself is traced."""
    run_child("""
        import atrex, torch
        from harness import inputs
        tensors = inputs.make_inputs(1, 70, 1, 2, 8, 8, seed=20, device="cpu")
        compiled = torch.compile(lambda *x: atrex.chunk_gated_delta_rule(*x), fullgraph=True, backend="eager")
        assert torch.equal(compiled(*tensors)[0], atrex.chunk_gated_delta_rule(*tensors)[0])
    """)


def test_compile_with_gradients():
    *tensors, _, _ = compiled_cases()
    tensors = [x.requires_grad_() for x in tensors]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: atrex.chunk_gated_delta_rule(*x)[0].square().sum(), fullgraph=True, backend="aot_eager"
    )
    got = torch.autograd.grad(compiled(*tensors), tensors)
    expected = torch.autograd.grad(atrex.chunk_gated_delta_rule(*tensors)[0].square().sum(), tensors)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("every", [0, 64])
@pytest.mark.parametrize("v_first", [False, True])
def test_operators_keep_the_rules_of_torch_library(v_first, every):
    import atrex.api._chunk_gdn_ops  # noqa: F401

    *tensors, states, offsets = compiled_cases()
    states = states.mT.contiguous() if v_first else states
    tail = (offsets, v_first, every, True)
    torch.library.opcheck(torch.ops.atrex.chunk_gated_delta_rule, (*tensors, 0.5, states[:2], True, *tail))
    torch.library.opcheck(torch.ops.atrex.chunk_gated_delta_rule, (*tensors, 0.5, None, False, None, *tail[1:]))
    indices = torch.tensor([3, -1])
    torch.library.opcheck(torch.ops.atrex.chunk_gated_delta_rule_pool, (*tensors, 0.5, states, indices, *tail))


def run_child(code):
    path = os.pathsep.join(filter(None, sys.path))
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env={**os.environ, "PYTHONPATH": path})


def measured_inputs(dtype):
    q, k, v, g, beta = inputs.make_inputs(1, 2048, 16, 32, seed=21, device=CPU, dtype=dtype)
    return (q, k, v, g, beta), (q.repeat_interleave(2, 2), k.repeat_interleave(2, 2), v, g, beta)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_slower_than_transformers(dtype):
    """Side by side, turn by turn; transformers gets q and k expanded to the v heads, as its layer hands them over."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    mine, theirs = measured_inputs(dtype)
    times = {"atrex": [], "transformers": []}
    with torch.inference_mode(), one_thread():
        for turn in range(6):
            start = time.perf_counter()
            o, final = atrex.chunk_gated_delta_rule(*mine, output_final_state=True)
            middle = time.perf_counter()
            want_o, want_final = torch_chunk_gated_delta_rule(*theirs, output_final_state=True)
            end = time.perf_counter()
            if turn:  # the first allocates and warms up
                times["atrex"].append(middle - start)
                times["transformers"].append(end - middle)
    assert_heads_close("o", o, want_o, 2, 1e-5 if dtype is torch.float32 else 4e-3)
    assert_heads_close("states", final, want_final, 1, 1e-5)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["atrex"] / medians["transformers"]
    print(f"{dtype}: {medians['atrex'] * 1e3:.0f} ms, ratio to transformers {ratio:.2f}")
    assert ratio <= 1.0, medians


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_below_transformers(dtype):
    """The peak of a process never falls, so atrex goes first: transformers must raise it."""
    run_child(f"""
        import re, torch, atrex
        from harness import inputs
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
        def peak():
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
        def call(T, function, ratio):
            q, k, v, g, beta = inputs.make_inputs(1, T, 16, 32, seed=22, device="cpu", dtype={dtype})
            q, k = q.repeat_interleave(ratio, 2), k.repeat_interleave(ratio, 2)
            function(q, k, v, g, beta, output_final_state=True)
        torch.set_num_threads(1)
        with torch.inference_mode():
            call(64, atrex.chunk_gated_delta_rule, 1)
            call(64, torch_chunk_gated_delta_rule, 2)
            before = peak()
            call(2048, atrex.chunk_gated_delta_rule, 2)
            mine = peak()
            call(2048, torch_chunk_gated_delta_rule, 2)
            theirs = peak()
        print(f"peak, MiB above the start: atrex {{(mine - before) >> 10}}, transformers {{(theirs - before) >> 10}}")
        assert before < mine < theirs
    """)


def bench_case(T, dtype, lengths=None):
    """Inputs of a Qwen3-Next layer, and the call on them."""

    def make():
        tensors = inputs.make_inputs(1, T, 16, 32, seed=23, device=CPU, dtype=dtype)
        options = {} if lengths is None else {"cu_seqlens": inputs.offsets(lengths, CPU)}
        torch.set_num_threads(1)

        def call():
            with torch.inference_mode():
                atrex.chunk_gated_delta_rule(*tensors, output_final_state=True, **options)

        return call

    return make


if __name__ == "__main__":
    sys.exit(
        modes.main(
            api="chunk_gated_delta_rule",
            about={
                "dispatch": "serves every call that no kernel serves; on a GPU one warning a reason",
                "compile": "none, it is PyTorch",
                "limits": "on a GPU it waits for cu_seqlens and state_indices and cannot be captured in a graph",
            },
            device=CPU,
            bench={
                "one sequence of 256, bfloat16": bench_case(256, torch.bfloat16),
                "one sequence of 256, float32": bench_case(256, torch.float32),
                "4 sequences of 64, bfloat16": bench_case(256, torch.bfloat16, [64] * 4),
            },
        )
    )
