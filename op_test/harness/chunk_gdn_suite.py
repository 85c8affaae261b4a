"""The tests of chunk_gated_delta_rule that every GPU target passes.

A target's test file imports all names of this module and says which target it is, as ``TARGET``.
"""

import concurrent.futures
import dataclasses
import json
import logging
import os
import statistics
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import atrex
from harness import chunk_gdn, chunk_gdn_cases, inputs, poison, reference, timing
from harness.chunk_gdn import Call, Case
from harness.chunk_gdn_cases import BF16, F32, FP16, RAGGED
from harness.chunk_gdn_modes import DEVICE, MALFORMED, malformed_call, profiled
from harness.compare import assert_heads_close

worst = {}  # (what, output) -> worst error of a head


def pytest_generate_tests(metafunc):
    target = metafunc.module.TARGET
    if "plan" in metafunc.fixturenames:
        metafunc.parametrize("plan", target.plans)
    if "speed" in metafunc.fixturenames:
        ids = [f"{T}x1" if N == 1 else f"{T}_in_{N}" for T, N, _ in target.speed]
        metafunc.parametrize("speed", target.speed, ids=ids)


@pytest.fixture(scope="module")
def target(request):
    return request.module.TARGET


@pytest.fixture(autouse=True)
def kernel_required(monkeypatch):
    """Nothing here may be served by the fallback unnoticed."""
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")


@pytest.fixture(scope="session", autouse=True)
def summary(request):
    poison.fill_cached_memory(DEVICE)
    yield
    out = request.config.pluginmanager.getplugin("terminalreporter")
    out.write_line(f"\n{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}; worst relative L2 of a head:")
    for (what, output), error in sorted(worst.items()):
        out.write_line(f"  {what:<24} {output:<12} {error:.2e}")


def record(what, errors):
    for output, error in errors.items():
        worst[what, output] = max(worst.get((what, output), 0.0), error)
    print(what, {output: f"{error:.1e}" for output, error in errors.items()})


def check(target, what, case):
    assert target.plan_of(case) in target.plans, "a plan that test_plan does not know"
    record(what, chunk_gdn.check(case, DEVICE))


# ---- Plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [
    {},
    {"state": F32, "every": 64},
    {"packed": False, "state": F32, "every": 128, "l2norm": True},
    {"state": F32, "pool": True, "gap": 32, "v_first": True, "every": 192},
    {"state": BF16, "pool": True, "padding": True, "index_dtype": torch.int64, "seed": 1},
    {"packed": False, "state": BF16, "pool": True, "padding": True, "v_first": True, "seed": 4},
    {"dtype": FP16, "state": F32, "gates": "resets"},
    {"dtype": FP16, "packed": False, "every": 64, "gates": "none"},
], ids=["plain", "states", "dense", "pool", "padding", "dense_padding", "fp16", "fp16_dense"])  # fmt: skip
def test_plan(target, plan, options):
    case = target.planned(plan, **options)
    check(target, f"plan {plan}{' fp16' if case.dtype is FP16 else ''}", case)


# ---- The contract ------------------------------------------------------------------------------------------------

CASES = dict(chunk_gdn_cases.named_cases())


@pytest.mark.parametrize("name", CASES)
def test_case(target, name):
    case = CASES[name]
    keys = "correlated" if case.correlated else "random"
    state = " bf16 states" if case.state is BF16 else ""
    check(target, f"{str(case.dtype).removeprefix('torch.')} {keys}{state}", case)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=chunk_gdn_cases.drawn_cases())
def test_drawn_case(target, case):
    check(target, f"drawn {str(case.dtype).removeprefix('torch.')}", case)


def test_guards_see_a_write_outside_of_an_allocation():
    for where in (-1, 70):
        with chunk_gdn.GuardedMemory() as allocations:
            x = torch.empty((7, 10), dtype=BF16, device=DEVICE)
        assert x.isnan().all() and allocations.holds(x)
        x.zero_()
        allocations.check()
        torch.as_strided(x, (1,), (1,), x.storage_offset() + where).zero_()
        with pytest.raises(AssertionError, match="a write (before|behind)"):
            allocations.check()


