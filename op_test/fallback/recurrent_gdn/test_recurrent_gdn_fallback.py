"""The fallback of fused_recurrent_gated_delta_rule: the whole contract on a CPU, gradients, and what it rejects."""

import functools
import re
import sys
import timeit

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import atrex
from atrex import _device, _dispatch
from harness import inputs, modes, poison, reference
from harness.compare import assert_heads_close
from harness.recurrent import CHOICES, Case, fused_gates
from harness.throughput import cpu_ratio

CPU = "cpu"
recurrent = atrex.fused_recurrent_gated_delta_rule


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    H = pick(1, 2, 3)
    return {name: pick(*values) for name, values in CHOICES.items()} | {
        "lengths": draw(st.lists(st.integers(0, 5), min_size=1, max_size=5)),
        "H": H,
        "HV": H * pick(1, 2, 4),
        "K": pick(8, 16, 31),
        "V": pick(8, 16, 31),
        "dtype": pick(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        "seed": draw(st.integers(0, 1 << 16)),
    }


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_contract(choices):
    case = Case(choices, CPU)
    with poison.nan_empty():
        result = recurrent(**case.arguments)
    case.check(*result)


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_verify_with_k_accepted_equals_k_decode_steps(accepted, state):
    tokens = inputs.make_inputs(2, 4, 2, 4, 16, 16, seed=1, device=CPU)
    more = inputs.make_inputs(2, 1, 2, 4, 16, 16, seed=2, device=CPU)
    pool = inputs.make_states(9, 4, 16, 16, seed=3, device=CPU, dtype=state)
    slots = torch.tensor([[1, 2, 3, 4], [8, 7, 6, 5]])
    verified, stepped = pool.clone(), pool.clone()
    o, _ = recurrent(*tokens, None, verified, state_indices=slots)
    after, _ = recurrent(
        *more, None, verified, state_indices=slots, num_accepted_tokens=torch.full((2,), accepted)
    )  # fmt: skip
    for t in range(accepted):
        one, _ = recurrent(*(x[:, t : t + 1] for x in tokens), None, stepped, state_indices=slots[:, 0])
        assert torch.equal(one, o[:, t : t + 1])
    assert torch.equal(recurrent(*more, None, stepped, state_indices=slots[:, 0])[0], after)
    buffer = torch.zeros(2, 4, *pool.shape[1:], dtype=state)
    again, _ = recurrent(*tokens, None, pool, state_indices=slots[:, 0], intermediate_states_buffer=buffer)
    assert torch.equal(again, o) and torch.equal(buffer[:, accepted - 1], stepped_back(pool, tokens, slots, accepted))


@pytest.mark.parametrize("v_first", [False, True], ids=["k_first", "v_first"])
@pytest.mark.parametrize("fused", [False, True], ids=["gates", "fused_gates"])
def test_many_tokens_at_a_layers_sizes_equal_as_many_calls(fused, v_first):
    """Bit for bit at the sizes of a layer, where products are added up by vectors, and in rows as in slots."""
    N, T, HV = 3, 4, 8
    q, k, v, g, beta = inputs.make_inputs(N, T, 4, HV, seed=4, device=CPU)
    gates = {"g": g, "beta": beta} if not fused else fused_gates((N, T), HV, 5, CPU, torch.bfloat16)[0]
    states = inputs.make_states(N, HV, seed=6, device=CPU, v_first=v_first)
    options = {"use_qk_l2norm_in_kernel": True, "state_v_first": v_first}
    pool, slots = states.repeat_interleave(T, 0), torch.arange(N * T).view(N, T)
    in_slots, _ = recurrent(q, k, v, **gates, initial_state=pool, state_indices=slots, **options)
    o, final = recurrent(q, k, v, **gates, initial_state=states, output_final_state=True, **options)
    assert torch.equal(o, in_slots) and torch.equal(final, pool[slots[:, -1]])
    for t in range(T):
        now = slice(t, t + 1)
        part = {name: x if x.dim() == 1 else x[:, now] for name, x in gates.items()}
        one, states = recurrent(
            q[:, now], k[:, now], v[:, now], **part, initial_state=states, output_final_state=True, **options
        )  # fmt: skip
        assert torch.equal(one, o[:, now]) and torch.equal(states, pool[slots[:, t]])


def stepped_back(pool, tokens, slots, count):
    """The states after ``count`` decode steps from ``pool``."""
    stepped = pool.clone()
    for t in range(count):
        recurrent(*(x[:, t : t + 1] for x in tokens), None, stepped, state_indices=slots[:, 0])
    return stepped[slots[:, 0]]


@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
def test_many_tokens_equal_as_many_calls(state):
    tokens = inputs.make_inputs(2, 4, 1, 2, 8, 8, seed=20, device=CPU)
    states = inputs.make_states(2, 2, 8, 8, seed=21, device=CPU, dtype=state)
    o, final = recurrent(*tokens, None, states, True)
    for t in range(4):
        one, states = recurrent(*(x[:, t : t + 1] for x in tokens), None, states, True)
        assert torch.equal(one, o[:, t : t + 1])
    assert torch.equal(states, final)


def test_decode_after_prefill_equals_prefill_of_one_token_more():
    tokens = inputs.make_inputs(2, 71, 2, 4, 16, 16, seed=4, device=CPU, dtype=torch.float32)
    o, final = atrex.chunk_gated_delta_rule(*tokens, output_final_state=True)
    _, state = atrex.chunk_gated_delta_rule(*(x[:, :70] for x in tokens), output_final_state=True)
    last, state = recurrent(*(x[:, 70:] for x in tokens), None, state, True)
    assert_heads_close("o", last, o[:, 70:], 2, 1e-5)
    assert_heads_close("states", state, final, 1, 1e-5)


def test_float16_outputs_stay_finite():
    """States that have grown for long read out beyond float16; inf would become NaN in the norm behind."""
    q, k, v, g, beta = inputs.make_inputs(1, 1, 1, 2, 16, 16, seed=5, device=CPU, dtype=torch.float16, gates="none")
    state = torch.full((1, 2, 16, 16), 1e5)
    state[:, :, :, 1::2] *= -1
    o, final = recurrent(q.abs() + 1, k, v, g, beta, 1.0, state, True)
    assert (o[..., ::2] == 65504).all() and (o[..., 1::2] == -65504).all() and final.isfinite().all()
    state[0, 0, 0, 0] = float("nan")
    assert recurrent(q, k, v, g, beta, 1.0, state)[0].isnan().any()  # hidden it must not be


def test_softplus_of_large_inputs():
    q, k, v, *_ = inputs.make_inputs(1, 1, 1, 4, 8, 8, seed=6, device=CPU, dtype=torch.float32)
    state = inputs.make_states(1, 4, 8, 8, seed=7, device=CPU)
    gates = {
        "A_log": torch.full((4,), -12.0),
        "a": torch.tensor([[[19.0, 21.0, 89.0, 2e4]]]),
        "b": torch.tensor([[[0.0, -200.0, 200.0, 3.0]]]),
        "dt_bias": torch.zeros(4),
    }
    o, final = recurrent(q, k, v, initial_state=state, output_final_state=True, **gates)
    g = -gates["A_log"].double().exp() * F.softplus(gates["a"].double())
    want_o, want_final, _ = reference.gated_delta_rule(q, k, v, g, gates["b"].double().sigmoid(), 8**-0.5, state)
    assert_heads_close("o", o, want_o, 2, 1e-5)
    assert_heads_close("states", final, want_final, 1, 1e-5)


@pytest.mark.parametrize("padding", [-1, 0])
def test_slot_zero_is_live_or_dead_by_choice(padding):
    tokens = inputs.make_inputs(2, 1, 1, 2, 8, 8, seed=8, device=CPU)
    before = inputs.make_states(4, 2, 8, 8, seed=9, device=CPU)
    pool = before.clone()
    o, _ = recurrent(*tokens, None, pool, state_indices=torch.tensor([0, 3]), padding_index=padding)
    assert o[1].any() and not torch.equal(pool[3], before[3])
    assert bool(o[0].any()) == (padding == -1) and torch.equal(pool[0], before[0]) == (padding == 0)


def test_pool_with_padded_slots_and_a_column_of_a_table():
    """Slots of a larger page, and indices as a column of a block table."""
    tokens = inputs.make_inputs(2, 1, 1, 2, 8, 8, seed=10, device=CPU)
    pages = torch.full((4, 2 * 8 * 8 + 32), 7.0)
    pool = pages[:, : 2 * 8 * 8].unflatten(1, (2, 8, 8))
    pool.copy_(inputs.make_states(4, 2, 8, 8, seed=11, device=CPU))
    expected = recurrent(*tokens, None, pool[[2, 1]], True)
    table = torch.tensor([[2, 9, 9], [1, 9, 9]])
    o, final = recurrent(*tokens, None, pool, True, state_indices=table[:, 0])
    assert final is pool and torch.equal(o, expected[0]) and torch.equal(pool[[2, 1]], expected[1])
    assert (pages[:, 2 * 8 * 8 :] == 7).all()


def test_packed_sequences_do_not_leak_into_each_other():
    tokens = inputs.make_inputs(1, 8, 1, 2, 8, 8, seed=17, device=CPU)
    states = inputs.make_states(2, 2, 8, 8, seed=18, device=CPU)
    o, final = recurrent(*tokens, None, states, True, cu_seqlens=inputs.offsets([4, 4], CPU))
    for n in range(2):
        alone, state = recurrent(*(x[:, 4 * n : 4 * n + 4] for x in tokens), None, states[n : n + 1], True)
        torch.testing.assert_close(o[:, 4 * n : 4 * n + 4], alone)
        torch.testing.assert_close(final[n : n + 1], state)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", range(6), ids=["q", "k", "v", "g", "beta", "state"])
def test_nan_and_inf_stay_in_their_sequence(where, bad):
    tensors = [*inputs.make_inputs(3, 2, 1, 2, 8, 8, seed=12, device=CPU, dtype=torch.float32)]
    tensors.append(inputs.make_states(3, 2, 8, 8, seed=13, device=CPU))
    clean = recurrent(*tensors[:5], None, tensors[5], True)
    tensors[where][1] = bad
    dirty = recurrent(*tensors[:5], None, tensors[5], True)
    for x, expected in zip(dirty, clean, strict=True):
        assert torch.equal(x[[0, 2]], expected[[0, 2]])
    assert not dirty[0][1].isfinite().all() or (where == 3 and bad > 0)


@pytest.mark.parametrize("fused", [False, True])
def test_gradcheck(fused):
    gen = torch.Generator().manual_seed(14)
    randn = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64, requires_grad=True)  # noqa: E731
    common = [randn(1, 5, 1, 3), randn(1, 5, 1, 3), randn(1, 5, 2, 2), randn(2, 2, 3, 2)]
    gates = [randn(2), randn(1, 5, 2), randn(1, 5, 2), randn(2)] if fused else [randn(1, 5, 2), randn(1, 5, 2)]

    def run(q, k, v, states, *gates):
        names = ("A_log", "a", "b", "dt_bias") if fused else ("g", "beta")
        return recurrent(
            q, k, v, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True,
            cu_seqlens=inputs.offsets([3, 1], CPU), **dict(zip(names, gates, strict=True)),
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (*common, *gates))


