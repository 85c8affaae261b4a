"""The fallback of gdn_prepare: the whole contract on a CPU, gradients, and what it rejects."""

import re
import sys
import timeit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import atrex
from atrex import _device, _dispatch
from harness import modes, poison
from harness.compare import assert_heads_close
from harness.prepare import CHOICES, Case

CPU = "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
prepare = atrex.gdn_prepare


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    H = pick(1, 2, 3)
    return {name: pick(*values) for name, values in CHOICES.items()} | {
        "tokens": draw(st.lists(st.integers(0, 5), min_size=1, max_size=2)),
        "H": H,
        "HV": H * pick(1, 2, 3),
        "K": pick(1, 8, 31),
        "V": pick(1, 8, 31),
        "dtype": pick(FP32, BF16, FP16, FP64),
        "seed": draw(st.integers(0, 1 << 16)),
    }


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_contract(choices):
    case = Case(choices, CPU)
    with poison.nan_empty():
        result = prepare(**case.arguments)
    case.check(*result)


def small(**options):
    choices = {name: values[0] for name, values in CHOICES.items()} | {"tokens": [2, 5], "seed": 1}
    choices |= {"H": 2, "HV": 4, "K": 8, "V": 6, "dtype": FP32} | options
    return Case(choices, CPU).arguments


def test_softplus_of_large_inputs():
    """Elsewhere exp of it overflowed from 89 on, and the state was multiplied by exp(-inf)."""
    arguments = small() | {"A_log": torch.zeros(4), "dt_bias": torch.zeros(4)}
    arguments["a"] = torch.tensor([19.0, 21.0, 89.0, 2e4]).expand(2, 5, 4)
    g = prepare(**arguments)[3]
    torch.testing.assert_close(g[0, 0], -torch.tensor([19.000000005602796, 21.0, 89.0, 2e4]))


@pytest.mark.parametrize("apply_l2norm", [True, False])
def test_results_fit_the_delta_rules(apply_l2norm):
    """Prefill, decode, and decode that does all of this itself give the same."""
    arguments = small(apply_l2norm=apply_l2norm)
    q, k, v, g, beta = prepare(**arguments)
    norm = {"use_qk_l2norm_in_kernel": not apply_l2norm}
    o, state = atrex.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True, **norm)
    again, final = atrex.fused_recurrent_gated_delta_rule(q, k, v, g, beta, output_final_state=True, **norm)
    x = arguments["conv_output"]
    parts = [part.unflatten(-1, (-1, size)) for part, size in zip(x.split((16, 16, 24), -1), (8, 8, 6), strict=True)]
    gates = {name: arguments[name] for name in ("a", "b", "A_log", "dt_bias")}
    fused, _ = atrex.fused_recurrent_gated_delta_rule(*parts, **gates, use_qk_l2norm_in_kernel=True)
    assert_heads_close("o", o, again, 2, 1e-5)
    assert_heads_close("state", state, final, 1, 1e-5)
    assert_heads_close("o", fused, again, 2, 1e-6)