def test_shared_head_without_memory_of_its_own():
    """q and k expanded over heads: a stride of zero."""
    q, k, v, g, beta = inputs.make_inputs(1, 100, 2, 4, seed=5, device=DEVICE)
    q, k = (x[:, :, :1].expand(-1, -1, 2, -1) for x in (q, k))
    o, _ = atrex.chunk_gated_delta_rule(q, k, v, g, beta)
    want, _, _ = reference.gated_delta_rule(q, k, v, g, beta, 128**-0.5, None)
    assert_heads_close("o", o, want, 2, 5e-3)


@pytest.mark.parametrize("split", [1, 64, 171])
def test_prefill_in_two_parts_equals_one(split):
    call = Call(Case((300,), packed=False, state=F32, v_first=True), DEVICE)
    want_o, want_final, _ = call.expected()
    head, state = atrex.chunk_gated_delta_rule(*(x[:, :split] for x in call.tensors), None, call.states, True,
                                               state_v_first=True)  # fmt: skip
    tail, state = atrex.chunk_gated_delta_rule(*(x[:, split:] for x in call.tensors), None, state, True,
                                               state_v_first=True)  # fmt: skip
    record("continued", {"o": assert_heads_close("o", torch.cat([head, tail], 1), want_o, 2, 5e-3),
                         "final": assert_heads_close("final", state.mT, want_final, 1, 5e-3)})  # fmt: skip


def test_pool_of_more_than_2_31_elements():
    HV = 8
    slot = 2**31 // (HV * 128 * 128) + 1  # cut to 32 bits it would be slot 1
    tensors = inputs.make_inputs(1, 70, 2, HV, seed=6, device=DEVICE)
    states = inputs.make_states(1, HV, seed=7, device=DEVICE, dtype=BF16)
    pool = torch.zeros(slot + 1, HV, 128, 128, dtype=BF16, device=DEVICE)
    pool[slot] = states[0]
    o, _ = atrex.chunk_gated_delta_rule(*tensors, None, pool, state_indices=torch.tensor([slot], device=DEVICE))
    want_o, want_final, _ = reference.gated_delta_rule(*tensors, 128**-0.5, states)
    record("pool of 2^31", {"o": assert_heads_close("o", o, want_o, 2, 5e-3),
                            "final": assert_heads_close("pool", pool[slot:], want_final, 1, 7e-3)})  # fmt: skip
    assert not pool[:slot].any()


def test_activations_of_more_than_2_31_elements():
    """A sequence behind element 2^31 of v gives bit for bit what it gives alone."""
    H, HV, last = 16, 32, 130
    T = 2**31 // (HV * 128) + 192
    q, k = (torch.full((1, T, H, 128), 0.01, dtype=BF16, device=DEVICE) for _ in range(2))
    v = torch.full((1, T, HV, 128), 0.5, dtype=BF16, device=DEVICE)
    g, beta = torch.full((1, T, HV), -0.1, device=DEVICE), torch.full((1, T, HV), 0.5, device=DEVICE)
    end = inputs.make_inputs(1, last, H, HV, seed=8, device=DEVICE)
    for x, values in zip((q, k, v, g, beta), end, strict=True):
        x[:, T - last :] = values
    o, final = atrex.chunk_gated_delta_rule(
        q, k, v, g, beta, output_final_state=True, cu_seqlens=inputs.offsets([T - last, last], DEVICE)
    )
    want_o, want_final, _ = reference.gated_delta_rule(*end, 128**-0.5, None)
    record("tokens behind 2^31", {"o": assert_heads_close("o", o[:, T - last :], want_o, 2, 5e-3),
                                  "final": assert_heads_close("final", final[1:], want_final, 1, 5e-3)})  # fmt: skip
    # With constant inputs the outputs settle: early chunks and those before the end agree.
    early, late = 64 * 1000, (T - last) // 64 * 64 - 64
    assert_heads_close("o", o[:, late : late + 64], o[:, early : early + 64], 2, 1e-3)
    assert o[:, early].any()


