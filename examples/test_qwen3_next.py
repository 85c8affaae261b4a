"""The example as it stands, and that it fails when it should; op_test/integrations holds what it relies on."""

import contextlib
import importlib.util
import inspect

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
SMALL = example.Setup(torch.float32, width=1 / 8, tokens=150, layer_tokens=70, batches=(2,), bound=1e-5)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(example.SETUPS, "cpu", SMALL)


def test_the_example_on_this_machine(capsys):
    assert example.main([]) == 0
    printed = capsys.readouterr().out
    for line in (
        "served  reading: 3 of 3 chunk_gated_delta_rule: ",
        "served  writing: 45 of 45 causal_conv1d_update: ",
        "served  writing: 48 of 48 gated_rms_norm: ",
        "tokens  16 of 16 written ones are the same",
        "model: reading 1",
        "model: reading 100, writing 16",
        "linear layer: reading ",
        "linear layer: 20 decode steps, batch 1 ",
    ):
        assert line in printed


def test_bfloat16_layers():
    """What the example does on a GPU; the heads of the linear layers have the sizes of Qwen3-Next here too."""
    model = example.build_model("cpu", torch.bfloat16, SMALL.width)
    ids = torch.tensor([list(example.TEXT.read_bytes()[:150])])
    expected = example.read(model, ids)
    with example.enabled(), example.recorded(example.READING) as recorded:
        logits = example.read(model, ids)
    assert [len(calls) for calls in recorded.values()] == [LINEAR_LAYERS] * 3
    calls = recorded["chunk_gated_delta_rule"]
    assert [(call.args[0].shape, call.args[0].dtype) for call in calls] == [((1, 150, 4, 128), torch.bfloat16)] * 3
    assert {call.args[3].dtype for call in calls} == {torch.float32}  # g
    assert torch.isfinite(logits).all()
    assert (logits - expected).abs().max() <= example.SETUPS["cuda"].bound * expected.abs().max()


def scaled(value):
    return lambda right: lambda x, *rest, **options: right(x * value, *rest, **options)


# Each operator with a fault that a caller of this function alone would see.
FAULTS = {
    "chunk_gated_delta_rule": lambda right: lambda q, k, v, g, beta, **rest: right(q, k, v, g * 1.01, -beta, **rest),
    "causal_conv1d_fn": scaled(1.01),
    "gated_rms_norm": lambda right: lambda x, weight, *rest, **options: right(x, weight * 1.01, *rest, **options),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_prefill_fails(small, monkeypatch, capsys, name):
    monkeypatch.setattr(atrex, name, FAULTS[name](inspect.unwrap(getattr(atrex, name))))
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: the logits are too far apart" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fused_recurrent_gated_delta_rule", "causal_conv1d_update"])
def test_a_wrong_decode_fails(small, monkeypatch, capsys, name):
    monkeypatch.setattr(atrex, name, scaled(-3)(inspect.unwrap(getattr(atrex, name))))
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: the written tokens differ" in capsys.readouterr().err


def test_layers_that_pass_atrex_by_fail(small, monkeypatch, capsys):
    monkeypatch.setattr(example, "enabled", contextlib.nullcontext)
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: in writing atrex did not serve each call of causal_conv1d_fn, " in capsys.readouterr().err