@pytest.mark.parametrize("offsets", [[1, 8], [0, 9], [0, 5, 3, 8], [-1, 8]])
def test_malformed_offsets_are_an_error_on_a_cpu(offsets):
    tensors = inputs.make_inputs(1, 8, 1, 1, 4, 4, seed=15, device=CPU)
    with pytest.raises(ValueError, match=r"cu_seqlens must rise from 0 to at most T=8, got \["):
        recurrent(*tensors, cu_seqlens=torch.tensor(offsets))


B, T, H, HV, K, V = 2, 3, 1, 2, 4, 6


def call(**options):
    q, k, v, g, beta = inputs.make_inputs(B, T, H, HV, K, V, seed=16, device=CPU)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta} | options


STATE = torch.zeros(B, HV, K, V)
IDS = torch.tensor([0, 1])
TABLE = torch.tensor([[0, 1], [2, 3]])
GATE, HEADS = torch.zeros(B, T, HV), torch.zeros(HV)
FUSED = {"g": None, "beta": None, "A_log": HEADS, "a": GATE, "b": GATE, "dt_bias": HEADS}
BUFFER = torch.zeros(B, T, HV, K, V)
CASES = {
    "q": (call(q=[1.0]), TypeError, r"q must be a torch.Tensor, got list"),
    "v_device": (call(v=torch.zeros(B, T, HV, V, device="meta")), ValueError, r"v must be on cpu as q, got meta"),
    "no_g": (call(g=None), TypeError, r"g must be a torch.Tensor, got NoneType"),
    "no_beta": (call(beta=None), TypeError, r"beta must be a torch.Tensor, got NoneType"),
    "g_shape": (call(g=GATE.mT), ValueError, r"g must have shape \[B=2, T=3, HV=2\], got \[2, 2, 3\]"),
    "both_gates": (call(A_log=HEADS), ValueError, r"g and beta are computed from A_log, a, b and dt_bias"),
    "no_dt_bias": (call(**FUSED | {"dt_bias": None}), TypeError, r"dt_bias must be a torch.Tensor, got NoneType"),
    "a_shape": (
        call(**FUSED | {"a": GATE[0]}),
        ValueError,
        r"a must have shape \[B=2, T=3, HV=2\] or \[B \* T=6, HV=2\], got \[3, 2\]",
    ),
    "A_log_shape": (call(**FUSED | {"A_log": GATE}), ValueError, r"A_log must have shape \[HV=2\], got \[2, 3, 2\]"),
    "b_dtype": (call(**FUSED | {"b": GATE.int()}), TypeError, r"b must be bfloat16 or .*, got int32"),
    "v_heads": (
        call(v=torch.zeros(B, T, 0, V)),
        ValueError,
        r"v must have shape .* multiple of H=1 .*, got \[2, 3, 0, 6\]",
    ),
    "scale": (call(scale="1"), TypeError, r"scale must be a number or None, got str"),
    "state_dtype": (
        call(initial_state=STATE.half()),
        TypeError,
        r"initial_state must be bfloat16 or float32, got float16",
    ),
    "state_rows": (
        call(initial_state=STATE[:1]),
        ValueError,
        r"initial_state must have shape \[N=2, HV=2, K=4, V=6\] with state_v_first=False, got \[1, 2, 4, 6\]",
    ),
    "state_layout": (
        call(initial_state=STATE, state_v_first=True, state_indices=IDS),
        ValueError,
        r"initial_state must have shape \[P, HV=2, V=6, K=4\] with state_v_first=True, got \[2, 2, 4, 6\]",
    ),
    "indices_without_pool": (call(state_indices=IDS), ValueError, r"state_indices names slots of a pool: .*, got None"),
    # A batch padded to the size of a captured graph brings its padding as indices, not as fewer of them.
    "fewer_indices_than_sequences": (
        call(initial_state=STATE, state_indices=IDS[:1]),
        ValueError,
        r"state_indices must have shape \[N=2\] or \[N=2, S\], got \[1\]",
    ),
    "indices_dtype": (
        call(initial_state=STATE, state_indices=IDS.short()),
        TypeError,
        r"state_indices must be int32 or int64, got int16",
    ),
    "accepted_without_table": (
        call(initial_state=STATE, state_indices=IDS, num_accepted_tokens=IDS),
        ValueError,
        r"num_accepted_tokens needs state_indices of shape \[N=2, S\], got \[2\]",
    ),
    "accepted_shape": (
        call(initial_state=STATE, state_indices=TABLE, num_accepted_tokens=IDS[:1]),
        ValueError,
        r"num_accepted_tokens must have shape \[N=2\], got \[1\]",
    ),
    "read_twice": (
        call(initial_state=STATE, state_indices=TABLE, num_accepted_tokens=IDS, initial_state_indices=IDS),
        ValueError,
        r"initial_state_indices and num_accepted_tokens both choose the slots that are read",
    ),
    "read_without_write": (
        call(initial_state=STATE, initial_state_indices=IDS),
        ValueError,
        r"initial_state_indices needs state_indices, where the states are written, got None",
    ),
    "padding_index": (call(padding_index=None), TypeError, r"padding_index must be an int, got NoneType"),
    "buffer_shape": (
        call(initial_state=STATE, intermediate_states_buffer=BUFFER[:1]),
        ValueError,
        r"intermediate_states_buffer must have shape \[at least N=2, S, 2, 4, 6\], got \[1, 3, 2, 4, 6\]",
    ),
    "buffer_dtype": (
        call(initial_state=STATE, intermediate_states_buffer=BUFFER.bfloat16()),
        TypeError,
        r"intermediate_states_buffer must be float32, got bfloat16",
    ),
    "buffer_without_state": (
        call(intermediate_states_buffer=BUFFER),
        ValueError,
        r"intermediate_states_buffer needs an initial_state, got None",
    ),
    "buffer_missing": (
        call(initial_state=STATE, intermediate_state_indices=IDS),
        TypeError,
        r"intermediate_states_buffer must be a torch.Tensor, got NoneType",
    ),
    "buffer_and_table": (
        call(initial_state=STATE, state_indices=TABLE, intermediate_states_buffer=BUFFER),
        ValueError,
        r"with intermediate_states_buffer state_indices must be the slots \[N\] that are read",
    ),
    "buffer_and_final": (
        call(initial_state=STATE, output_final_state=True, intermediate_states_buffer=BUFFER),
        ValueError,
        r"with intermediate_states_buffer there is no final state: output_final_state must be False",
    ),
    "pool_with_grad": (
        call(initial_state=STATE.clone().requires_grad_(), state_indices=IDS),
        ValueError,
        r"initial_state is written in place with state_indices: it must not require grad",
    ),
    "packed_batches": (call(cu_seqlens=torch.tensor([0, 3])), ValueError, r"cu_seqlens packs .* B=1, got B=2"),
}