# ---- What must not leak ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("n", [0, 1])  # packed: the long one, and one behind it that is short
def test_nan_and_inf_stay_in_their_sequence(target, plan, n, packed, bad):
    case = target.planned(plan, packed, state=F32, every=64)
    call = Call(case, DEVICE)
    starts = [0, *torch.tensor(case.lengths).cumsum(0).tolist()]
    clean = split_results(call.run(), case)
    for name, x in zip(("q", "k", "v", "g", "beta", "state"), (*call.tensors, call.states), strict=True):
        sequence = x[0, starts[n] : starts[n + 1]] if packed and name != "state" else x[n]
        before = sequence.clone()
        sequence.fill_(bad)
        dirty = split_results(call.run(), case)
        sequence.copy_(before)
        for other in set(range(len(case.lengths))) - {n}:
            assert all(map(torch.equal, dirty[other], clean[other])), f"{name} of sequence {n} reached {other}"
        assert (name == "g" and bad > 0) or not all(x.isfinite().all() for x in dirty[n]), name


def split_results(result, case):
    """Outputs, final state and checkpoints of each sequence."""
    o, final, checkpoints = result
    o = o[0].split([*case.lengths, case.tail]) if case.packed else o
    rows = [length // case.every for length in case.lengths]
    checkpoints = checkpoints[: sum(rows)].split(rows)
    return [(o[n], final[n], checkpoints[n]) for n in range(len(rows))]


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_offsets(target, name):
    """Inside the tensors whatever they say; where they still give disjoint ranges, those are served."""
    offsets = MALFORMED[name]
    call = malformed_call(offsets)
    with chunk_gdn.GuardedMemory() as allocations:
        o, _, _ = call.run()
    torch.cuda.synchronize()
    allocations.check()
    call.verify_memory()
    if offsets == sorted(offsets):
        ends = [min(max(offset, 0), 200) for offset in offsets]
        for n, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            part = [x[:, start:end] for x in call.tensors]
            want_o, want_final, _ = reference.gated_delta_rule(*part, 128**-0.5, call.initial[n : n + 1])
            assert_heads_close("o", o[:, start:end], want_o, 2, 5e-3)
            assert_heads_close("state", call.states[call.slots[n]][None], want_final, 1, 5e-3)
    check(target, "after malformed offsets", Case(RAGGED, state=F32, every=64))


# ---- How it runs -------------------------------------------------------------------------------------------------


def test_200_repeats_are_bitwise_equal(target, plan):
    call = Call(target.planned(plan, state=F32, every=64), DEVICE)
    first = [x.clone() for x in call.run()]
    differences = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(200):
        for x, y in zip(call.run(), first, strict=True):
            differences += (x != y).sum()
    assert differences.item() == 0


@pytest.mark.parametrize("pool", [False, True], ids=["states", "pool"])
def test_graph_replays_with_changed_inputs(target, plan, pool):
    """Other values, other lengths, other slots and states: nothing of the capture's call is baked in."""
    case = target.planned(plan, state=F32, pool=pool, every=64)
    static = Call(case, DEVICE)
    static.run()
    stream = torch.cuda.Stream(DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = static.run()
    _, T, N = case.sizes
    for turn, lengths in enumerate([case.lengths[::-1], (T, *[0] * (N - 1)), case.lengths]):
        changed = dataclasses.replace(case, lengths=lengths, tail=T - sum(lengths), seed=10 + turn)
        call = Call(changed, DEVICE)
        for to, source in zip(static._read_only(), call._read_only(), strict=True):
            to.copy_(source)
        static.states.copy_(call.states)
        for x in result:
            if x is not static.states:
                x.fill_(float("nan"))
        graph.replay()
        eager = call.run()
        assert all(a.equal(b) for a, b in zip(live_rows(result, call), live_rows(eager, call), strict=True))
    want = call.expected()
    record(f"graph {plan}", call.verify(eager, want))


def live_rows(result, call):
    """The results without the pool's slots of NaN, which equal nothing."""
    o, final, checkpoints = result
    return o, final[call.slots], checkpoints


def test_current_stream_is_honoured():
    """The inputs appear late on the current stream, and their consumer waits for that stream alone."""
    call = Call(Case((200,), packed=False, state=F32), DEVICE)
    want = call.expected()
    late = call.tensors[2].clone()
    call.tensors[2].fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        call.tensors[2].copy_(late)
        result = call.run()
    assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    record("side stream", call.verify(result, want))


def test_first_call_of_a_thread():
    """Where nothing has made the GPU's context current yet, since memory is at hand."""
    call = Call(Case(RAGGED, state=F32), DEVICE)
    want = call.expected()
    call.run()
    torch.cuda.synchronize()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        result = threads.submit(call.run).result()
    record("another thread", call.verify(result, want))


def test_compile_without_graph_breaks():
    call = Call(Case(RAGGED, state=F32, pool=True, every=64), DEVICE)
    other = Call(call.case, DEVICE)

    def layer(q, k, v, g, beta, states, offsets, indices):
        o, final, checkpoints = atrex.chunk_gated_delta_rule(
            q, k, v, g, beta, None, states, True, cu_seqlens=offsets, state_indices=indices, checkpoint_every=64
        )
        return o * 2, final, checkpoints

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    options = other.options["cu_seqlens"], other.options["state_indices"]
    o, final, checkpoints = compiled(*other.tensors, other.states, *options)
    want_o, want_final, want_checkpoints = call.run()
    assert torch.equal(o, want_o * 2) and torch.equal(checkpoints, want_checkpoints)
    assert torch.equal(final[other.slots], want_final[call.slots])
    assert torch.equal(other.states[other.slots], call.states[call.slots])


# ---- Dispatch ----------------------------------------------------------------------------------------------------


def test_dispatch_is_live(target):
    call = Call(Case(RAGGED, state=F32, pool=True), DEVICE)
    allocated, page = torch.cuda.memory_allocated(), chunk_gdn.memory(call.page).clone()
    answer = atrex.can_use_chunk_gated_delta_rule(*call.tensors, None, call.states, True, **call.options)
    assert answer and (answer.target, answer.reason) == (str(target), "")
    assert torch.cuda.memory_allocated() == allocated + page.numel()
    assert torch.equal(chunk_gdn.memory(call.page), page)
    call.run()  # ATREX_REQUIRE_KERNEL=1: the fallback would raise


NEGATIVE = {
    "fp32": (Case((70,), dtype=F32), {}, "q, k and v must be all bfloat16 or all float16"),
    "mixed_dtypes": (Case((70,)), {"v": lambda v: v.half()}, "got bfloat16, bfloat16, float16"),
    "K_64": (Case((70,), K=64), {}, "got K=64, V=128"),
    "V_64": (Case((70,), V=64), {}, "got K=128, V=64"),
    "grad": (Case((70,)), {"v": lambda v: v.requires_grad_()}, "no input may require grad"),
    "strided_state": (Case((70,), state=F32), {"state": lambda s: s.mT.contiguous().mT}, "must be contiguous within"),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_what_the_target_refuses_runs_on_the_fallback(target, name, monkeypatch, caplog):
    from atrex import _dispatch

    case, changes, reason = NEGATIVE[name]
    call = Call(case, DEVICE)
    if "v" in changes:
        call.tensors[2] = changes["v"](call.tensors[2])
    states = changes["state"](call.states) if "state" in changes else call.states
    arguments = *call.tensors, None, states, True
    answer = atrex.can_use_chunk_gated_delta_rule(*arguments, **call.options)
    assert not answer and answer.target == str(target) and reason in answer.reason
    with pytest.raises(RuntimeError, match="ATREX_REQUIRE_KERNEL=1 forbids"):
        atrex.chunk_gated_delta_rule(*arguments, **call.options)
    monkeypatch.delenv("ATREX_REQUIRE_KERNEL")
    _dispatch._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "atrex"):
        o, final = atrex.chunk_gated_delta_rule(*arguments, **call.options)
    assert any(answer.reason in line.message for line in caplog.records), caplog.records
    want_o, want_final, _ = call.expected()
    assert_heads_close("o", o.detach(), want_o.detach(), 2, chunk_gdn.OUTPUT_LIMITS[case.dtype])
    assert_heads_close("final", final.detach(), want_final.detach(), 1, 1e-5)
    if name == "grad":
        o.float().square().sum().backward()
        assert call.tensors[2].grad.isfinite().all() and call.tensors[2].grad.any()


# ---- Child processes ---------------------------------------------------------------------------------------------


def child(*command, **env):
    """What a fresh process prints as JSON on its last line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
    done = subprocess.run([sys.executable, *command], env=env, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_first_call_needs_no_prewarm(target, captured, tmp_path):
    """Native code: the first call of a process compiles nothing, caches nothing, and may be captured in a graph."""
    places = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
    seen = child("-c", textwrap.dedent(f"""
        import json, sys, time
        import torch, atrex
        from harness import inputs, stand_in
        stand_in.activate()
        tensors = inputs.make_inputs(1, 200, 2, 4, seed=1, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        torch.cuda.synchronize()
        started, modules = [], set(sys.modules)
        sys.addaudithook(lambda event, _: started.append(event) if event.startswith(
            ("subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system")) else None)
        begin = time.perf_counter()
        if {captured}:
            with torch.cuda.graph(graph, stream=stream):
                o, _ = atrex.chunk_gated_delta_rule(*tensors)
            graph.replay()
        else:
            o, _ = atrex.chunk_gated_delta_rule(*tensors)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        fresh = [m for m in set(sys.modules) - modules if m.startswith(("triton", "torch._inductor", "atrex.fallback"))]
        same = torch.equal(o, atrex.chunk_gated_delta_rule(*tensors)[0]) and bool(o.isfinite().all())
        print(json.dumps([seconds, started, fresh, same]))
    """), **dict.fromkeys(places, str(tmp_path)))  # fmt: skip
    seconds, started, fresh, same = seen
    print(f"first call: {seconds * 1e3:.0f} ms")
    assert same and not started and not fresh
    assert not [*tmp_path.rglob("*")]
    assert seconds < 0.3


def test_profiler_sees_only_kernels_of_the_operator(target, request):
    cases = child(str(request.path), "--profile")["cases"]
    assert [case["case"] for case in cases] == list(profiled(target))
    for case in cases:
        print(f"{case['case']}: {', '.join(case['operator'])}")
        assert not case["problems"] and not case["framework"], case


# ---- Speed -------------------------------------------------------------------------------------------------------


def test_speed(speed):
    T, N, limit_ms = speed
    tensors = inputs.make_inputs(1, T, 16, 32, seed=9, device=DEVICE)
    options = {"output_final_state": True, "cu_seqlens": inputs.offsets([T // N] * N, DEVICE)}
    median = statistics.median(timing.samples(lambda: atrex.chunk_gated_delta_rule(*tensors, **options), "cuda"))
    print(f"16/32 heads, {T} tokens in {N}: {median:.3f} ms in a graph, limit {limit_ms} ms")
    assert median < limit_ms


def test_host_part_of_a_call():
    """On inputs so small that the GPU is never behind."""
    tensors = inputs.make_inputs(1, 64, 2, 4, seed=9, device=DEVICE)
    offsets = inputs.offsets([64], DEVICE)
    times = []
    for turn in range(300):
        if turn % 20 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        atrex.chunk_gated_delta_rule(*tensors, output_final_state=True, cu_seqlens=offsets)
        times.append(time.perf_counter() - start)
    median = statistics.median(times[100:]) * 1e6
    print(f"host part of an eager call: {median:.1f} us")
    assert median < 60
