"""The fallback of causal_conv1d_fn and causal_conv1d_update: the whole contract on a CPU, gradients, and rejections."""

import functools
import re
import sys

import pytest
import torch
import torch.nn.functional as F

import atrex
from atrex import _device, _dispatch
from harness import modes, poison
from harness.causal_conv1d import PREFILL, UPDATE, PrefillCase, UpdateCase, assert_close, convolve, draw

torch.set_num_threads(1)  # many small operators: threads only wait for each other
fn, update = atrex.causal_conv1d_fn, atrex.causal_conv1d_update
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("W", [2, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", PREFILL["mode"])
def test_prefill_contract(mode, dtype, W):
    for choices in draw(PREFILL, 8, mode=mode, dtype=dtype, W=W, C=6):
        case = PrefillCase(choices, "cpu")
        with poison.nan_empty():
            result = fn(**case.arguments)
        case.check(result)


@pytest.mark.parametrize("W", [2, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", UPDATE["mode"])
def test_update_contract(mode, dtype, W):
    for choices in draw(UPDATE, 8, mode=mode, dtype=dtype, W=W, C=6):
        case = UpdateCase(choices, "cpu")
        with poison.nan_empty():
            result = update(**case.arguments)
        case.check(result)


@pytest.mark.parametrize("columns", [3, 4])
def test_decode_after_prefill_equals_prefill_of_one_token_more(columns):
    x, weight, bias = randn(2, 16, 9, seed=1), randn(16, 4, seed=2), randn(16, seed=3)
    whole = fn(x, weight, bias, activation="silu")
    first, final = fn(x[..., :8], weight, bias, activation="silu", return_final_states=True)
    state = F.pad(final, (columns - 3, 0), value=float("nan"))  # a column more than is needed is never read
    last = update(x[..., 8:], state, weight, bias, "silu")
    torch.testing.assert_close(torch.cat([first, last], -1), whole)
    assert torch.equal(state[..., -3:], x[..., 6:])


# ---- what went wrong elsewhere --------------------------------------------------------------------------------------


def test_state_wider_than_needed_is_read_from_its_end():
    """transformers keeps four columns: reading the first three is wrong by the size of the outputs."""
    x, state, weight = randn(1, 8, 1, seed=4), randn(1, 8, 4, seed=5), randn(8, 4, seed=6)
    before = state.clone()
    want, magnitude = convolve(x[0].t(), before[0, :, 1:].t(), weight, None, True)
    assert_close(update(x, state, weight, None, "silu")[0].t(), want, magnitude)
    assert torch.equal(state, torch.cat([before[..., 1:], x], -1))


@pytest.mark.parametrize("accepted", [(2, 0), (4, 1), (-5, 1 << 30)])
def test_counts_of_accepted_tokens_out_of_range_are_padding(accepted):
    x, pool, weight = randn(2, 8, 3, seed=7), randn(4, 8, 5, seed=8), randn(8, 4, seed=9)
    before = pool.clone()
    out = update(x, pool, weight, conv_state_indices=ints(1, 2), num_accepted_tokens=ints(*accepted))
    for n in range(2):
        live = 1 <= accepted[n] <= 3
        assert out[n].any() == live and torch.equal(pool[n + 1], before[n + 1]) != live
    assert torch.equal(pool[[0, 3]], before[[0, 3]])


@pytest.mark.parametrize("padding", [-1, 0])
def test_slot_zero_is_live_or_dead_by_choice(padding):
    x, before, weight = randn(2, 8, seed=10), randn(4, 8, 3, seed=11), randn(8, 4, seed=12)
    for prefill in (False, True):
        pool = before.clone()
        if prefill:
            out = fn(x.t(), weight, query_start_loc=ints(0, 1, 2), conv_states=pool, cache_indices=ints(0, 3),
                     has_initial_state=torch.ones(2, dtype=torch.bool), pad_slot_id=padding).t()  # fmt: skip
        else:
            out = update(x, pool, weight, conv_state_indices=ints(0, 3), pad_slot_id=padding)
        assert out[1].any() and not torch.equal(pool[3], before[3]) and torch.equal(pool[1:3], before[1:3])
        assert bool(out[0].any()) == (padding == -1) and torch.equal(pool[0], before[0]) == (padding == 0)


def test_batch_padded_to_the_size_of_a_graph():
    x, before, weight = randn(8, 8, seed=13), randn(9, 8, 3, seed=14), randn(8, 4, seed=15)
    pool = before.clone()
    with pytest.raises(ValueError, match=r"conv_state_indices must have shape \[N=8\], got \[5\]"):
        update(x, pool, weight, conv_state_indices=ints(1, 2, 3, 4, 5))
    out = update(x, pool, weight, conv_state_indices=ints(1, 2, 3, 4, 5, -1, -1, -1))
    assert out[:5].any(-1).all() and not out[5:].any() and torch.equal(pool[[0, 6, 7, 8]], before[[0, 6, 7, 8]])


def test_prefill_without_states():
    x, weight = randn(1, 64, 1025, seed=16, dtype=torch.bfloat16), randn(64, 4, seed=17, dtype=torch.bfloat16)
    want, magnitude = convolve(x[0].t(), x.new_zeros(3, 64), weight, None, True)
    assert_close(fn(x, weight, activation="silu")[0].t(), want, magnitude)
    packed = fn(x[0], weight, activation="silu", query_start_loc=ints(0, 1025))
    assert torch.equal(packed, fn(x[0], weight, activation="silu", query_start_loc=ints(0, 1025), conv_states=None))
    assert_close(packed.t(), want, magnitude)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_chunk_shorter_than_the_state_leaves_a_shared_source_slot_alone(length):
    x, before, weight = randn(8, 2 * length, seed=18), randn(4, 8, 3, seed=19), randn(8, 4, seed=20)
    pool = before.clone()
    fn(x, weight, query_start_loc=ints(0, length, 2 * length), conv_states=pool, cache_indices=ints(1, 2),
       initial_state_indices=ints(3, 3), has_initial_state=torch.ones(2, dtype=torch.bool))  # fmt: skip
    assert torch.equal(pool[[0, 3]], before[[0, 3]])
    for n in range(2):
        tokens = x[:, n * length : (n + 1) * length]
        assert torch.equal(pool[n + 1], torch.cat([before[3], tokens], 1)[:, -3:])


def test_verify_slides_a_window_over_one_slot():
    """Two of three tokens accepted: the step after them sees what decode steps of the two would have left."""
    x, more, weight = randn(1, 8, 3, seed=21), randn(1, 8, 3, seed=22), randn(8, 4, seed=23)
    pool = torch.zeros(1, 8, 5)
    pool[..., :3] = stepped = randn(1, 8, 3, seed=24)
    update(x, pool, weight, num_accepted_tokens=ints(1))
    out = update(more, pool, weight, num_accepted_tokens=ints(2))
    stepped = stepped.clone()
    for t in range(2):
        update(x[..., t], stepped, weight)
    torch.testing.assert_close(out, update(more, stepped, weight))


def test_packed_sequences_with_initial_states_at_an_odd_length():
    """A length at which sequence ids were read out of bounds; and ids with initial states were refused."""
    x, weight, states = randn(32, 4099, seed=25), randn(32, 4, seed=26), randn(3, 32, 3, seed=27)
    out = fn(x, weight, query_start_loc=ints(0, 4000, 4001, 4099), initial_states=states)
    for n, (start, end) in enumerate(((0, 4000), (4000, 4001), (4001, 4099))):
        want, magnitude = convolve(x[:, start:end].t(), states[n].t(), weight, None, False)
        assert_close(out[:, start:end].t(), want, magnitude)


def test_packed_sequences_do_not_leak_into_each_other():
    x, weight = randn(1, 8, 8, seed=28), randn(8, 4, seed=29)
    out = fn(x, weight, query_start_loc=ints(0, 4, 8))
    torch.testing.assert_close(out, torch.cat([fn(x[..., :4], weight), fn(x[..., 4:], weight)], -1))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["x", "state"])
def test_nan_and_inf_stay_in_their_sequence(where, bad):
    x, states, weight = randn(3, 8, 2, seed=30), randn(3, 8, 3, seed=31), randn(8, 4, seed=32)
    clean, clean_final = fn(x, weight, initial_states=states, return_final_states=True)
    (x if where == "x" else states)[1] = bad
    out, final = fn(x, weight, initial_states=states, return_final_states=True)
    assert torch.equal(out[[0, 2]], clean[[0, 2]]) and torch.equal(final[[0, 2]], clean_final[[0, 2]])
    assert not out[1].isfinite().any()


# ---- gradients, rejections, dispatch --------------------------------------------------------------------------------


def test_gradcheck():
    gen = torch.Generator().manual_seed(33)
    leaf = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64, requires_grad=True)  # noqa: E731
    run = functools.partial(
        lambda x, weight, bias, states: fn(
            x, weight, bias, activation="silu", initial_states=states, return_final_states=True,
            query_start_loc=ints(0, 3, 3, 5),
        )
    )  # fmt: skip
    assert torch.autograd.gradcheck(run, (leaf(1, 3, 6), leaf(3, 4), leaf(3), leaf(3, 3, 3)))
    state = torch.zeros(1, 3, 3, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, weight: update(x, state.clone(), weight, None, "silu"), (leaf(1, 3, 2), leaf(3, 4))
    )


X, WEIGHT, STATES = torch.zeros(2, 8, 3), torch.zeros(8, 4), torch.zeros(2, 8, 3)
REJECTED_FN = {
    "x": ((None, WEIGHT), {}, TypeError, "x must be a torch.Tensor, got NoneType"),
    "dims": ((X[0], WEIGHT), {}, ValueError, "x must have shape [B, C, T], or with query_start_loc [C, T], got [8, 3]"),
    "dtype": (
        (X.long(), WEIGHT.long()), {}, TypeError, "x must be bfloat16 or float16 or float32 or float64, got int64"
    ),
    "weight dtype": ((X, WEIGHT.half()), {}, TypeError, "weight must be float32, got float16"),
    "weight": ((X, WEIGHT[:4]), {}, ValueError, "weight must have shape [C=8, W] with W of at least 2, got [4, 4]"),
    "bias": ((X, WEIGHT, WEIGHT), {}, ValueError, "bias must have shape [C=8], got [8, 4]"),
    "device": ((X, WEIGHT.to("meta")), {}, ValueError, "weight must be on cpu as x, got meta"),
    "activation": (
        (X, WEIGHT), {"activation": "gelu"}, ValueError, "activation must be None, 'silu' or 'swish', got 'gelu'"
    ),
    "initial": (
        (X, WEIGHT), {"initial_states": STATES[:1]}, ValueError,
        "initial_states must have shape [N=2, C=8, W - 1=3], got [1, 8, 3]",
    ),
    "both": (
        (X, WEIGHT), {"initial_states": STATES, "conv_states": STATES}, ValueError,
        "conv_states holds the initial and the final states: initial_states must be None and return_final_states False",
    ),
    "wide": (
        (X, WEIGHT), {"conv_states": torch.zeros(2, 8, 4)}, ValueError,
        "conv_states must have shape [N=2, C=8, W - 1=3], got [2, 8, 4]",
    ),
    "no pool": (
        (X, WEIGHT), {"cache_indices": ints(0, 1)}, ValueError,
        "cache_indices is about a pool: conv_states must be that pool, got None",
    ),
    "has": (
        (X, WEIGHT), {"conv_states": STATES, "has_initial_state": ints(0, 1)}, TypeError,
        "has_initial_state must be bool, got int32",
    ),
    "source": (
        (X, WEIGHT), {"conv_states": STATES, "cache_indices": ints(0, 1), "initial_state_indices": ints(0, 1)},
        ValueError, "initial_state_indices needs cache_indices and has_initial_state, got None",
    ),
    "batch": (
        (X, WEIGHT), {"query_start_loc": ints(0, 3)}, ValueError,
        "query_start_loc packs the sequences into one batch: x must have B=1, got B=2",
    ),
    "strided": (
        (X[0], WEIGHT), {"query_start_loc": ints(0, 9, 3, 9)[::2]}, ValueError,
        "query_start_loc must be contiguous, got stride 2",
    ),
    "offsets": (
        (X[0], WEIGHT), {"query_start_loc": ints(0, 4)}, ValueError,
        "query_start_loc must rise from 0 to at most T=3, got [0, 4]",
    ),
    "padding": ((X, WEIGHT), {"pad_slot_id": None}, TypeError, "pad_slot_id must be an int, got NoneType"),
}  # fmt: skip
REJECTED_UPDATE = {
    "dims": ((X[0, 0], STATES, WEIGHT), {}, ValueError, "x must have shape [N, C] or [N, C, T], got [3]"),
    "packed": (
        (X, STATES, WEIGHT), {"query_start_loc": ints(0, 1)}, ValueError,
        "x must have shape [T, C] with query_start_loc, got [2, 8, 3]",
    ),
    "state": ((X, None, WEIGHT), {}, TypeError, "conv_state must be a torch.Tensor, got NoneType"),
    "state dtype": ((X, STATES.half(), WEIGHT), {}, TypeError, "conv_state must be float32, got float16"),
    "narrow": (
        (X, STATES[..., :2], WEIGHT), {}, ValueError,
        "conv_state must have shape [N=2, C=8, L] with L of at least W - 1=3, got [2, 8, 2]",
    ),
    "verify": (
        (X, STATES, WEIGHT), {"num_accepted_tokens": ints(1, 1)}, ValueError,
        "conv_state must have shape [., C=8, L] with L of at least W - 2 + T=5 to keep T=3 tokens, got [2, 8, 3]",
    ),
    "source": (
        (X, STATES, WEIGHT), {"initial_state_indices": ints(0, 1)}, ValueError,
        "initial_state_indices needs conv_state_indices, where the states are written, got None",
    ),
    "grad": (
        (X, STATES.clone().requires_grad_(), WEIGHT), {}, ValueError,
        "conv_state is written in place: it must not require grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED_FN)
def test_prefill_rejects(name):
    arguments, options, error, message = REJECTED_FN[name]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        fn(*arguments, **options)
    answer = atrex.can_use_causal_conv1d_fn(*arguments, **options)
    assert not answer and (name == "offsets" or answer.reason == message)  # values are not read to answer


@pytest.mark.parametrize("name", REJECTED_UPDATE)
def test_update_rejects(name):
    arguments, options, error, message = REJECTED_UPDATE[name]
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        update(*arguments, **options)
    answer = atrex.can_use_causal_conv1d_update(*arguments, **options)
    assert not answer and answer.reason == message


X16, WEIGHT16 = X.bfloat16().mT.contiguous().mT, WEIGHT.bfloat16()
STATES16 = torch.zeros(4, 8, 5, dtype=torch.bfloat16)
POLICY = {
    "served": (X16, WEIGHT16, {}, ""),
    "float64": (X.double(), WEIGHT.double(), {}, "x must be bfloat16, float16 or float32, got float64"),
    "width": (X16, WEIGHT16[:, 1:], {}, "weight must be [C, 4], got W=3"),
    "channels": (
        X16[:, :4], WEIGHT16[:4], {}, "x must have C of a multiple of 8 for bfloat16, got C=4"
    ),
    "grad": (
        X16.clone().requires_grad_(), WEIGHT16, {},
        "no input may require grad in grad mode: the kernels have no backward",
    ),
    "weight": (
        X16, WEIGHT16.t().contiguous().t(), {},
        "weight must be contiguous and start at multiples of 16 bytes, got strides (1, 8) of bfloat16 at offset 0",
    ),
    "states": (
        X16, WEIGHT16, {"initial_states": STATES16[:2, :, :3]},
        "initial_states must be contiguous in its channels, or in its columns with 3 or 4 of them, and start at "
        "multiples of 16 bytes, got strides (40, 5, 1) of bfloat16 at offset 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", POLICY)
def test_policy_of_the_hopper_target(name, monkeypatch):
    x, weight, options, reason = POLICY[name]
    hopper = _device.DeviceTarget("nvidia", "sm90")
    monkeypatch.setattr(_dispatch, "device_target", lambda device: hopper)
    monkeypatch.setattr(_dispatch, "_in_wheel", lambda entry: True)
    assert atrex.can_use_causal_conv1d_fn(x, weight, **options).reason == reason
    states = STATES16.mT.contiguous().mT.to(x.dtype)
    if "states" not in name:
        answer = atrex.can_use_causal_conv1d_update(x, states[:2, : x.shape[1], : weight.shape[1] - 1], weight)
        assert answer.reason == reason
    if name == "served":
        verify = {"conv_state_indices": ints(0, 1), "num_accepted_tokens": ints(1, 1)}
        assert atrex.can_use_causal_conv1d_update(x, states, weight, **verify)
        answer = atrex.can_use_causal_conv1d_update(x[..., :1], STATES16[..., :4].contiguous(), weight, **verify)
        assert answer.reason == "conv_state must be contiguous in its channels for verify, got strides (32, 4, 1)"


def main():
    x, weight = randn(1, 8192, 512, seed=40, dtype=torch.bfloat16), randn(8192, 4, seed=41, dtype=torch.bfloat16)
    return modes.main(
        api="causal_conv1d_fn",
        about={"dispatch": "every call of the contract", "compile": "nothing", "limits": "PyTorch operators"},
        device="cpu",
        bench={"512 tokens, 8192 channels": lambda: functools.partial(fn, x, weight, activation="silu")},
    )


if __name__ == "__main__":
    sys.exit(main())