@pytest.mark.parametrize("name", CASES)
def test_rejected(name):
    arguments, error, message = CASES[name]
    with pytest.raises(error, match=f"^{message}") as raised:
        recurrent(**arguments)
    answer = atrex.can_use_fused_recurrent_gated_delta_rule(**arguments)
    assert not answer and answer.reason == str(raised.value)


def test_not_eligible_on_a_cpu():
    answer = atrex.can_use_fused_recurrent_gated_delta_rule(**call())
    assert not answer and answer.target == "unknown/cpu" and "no implementation for unknown/cpu" in answer.reason


# ---- what the policy says, as if a CPU tensor lay on an H200 -------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """An sm90 implementation in the wheel that records its calls."""
    calls = []
    monkeypatch.setitem(_device._targets, torch.device(CPU), _device.DeviceTarget("nvidia", "sm90"))
    monkeypatch.setattr(_dispatch, "_in_wheel", lambda entry: True)
    monkeypatch.setattr(_dispatch, "_load", lambda entry: lambda call: calls.append((entry, call)) or (call.v, None))
    return calls


def large(**options):
    q, k, v, g, beta = inputs.make_inputs(2, 1, 2, 4, seed=19, device=CPU)
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta} | options


STATES = torch.zeros(2, 4, 128, 128)
REFUSED = {
    "float32": ({"v": torch.zeros(2, 1, 4, 128)}, "q, k and v must be all bfloat16 or all float16, got .*, float32"),
    "V": ({"v": torch.zeros(2, 1, 4, 64).bfloat16()}, "q, k and v must have head sizes K=V=128, got K=128, V=64"),
    "grad": ({"beta": torch.zeros(2, 1, 4).requires_grad_()}, "no input may require grad in grad mode"),
    "layout": (
        {"initial_state": STATES.mT},
        r"initial_state must be contiguous .*, got strides \(65536, 16384, 1, 128\)",
    ),
    "pitch": (
        {
            "initial_state": torch.zeros(3 * 65538).as_strided((3, 4, 128, 128), (65538, 16384, 128, 1)),
            "state_indices": IDS,
        },
        r"initial_state must .* at multiples of 16 bytes, got strides \(65538, .* of float32 at offset 0",
    ),
    "offset": (
        {"initial_state": torch.zeros(STATES.numel() + 4).bfloat16()[4:].view_as(STATES)},
        r"initial_state must .* at multiples of 16 bytes, got .* of bfloat16 at offset 4",
    ),
    "buffer": (
        {"initial_state": STATES, "intermediate_states_buffer": torch.zeros(2, 3, 4, 128, 128).mT},
        "intermediate_states_buffer must be contiguous within a sequence or slot",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sm90_refuses(kernel, name):
    options, reason = REFUSED[name]
    answer = atrex.can_use_fused_recurrent_gated_delta_rule(**large(**options))
    assert not answer and answer.target == "nvidia/sm90" and re.match(reason, answer.reason)
    recurrent(**large(**options))
    assert not kernel


def test_what_sm90_serves(kernel):
    pages = torch.zeros(5, 65536 + 64)[:, 32:-32].unflatten(1, (4, 128, 128))
    transposed = torch.zeros(2, 1, 128, 4).bfloat16().mT  # packed by the runtime
    arguments = large(initial_state=pages, state_indices=torch.tensor([[1, 9], [2, 9]])[:, 0], scale=0.0, v=transposed)
    assert atrex.can_use_fused_recurrent_gated_delta_rule(**arguments)
    recurrent(**arguments)
    ((entry, made),) = kernel
    assert entry == "atrex.kernels.nvidia.recurrent_gdn.sm90.runtime:fused_recurrent_gated_delta_rule"
    assert all(getattr(made, name) is x for name, x in arguments.items())
    assert made.padding_index == -1 and made.state_dtype is torch.float32 and not made.needs_grad
    assert (made.B, made.T, made.H, made.HV, made.K, made.V, made.N) == (2, 1, 2, 4, 128, 128, 2)


def test_host_cost_of_checks_and_dispatch(kernel):
    """About 8 us on a 2.45 GHz EPYC; the bound leaves room for a slower or busy machine, not for a copy."""
    arguments = large(initial_state=STATES, state_indices=IDS, use_qk_l2norm_in_kernel=True)
    best = min(timeit.repeat(lambda: recurrent(**arguments), number=200, repeat=40)) / 200
    print(f"checks and dispatch: {best * 1e6:.1f} us")
    assert best < 25e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decode_no_slower_than_transformers(dtype):
    """A token at the heads of Qwen3-Next, with q and k expanded to the v heads, as its layer hands them over."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule as transformers

    tokens, states = (
        inputs.make_inputs(1, 1, 32, 32, seed=47, device=CPU, dtype=dtype),
        inputs.make_states(1, 32, seed=48, device=CPU),
    )
    options = {"initial_state": states, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    mine, theirs = (functools.partial(call, *tokens, **options) for call in (recurrent, transformers))
    (o, final), (want_o, want_final) = mine(), theirs()
    assert_heads_close("o", o, want_o, 2, 1e-5 if dtype is torch.float32 else 4e-3)
    assert_heads_close("states", final, want_final, 1, 1e-5 if dtype is torch.float32 else 4e-3)
    assert cpu_ratio(mine, theirs) <= 1.0


def benched(B):
    """A decode step of a Qwen3-Next layer on a pool."""

    def make():
        torch.set_num_threads(1)
        tokens = inputs.make_inputs(B, 1, 16, 32, seed=45, device=CPU)
        pool = inputs.make_states(B, 32, seed=46, device=CPU)
        return lambda: recurrent(*tokens, None, pool, state_indices=torch.arange(B))

    return make


if __name__ == "__main__":
    sys.exit(
        modes.main(
            api="fused_recurrent_gated_delta_rule",
            about={
                "dispatch": "serves every call that no kernel serves; on a GPU one warning a reason",
                "compile": "none, it is PyTorch",
                "limits": "on a GPU it waits for the values of integer tensors and cannot be captured in a graph",
            },
            device=CPU,
            bench={f"decode, {B} sequences": benched(B) for B in (1, 8)},
        )
    )
