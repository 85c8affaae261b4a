"""The fallback of gated_rms_norm: the whole contract on a CPU, gradients, and what it rejects."""

import re
import sys
import timeit

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import atrex
from atrex import _device, _dispatch
from harness import inputs, modes, poison
from harness.gated_norm import CHOICES, Case, differing, expected, make_tensors

CPU = "cpu"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
norm = atrex.gated_rms_norm


@st.composite
def cases(draw):
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    choices = {name: pick(*values) for name, values in CHOICES.items()} | {
        "shape": draw(st.lists(st.integers(0, 5), min_size=3, max_size=3)),
        "x_layout": pick(*inputs.LAYOUTS),
        "z_layout": pick(*inputs.LAYOUTS),
        "D": pick(1, 8, 31, 128),
        "dtype": pick(FP32, BF16, FP16, FP64),
        "seed": draw(st.integers(0, 1 << 16)),
    }
    return choices | {"weight_dtype": FP64 if choices["dtype"] is FP64 else choices["weight_dtype"]}


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_contract(choices):
    case = Case(choices, CPU)
    with poison.nan_empty():
        out = norm(**case.arguments)
    case.check(out)


@pytest.mark.parametrize("weight_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_cast_before_weight_is_transformers_bit_for_bit(dtype, weight_dtype):
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    x, weight, z = make_tensors([2, 9, 4], 128, seed=1, device=CPU, dtype=dtype, weight_dtype=weight_dtype)
    module = Qwen3NextRMSNormGated(128, eps=1e-5)
    module.weight = torch.nn.Parameter(weight)
    want = module(x.reshape(-1, 128), z.reshape(-1, 128)).view_as(x)
    assert torch.equal(norm(x, weight, z, 1e-5, cast_before_weight=True), want)


def test_the_two_roundings_differ():
    x, weight, z = make_tensors([2, 50, 4], 128, seed=2, device=CPU)
    for cast in (False, True):
        out = norm(x, weight, z, cast_before_weight=cast)
        assert differing(out, expected(x, weight, z, 1e-6, "silu", cast)) < 5e-3
        assert differing(out, expected(x, weight, z, 1e-6, "silu", not cast)) > 0.2


def test_sigmoid_is_not_run_as_silu():
    """Elsewhere a model whose output gate is a sigmoid got the silu. z = 0 tells them apart: 0.5 or 0."""
    x, weight = torch.full((1, 8), 3.0), torch.full((8,), 2.0)
    z = torch.tensor([[0.0, 1.0, -1.0, 30.0, -30.0, 200.0, -200.0, 2.0]])
    out = norm(x, weight, z, activation="sigmoid")
    torch.testing.assert_close(out, 2 * z.sigmoid())
    torch.testing.assert_close(norm(x, weight, z), 2 * z * z.sigmoid())
    assert torch.equal(norm(x, weight, z, activation="swish"), norm(x, weight, z, activation="silu"))


def test_a_row_stays_by_itself():
    x, weight, z = make_tensors([1, 3, 2], 16, seed=3, device=CPU)
    clean = norm(x, weight, z)
    x[0, 1, 0], z[0, 1, 1, 3] = float("inf"), float("nan")
    dirty = norm(x, weight, z)
    assert torch.equal(dirty[0, ::2], clean[0, ::2])
    assert dirty[0, 1, 0].isnan().any() and dirty[0, 1, 1].isnan().nonzero().tolist() == [[3]]


def test_autocast_changes_nothing():
    x, weight, z = make_tensors([1, 3, 2], 16, seed=4, device=CPU, dtype=FP32)
    want = norm(x, weight, z)
    with torch.autocast(CPU):
        assert torch.equal(norm(x, weight, z), want)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("cast", [False, True])
def test_gradients(activation, cast):
    tensors = make_tensors([1, 3, 2], 5, seed=5, device=CPU, dtype=FP64)
    tensors = [x.requires_grad_() for x in tensors]
    assert torch.autograd.gradcheck(
        lambda *x: norm(*x, 1e-5, activation=activation, cast_before_weight=cast), tensors
    )  # fmt: skip


# ---- what it rejects ------------------------------------------------------------------------------------------------

X = torch.zeros(6, 8)
REJECTED = {
    "x": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    "weight": ({"weight": None}, TypeError, "weight must be a torch.Tensor, got NoneType"),
    "z": ({"z": 1.0}, TypeError, "z must be a torch.Tensor, got float"),
    "x device": ({"x": X.to("meta")}, ValueError, "weight must be on meta as x, got cpu"),
    "z device": ({"z": X.to("meta")}, ValueError, "z must be on cpu as x, got meta"),
    "x dtype": ({"x": X.int()}, TypeError, "x must be bfloat16 or float16 or float32, got int32"),
    "weight dtype": (
        {"weight": torch.ones(8).double()},
        TypeError,
        "weight must be bfloat16 or float16 or float32, got float64",
    ),
    "z dtype": ({"x": X.double(), "weight": torch.ones(8).double()}, TypeError, "z must be float64, got float32"),
    "x scalar": ({"x": torch.tensor(1.0)}, ValueError, r"x must have shape \[\*, D\] with D of at least 1, got \[\]"),
    "x empty": ({"x": torch.zeros(6, 0)}, ValueError, r"x must have shape \[\*, D\] with .* got \[6, 0\]"),
    "weight shape": ({"weight": torch.ones(1, 8)}, ValueError, r"weight must have shape \[D=8\], got \[1, 8\]"),
    "z rows": (
        {"z": torch.zeros(5, 8)},
        ValueError,
        r"z must have shape \[\*, D=8\] with 6 rows as x, got \[5, 8\]",
    ),
    "z broadcast": ({"z": torch.zeros(8)}, ValueError, r"z must have shape .* 6 rows as x, got \[8\]"),
    "z columns": ({"z": torch.zeros(12, 4)}, ValueError, r"z must have shape \[\*, D=8\] .* got \[12, 4\]"),
    "eps": ({"eps": None}, TypeError, "eps must be a number, got NoneType"),
    "eps bool": ({"eps": True}, TypeError, "eps must be a number, got bool"),
    "activation": (
        {"activation": "gelu"},
        ValueError,
        "activation must be 'silu', 'swish' or 'sigmoid', got 'gelu'",
    ),
    "activation None": ({"activation": None}, ValueError, "activation must be .*, got None"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejected(name):
    options, error, message = REJECTED[name]
    arguments = {"x": X, "weight": torch.ones(8), "z": X, "eps": 1e-6, "activation": "silu"} | options
    with pytest.raises(error, match=f"^{message}$"):
        norm(**arguments)
    answer = atrex.can_use_gated_rms_norm(**arguments)
    assert not answer and re.match(f"^{message}$", answer.reason)


# ---- dispatch -------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    """An sm90 implementation in the wheel that records its calls."""
    calls = []
    monkeypatch.setitem(_device._targets, torch.device(CPU), _device.DeviceTarget("nvidia", "sm90"))
    monkeypatch.setattr(_dispatch, "_in_wheel", lambda entry: True)
    monkeypatch.setattr(_dispatch, "_load", lambda entry: lambda call: calls.append((entry, call)) or call.x)
    return calls


def large(**options):
    x, weight, z = make_tensors([2, 3, 4], 128, seed=6, device=CPU)
    return {"x": x, "weight": weight, "z": z} | options


def rows_of(*strides, offset=0):
    return torch.zeros(1 << 14, dtype=BF16).as_strided((2, 3, 4, 128), (*strides, 1), offset)


REFUSED = {
    "float32": ({"x": torch.zeros(2, 3, 4, 128)}, "x and z must be both bfloat16 or both float16, got float32, bf"),
    "mixed": ({"z": torch.zeros(2, 3, 4, 128).half()}, "x and z must be both .*, got bfloat16, float16"),
    "D": ({name: torch.zeros(*s, 64).bfloat16() for name, s in (("x", [3]), ("z", [3]), ("weight", []))}, ".*D=64"),
    "grad": ({"weight": torch.zeros(128).requires_grad_()}, "no input may require grad in grad mode"),
    "three strides": (
        {"z": rows_of(4096, 1024, 136)},
        r"z must have contiguous rows .* at most two strides .*, got shape \[2, 3, 4, 128\], strides \(4096, 1024, 136",
    ),
    "off the grid": ({"x": rows_of(1536, 512, 128, offset=4)}, r"x must have .* 16-byte grid.*, offset 4"),
    "pitch": ({"z": rows_of(2040, 516, 128)}, r"z must have .* strides \(2040, 516, 128, 1\)"),
    "no rows": ({"z": torch.zeros(2, 3, 128, 4).bfloat16().mT}, r"z must have contiguous rows"),
    "weight": ({"weight": torch.zeros(256)[::2]}, "weight must be contiguous on the 16-byte grid, got stride 2, off"),
    "weight offset": ({"weight": torch.zeros(129)[1:]}, "weight must be contiguous .*, got stride 1, offset 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_sm90_refuses(kernel, name):
    options, reason = REFUSED[name]
    answer = atrex.can_use_gated_rms_norm(**large(**options))
    assert not answer and answer.target == "nvidia/sm90" and re.match(reason, answer.reason), answer.reason
    norm(**large(**options))
    assert not kernel


@pytest.mark.parametrize(
    "z",
    [
        rows_of(1536, 512, 128),
        rows_of(2048, 512, 128),  # (B), (T, HV)
        rows_of(3072, 1024, 128),  # (B, T), (HV)
        rows_of(0, 0, 0),
        torch.zeros(24, 136, dtype=BF16)[:, :128],
        torch.zeros(1, 6, 4, 192, dtype=BF16)[..., 32:160],
    ],
    ids=lambda z: str(z.stride()),
)
def test_what_sm90_serves(kernel, z):
    arguments = large(z=z, weight=torch.ones(128), eps=1e-5, cast_before_weight=True)
    assert atrex.can_use_gated_rms_norm(**arguments)
    norm(**arguments)
    ((entry, made),) = kernel
    assert entry == "atrex.kernels.nvidia.gated_rms_norm.sm90.runtime:gated_rms_norm"
    assert all(getattr(made, name) is x for name, x in arguments.items())
    assert (made.rows, made.D, made.is_sigmoid, made.needs_grad) == (24, 128, False, False)


def test_a_refusal_names_the_first_tensor():
    answer = atrex.can_use_gated_rms_norm(**large())
    assert answer.reason == "no implementation for unknown/cpu (x is on cpu), there is one for nvidia/sm90"


def test_host_cost_of_checks_and_dispatch(kernel):
    """About 5 us on a 2.45 GHz EPYC; the bound leaves room for a slower or busy machine, not for a copy."""
    arguments = large(z=rows_of(3072, 1024, 128))
    best = min(timeit.repeat(lambda: norm(**arguments), number=200, repeat=40)) / 200
    print(f"checks and dispatch: {best * 1e6:.1f} us")
    assert best < 25e-6


def benched(T):
    """The norm of T tokens of a Qwen3-Next layer."""

    def make():
        torch.set_num_threads(1)
        x, weight, z = make_tensors([1, T, 32], 128, seed=7, device=CPU)
        return lambda: norm(x, weight, z)

    return make


if __name__ == "__main__":
    sys.exit(
        modes.main(
            api="gated_rms_norm",
            about={
                "dispatch": "serves every call that no kernel serves; on a GPU one warning a reason",
                "compile": "none, it is PyTorch",
                "limits": "several launches and float32 copies of its inputs on a GPU",
            },
            device=CPU,
            bench={f"{T} tokens": benched(T) for T in (1, 512)},
        )
    )
