"""``chunk_gated_delta_rule`` as opaque operators in a graph of ``torch.compile``.

Eager calls do not pass here: going through ``torch.library`` costs more than all checks. An operator returns tensors
only, so an output that was not asked for is an empty one here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._chunk_gdn_call import ChunkGdnCall, check
from .chunk_gdn import run


def call_compiled(call: ChunkGdnCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Record a checked call in the graph that is being traced."""
    common = (call.cu_seqlens, call.state_v_first, call.checkpoint_every, call.use_qk_l2norm_in_kernel)
    inputs = (call.q, call.k, call.v, call.g, call.beta, call.scale)
    if call.state_indices is None:
        o, final_state, checkpoints = _op(*inputs, call.initial_state, call.output_final_state, *common)
    else:
        o, checkpoints = _pool_op(*inputs, call.initial_state, call.state_indices, *common)
        final_state = call.initial_state
    return o, final_state if call.output_final_state else None, checkpoints if call.checkpoint_every else None


@torch.library.custom_op("atrex::chunk_gated_delta_rule", mutates_args=())
def _op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    initial_state: Tensor | None, output_final_state: bool,
    cu_seqlens: Tensor | None, state_v_first: bool, checkpoint_every: int, use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = check(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens,
        state_v_first, None, checkpoint_every, False,
    )  # fmt: skip
    o, final_state, checkpoints = run(call)
    return o, _present(final_state, o), _present(checkpoints, o)


@torch.library.custom_op("atrex::chunk_gated_delta_rule_pool", mutates_args=("pool",))
def _pool_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float,
    pool: Tensor, state_indices: Tensor,
    cu_seqlens: Tensor | None, state_v_first: bool, checkpoint_every: int, use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    call = check(
        q, k, v, g, beta, scale, pool, False, use_qk_l2norm_in_kernel, cu_seqlens,
        state_v_first, state_indices, checkpoint_every, False,
    )  # fmt: skip
    o, _, checkpoints = run(call)
    return o, _present(checkpoints, o)


def _present(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


@_op.register_fake
def _(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens, state_v_first, checkpoint_every, l2norm):
    call = check(
        q, k, v, g, beta, scale, initial_state, output_final_state, l2norm, cu_seqlens,
        state_v_first, None, checkpoint_every, False,
    )  # fmt: skip
    final_state = _fake_states(call, call.N) if output_final_state else v.new_empty(0)
    return v.new_empty(v.shape), final_state, _fake_checkpoints(call)


@_pool_op.register_fake
def _(q, k, v, g, beta, scale, pool, state_indices, cu_seqlens, state_v_first, checkpoint_every, l2norm):
    call = check(
        q, k, v, g, beta, scale, pool, False, l2norm, cu_seqlens,
        state_v_first, state_indices, checkpoint_every, False,
    )  # fmt: skip
    return v.new_empty(v.shape), _fake_checkpoints(call)


def _fake_states(call: ChunkGdnCall, rows: int) -> Tensor:
    shape = (call.V, call.K) if call.state_v_first else (call.K, call.V)
    return call.v.new_empty(rows, call.HV, *shape, dtype=call.state_dtype)


def _fake_checkpoints(call: ChunkGdnCall) -> Tensor:
    if not call.checkpoint_every:
        return call.v.new_empty(0)
    return _fake_states(call, call.B * (call.T // call.checkpoint_every))
