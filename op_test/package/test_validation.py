"""Calls that the contract rejects: each names the argument, what came and what is accepted, on every path alike."""

import pytest
import torch

import atrex
from harness import inputs

B, T, H, HV, K, V = 2, 5, 2, 4, 8, 6


def arguments():
    q, k, v, g, beta = inputs.make_inputs(B, T, H, HV, K, V, seed=1, device="cpu")
    return {"q": q, "k": k, "v": v, "g": g, "beta": beta}


def packed(**options):
    return {name: x[:1] for name, x in arguments().items()} | options


def batch(**options):
    return arguments() | options


BF16 = torch.bfloat16
IDS = torch.tensor([0, 1])
OFFSETS = torch.tensor([0, 2, 5])
STATE = torch.zeros(B, HV, K, V)

CASES = {
    "q_no_tensor": (batch(q=[1.0]), TypeError, r"q must be a torch.Tensor, got list"),
    "k_no_tensor": (batch(k=None), TypeError, r"k must be a torch.Tensor, got NoneType"),
    "beta_no_tensor": (batch(beta=1.0), TypeError, r"beta must be a torch.Tensor, got float"),
    "state_no_tensor": (batch(initial_state=0), TypeError, r"initial_state must be a torch.Tensor, got int"),
    "offsets_no_tensor": (packed(cu_seqlens=[0, 5]), TypeError, r"cu_seqlens must be a torch.Tensor, got list"),
    "q_dims": (batch(q=torch.zeros(T, H, K, dtype=BF16)), ValueError, r"q must have shape \[B, T, H, K\].*\[5, 2, 8\]"),
    "q_no_heads": (
        batch(q=torch.zeros(B, T, 0, K, dtype=BF16)),
        ValueError,
        r"q must have shape \[B, T, H, K\] with .* at least 1, got \[2, 5, 0, 8\]",
    ),
    "k_shape": (
        batch(k=torch.zeros(B, T, H, K + 1, dtype=BF16)),
        ValueError,
        r"k must have shape \[B=2, T=5, H=2, K=8\] as q, got \[2, 5, 2, 9\]",
    ),
    "v_tokens": (
        batch(v=torch.zeros(B, T + 1, HV, V, dtype=BF16)),
        ValueError,
        r"v must have shape \[B=2, T=5, HV, V\] as q, got \[2, 6, 4, 6\]",
    ),
    "v_heads": (
        batch(v=torch.zeros(B, T, 3, V, dtype=BF16)),
        ValueError,
        r"v must have shape .* HV a multiple of H=2 .*, got \[2, 5, 3, 6\]",
    ),
    "g_shape": (batch(g=torch.zeros(B, T, H)), ValueError, r"g must have shape \[B=2, T=5, HV=4\], got \[2, 5, 2\]"),
    "beta_shape": (batch(beta=torch.zeros(B, HV, T)), ValueError, r"beta must have shape .*, got \[2, 4, 5\]"),
    "head_first": (batch(head_first=True), ValueError, r"head_first=True is not accepted.*transpose"),
    "q_dtype": (
        batch(q=torch.zeros(B, T, H, K, dtype=torch.int32)),
        TypeError,
        r"q must be bfloat16 or float16 or float32, got int32",
    ),
    "v_float64_alone": (
        batch(v=torch.zeros(B, T, HV, V, dtype=torch.float64)),
        TypeError,
        r"v must be bfloat16 or float16 or float32, got float64",
    ),
    "k_not_float64_with_q": (
        batch(q=torch.zeros(B, T, H, K, dtype=torch.float64)),
        TypeError,
        r"k must be float64, got bfloat16",
    ),
    "g_dtype": (
        batch(g=torch.zeros(B, T, HV, dtype=torch.float64)),
        TypeError,
        r"g must be bfloat16 or float16 or float32, got float64",
    ),
    "beta_dtype": (batch(beta=torch.zeros(B, T, HV, dtype=torch.int64)), TypeError, r"beta must be .*, got int64"),
    "scale": (batch(scale="1"), TypeError, r"scale must be a number or None, got str"),
    "scale_bool": (batch(scale=True), TypeError, r"scale must be a number or None, got bool"),
    "state_dtype": (
        batch(initial_state=STATE.half()),
        TypeError,
        r"initial_state must be bfloat16 or float32, got float16",
    ),
    "state_sequences": (
        batch(initial_state=STATE[:1]),
        ValueError,
        r"initial_state must have shape \[N=2, HV=4, K=8, V=6\] with state_v_first=False, got \[1, 4, 8, 6\]",
    ),
    "state_layout": (
        batch(initial_state=STATE, state_v_first=True),
        ValueError,
        r"initial_state must have shape \[N=2, HV=4, V=6, K=8\] with state_v_first=True, got \[2, 4, 8, 6\]",
    ),
    "pool_shape": (
        batch(initial_state=STATE.mT, state_indices=IDS),
        ValueError,
        r"initial_state must have shape \[P, HV=4, K=8, V=6\].*, got \[2, 4, 6, 8\]",
    ),
    "pool_dims": (
        batch(initial_state=STATE[0], state_indices=IDS),
        ValueError,
        r"initial_state must have shape \[P, HV=4, K=8, V=6\].*, got \[4, 8, 6\]",
    ),
    "offsets_batch": (batch(cu_seqlens=OFFSETS), ValueError, r"cu_seqlens packs .*q must have B=1, got B=2"),
    "offsets_dtype": (packed(cu_seqlens=OFFSETS.float()), TypeError, r"cu_seqlens must be int32 or int64, got float32"),
    "offsets_dims": (
        packed(cu_seqlens=OFFSETS[None]),
        ValueError,
        r"cu_seqlens must have .* one dimension, got \[1, 3\]",
    ),
    "offsets_length": (
        packed(cu_seqlens=OFFSETS[:1]),
        ValueError,
        r"cu_seqlens must have shape \[N \+ 1\].*, got \[1\]",
    ),
    "offsets_strided": (
        packed(cu_seqlens=torch.tensor([0, 0, 2, 2, 5])[::2]),
        ValueError,
        r"cu_seqlens must be contiguous, got stride 2",
    ),
    "indices_without_pool": (
        batch(state_indices=IDS),
        ValueError,
        r"state_indices .* initial_state must be .*, got None",
    ),
    "indices_dtype": (
        batch(initial_state=STATE, state_indices=IDS.short()),
        TypeError,
        r"state_indices must be int32 or int64, got int16",
    ),
    "indices_length": (
        batch(initial_state=STATE, state_indices=IDS[:1]),
        ValueError,
        r"state_indices must have shape \[N=2\], got \[1\]",
    ),
    "indices_strided": (
        batch(initial_state=STATE, state_indices=torch.tensor([0, 9, 1])[::2]),
        ValueError,
        r"state_indices must be contiguous, got stride 2",
    ),
    "pool_with_grad": (
        batch(initial_state=STATE.clone().requires_grad_(), state_indices=IDS),
        ValueError,
        r"initial_state is written in place with state_indices: it must not require grad",
    ),
    "checkpoint_type": (batch(checkpoint_every=64.0), TypeError, r"checkpoint_every must be an int, got float"),
    "checkpoint_bool": (batch(checkpoint_every=True), TypeError, r"checkpoint_every must be an int, got bool"),
    "checkpoint_multiple": (
        batch(checkpoint_every=96),
        ValueError,
        r"checkpoint_every must be 0 or a positive multiple of 64, got 96",
    ),
    "checkpoint_negative": (batch(checkpoint_every=-64), ValueError, r"checkpoint_every must be .*, got -64"),
} | {
    f"{name}_device": (
        packed(cu_seqlens=OFFSETS, initial_state=STATE, state_indices=IDS)
        | {name: packed(cu_seqlens=OFFSETS, initial_state=STATE, state_indices=IDS)[name].to("meta")},
        ValueError,
        rf"{name} must be on cpu as q, got meta",
    )
    for name in ("k", "v", "g", "beta", "cu_seqlens", "initial_state", "state_indices")
}


@pytest.mark.parametrize("name", CASES)
def test_rejected(name):
    call, error, message = CASES[name]
    with pytest.raises(error, match=f"^{message}"):
        atrex.chunk_gated_delta_rule(**call)
    answer = atrex.can_use_chunk_gated_delta_rule(**call)
    with pytest.raises(error) as raised:
        atrex.chunk_gated_delta_rule(**call)
    assert not answer and answer.reason == str(raised.value)


def test_accepted_edges():
    """What lies next to the rejected: no tokens, mixed 16 and 32 bit inputs, an integer scale, a pool of no slots."""
    assert atrex.chunk_gated_delta_rule(**{name: x[:, :0] for name, x in arguments().items()})[0].shape == (B, 0, HV, V)
    call = batch(q=arguments()["q"].float(), k=arguments()["k"].half(), scale=1, g=arguments()["g"].half())
    assert atrex.chunk_gated_delta_rule(**call)[0].dtype is BF16
    o, pool = atrex.chunk_gated_delta_rule(**batch(initial_state=STATE[:0], state_indices=IDS, output_final_state=True))
    assert not o.any() and pool.shape[0] == 0
