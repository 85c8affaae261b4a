"""A wheel without any kernel target: pure Python, importable, and it computes with the fallback."""

import pathlib

import torch
from runfiles import Runfiles

import atrex


def test_wheel_is_pure():
    (wheel,) = pathlib.Path(Runfiles.Create().Rlocation("_main/python/wheel_without_targets")).iterdir()
    assert wheel.name == f"atrex-{atrex.__version__}-py3-none-any.whl"
    assert not (pathlib.Path(atrex.__file__).parent / "kernels").exists()


def test_call_falls_back():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 5, 2, 16).unbind()
    g, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    out, state = atrex.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)
    # The first token by hand: S = beta k v^T, o = scale S^T q.
    expected = (q[:, 0] * k[:, 0]).sum(-1, keepdim=True) * 16**-0.5 * beta[:, 0, :, None] * v[:, 0]
    torch.testing.assert_close(out[:, 0], expected)
    assert state.shape == (1, 2, 16, 16)
