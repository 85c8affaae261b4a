"""What stands in for the operators that transformers' Gated DeltaNet layers look up in their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import atrex

# The layers hand each operator all keywords that came to the model and that nobody took on the way: `use_cache`,
# `output_router_logits`, `cu_seq_lens_k`, `max_length_q` and what a user adds. They are meant for other layers, and
# transformers drops them for its own operators too. Those that mean something here are named in each signature.


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


def convolving_apart(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`own`, transformers' convolution, which alone would let packed texts see the last tokens of the text before.

    Packed texts are spread, with as many zeros before each as the convolution looks back. The offsets stay on their
    device, so nothing waits for a GPU.
    """

    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        cu_seq_lens_q: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None or cu_seq_lens_q.shape[0] <= 2:
            return own(hidden_states, weight, bias, activation=activation, **keywords)
        tokens, width = hidden_states.shape[-1], weight.shape[-1]
        ends = cu_seq_lens_q[1:]
        if tokens == width:  # with a cache, transformers puts zeros before fewer tokens than this
            ends = ends + (tokens - ends[-1])
        column = torch.arange(tokens, device=ends.device, dtype=ends.dtype)
        column = column + (width - 1) * torch.searchsorted(ends, column, right=True)
        spread = hidden_states.new_zeros(*hidden_states.shape[:-1], tokens + (width - 1) * ends.shape[0])
        spread[..., column] = hidden_states
        return own(spread, weight, bias, activation=activation)[..., column]

    return causal_conv1d_fn


# By the global that the layers look up: from transformers' own operator to the one that stands in for it.
HOOKS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "causal_conv1d_fn": convolving_apart,
    "torch_chunk_gated_delta_rule": lambda own: chunk_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": lambda own: fused_recurrent_gated_delta_rule,
}
