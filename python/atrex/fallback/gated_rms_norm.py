"""Gated RMS norm in PyTorch: any device, any row size, differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..api._gated_rms_norm_call import GatedRmsNormCall


def gated_rms_norm(call: GatedRmsNormCall) -> torch.Tensor:
    """The contract of ``atrex.gated_rms_norm``."""
    with torch.autocast(call.x.device.type, enabled=False):
        x, weight = call.x, call.weight
        dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
        y, z = x.to(dtype), call.z.reshape(x.shape).to(dtype)
        y = y * (y.square().mean(-1, keepdim=True) + call.eps).rsqrt()
        y = weight * y.to(x.dtype) if call.cast_before_weight else y * weight.to(dtype)
        gate = z.sigmoid() if call.is_sigmoid else torch.nn.functional.silu(z)
        return (y * gate).to(x.dtype, memory_format=torch.contiguous_format).contiguous()
