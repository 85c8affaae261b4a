"""What 16-bit operands cost: the chunked form in float64, each operand of a matrix product rounded once.

Keys that share a direction make outputs small beside the terms they are summed from. Then rounding alone costs more
than a fixed limit allows, whatever computes it; this is the measure that a kernel is held to instead.
"""

import torch


def gated_delta_rule(q, k, v, g, beta, scale, states, spans, l2norm, dtype, checkpoint_every=0):
    """Outputs, final states and checkpoints as the reference gives them; ``spans`` are (batch, start, end).

    ``checkpoint_every``: a multiple of 64, or 0 for none.
    """

    def rounded(x):
        return x.to(dtype).double()

    B, T, HV, V = v.shape
    K, ratio = k.shape[3], HV // q.shape[2]
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    if l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(ratio, 2) for x in (q, k))
    g = g.clamp(min=-1e4)  # a reset, finite so that differences are
    o, finals, checkpoints = torch.zeros_like(v), [], []
    for n, (b, start, end) in enumerate(spans):
        S = v.new_zeros(HV, K, V) if states is None else states[n].double()
        for first in range(start, end, 64):
            at = slice(first, min(first + 64, end))
            qc, kc, vc = (x[b, at].transpose(0, 1) for x in (q, k, v))  # [HV, n, .]
            gc, bc = (x[b, at].T for x in (g, beta))
            total = gc.cumsum(1)
            decay = (total[:, :, None] - total[:, None]).tril().exp().tril()
            identity = torch.eye(gc.shape[1], dtype=v.dtype, device=v.device)
            system = identity + (bc[:, :, None] * (kc @ kc.mT) * decay).tril(-1)
            inverse = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False)
            since_start = total.exp()[:, :, None]
            r = bc[:, :, None] * (vc - since_start * (kc @ rounded(S)))
            u = r + rounded(inverse - identity) @ rounded(r)
            o[b, at] = scale * (since_start * (qc @ rounded(S))).transpose(0, 1)
            o[b, at] += (rounded(scale * decay * (qc @ kc.mT)) @ rounded(u)).transpose(0, 1)
            until_end = (total[:, -1:] - total).exp()[:, :, None]
            S = total[:, -1].exp()[:, None, None] * S + kc.mT @ rounded(until_end * u)
            if checkpoint_every and (at.stop - start) % checkpoint_every == 0:
                checkpoints.append(S)
        finals.append(S)
    rows = B * (T // checkpoint_every) if checkpoint_every else 0
    checkpoints += [v.new_zeros(HV, K, V)] * (rows - len(checkpoints))
    return rounded(o), torch.stack(finals), torch.stack(checkpoints) if rows else v.new_zeros(0, HV, K, V)
