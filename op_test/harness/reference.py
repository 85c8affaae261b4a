"""The gated delta rule token by token in float64: what every implementation is compared with."""

import itertools

import torch


def gated_delta_rule(q, k, v, g, beta, scale, states, lengths=None, l2norm=False, checkpoint_every=0):
    """Outputs ``[B, T, HV, V]``, final states ``[N, HV, K, V]`` and checkpoints, all float64, on q's device.

    ``states``: ``[N, HV, K, V]`` or None for zeros. ``lengths``: of the sequences packed into B = 1; None if each
    batch is one sequence. Tokens past the sequences get zeros.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
    spans = [(b, 0, T) for b in range(B)]
    if lengths is not None:
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        spans = [(0, start, end) for start, end in itertools.pairwise(ends)]
    o = torch.zeros_like(v)
    finals, checkpoints = [], []
    for n, (b, start, end) in enumerate(spans):
        S = v.new_zeros(HV, K, V) if states is None else states[n].double()
        for t in range(start, end):
            S = g[b, t].exp()[:, None, None] * S
            u = beta[b, t][:, None] * (v[b, t] - (S * k[b, t][:, :, None]).sum(1))
            S = S + k[b, t][:, :, None] * u[:, None, :]
            o[b, t] = scale * (S * q[b, t][:, :, None]).sum(1)
            if checkpoint_every and (t + 1 - start) % checkpoint_every == 0:
                checkpoints.append(S)
        finals.append(S)
    rows = B * (T // checkpoint_every) if checkpoint_every else 0
    checkpoints += [v.new_zeros(HV, K, V)] * (rows - len(checkpoints))
    return o, torch.stack(finals), torch.stack(checkpoints) if rows else v.new_zeros(0, HV, K, V)
