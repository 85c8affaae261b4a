"""What the other tests lean on, tested by hand."""

import math

import pytest
import torch

from harness import chunk_gdn, compare, inputs, poison, reference, rounded


def scalar(*values):
    return torch.tensor(values, dtype=torch.float64).view(1, -1, 1)


def test_reference_of_one_number_by_hand():
    # S = 0; S = 0 + 1 * 0.5 (2 - 0) = 1, o = 3 * 1. Then S = 0.5 * 1, u = 1 (3 - 0.5 * 2) = 2, S = 0.5 + 2 * 2 = 4.5.
    o, final, _ = reference.gated_delta_rule(
        q=scalar(1, 2)[..., None],
        k=scalar(1, 2)[..., None],
        v=scalar(2, 3)[..., None],
        g=scalar(0, math.log(0.5)),
        beta=scalar(0.5, 1),
        scale=3.0,
        states=None,
    )
    torch.testing.assert_close(o.flatten(), torch.tensor([3.0, 27.0], dtype=torch.float64))
    torch.testing.assert_close(final.flatten(), torch.tensor([4.5], dtype=torch.float64))


def test_reference_layout_by_hand():
    # One token, K = 2, V = 3, two v heads on one q/k head: S = [[1, 0, 0], [0, 2, 0]] and its double.
    state = torch.tensor([[[1.0, 0, 0], [0, 2, 0]]], dtype=torch.float64)
    states = torch.stack([state, 2 * state], 1)
    token = torch.tensor([0.0, 1.0], dtype=torch.float64).view(1, 1, 1, 2)  # reads and writes row 1 of S
    v = torch.tensor([[1.0, 1, 1], [0, 0, 5]], dtype=torch.float64).view(1, 1, 2, 3)
    zeros, ones = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    o, final, _ = reference.gated_delta_rule(token, token, v, zeros, ones, 1.0, states)
    # beta = 1 and |k| = 1 overwrite what k reads: row 1 becomes v.
    torch.testing.assert_close(o[0, 0], v[0, 0])
    torch.testing.assert_close(final[0, :, 1], v[0, 0])
    torch.testing.assert_close(final[0, :, 0], torch.tensor([[1.0, 0, 0], [2, 0, 0]], dtype=torch.float64))


def test_reference_sequences_and_checkpoints():
    q, k, v, g, beta = inputs.make_inputs(1, 12, 1, 2, 4, 4, seed=1, device="cpu")
    states = inputs.make_states(3, 2, 4, 4, seed=2, device="cpu")
    o, finals, checkpoints = reference.gated_delta_rule(q, k, v, g, beta, 1.0, states, [5, 0, 4], checkpoint_every=2)
    torch.testing.assert_close(finals[1], states[1].double())
    assert not o[:, 9:].any()
    assert checkpoints.shape == (6, 2, 4, 4)
    torch.testing.assert_close(checkpoints[3], finals[2])  # after 2 and 4 of 5, then after 2 and 4 of 4
    assert not checkpoints[4:].any()
    alone, final, _ = reference.gated_delta_rule(*(x[:, 5:9] for x in (q, k, v, g, beta)), 1.0, states[2:])
    torch.testing.assert_close(o[:, 5:9], alone)
    torch.testing.assert_close(finals[2:], final)


def test_compare_names_the_wrong_head_and_nan_fails():
    want = torch.ones(1, 8, 4, 16)
    got = want.clone()
    assert compare.assert_heads_close("o", got, want, 2, 0) == 0
    got[0, 3, 2, 5] += 1
    with pytest.raises(AssertionError, match=r"o: head 2 has relative L2 error 8\.84e-02"):
        compare.assert_heads_close("o", got, want, 2, 1e-3)
    got[0, 0, 1, 0] = float("nan")
    with pytest.raises(AssertionError, match="head 1"):
        compare.assert_heads_close("o", got, want, 2, float("inf"))
    with pytest.raises(AssertionError, match="shape"):
        compare.assert_heads_close("o", got[:, :4], want, 2, 1)


def test_compare_judges_zeros_by_their_norm():
    with pytest.raises(AssertionError):
        compare.assert_heads_close("o", torch.full((2, 3), 0.1), torch.zeros(2, 3), 0, 1e-3)


@pytest.mark.parametrize("layout", inputs.LAYOUTS)
def test_layouts_hold_the_same_values(layout):
    plain = inputs.make_inputs(2, 5, 2, 4, 16, 8, seed=3, device="cpu")
    laid_out = inputs.make_inputs(2, 5, 2, 4, 16, 8, seed=3, device="cpu", layout=layout)
    assert all(torch.equal(a, b) for a, b in zip(plain, laid_out, strict=True))
    q, v = laid_out[0], laid_out[2]
    expected = {
        "contiguous": q.is_contiguous() and q.data_ptr() % 16 == 0,
        "split": q.stride(-1) == v.stride(-1) == 1 and not q.is_contiguous(),
        "heads_first": q.stride(2) > q.stride(1) > q.stride(0) > q.stride(3) == 1,
        "transposed": 1 not in q.stride() and 1 not in v.stride(),
        "misaligned": q.is_contiguous() and q.data_ptr() % 16 != 0 and v.data_ptr() % 16 != 0,
    }
    assert expected[layout]


