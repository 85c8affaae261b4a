"""Split, norms and gates between convolution and delta rule in PyTorch: any device, any head size, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._exact import without_autocast

if TYPE_CHECKING:
    from ..api._gdn_prepare_call import GdnPrepareCall


def gdn_prepare(
    call: GdnPrepareCall,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The contract of ``atrex.gdn_prepare``."""
    with without_autocast(call.conv_output.device):
        x, columns = call.conv_output, call.H * call.K
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        q, k, v = (
            part.unflatten(-1, heads)
            for part, heads in zip(
                x.split((columns, columns, call.HV * call.V), -1),
                ((call.H, call.K), (call.H, call.K), (call.HV, call.V)),
                strict=True,
            )
        )
        if call.apply_l2norm:
            q, k = (_normalised(part, dtype) for part in (q, k))
        # The threshold of softplus is 20.
        g = -call.A_log.to(dtype).exp() * F.softplus(call.a.to(dtype) + call.dt_bias.to(dtype))
        return q, k, v, g.contiguous(), call.b.to(dtype).sigmoid().contiguous()


def _normalised(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = x.to(dtype)
    return (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype).contiguous()
