"""The example as it stands, and that it fails when it should; op_test/integrations holds what it relies on."""

import contextlib
import importlib.util

import pytest
import torch
from runfiles import Runfiles

import atrex

torch.set_num_threads(
    1
)  # Bazel counts a core a test; threads that wait for a taken core make the run many times slower

_SPEC = importlib.util.spec_from_file_location(
    "qwen3_next", Runfiles.Create().Rlocation("_main/examples/qwen3_next.py")
)
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)

LINEAR_LAYERS = 3
SMALL = example.Setup(torch.float32, width=1 / 8, tokens=150, bound=1e-5)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(example.SETUPS, "cpu", SMALL)


def test_the_example_on_this_machine(capsys):
    assert example.main([]) == 0
    printed = capsys.readouterr().out
    assert f"served  {LINEAR_LAYERS} of {LINEAR_LAYERS} layers by atrex: " in printed
    for line in (
        "whole forward pass         ....",
        "its gated delta rules only ....",
        "reading 100, writing 16    ....",
    ):
        assert line in printed


def test_bfloat16_layers():
    """What the example does on a GPU; the heads of the linear layers have the sizes of Qwen3-Next here too."""
    model = example.build_model("cpu", torch.bfloat16, SMALL.width)
    ids = torch.tensor([list(example.TEXT.read_bytes()[:150])])
    expected = example.read(model, ids)
    with example.enabled(), example.recorded("chunk_gated_delta_rule") as calls:
        logits = example.read(model, ids)
    assert [(call.args[0].shape, call.args[0].dtype) for call in calls] == [((1, 150, 4, 128), torch.bfloat16)] * 3
    assert {call.args[3].dtype for call in calls} == {torch.float32}  # g
    assert torch.isfinite(logits).all()
    assert (logits - expected).abs().max() <= example.SETUPS["cuda"].bound * expected.abs().max()


def with_a_fault(monkeypatch, name):
    right = getattr(atrex, name)
    monkeypatch.setattr(atrex, name, lambda q, k, v, g, beta, **rest: right(q, k, v, g * 1.01, -beta, **rest))


def test_a_wrong_prefill_fails(small, monkeypatch, capsys):
    with_a_fault(monkeypatch, "chunk_gated_delta_rule")
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: the logits are too far apart" in capsys.readouterr().err


def test_a_wrong_decode_fails(small, monkeypatch, capsys):
    with_a_fault(monkeypatch, "fused_recurrent_gated_delta_rule")
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: the written tokens differ" in capsys.readouterr().err


def test_layers_that_pass_atrex_by_fail(small, monkeypatch, capsys):
    monkeypatch.setattr(example, "enabled", contextlib.nullcontext)
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: atrex served 0 of 3 layers in reading and 0 of 45 in writing" in capsys.readouterr().err
