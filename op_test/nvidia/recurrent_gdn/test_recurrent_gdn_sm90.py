"""fused_recurrent_gated_delta_rule on an H200: the whole contract on every kernel, dispatch, profiler gate, speed.

Private modes, for child processes and by hand:
    --bench, --profile    as harness/modes.py describes them
    --table [--json FILE] the tables of docs/performance/recurrent_gdn_sm90.md, with the peers that can be imported: of
                          this operator, and of a layer's whole decode step, which is mostly its
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
import torch.nn.functional as F

import atrex
from harness import gdn_layer_table, inputs, modes, poison, recurrent_table, reference
from harness.compare import assert_heads_close
from harness.gdn_layer import Layer
from harness.recurrent import CHOICES, Case
from harness.recurrent_table import decode_us, state_bytes
from harness.throughput import copy_bandwidth, host_us

DEVICE = "cuda:0"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
recurrent = atrex.fused_recurrent_gated_delta_rule
can_use = atrex.can_use_fused_recurrent_gated_delta_rule
make_inputs = functools.partial(inputs.make_inputs, device=DEVICE)
make_states = functools.partial(inputs.make_states, device=DEVICE)
layouts = pytest.mark.parametrize("v_first", [True, False], ids=["v_first", "k_first"])
state_dtypes = pytest.mark.parametrize("state", [FP32, BF16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def kernel_or_error(monkeypatch):
    """No test passes on the fallback; those that want it say so."""
    monkeypatch.setenv("ATREX_REQUIRE_KERNEL", "1")


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


# ---- correctness ----------------------------------------------------------------------------------------------------


HEADS = [(16, 32), (8, 16), (4, 8), (2, 8), (1, 1), (3, 9)]


def cases(count, heads, **fixed):
    """``count`` cases with options drawn at random, always the same ones."""
    draw = random.Random(str(fixed))
    for _ in range(count):
        choices = {name: draw.choice(values) for name, values in CHOICES.items()}
        H, HV = draw.choice(heads)
        yield Case(choices | fixed | {"H": H, "HV": HV, "K": 128, "V": 128, "seed": draw.randrange(1 << 16)}, DEVICE)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@state_dtypes
@layouts
@pytest.mark.parametrize("mode", CHOICES["mode"])
def test_contract(mode, v_first, state, dtype):
    """Every mode on every kernel, in memory that starts as NaN."""
    for case in cases(12, HEADS, mode=mode, v_first=v_first, state=state, dtype=dtype):
        assert can_use(**case.arguments)
        poison.fill_cached_memory(DEVICE)
        with poison.nan_empty():
            result = recurrent(**case.arguments)
        try:
            case.check(*result)
        except AssertionError as error:
            raise AssertionError(f"{case.choices}: {error}") from error


@state_dtypes
@layouts
def test_decode_after_prefill_equals_prefill_of_one_token_more(v_first, state):
    tokens = make_inputs(2, 201, 4, 8, seed=1)
    options = {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    start = make_states(2, 8, seed=2, dtype=state, v_first=v_first)
    o, final = atrex.chunk_gated_delta_rule(*tokens, None, start, True, **options)
    _, pool = atrex.chunk_gated_delta_rule(*(x[:, :200] for x in tokens), None, start, True, **options)
    last, _ = recurrent(*(x[:, 200:] for x in tokens), None, pool, state_indices=ints(0, 1), **options)
    assert_heads_close("o", last, o[:, 200:], 2, 1e-2)
    assert_heads_close("states", pool, final, 1, 1e-2)


@pytest.mark.parametrize("accepted", [1, 3, 5])
@state_dtypes
@layouts
def test_verify_with_k_accepted_equals_k_decode_steps(v_first, state, accepted):
    """Bit for bit, with slots for each token and with a buffer."""
    N, S, HV = 3, 5, 8
    tokens, more = make_inputs(N, S, 4, HV, seed=3), make_inputs(N, 1, 4, HV, seed=4)
    pool = make_states(N * S + 1, HV, seed=5, dtype=state, v_first=v_first)
    slots = (torch.randperm(N * S, generator=torch.Generator().manual_seed(6)) + 1).view(N, S).to(DEVICE)
    options = {"state_v_first": v_first, "use_qk_l2norm_in_kernel": True}
    verified, stepped = pool.clone(), pool.clone()
    o, _ = recurrent(*tokens, None, verified, state_indices=slots, **options)
    counts = torch.full((N,), accepted, device=DEVICE)
    after, _ = recurrent(*more, None, verified, state_indices=slots, num_accepted_tokens=counts, **options)
    for t in range(accepted):
        one, _ = recurrent(*(x[:, t : t + 1] for x in tokens), None, stepped, state_indices=slots[:, 0], **options)
        assert torch.equal(one, o[:, t : t + 1])
    buffer = torch.zeros(N, S, *pool.shape[1:], dtype=state, device=DEVICE)
    before = pool.clone()
    again, _ = recurrent(
        *tokens, None, pool, state_indices=slots[:, 0], intermediate_states_buffer=buffer, **options
    )  # fmt: skip
    assert torch.equal(again, o) and torch.equal(pool, before)
    assert torch.equal(buffer[:, accepted - 1], stepped[slots[:, 0]])
    assert torch.equal(recurrent(*more, None, stepped, state_indices=slots[:, 0], **options)[0], after)


@state_dtypes
@layouts
def test_many_tokens_equal_as_many_calls(v_first, state):
    tokens, states = make_inputs(2, 4, 2, 6, seed=47), make_states(2, 6, seed=48, dtype=state, v_first=v_first)
    o, final = recurrent(*tokens, None, states, True, state_v_first=v_first)
    for t in range(4):
        one, states = recurrent(*(x[:, t : t + 1] for x in tokens), None, states, True, state_v_first=v_first)
        assert torch.equal(one, o[:, t : t + 1])
    assert torch.equal(states, final)


@layouts
def test_error_of_many_tokens(v_first):
    """No worse than float32 arithmetic over hundreds of tokens, and an initial state that matters to the end."""
    tokens = make_inputs(2, 300, 2, 4, seed=7, gates="none")
    states = make_states(2, 4, seed=8, v_first=v_first)
    o, final = recurrent(*tokens, None, states, True, state_v_first=v_first)
    want_o, want_final, _ = reference.gated_delta_rule(*tokens, 128**-0.5, states.mT if v_first else states)
    assert_heads_close("o", o, want_o, 2, 4e-3)
    assert_heads_close("states", final.mT if v_first else final, want_final, 1, 1e-5)


# ---- a layer: convolution, this operator, gated norm ----------------------------------------------------------------

# Outputs carry the roundings of the convolution's output, of o and of the result to bfloat16; states the first alone.
LAYER_LIMITS = {FP32: (6e-3, 1e-3), BF16: (6e-3, 4e-3)}
layers = pytest.mark.parametrize("H, HV", [(16, 32), (8, 16), (4, 8)])


@state_dtypes
@layers
def test_captured_decode_step_of_a_layer(H, HV, state):
    """Replayed with other tokens, slots and padding it is the eager step, bit for bit, and the float64 composition."""
    N, P = 6, 9
    layer, slots = Layer(H, HV, seed=0, device=DEVICE), ints(*range(N))
    conv_pool, pool = layer.conv_states(P, 1), make_states(P, HV, seed=2, dtype=state, v_first=True)
    tokens = layer.tokens(N, 1, 3)
    layer.step(tokens, conv_pool.clone(), pool.clone(), slots, slots)  # loads the modules
    captured, eager = [[conv_pool.mT.clone().mT, pool.clone()] for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.step(tokens, *captured, slots, slots)
    for i in range(4):
        for static, new in zip(tokens, layer.tokens(N, 1, 4 + i), strict=True):
            static.copy_(new)
        slots.copy_(torch.randperm(P, generator=torch.Generator().manual_seed(i))[:N])
        slots[i] = -1
        live = [n for n in range(N) if n != i]
        at = slots[live].long()
        before = [x[at].clone() for x in captured]
        graph.replay()
        assert torch.equal(out, layer.step(tokens, *eager, slots, slots))
        assert all(map(torch.equal, captured, eager)) and not out[i].any()
        want, want_states = layer.reference([x[live] for x in tokens], *before)
        assert_heads_close("out", out[live], want, 2, LAYER_LIMITS[state][0])
        assert_heads_close("states", captured[1][at], want_states, 1, LAYER_LIMITS[state][1])
        assert torch.equal(captured[0][at], torch.cat([before[0], tokens[0][live].mT], -1)[..., 1:])


@pytest.mark.parametrize("accepted", [1, 2, 4])
@state_dtypes
def test_verify_of_a_layer_with_k_accepted_equals_k_decode_steps(state, accepted):
    """Bit for bit, the step after it too. The convolution slides over one slot, the rule has a slot a token."""
    N, S = 3, 4
    layer = Layer(4, 8, seed=0, device=DEVICE)
    tokens, more = layer.tokens(N, S, 1), layer.tokens(N, 1, 2)
    conv_states = layer.conv_states(N, 3)
    wide = torch.cat([conv_states.mT, torch.zeros_like(conv_states.mT)], 1).mT  # room for S - 1 tokens more
    pool = make_states(N * S, 8, seed=4, dtype=state, v_first=True)
    rows, slots = ints(*range(N)), ints(*range(N * S)).view(N, S)
    stepped, first = pool.clone(), slots[:, 0]
    out = layer.step(tokens, wide, pool, rows, slots, ints(*[1] * N))
    after = layer.step(more, wide, pool, rows, slots, ints(*[accepted] * N))
    for t in range(accepted):
        now = [x[:, t : t + 1] for x in tokens]
        assert torch.equal(layer.step(now, conv_states, stepped, rows, first), out[:, t : t + 1])
    assert torch.equal(layer.step(more, conv_states, stepped, rows, first), after)
    assert torch.equal(pool[first.long()], stepped[first.long()])


@layers
def test_decode_of_a_layer_after_its_prefill_equals_prefill_of_one_token_more(H, HV):
    layer = Layer(H, HV, seed=0, device=DEVICE)
    tokens = layer.tokens(2, 201, 1)
    out, conv_states, states = layer.prefill(tokens)
    _, conv_pool, pool = layer.prefill([x[:, :200] for x in tokens])
    last = layer.step([x[:, 200:] for x in tokens], conv_pool, pool, ints(0, 1), ints(0, 1))
    assert torch.equal(conv_pool, conv_states)
    assert_heads_close("out", last, out[:, 200:], 2, 1.5e-2)
    assert_heads_close("states", pool, states, 1, 1e-2)


# ---- what went wrong elsewhere --------------------------------------------------------------------------------------


@state_dtypes
def test_float16_outputs_stay_finite(state):
    """States that have grown for long read out beyond float16; inf would become NaN in the norm behind."""
    q, k, v, g, beta = make_inputs(1, 1, 1, 2, seed=9, dtype=FP16, gates="none")
    states = torch.full((1, 2, 128, 128), 1e5, device=DEVICE, dtype=state)
    states[:, :, :, 1::2] *= -1
    o, final = recurrent(q.abs() + 1, k, v, g, beta, 1.0, states, True)
    assert (o[..., ::2] == 65504).all() and (o[..., 1::2] == -65504).all() and final.isfinite().all()
    states[0, 0, 0, 0] = float("nan")
    assert recurrent(q, k, v, g, beta, 1.0, states)[0].isnan().any()  # hidden it must not be


def test_softplus_of_large_inputs():
    q, k, v, *_ = make_inputs(1, 1, 1, 4, seed=10)
    states = make_states(1, 4, seed=11)
    gates = {
        "A_log": torch.full((4,), -12.0, device=DEVICE),
        "a": torch.tensor([[[19.0, 21.0, 89.0, 2e4]]], device=DEVICE),
        "b": torch.tensor([[[0.0, -200.0, 200.0, 3.0]]], device=DEVICE),
        "dt_bias": torch.zeros(4, device=DEVICE),
    }
    o, final = recurrent(q, k, v, initial_state=states, output_final_state=True, **gates)
    g = -gates["A_log"].double().exp() * F.softplus(gates["a"].double())
    want_o, want_final, _ = reference.gated_delta_rule(q, k, v, g, gates["b"].double().sigmoid(), 128**-0.5, states)
    assert_heads_close("o", o, want_o, 2, 4e-3)
    assert_heads_close("states", final, want_final, 1, 1e-5)


@pytest.mark.parametrize("padding", [-1, 0])
def test_slot_zero_is_live_or_dead_by_choice(padding):
    tokens, before = make_inputs(2, 1, 2, 4, seed=12), make_states(4, 4, seed=13)
    pool = before.clone()
    o, _ = recurrent(*tokens, None, pool, state_indices=ints(0, 3), padding_index=padding)
    assert o[1].any() and not torch.equal(pool[3], before[3]) and torch.equal(pool[1:3], before[1:3])
    assert bool(o[0].any()) == (padding == -1) and torch.equal(pool[0], before[0]) == (padding == 0)


def test_batch_padded_to_the_size_of_a_graph():
    """Eight sequences of which five are live: fewer indices are an error, padding indices are not."""
    tokens, before = make_inputs(1, 8, 2, 4, seed=14), make_states(9, 4, seed=15)
    pool, offsets = before.clone(), ints(0, 1, 2, 3, 4, 5, 5, 5, 5)
    with pytest.raises(ValueError, match=r"state_indices must have shape \[N=8\] or \[N=8, S\], got \[5\]"):
        recurrent(*tokens, None, pool, cu_seqlens=offsets, state_indices=ints(1, 2, 3, 4, 5))
    o, _ = recurrent(*tokens, None, pool, cu_seqlens=offsets, state_indices=ints(1, 2, 3, 4, 5, -1, 7, 0))
    assert o[:, :5].any(-1).all() and not o[:, 5:].any()
    assert torch.equal(pool[[0, 6, 7, 8]], before[[0, 6, 7, 8]])


@layouts
def test_packed_sequences_do_not_leak_into_each_other(v_first):
    tokens, states = make_inputs(1, 8, 2, 4, seed=15), make_states(2, 4, seed=16, v_first=v_first)
    o, final = recurrent(*tokens, None, states, True, cu_seqlens=ints(0, 4, 8), state_v_first=v_first)
    for n in range(2):
        part = [x[:, 4 * n : 4 * n + 4] for x in tokens]
        alone, state = recurrent(*part, None, states[n : n + 1], True, state_v_first=v_first)
        assert torch.equal(o[:, 4 * n : 4 * n + 4], alone) and torch.equal(final[n : n + 1], state)


@layouts
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_malformed_indices_and_counts_touch_nothing_else(dtype, v_first):
    """Extreme indices, counts and offsets; the pool and the outputs lie between guards."""
    extremes = [-1, 4, 5, 1 << 20, (1 << 31) - 1, -(1 << 31)]
    extremes += [(1 << 62), -(1 << 62)] if dtype is torch.int64 else []
    N, S, HV = len(extremes) + 1, 3, 4
    memory = torch.full((1 << 22,), 7.0, device=DEVICE)
    pool = memory[1 << 20 :][: 4 * HV * 128 * 128].view(4, HV, 128, 128)
    pool.copy_(make_states(4, HV, seed=16))
    before = memory.clone()
    tokens = make_inputs(N, S, 2, HV, seed=17)
    slots = torch.tensor([[x] * S for x in extremes] + [[0, 1, -7]], dtype=dtype, device=DEVICE)
    options = {"state_v_first": v_first}
    o, _ = recurrent(*tokens, None, pool, state_indices=slots, **options)
    assert not o[:-1].any() and o[-1].any(-1).all()
    counts = torch.tensor([*extremes[1:], 0, 2], dtype=dtype, device=DEVICE)  # all malformed but the last
    valid = torch.tensor([[2, 3, 3]] * (N - 1) + [[0, 1, 1 << 30]], dtype=dtype, device=DEVICE)
    o, _ = recurrent(*tokens, None, pool, state_indices=valid, num_accepted_tokens=counts, **options)
    assert not o[:-1].any() and o[-1].any(-1).all()
    buffer = memory[: 2 * S * HV * 128 * 128 // 2].view(1, S, HV, 128, 128)
    recurrent(
        *tokens, None, pool, state_indices=torch.zeros_like(slots[:, 0]), intermediate_states_buffer=buffer,
        intermediate_state_indices=torch.tensor([*extremes[:1], *extremes[2:], 1, 9], dtype=dtype, device=DEVICE),
        **options,
    )  # fmt: skip
    memory[1 << 20 :][: 2 * HV * 128 * 128] = before[1 << 20 :][: 2 * HV * 128 * 128]  # slots 0 and 1 are written
    assert torch.equal(memory, before)
    packed = make_inputs(1, 6, 2, HV, seed=18)
    for offsets in ([-5, 2, 9, 3], [6, 0, 6, 1 << 30], [3, 3, 3, 3], [0, 5, 2, 6]):
        poison.fill_cached_memory(DEVICE)
        with poison.nan_empty():
            o, _ = recurrent(*packed, None, None, True, cu_seqlens=torch.tensor(offsets, dtype=dtype, device=DEVICE))
        assert o.isfinite().all()


@state_dtypes
def test_slots_beyond_two_giga_elements(state):
    HV, P = 32, 4200
    pool = torch.empty(P, HV, 128, 128, dtype=state, device=DEVICE)
    assert pool[4096:].storage_offset() >= 1 << 31
    slots = [4199, 4096, 4095, 0]
    start = make_states(4, HV, seed=19, dtype=state)
    for slot, one in zip(slots, start, strict=True):
        pool[slot] = one
    tokens = make_inputs(4, 1, 16, HV, seed=20)
    o, _ = recurrent(*tokens, None, pool, state_indices=ints(*slots))
    want_o, want_final = recurrent(*tokens, None, start, True)
    assert torch.equal(o, want_o) and all(torch.equal(pool[slot], want_final[i]) for i, slot in enumerate(slots))


@layouts
@pytest.mark.parametrize("where", range(6), ids=["q", "k", "v", "g", "beta", "state"])
def test_nan_stays_in_its_sequence(where, v_first):
    tensors = [*make_inputs(3, 2, 2, 4, seed=21), make_states(3, 4, seed=22)]
    clean = recurrent(*tensors[:5], None, tensors[5], True, state_v_first=v_first)
    tensors[where][1] = float("nan")
    dirty = recurrent(*tensors[:5], None, tensors[5], True, state_v_first=v_first)
    for x, expected in zip(dirty, clean, strict=True):
        assert torch.equal(x[[0, 2]], expected[[0, 2]])
    assert dirty[0][1].isnan().any()


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_the_kernel_is_eligible_and_loaded():
    answer = can_use(*make_inputs(1, 1, 16, 32, seed=23))
    assert answer and answer.target == "nvidia/sm90" and answer.reason == ""
    recurrent(*make_inputs(1, 1, 16, 32, seed=23))
    module = sys.modules["atrex.kernels.nvidia.recurrent_gdn.sm90.runtime"]
    assert os.path.dirname(module.__file__).startswith(os.path.dirname(atrex.__file__))


def off_the_grid():
    """Slots whose pitch is no multiple of 16 bytes."""
    pages = torch.zeros(3, 4 * 128 * 128 + 2, device=DEVICE)
    return pages[:, : 4 * 128 * 128].unflatten(1, (4, 128, 128))


REFUSED = {
    "float32": (
        lambda: {"dtype": FP32},
        "q, k and v must be all bfloat16 or all float16, got float32, float32, float32",
    ),
    "K": (lambda: {"K": 64}, "q, k and v must have head sizes K=V=128, got K=64, V=128"),
    "V": (lambda: {"V": 256}, "q, k and v must have head sizes K=V=128, got K=128, V=256"),
    "grad": (lambda: {"grad": True}, "no input may require grad in grad mode: the kernels have no backward"),
    "pool": (
        lambda: {"initial_state": off_the_grid(), "state_indices": ints(0, 2)},
        "initial_state must be contiguous within a sequence or slot and start at multiples of 16 bytes, got strides "
        "(65538, 16384, 128, 1) of float32 at offset 0",
    ),
    "buffer": (
        lambda: {
            "initial_state": make_states(2, 4, seed=1),
            "intermediate_states_buffer": torch.zeros(2, 1, 4, 128, 128, device=DEVICE).mT,
        },
        "intermediate_states_buffer must be contiguous within a sequence or slot and start at multiples of 16 bytes, "
        "got strides (65536, 65536, 16384, 1, 128) of float32 at offset 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_refuses_runs_on_the_fallback(name, monkeypatch, caplog):
    make, reason = REFUSED[name]
    options = make()
    shape = {x: options.pop(x) for x in ("dtype", "K", "V") if x in options}
    tokens = [x.requires_grad_(bool(options.get("grad"))) for x in make_inputs(2, 1, 2, 4, seed=24, **shape)]
    options.pop("grad", None)
    answer = can_use(*tokens, **options)
    assert not answer and answer.target == "nvidia/sm90" and answer.reason == reason
    with pytest.raises(RuntimeError, match="ATREX_REQUIRE_KERNEL=1 forbids the PyTorch fallback"):
        recurrent(*tokens, **options)
    monkeypatch.delenv("ATREX_REQUIRE_KERNEL")
    initial = options.get("initial_state")
    rows = [0, 1] if "state_indices" not in options else [0, 2]
    want_o, *_ = reference.gated_delta_rule(
        *(x.detach() for x in tokens), tokens[0].shape[-1] ** -0.5, None if initial is None else initial[rows]
    )
    with caplog.at_level(logging.WARNING, "atrex"):
        (o, _), _ = (recurrent(*tokens, **options) for _ in range(2))  # the second finds the states of the first
    assert [x.getMessage() for x in caplog.records if reason in x.getMessage()] == [
        f"fused_recurrent_gated_delta_rule runs on the slower PyTorch fallback: {reason}"
    ]
    assert_heads_close("o", o.detach() if initial is None else o, want_o, 2, 4e-3)


def test_rejected_before_any_launch():
    tokens = make_inputs(2, 1, 2, 4, seed=25)
    with pytest.raises(ValueError, match=r"initial_state must be on cuda:0 as q, got cpu"):
        recurrent(*tokens, None, torch.zeros(2, 4, 128, 128))
    with pytest.raises(TypeError, match=r"g must be a torch.Tensor, got NoneType"):
        recurrent(*tokens[:3], beta=tokens[4])
    with pytest.raises(ValueError, match=r"num_accepted_tokens needs state_indices of shape \[N=2, S\], got \[2\]"):
        recurrent(*tokens, None, make_states(4, 4, seed=1), state_indices=ints(0, 1), num_accepted_tokens=ints(1, 1))


# ---- graphs, repeats, names of kernels ------------------------------------------------------------------------------


@state_dtypes
@layouts
def test_capture_and_replay(v_first, state):
    """A captured verify step that is replayed with other tokens, slots, lengths and counts."""
    steps = [make_inputs(1, 12, 4, 8, seed=30 + i) for i in range(4)]
    pool = make_states(13, 8, seed=31, dtype=state, v_first=v_first)
    slots = [torch.randperm(12, generator=torch.Generator().manual_seed(i)).view(4, 3).to(DEVICE) for i in range(4)]
    offsets = [ints(0, 3, 6, 9, 12), ints(0, 1, 2, 2, 5), ints(0, 2, 5, 8, 9), ints(0, 3, 3, 4, 4)]
    counts = [ints(1, 1, 1, 1), ints(3, 1, 0, 2), ints(1, 2, 3, 9), ints(2, 2, 2, 2)]
    tokens = make_inputs(1, 12, 4, 8, seed=30, layout="misaligned")  # so that the packing is captured too
    at, ends, accepted = slots[0].clone(), offsets[0].clone(), counts[0].clone()

    def call(tokens, pool, slots, offsets, counts):
        return recurrent(
            *tokens, None, pool, use_qk_l2norm_in_kernel=True, cu_seqlens=offsets, state_v_first=v_first,
            state_indices=slots, num_accepted_tokens=counts,
        )[0]  # fmt: skip

    captured_pool, eager_pool = pool.clone(), pool.clone()
    call(tokens, pool, at, ends, accepted)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(tokens, captured_pool, at, ends, accepted)
    for i in range(4):
        for static, new in zip(
            (*tokens, at, ends, accepted), (*steps[i], slots[i], offsets[i], counts[i]), strict=True
        ):
            static.copy_(new)
        graph.replay()
        eager = call(steps[i], eager_pool, slots[i], offsets[i], counts[i])
        assert torch.equal(captured, eager) and torch.equal(captured_pool, eager_pool)


@layouts
def test_repeats_are_bitwise_equal(v_first):
    tokens, states = make_inputs(64, 3, 16, 32, seed=32), make_states(64, 32, seed=33, v_first=v_first)
    first = recurrent(*tokens, None, states, True, state_v_first=v_first)
    for _ in range(20):
        assert all(map(torch.equal, first, recurrent(*tokens, None, states, True, state_v_first=v_first)))


def test_other_stream_and_current_device():
    tokens, pool = make_inputs(4, 1, 4, 8, seed=34), make_states(4, 8, seed=35)
    want, want_pool = recurrent(*tokens, None, pool, True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        o, _ = recurrent(*tokens, None, pool, state_indices=ints(0, 1, 2, 3))
    stream.synchronize()
    assert torch.equal(o, want) and torch.equal(pool, want_pool)


def test_profiler_sees_kernels_of_this_operator_alone():
    child = [sys.executable, os.path.abspath(__file__), "--profile"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    seen = json.loads(subprocess.run(child, check=True, env=env, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    for case in seen["cases"]:
        print(f"{case['case']}: {', '.join(case['operator'])}")
        assert case["problems"] == [] and case["framework"] == []
    steps = [case["operator"] for case in seen["cases"] if case["case"].startswith("layer")]
    names = {name for case in seen["cases"] for name in case["operator"] if not case["case"].startswith("layer")}
    assert len(names) == 9 and all(name.startswith("atrex_recurrent_gdn_") for name in names)
    assert len(steps) == 4
    for launches in steps:  # three, eager and replayed
        convolution, rule, norm = launches
        assert convolution.startswith("atrex_causal_conv1d_update_") and norm.startswith("atrex_gated_rms_norm_")
        assert rule in names


def profiled():
    """A call for each of the eight kernels, one whose inputs are packed first, and decode steps of a layer."""

    def case(v_first, state, dtype, layout="contiguous"):
        tokens = make_inputs(2, 2, 4, 8, seed=36, dtype=dtype, layout=layout)
        pool = make_states(4, 8, seed=37, dtype=state, v_first=v_first)
        return functools.partial(recurrent, *tokens, None, pool, state_indices=ints(3, 1), state_v_first=v_first)

    kernels = {
        f"{layout} first, {state} states, {dtype}": functools.partial(case, layout == "V", state, dtype)
        for layout in "VK"
        for state in (FP32, BF16)
        for dtype in (BF16, FP16)
    }
    layer_steps = {
        f"layer, {state} states, {how}": functools.partial(layer_step, state, how == "replayed")
        for state in (FP32, BF16)
        for how in ("eager", "replayed")
    }
    return kernels | {"packed": functools.partial(case, True, FP32, BF16, "transposed")} | layer_steps


def layer_step(state, replayed):
    layer, rows = Layer(4, 8, seed=38, device=DEVICE), ints(0, 1)
    tokens, conv_states = layer.tokens(2, 1, 39), layer.conv_states(2, 40)
    states = make_states(2, 8, seed=41, dtype=state, v_first=True)
    eager = functools.partial(layer.step, tokens, conv_states, states, rows, rows)
    if not replayed:
        return eager
    eager()  # loads the modules
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = eager()

    def replay():
        graph.replay()
        return eager, out  # whose tensors the graph uses

    return replay


def sanitize():
    """Few launches: made on the GPU, judged on the CPU; each tensor is an allocation, so that memcheck sees its end."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    for mode in CHOICES["mode"]:
        for v_first, state in ((True, FP32), (True, BF16), (False, FP32), (False, BF16)):
            for case in cases(1, [(1, 2)], mode=mode, v_first=v_first, state=state, dtype=BF16, page=False):
                o, final = recurrent(**case.arguments)
                in_place = final is case.states
                case.device, case.tensors = "cpu", [x.cpu() for x in case.tensors]
                for name in ("pool", "states", "buffer"):
                    setattr(case, name, None if getattr(case, name) is None else getattr(case, name).cpu())
                case.check(o.cpu(), case.states if in_place else None if final is None else final.cpu())
                print(mode, "V first" if v_first else "K first", state, case.lengths, flush=True)


