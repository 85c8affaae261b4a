"""What stands in for the operators that transformers' Gated DeltaNet layers call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import atrex

from . import _transformers_ops as ops

# The layers hand each operator all keywords that came to the model and that nobody took on the way: `use_cache`,
# `output_router_logits`, `cu_seq_lens_k`, `max_length_q` and what a user adds. They are meant for other layers, and
# transformers drops them for its own operators too. Those that mean something here are named in each signature.


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    **_for_other_layers: Any,
) -> Tensor:
    offsets = None
    if cu_seq_lens_q is not None and cu_seq_lens_q.shape[0] > 2:
        offsets, tokens = cu_seq_lens_q, hidden_states.shape[-1]
        if tokens == weight.shape[-1]:  # with a cache, transformers puts zeros before fewer tokens than this
            offsets = torch.cat([offsets[:1], offsets[1:] + (tokens - offsets[-1])])
    return _convolved(hidden_states, weight, bias, activation, offsets)


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    # In grad mode the state that transformers has copied into its cache requires grad. Nobody can go back through a
    # cache, since it is overwritten: that takes no more than the state as it is.
    state, dtype = conv_state.detach(), conv_state.dtype
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    opaque = torch.compiler.is_compiling() and not _needs_grad(hidden_states, weight)
    update = ops.causal_conv1d_update if opaque else atrex.causal_conv1d_update
    return update(hidden_states.to(dtype), state, weight, bias, activation).to(hidden_states.dtype)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, offsets: Tensor | None
) -> Tensor:
    # Under autocast the weights are float32 and x is not; transformers' own convolution then rounds them as here.
    weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    opaque = torch.compiler.is_compiling() and not _needs_grad(x, weight)
    convolve = ops.causal_conv1d_fn if opaque else atrex.causal_conv1d_fn
    return convolve(x, weight, bias, activation=activation, query_start_loc=offsets)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_for_other_layers: Any,
) -> tuple[Tensor, Tensor | None]:
    _check_packing(cu_seqlens, seq_idx, initial_state)
    return atrex.chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_for_other_layers: Any,
) -> tuple[Tensor, Tensor | None]:
    _check_packing(cu_seqlens, seq_idx, initial_state)
    if torch.compiler.is_compiling() and not _needs_grad(query, key, value, g, beta, initial_state):
        o, final_state = ops.fused_recurrent_gated_delta_rule(
            query, key, value, g, beta, initial_state, use_qk_l2norm_in_kernel, cu_seqlens
        )
        return o, final_state if output_final_state else None
    return atrex.fused_recurrent_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def _check_packing(cu_seqlens: Tensor | None, seq_idx: Tensor | None, initial_state: Tensor | None) -> None:
    if cu_seqlens is None:
        if seq_idx is not None:
            raise ValueError(
                "seq_idx marks packed texts, but the delta rule needs their offsets: pass cu_seq_lens_q too"
            )
    elif initial_state is not None and cu_seqlens.shape[0] > 2:
        texts = cu_seqlens.shape[0] - 1
        raise ValueError(
            f"cu_seq_lens_q packs {texts} texts, but only one text can continue from a cache: "
            "transformers keeps the last columns of the convolution for one"
        )


def rms_norm_gated(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    """The forward pass of an RMSNormGated module, ``self``."""
    weight, eps, activation = self.weight, self.variance_epsilon, self.activation
    if torch.compiler.is_compiling() and not _needs_grad(hidden_states, weight, gate):
        return ops.gated_rms_norm(hidden_states, weight, gate, eps, activation)
    return atrex.gated_rms_norm(hidden_states, weight, gate, eps, activation=activation, cast_before_weight=True)


def _needs_grad(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


# By the global that the layers look up.
GLOBALS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
}
