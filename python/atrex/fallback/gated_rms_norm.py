"""Gated RMS norm in PyTorch: any device, any row size, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ._exact import without_autocast

if TYPE_CHECKING:
    from ..api._gated_rms_norm_call import GatedRmsNormCall


def gated_rms_norm(call: GatedRmsNormCall) -> torch.Tensor:
    """The contract of ``atrex.gated_rms_norm``."""
    with without_autocast(call.x.device):
        x, weight, z = call.x, call.weight, call.z
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        y = x.to(dtype)
        z = (z if z.shape == x.shape else z.reshape(x.shape)).to(dtype)
        y = y * (y.square().mean(-1, keepdim=True) + call.eps).rsqrt()
        y = weight * y.to(x.dtype) if call.cast_before_weight else y * weight.to(dtype)
        y = y * (z.sigmoid() if call.is_sigmoid else F.silu(z))
        return y.to(x.dtype, memory_format=torch.contiguous_format).contiguous()