# ---- speed ----------------------------------------------------------------------------------------------------------


@state_dtypes
@layouts
@pytest.mark.parametrize("H, HV", [(16, 32), (8, 16), (4, 8)])
def test_decode_at_80_percent_of_copy_bandwidth(H, HV, v_first, state):
    copy = copy_bandwidth()
    for B in (128, 512):
        us = decode_us(B, H, HV, state, v_first)
        share = state_bytes(B, HV, state) / (us * 1e-6) / copy
        print(f"{H}/{HV} B={B} {state}: {us:.1f} us, {share:.0%} of a copy's {copy / 1e12:.2f} TB/s")
        # The other layouts and the smaller grids are bounded less tightly: nobody runs bfloat16 states K first.
        assert share >= (0.8 if v_first and B * HV >= 4096 else 0.6), (B, us, share)


def test_one_sequence_under_5_us():
    for state in (FP32, BF16):
        us = decode_us(1, 16, 32, state, True)
        print(f"B=1 {state}: {us:.2f} us")
        assert us < 5


def test_decode_step_of_a_layer_at_70_percent_of_copy_bandwidth():
    """Three launches in a row; the outputs of the first two are counted as if they never left the L2."""
    copy = copy_bandwidth()
    for state in (FP32, BF16):
        layer = Layer(16, 32, seed=0, device=DEVICE)
        us = gdn_layer_table.step_us(layer, 128, state)
        share = gdn_layer_table.step_bytes(layer, 128, state) / (us * 1e-6) / copy
        print(f"layer, B=128 {state}: {us:.1f} us, {share:.0%} of a copy's {copy / 1e12:.2f} TB/s")
        assert share >= 0.7
        us = gdn_layer_table.step_us(layer, 1, state)
        print(f"layer, B=1 {state}: {us:.1f} us")
        assert us < 12


