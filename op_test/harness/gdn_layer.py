"""A Gated DeltaNet layer between its projections, of public operators: decode, verify, prefill, and its float64."""

import math

import torch
import torch.nn.functional as F

import atrex

from . import gated_norm, reference
from .causal_conv1d import convolve

D = 128  # of a head, K and V


class Layer:
    """Parameters of a layer with H heads of q and k and HV of v; states V first, as vLLM and SGLang keep them.

    Tokens are ``(mixed [N, T, C], a [N, T, HV], b [N, T, HV], z [N, T, HV, D])``, as the projections make them.
    """

    def __init__(self, H, HV, *, seed, device, dtype=torch.bfloat16):
        self.H, self.HV, self.C, self.device, self.dtype = H, HV, (2 * H + HV) * D, device, dtype
        gen = torch.Generator(device).manual_seed(seed)
        self.weight = self._randn(gen, self.C, 4) / 2
        self.norm = 1 + 0.3 * self._randn(gen, D)
        # A state remembers some ten to some thousand tokens.
        self.A_log = torch.empty(HV, device=device).uniform_(-4, 0, generator=gen)
        self.dt_bias = torch.empty(HV, device=device).uniform_(math.log(0.01), math.log(0.1), generator=gen)

    def _randn(self, gen, *shape):
        return torch.randn(*shape, generator=gen, device=self.device).to(self.dtype)

    def tokens(self, N, T, seed):
        gen = torch.Generator(self.device).manual_seed(seed)
        b, a = self._randn(gen, N, T, 2 * self.HV).split(self.HV, -1)
        return self._randn(gen, N, T, self.C), a, b, self._randn(gen, N, T, self.HV, D)

    def conv_states(self, rows, seed, columns=3):
        """``[rows, C, columns]``, channels contiguous."""
        return self._randn(torch.Generator(self.device).manual_seed(seed), rows, columns, self.C).mT

    def split(self, x):
        """q, k ``[N, T, H, D]`` and v ``[N, T, HV, D]``, views of ``x [N, T, C]``."""
        heads = x.unflatten(-1, (-1, D))
        return heads.split((self.H, self.H, self.HV), 2)

    def step(self, tokens, conv_states, states, conv_slots, slots, accepted=None):
        """Decode, or with ``slots [N, S]`` and ``accepted`` verify: three launches; both pools are written."""
        mixed, a, b, z = tokens
        x = atrex.causal_conv1d_update(
            mixed.mT, conv_states, self.weight, None, "silu", conv_state_indices=conv_slots,
            num_accepted_tokens=accepted,
        )  # fmt: skip
        o, _ = atrex.fused_recurrent_gated_delta_rule(
            *self.split(x.mT), initial_state=states, A_log=self.A_log, a=a, b=b, dt_bias=self.dt_bias,
            use_qk_l2norm_in_kernel=True, state_v_first=True, state_indices=slots, num_accepted_tokens=accepted,
        )  # fmt: skip
        return atrex.gated_rms_norm(o, self.norm, z)

    def prefill(self, tokens):
        """Outputs, states of the convolution ``[N, C, 3]`` and of the rule ``[N, HV, D, D]``, from nothing."""
        mixed, a, b, z = tokens
        x, conv_states = atrex.causal_conv1d_fn(mixed.mT, self.weight, activation="silu", return_final_states=True)
        rule = atrex.gdn_prepare(x.mT, a, b, self.A_log, self.dt_bias, self.H, D, D)
        o, states = atrex.chunk_gated_delta_rule(*rule, output_final_state=True, state_v_first=True)
        return atrex.gated_rms_norm(o, self.norm, z), conv_states, states

    def reference(self, tokens, conv_states, states):
        """Outputs and states in float64 of sequences behind ``conv_states [N, C, 3]`` and ``states``; no roundings."""
        mixed, a, b, z = tokens
        before = conv_states.mT
        x = torch.stack([
            convolve(one, first, self.weight, None, True)[0] for one, first in zip(mixed, before, strict=True)
        ])  # fmt: skip
        g = -self.A_log.double().exp() * F.softplus(a.double() + self.dt_bias.double())
        o, final, _ = reference.gated_delta_rule(
            *self.split(x), g, b.double().sigmoid(), D**-0.5, states.mT, l2norm=True
        )
        return gated_norm.expected(o, self.norm, z, 1e-6, "silu", False), final.mT