def test_gate_regimes():
    gates = {name: inputs.make_inputs(1, 512, 2, 4, 4, 4, seed=4, device="cpu", gates=name)[3] for name in inputs.GATES}
    assert not gates["none"].any()
    assert not gates["mixed"][..., 0].any() and (gates["mixed"][..., 1:] < 0).all()
    assert gates["strong"].unflatten(1, (8, 64)).sum(2).max() < -103  # exp of a chunk's sum is 0 in float32
    assert gates["resets"].isneginf().any() and (gates["resets"] == -1e4).any()


def test_poison():
    original = torch.empty
    with poison.nan_empty():
        x = torch.zeros(3)
        for made in (torch.empty(3), torch.empty_like(x), torch.empty_strided((3,), (1,)), x.new_empty(3)):
            assert made.isnan().all()
        assert torch.empty(3, dtype=torch.int32).dtype is torch.int32
    assert torch.empty is original


def test_rounded_model_without_rounding_is_the_reference():
    tensors = inputs.make_inputs(1, 260, 1, 2, 8, 4, seed=7, device="cpu", dtype=torch.float64, gates="resets")
    states = inputs.make_states(3, 2, 8, 4, seed=8, device="cpu", dtype=torch.float64)
    want = reference.gated_delta_rule(*tensors, 0.5, states, [70, 0, 140], l2norm=True, checkpoint_every=64)
    assert want[2].flatten(1).any(1).tolist() == [True, True, True, False]
    spans = [(0, 0, 70), (0, 70, 70), (0, 70, 210)]
    results = rounded.gated_delta_rule(*tensors, 0.5, states, spans, True, torch.float64, 64)
    for name, got, expected, dim in zip(("o", "states", "checkpoints"), results, want, (2, 1, 1), strict=True):
        compare.assert_heads_close(name, got, expected, dim, 1e-12)
    o, _, _ = rounded.gated_delta_rule(*tensors, 0.5, states, spans, True, torch.bfloat16)
    assert 1e-4 < compare.head_errors(o, want[0], 2).max() < 2e-2


def test_checkpoints_of_the_rounded_model_are_its_states_after_a_prefix():
    tensors = inputs.make_inputs(2, 200, 1, 2, 8, 4, seed=9, device="cpu", correlated=True)
    states = inputs.make_states(2, 2, 8, 4, seed=10, device="cpu")

    def model(T, every=0):
        prefix = [x[:, :T] for x in tensors]
        return rounded.gated_delta_rule(*prefix, 0.5, states, [(0, 0, T), (1, 0, T)], False, torch.bfloat16, every)

    _, _, checkpoints = model(200, 64)
    prefixes = torch.stack([model(T)[1] for T in (64, 128, 192)], 1).flatten(0, 1)  # sequence by sequence
    assert torch.equal(checkpoints, prefixes)
    assert torch.equal(model(200, 128)[2], checkpoints[[1, 4]])


def test_limit_of_checkpoints_follows_from_their_own_rounding():
    """With correlated keys and no state to start from, the first states cancel more than the final one."""
    call = chunk_gdn.Call(chunk_gdn.Case((130,), 1, 2, correlated=True, every=64, seed=2), "cpu")
    want_o, want_final, want_checkpoints = want = call.expected()
    _, final_cost, cost = call.rounding
    allowed = chunk_gdn.ROUNDING_ALLOWANCE
    # At the limit of the final states, rounding alone would fail.
    assert cost > max(chunk_gdn.OUTPUT_LIMITS[torch.bfloat16], allowed * final_cost)

    def verify(final_error, checkpoint_error):
        final, checkpoints = want_final * (1 + final_error), want_checkpoints * (1 + checkpoint_error)
        return call.verify((want_o.bfloat16(), final.float(), checkpoints.float()), want)

    assert verify(0, 0.99 * allowed * cost)["checkpoints"] > cost
    with pytest.raises(AssertionError, match="checkpoints: head"):
        verify(0, 1.01 * allowed * cost)
    with pytest.raises(AssertionError, match="final_state: head"):
        verify(cost, 0)


def test_padding_sequences_have_no_part_in_the_limits():
    case = chunk_gdn.Case((70, 80), 1, 2, correlated=True, state=torch.float32, pool=True, padding=True, every=64)
    call = chunk_gdn.Call(case, "cpu")
    call.expected()
    before = call.rounding
    assert call.live == [False, True] and all(before)
    call.tensors[2][:, :70] *= 100
    call.expected()
    assert call.rounding == before


@pytest.mark.parametrize("pool", [True, False])
def test_call_and_result_are_verified_on_another_device(pool):
    """To a copy on the same device here: what matters is that the pool stays the pool, and that an error is seen."""
    case = chunk_gdn.Case((65, 3), state=torch.float32, pool=pool, every=64, dtype=torch.float32)
    call = chunk_gdn.Call(case, "cpu")
    want = call.expected()
    result = call.run()
    o, final, checkpoints = call.bring(result, "cpu")
    assert (final is call.states) is pool
    call.verify((o, final, checkpoints), want)
    o[0, 0, 0] += 1
    with pytest.raises(AssertionError, match="o: head 0"):
        call.verify((o, final, checkpoints), want)