def test_host_cost_of_an_eager_call():
    tokens, pool = make_inputs(1, 4, 4, 8, seed=41), make_states(5, 8, seed=42)
    with torch.inference_mode():
        us = host_us(functools.partial(
            recurrent, *tokens, None, pool, use_qk_l2norm_in_kernel=True, cu_seqlens=ints(0, 1, 2, 3, 4),
            state_v_first=True, state_indices=ints(0, 1, 2, 3),
        ))  # fmt: skip
    print(f"eager call: {us:.1f} us")
    assert us < 25


def benched(B, T=1):
    """A decode step, or a verify step that keeps the states of T tokens, of a Qwen3-Next layer."""

    def make():
        tokens = make_inputs(B, T, 16, 32, seed=45, unit_keys=False)
        pool = make_states(B * T, 32, seed=46, v_first=True)
        slots = torch.arange(B * T, dtype=torch.int32, device=DEVICE).view(B, T)
        return functools.partial(
            recurrent, *tokens, None, pool, use_qk_l2norm_in_kernel=True, state_v_first=True,
            state_indices=slots if T > 1 else slots[:, 0],
        )  # fmt: skip

    return make


def main():
    os.environ["ATREX_REQUIRE_KERNEL"] = "1"
    if sys.argv[1:2] == ["--sanitize"]:
        return sanitize()
    if sys.argv[1:2] == ["--table"]:
        result = recurrent_table.table() | {"layer": gdn_layer_table.table(DEVICE)}
        if sys.argv[2:3] == ["--json"]:
            pathlib.Path(sys.argv[3]).write_text(json.dumps(result, indent=1))
        return None
    return modes.main(
        api="fused_recurrent_gated_delta_rule",
        about={
            "dispatch": "bfloat16 or float16 q, k, v with K=V=128 and states on the 16-byte grid, no gradients",
            "compile": "ahead of time, by nvcc for sm_90a",
            "limits": "tokens of a sequence go one after the other: long sequences are for chunk_gated_delta_rule",
        },
        device="cuda",
        bench={f"decode, {B} sequences": benched(B) for B in (1, 32, 128, 512)}
        | {"verify of 4 tokens, 32 sequences": benched(32, 4)},
        profile=profiled(),
    )


if __name__ == "__main__":
    sys.exit(main())
