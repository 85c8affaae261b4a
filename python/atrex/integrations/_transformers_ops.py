"""What transformers' layers call, as opaque operators in a graph of ``torch.compile``.

With the arguments that these layers pass, and no others. Eager calls do not pass here: going through ``torch.library``
costs more than all checks. The chunked delta rule has an operator of its own (``api/_chunk_gdn_ops.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

import atrex


@torch.library.custom_op("atrex_transformers::causal_conv1d_fn", mutates_args=())
def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, query_start_loc: Tensor | None
) -> Tensor:
    return atrex.causal_conv1d_fn(x, weight, bias, activation=activation, query_start_loc=query_start_loc)


@torch.library.custom_op("atrex_transformers::causal_conv1d_update", mutates_args=("conv_state",))
def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    return atrex.causal_conv1d_update(x, conv_state, weight, bias, activation)


@causal_conv1d_fn.register_fake
def _(x, weight, bias, activation, query_start_loc):
    return x.new_empty(x.mT.shape).mT


@causal_conv1d_update.register_fake
def _(x, conv_state, weight, bias, activation):
    return x.new_empty(x.mT.shape).mT


@torch.library.custom_op("atrex_transformers::fused_recurrent_gated_delta_rule", mutates_args=())
def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None,
    use_qk_l2norm_in_kernel: bool, cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return atrex.fused_recurrent_gated_delta_rule(
        q, k, v, g, beta, initial_state=initial_state, output_final_state=True,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@fused_recurrent_gated_delta_rule.register_fake
def _(q, k, v, g, beta, initial_state, use_qk_l2norm_in_kernel, cu_seqlens):
    if initial_state is not None:
        return v.new_empty(v.shape), initial_state.new_empty(initial_state.shape)
    states = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = torch.float64 if v.dtype is torch.float64 else torch.float32
    return v.new_empty(v.shape), v.new_empty(states, v.shape[2], q.shape[3], v.shape[3], dtype=dtype)


@torch.library.custom_op("atrex_transformers::gated_rms_norm", mutates_args=())
def gated_rms_norm(x: Tensor, weight: Tensor, z: Tensor, eps: float, activation: str) -> Tensor:
    return atrex.gated_rms_norm(x, weight, z, eps, activation=activation, cast_before_weight=True)


@gated_rms_norm.register_fake
def _(x, weight, z, eps, activation):
    return x.new_empty(x.shape)
