"""The example as it stands, and what it relies on: that transformers' layers call atrex, in every way they can."""

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


@pytest.fixture(autouse=True)
def hook_is_gone_afterwards():
    yield
    assert example.modeling_qwen3_next.torch_chunk_gated_delta_rule is example.OWN


@pytest.fixture(scope="module")
def model():
    return example.build_model("cpu", SMALL.dtype, SMALL.width)


@pytest.fixture
def atrex_calls(monkeypatch):
    """The q tensors of the calls that reach atrex."""
    calls = []
    served = atrex.chunk_gated_delta_rule

    def counted(q, *arguments, **keywords):
        calls.append(q)
        return served(q, *arguments, **keywords)

    monkeypatch.setattr(atrex, "chunk_gated_delta_rule", counted)
    return calls


def tokens(start, stop):
    return torch.tensor([list(example.TEXT.read_bytes()[start:stop])])


def assert_close(logits, expected, bound=SMALL.bound):
    assert logits.shape == expected.shape
    assert torch.isfinite(logits).all()
    assert (logits - expected).abs().max() <= bound * expected.abs().max()


def test_the_example_on_this_machine(capsys):
    assert example.main([]) == 0
    printed = capsys.readouterr().out
    assert f"served  {LINEAR_LAYERS} of {LINEAR_LAYERS} layers by atrex: " in printed
    assert "whole forward pass         ...." in printed and "its gated delta rules only ...." in printed


def test_every_linear_layer_calls_atrex(model, atrex_calls):
    ids = tokens(0, 150)
    expected, _ = example.read(model, example.OWN, ids)
    assert not atrex_calls
    logits, calls = example.read(model, example.through_atrex, ids)
    assert model.config.layer_types.count("linear_attention") == LINEAR_LAYERS
    assert len(atrex_calls) == len(calls) == LINEAR_LAYERS
    assert {q.shape for q in atrex_calls} == {(1, 150, 4, 128)}
    assert_close(logits, expected)


def test_bfloat16_layers(atrex_calls):
    bound = example.SETUPS["cuda"].bound
    model = example.build_model("cpu", torch.bfloat16, SMALL.width)
    expected, _ = example.read(model, example.OWN, tokens(0, 150))
    logits, calls = example.read(model, example.through_atrex, tokens(0, 150))
    assert [q.dtype for q in atrex_calls] == [torch.bfloat16] * LINEAR_LAYERS
    assert {keywords["g"].dtype for _, keywords in calls} == {torch.float32}
    assert_close(logits, expected, bound)


def test_padded_batch(model, atrex_calls):
    texts = tokens(0, 150), tokens(200, 270)
    ids = torch.zeros(2, 150, dtype=torch.long)
    mask = torch.zeros(2, 150, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, -text.shape[1] :] = text
        mask[row, -text.shape[1] :] = 1
    expected, _ = example.read(model, example.OWN, ids, attention_mask=mask)
    logits, _ = example.read(model, example.through_atrex, ids, attention_mask=mask)
    assert [q.shape[0] for q in atrex_calls] == [2] * LINEAR_LAYERS
    assert_close(logits[mask == 1], expected[mask == 1])
    for row, text in enumerate(texts):
        alone, _ = example.read(model, example.through_atrex, text)
        assert_close(logits[row, -text.shape[1] :], alone[0])


def test_reading_on_from_a_cache(model, atrex_calls):
    whole, _ = example.read(model, example.OWN, tokens(0, 150))
    with torch.inference_mode(), example.served_by(example.through_atrex):
        begun = model(tokens(0, 90))
        continued = model(tokens(90, 150), past_key_values=begun.past_key_values)
    assert len(atrex_calls) == 2 * LINEAR_LAYERS
    assert_close(torch.cat([begun.logits, continued.logits], dim=1), whole)


def test_hook_goes_with_an_error(model):
    def broken(*_, **__):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        example.read(model, broken, tokens(0, 8))


def test_a_wrong_operator_fails(monkeypatch, capsys):
    monkeypatch.setitem(example.SETUPS, "cpu", SMALL)
    right = example.through_atrex
    monkeypatch.setattr(example, "through_atrex", lambda *qkv, g, **keywords: right(*qkv, g=g * 1.01, **keywords))
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: the logits are too far apart" in capsys.readouterr().err


def test_a_layer_that_passes_atrex_by_fails(monkeypatch, capsys):
    monkeypatch.setitem(example.SETUPS, "cpu", SMALL)
    monkeypatch.setattr(example, "served_by", lambda _: contextlib.nullcontext())
    assert example.main(["--device", "cpu"]) == 1
    assert "FAILED: 3 of 3 linear-attention layers passed atrex by" in capsys.readouterr().err