def test_tokens_that_lie_in_a_row():
    """The convolution of transformers returns ``[B, C, T]``, of which this is the transpose."""
    arguments = small()
    want = prepare(**arguments)
    arguments["conv_output"] = arguments["conv_output"].mT.contiguous().mT
    for got, expected in zip(prepare(**arguments), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients():
    arguments = small(dtype=FP64, gate_dtype=FP64, parameter_dtype=FP64, tokens=[2])
    names = ("conv_output", "a", "b", "A_log", "dt_bias")
    arguments["a"] = arguments["a"].clamp(-3, 3)
    tensors = [arguments[name].clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(lambda *x: prepare(**arguments | dict(zip(names, x, strict=True))), tensors)


# ---- what it rejects ------------------------------------------------------------------------------------------------

X, GATE, HEADS = torch.zeros(2, 5, 56), torch.zeros(2, 5, 4), torch.zeros(4)
REJECTED = {
    "x": ({"conv_output": 1}, TypeError, "conv_output must be a torch.Tensor, got int"),
    "a": ({"a": None}, TypeError, "a must be a torch.Tensor, got NoneType"),
    "A_log": ({"A_log": [0.0]}, TypeError, "A_log must be a torch.Tensor, got list"),
    "device": ({"b": GATE.to("meta")}, ValueError, "b must be on cpu as conv_output, got meta"),
    "x dtype": ({"conv_output": X.int()}, TypeError, "conv_output must be bfloat16 or float16 or float32, got int32"),
    "dt_bias dtype": ({"dt_bias": HEADS.double()}, TypeError, "dt_bias must be bfloat16 or .*, got float64"),
    "x dims": (
        {"conv_output": X[0, 0]},
        ValueError,
        r"conv_output must have shape \[T, C\] or \[B, T, C\], got \[56\]",
    ),
    "channels": (
        {"conv_output": torch.zeros(2, 5, 57)},
        ValueError,
        r"conv_output must have shape .* C=2\*H\*K\+HV\*V, H=2, K=8, V=6 and HV a multiple of H, got \[2, 5, 57\]",
    ),
    "odd heads": ({"conv_output": torch.zeros(2, 5, 50)}, ValueError, r"conv_output must have .* got \[2, 5, 50\]"),
    "no heads": ({"conv_output": torch.zeros(2, 5, 32)}, ValueError, r"conv_output must have .* got \[2, 5, 32\]"),
    "a shape": ({"a": GATE[0]}, ValueError, r"a must have shape \[B=2, T=5, HV=4\], got \[5, 4\]"),
    "b flat": (
        {"conv_output": X[0], "a": GATE[0], "b": GATE[0, :4]},
        ValueError,
        r"b must have shape \[T=5, HV=4\], got \[4, 4\]",
    ),
    "A_log shape": ({"A_log": HEADS[:2]}, ValueError, r"A_log must have shape \[HV=4\], got \[2\]"),
    "heads": ({"num_k_heads": 0}, ValueError, "num_k_heads must be at least 1, got 0"),
    "head_k_dim": ({"head_k_dim": 8.0}, TypeError, "head_k_dim must be an int, got float"),
    "head_v_dim": ({"head_v_dim": None}, TypeError, "head_v_dim must be an int, got NoneType"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    options, error, message = REJECTED[name]
    arguments = {"conv_output": X, "a": GATE, "b": GATE, "A_log": HEADS, "dt_bias": HEADS}
    arguments |= {"num_k_heads": 2, "head_k_dim": 8, "head_v_dim": 6} | options
    with pytest.raises(error, match=f"^{message}$"):
        prepare(**arguments)
    answer = atrex.can_use_gdn_prepare(**arguments)
    assert not answer and re.match(f"^{message}$", answer.reason)


# ---- dispatch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """An sm90 implementation in the wheel that records its calls."""
    calls = []
    monkeypatch.setitem(_device._targets, torch.device(CPU), _device.DeviceTarget("nvidia", "sm90"))
    monkeypatch.setattr(_dispatch, "_in_wheel", lambda entry: True)
    monkeypatch.setattr(_dispatch, "_load", lambda entry: lambda call: calls.append((entry, call)))
    return calls


def large(**options):
    return small(K=128, V=64, dtype=BF16) | options


C = 2 * 2 * 128 + 4 * 64
REFUSED = {
    "float32": (
        lambda: large(conv_output=torch.zeros(2, 5, C)),
        "conv_output must be bfloat16 or float16, got float32",
    ),
    "K": (lambda: small(dtype=BF16), "head_k_dim must be 128, got 8"),
    "grad": (lambda: large(A_log=torch.zeros(4).requires_grad_()), "no input may require grad in grad mode"),
    "layout": (
        lambda: large(conv_output=torch.zeros(2, C, 5, dtype=BF16).mT),
        r"conv_output must have contiguous channels on the 16-byte grid, got strides \(3840, 1, 5\), offset 0",
    ),
    "pitch": (lambda: large(conv_output=torch.zeros(2, 5, C + 4, dtype=BF16)[..., :C]), ".*16-byte grid, got strides"),
    "offset": (lambda: large(conv_output=torch.zeros(2, 5, C + 8, dtype=BF16)[..., 4:-4]), ".*16-byte .*, offset 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sm90_refuses(kernel, name):
    make, reason = REFUSED[name]
    arguments = make()
    answer = atrex.can_use_gdn_prepare(**arguments)
    assert not answer and answer.target == "nvidia/sm90" and re.match(reason, answer.reason), answer.reason
    prepare(**arguments)
    assert not kernel


def test_what_sm90_serves(kernel):
    arguments = large(conv_output=torch.zeros(2, 5, C + 24, dtype=BF16)[..., 8:-16])
    assert atrex.can_use_gdn_prepare(**arguments)
    prepare(**arguments)
    ((entry, made),) = kernel
    assert entry == "atrex.kernels.nvidia.gdn_prepare.sm90.runtime:gdn_prepare"
    assert all(getattr(made, name) is arguments[name] for name in ("conv_output", "a", "b", "A_log", "dt_bias"))
    assert (made.H, made.HV, made.K, made.V, made.apply_l2norm, made.needs_grad) == (2, 4, 128, 64, True, False)


def test_host_cost_of_checks_and_dispatch(kernel):
    """About 7 us on a 2.45 GHz EPYC; the bound leaves room for a slower or busy machine, not for a copy."""
    arguments = large()
    best = min(timeit.repeat(lambda: prepare(**arguments), number=200, repeat=40)) / 200
    print(f"checks and dispatch: {best * 1e6:.1f} us")
    assert best < 25e-6


def benched(T):
    """T tokens of a Qwen3-Next layer."""

    def make():
        torch.set_num_threads(1)
        arguments = small(H=16, HV=32, K=128, V=128, dtype=BF16, tokens=[1, T])
        return lambda: prepare(**arguments)

    return make


if __name__ == "__main__":
    sys.exit(
        modes.main(
            api="gdn_prepare",
            about={
                "dispatch": "serves every call that no kernel serves; on a GPU one warning a reason",
                "compile": "none, it is PyTorch",
                "limits": "several launches and float32 copies of q and k on a GPU",
            },
            device=CPU,
            bench={f"{T} tokens": benched(T) for T in (1, 512)},
        )
    )
