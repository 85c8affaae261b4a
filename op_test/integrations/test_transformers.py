"""Transformers' models with `atrex` in their linear attention: the same texts and logits, and no trace afterwards."""

import collections
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import transformers

import atrex
from atrex.integrations.transformers import disable, enable, enabled
from harness.throughput import cpu_ratio

# Bazel counts a core a test; threads that wait for a taken core make the run many times slower.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()  # it would warn that its own operators are the slow ones

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
QWEN3_NEXT = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
CONFIGS = {
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**SMALL, **EXPERTS, intermediate_size=64),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**SMALL, intermediate_size=64),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**SMALL, **EXPERTS),
}
LINEAR_LAYERS, HEADS = 3, 4  # of the four layers, and their heads
BOUND = 2e-5  # of the largest logit, in float32
GLOBALS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
MODULES = [importlib.import_module(f"transformers.models.{name}.modeling_{name}") for name in CONFIGS]
NORMS = [
    getattr(module, f"{prefix}RMSNormGated")
    for module, prefix in zip(MODULES, ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe"), strict=True)
]
CONV, UPDATE, NORM = "causal_conv1d_fn", "causal_conv1d_update", "gated_rms_norm"
CHUNK, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"


def texts_of(offsets):
    return 1 if offsets is None else len(offsets) - 1


# What a call is told apart by: tokens and texts, tokens, rows, tokens and states.
SIZES = {
    CONV: lambda x, *_, query_start_loc=None, **__: (x.shape[-1], texts_of(query_start_loc)),
    UPDATE: lambda x, *_, **__: x.shape[-1],
    NORM: lambda x, *_, **__: x.shape[0],
    **{
        name: lambda q, *_, initial_state=None, **__: (q.shape[1], 0 if initial_state is None else len(initial_state))
        for name in (CHUNK, RECURRENT)
    },
}  # fmt: skip


def operators():
    """All that `enable` replaces."""
    found = []
    for module, norm in zip(MODULES, NORMS, strict=True):
        found += [*(getattr(module, name) for name in GLOBALS), norm.forward]
    return found


OWN = operators()
OF_A_MODULE = len(GLOBALS) + 1


def build(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    for parameter, value in model.named_parameters():
        if parameter.endswith("A_log"):
            # As it comes, a state forgets within a few tokens, and most of what is tested would not show.
            value.data.uniform_(-5, -1)
        elif value.ndim > 1:
            value.data.normal_(std=0.2)  # as it comes, the layers hardly change what the embedding says
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def next_model():
    return build("qwen3_next")


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    disable()
    assert operators() == OWN


@pytest.fixture
def calls(monkeypatch):
    """The sizes of each call of each public operator."""
    seen = collections.defaultdict(list)

    def count(name, operator):
        def counted(*arguments, **keywords):
            seen[name].append(SIZES[name](*arguments, **keywords))
            return operator(*arguments, **keywords)

        monkeypatch.setattr(atrex, name, counted)

    for name in SIZES:
        count(name, inspect.unwrap(getattr(atrex, name)))  # not the proxy, which would replace what counts
    return seen


def each_layer(**sizes):
    """``calls`` after all linear-attention layers have made calls of ``sizes``, one after the other."""
    return {name: [size for step in steps for size in [step] * LINEAR_LAYERS] for name, steps in sizes.items()}


def tokens(*shape):
    return torch.randint(0, 128, shape, generator=torch.Generator().manual_seed(sum(shape)))


def logits(model, ids, **inputs):
    with torch.inference_mode():
        return model(ids, **inputs).logits


def largest_difference(got, expected):
    assert got.shape == expected.shape
    return ((got - expected).abs().max() / expected.abs().max()).item()


def assert_close(got, expected):
    assert largest_difference(got, expected) <= BOUND


@pytest.mark.parametrize("prompt", [2, 70])  # shorter than the convolution looks back, and longer than a chunk
def test_greedy_text_is_the_same(model, calls, prompt):
    def generate():
        return model.generate(
            tokens(2, prompt), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip

    expected = generate()
    assert not calls
    with enabled():
        got = generate()
    assert calls == each_layer(**{
        CONV: [(max(prompt, 4), 1)],
        CHUNK: [(prompt, 0)],
        UPDATE: [1] * 11,
        RECURRENT: [(1, 2)] * 11,
        NORM: [2 * prompt * HEADS] + [2 * HEADS] * 11,
    })  # fmt: skip
    assert torch.equal(got.sequences, expected.sequences)
    assert len(set(got.sequences[0, prompt:].tolist())) > 3  # a text that repeats one token would show little
    assert_close(torch.stack(got.logits), torch.stack(expected.logits))


def test_reading_on_from_a_cache(model, calls):
    ids = tokens(1, 30)
    whole = logits(model, ids)
    with enabled(), torch.inference_mode():
        begun = model(ids[:, :20])
        parts = [begun.logits]
        for start, stop in ((20, 23), (23, 24), (24, 30)):
            parts.append(model(ids[:, start:stop], past_key_values=begun.past_key_values).logits)
    assert calls == each_layer(**{
        CONV: [(20, 1), (4 + 3, 1), (4 + 6, 1)],  # transformers puts the four columns of its cache before the tokens
        UPDATE: [1],
        CHUNK: [(20, 0), (3, 1), (6, 1)],
        RECURRENT: [(1, 1)],
        NORM: [HEADS * n for n in (20, 3, 1, 6)],
    })  # fmt: skip
    assert_close(torch.cat(parts, dim=1), whole)


def test_texts_padded_on_the_left(model, calls):
    ids, lengths = tokens(2, 12), (12, 7)
    mask = torch.tensor([[0] * (12 - length) + [1] * length for length in lengths])
    expected = logits(model, ids, attention_mask=mask)
    with enabled():
        got = logits(model, ids, attention_mask=mask)
        for row, length in enumerate(lengths):
            assert_close(got[row, -length:], logits(model, ids[row : row + 1, -length:])[0])
    assert_close(got[mask == 1], expected[mask == 1])
    assert calls[CHUNK][0] == (12, 0) and calls[CONV][0] == (12, 1)


def packed(offsets):
    positions = torch.cat([torch.arange(stop - start) for start, stop in zip(offsets, offsets[1:], strict=False)])
    return {
        "position_ids": positions[None],
        "cu_seq_lens_q": torch.tensor(offsets, dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor(offsets, dtype=torch.int32),
        "max_length_q": 8,
        "max_length_k": 8,
    }


def each_alone(read, offsets):
    spans = zip(offsets, offsets[1:], strict=False)
    return torch.cat([read(slice(start, stop)) for start, stop in spans if start < stop], dim=1)


PACKED = pytest.mark.parametrize("offsets", [[0, 4, 8], [0, 1, 3], [0, 2, 2, 3, 70, 71], [0, 6]], ids=str)


@PACKED
def test_packed_texts_do_not_see_each_other(model, calls, offsets):
    ids = tokens(1, offsets[-1])
    with enabled():
        got = logits(model, ids, **packed(offsets), use_cache=False)
    count, texts = offsets[-1], len(offsets) - 1
    assert calls == each_layer(**{CONV: [(count, texts)], CHUNK: [(count, 0)], NORM: [count * HEADS]})
    assert_close(got, each_alone(lambda text: logits(model, ids[:, text]), offsets))


@PACKED
def test_packed_texts_in_a_layer_with_a_cache(model, calls, offsets):
    """In the layer alone: with a cache, the full attention beside it takes no notice of position ids."""
    layer = model.model.layers[0].linear_attn
    hidden = torch.randn(1, offsets[-1], 64, generator=torch.Generator().manual_seed(0))
    cache = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        expected = each_alone(lambda text: layer(hidden[:, text]), offsets)
        with enabled():
            assert_close(layer(hidden, cache_params=cache, **packed(offsets)), expected)
    count, texts = offsets[-1], len(offsets) - 1
    assert calls == {CONV: [(max(count, 4), texts)], CHUNK: [(count, 0)], NORM: [count * HEADS]}


def test_transformers_alone_lets_packed_texts_see_each_other(model):
    """Else the tests above prove nothing."""
    ids = tokens(1, 8)
    apart = each_alone(lambda text: logits(model, ids[:, text]), [0, 4, 8])
    assert largest_difference(logits(model, ids, **packed([0, 4, 8]), use_cache=False), apart) > 1000 * BOUND


def test_packing_that_cannot_be_kept_apart_is_refused(next_model):
    ids = tokens(1, 8)
    with enabled():
        with pytest.raises(ValueError, match="seq_idx marks packed texts.*pass cu_seq_lens_q too"):
            logits(next_model, ids, seq_idx=torch.tensor([[0] * 4 + [1] * 4], dtype=torch.int32))
        cache = next_model(ids).past_key_values
        with pytest.raises(ValueError, match="packs 2 texts, but only one text can continue from a cache"):
            logits(next_model, ids, **packed([0, 4, 8]), past_key_values=cache)


def test_gradients(next_model, calls):
    ids = tokens(1, 10)

    def gradients():
        next_model.zero_grad()
        next_model(ids, labels=ids, use_cache=False).loss.backward()
        layer = next_model.model.layers[0].linear_attn
        return [layer.in_proj_qkvz.weight.grad.clone(), layer.A_log.grad.clone(), layer.conv1d.weight.grad.clone()]

    expected = gradients()
    with enabled():
        got = gradients()
    assert calls == each_layer(**{CONV: [(10, 1)], CHUNK: [(10, 0)], NORM: [10 * HEADS]})
    for ours, own in zip(got, expected, strict=True):
        assert largest_difference(ours, own) < 1e-4


def test_decode_without_no_grad(next_model, calls):
    """Where the states in the cache require grad; no gradient goes back through them, in transformers neither."""
    ids = tokens(1, 11)

    def read():
        cache = transformers.DynamicCache(config=next_model.config)
        spans = ((0, 9), (9, 10), (10, 11))
        return torch.cat([next_model(ids[:, start:stop], past_key_values=cache).logits for start, stop in spans], 1)

    expected = read()
    with enabled():
        got = read()
    assert calls == each_layer(**{
        CONV: [(9, 1)], UPDATE: [1, 1], CHUNK: [(9, 0)], RECURRENT: [(1, 1)] * 2, NORM: [HEADS * n for n in (9, 1, 1)],
    })  # fmt: skip
    assert got.requires_grad
    assert_close(got, expected)


def test_autocast(next_model, calls):
    """float32 parameters and bfloat16 activations."""
    ids = tokens(1, 12)

    def read():
        cache = transformers.DynamicCache(config=next_model.config)
        with torch.autocast("cpu", torch.bfloat16):
            parts = [
                logits(next_model, ids[:, start:stop], past_key_values=cache)
                for start, stop in ((0, 8), (8, 9), (9, 12))
            ]
        return torch.cat(parts, dim=1).float()

    expected = read()
    with enabled():
        got = read()
    assert {name: len(sizes) for name, sizes in calls.items()} == {
        CONV: 2 * LINEAR_LAYERS, CHUNK: 2 * LINEAR_LAYERS, UPDATE: LINEAR_LAYERS, RECURRENT: LINEAR_LAYERS,
        NORM: 3 * LINEAR_LAYERS,
    }  # fmt: skip
    # bfloat16 takes transformers itself this far away from its float32 logits.
    assert largest_difference(got, expected) <= largest_difference(expected, logits(next_model, ids))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_breaks_no_graph(model, calls, backend):
    layer = model.model.layers[0].linear_attn
    hidden = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(1))

    def run(call):
        cache = transformers.DynamicCache(config=model.config)
        with enabled(), torch.no_grad():
            return [
                call(hidden), call(hidden, **packed([0, 8, 20])), layer(hidden, cache), call(hidden[:, :1], cache),
                call(hidden[:, :1], cache), cache.layers[0].conv_states[0], cache.layers[0].recurrent_states[0],
            ]  # fmt: skip

    torch._dynamo.reset()
    expected = run(layer)
    eager = {name: list(sizes) for name, sizes in calls.items()}
    for sizes in calls.values():
        sizes.clear()
    for got, want in zip(run(torch.compile(layer, fullgraph=True, backend=backend)), expected, strict=True):
        assert_close(got, want)
    assert calls == eager


def test_a_decode_step_is_no_slower():
    """Side by side on one CPU, at the heads of Qwen3-Next; the layer is narrow, for its projections are the same."""
    config = transformers.Qwen3NextConfig(**SMALL | EXPERTS | QWEN3_NEXT)
    torch.manual_seed(0)
    layer = MODULES[0].Qwen3NextGatedDeltaNet(config, 0).eval()
    caches = [transformers.DynamicCache(config=config) for _ in range(2)]
    hidden = torch.randn(1, 5, 64)
    with torch.inference_mode():
        for cache in caches:
            layer(hidden, cache)

    def steps(cache):
        return [layer(hidden[:, :1], cache) for _ in range(5)]

    ours = enabled()(lambda: steps(caches[0]))
    with torch.inference_mode():
        assert_close(ours()[-1], steps(caches[1])[-1])
    assert cpu_ratio(ours, lambda: steps(caches[1]), count=1) <= 1.0


def test_an_operator_counts_only_while_it_serves(next_model, calls):
    ids = tokens(1, 8)
    with enabled():
        logits(next_model, ids)
    before = dict(calls)
    logits(next_model, ids)
    assert calls == before and set(before) == {CONV, CHUNK, NORM}


def serving():
    """Whether `atrex` serves now: all operators in all modules, or none."""
    (answer,) = {now is not own for now, own in zip(operators(), OWN, strict=True)}
    return answer


def test_enable_and_disable_can_be_repeated():
    disable()
    assert not serving()
    enable()
    held = operators()
    enable()
    assert serving() and operators() == held
    disable()
    assert operators() == OWN
    disable()
    assert operators() == OWN


def test_blocks_nest():
    with enabled():
        with enabled():
            assert serving()
        assert serving()
    assert operators() == OWN
    enable()
    with enabled():
        pass
    assert serving()
    disable()
    with enabled():
        enable()
        disable()
        assert serving()
    assert operators() == OWN


def test_a_block_in_another_thread():
    entered, leave = threading.Event(), threading.Event()

    @enabled()
    def hold():
        entered.set()
        leave.wait(30)

    thread = threading.Thread(target=hold)
    with enabled():
        thread.start()
        assert entered.wait(30)
    assert serving()
    leave.set()
    thread.join(30)
    assert operators() == OWN


def test_an_error_in_a_block(next_model, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(atrex, CHUNK, broken)
    with pytest.raises(ZeroDivisionError), enabled():
        logits(next_model, tokens(1, 8))
    assert operators() == OWN


def test_what_others_replaced_meanwhile_is_left(monkeypatch, caplog):
    module = MODULES[0]
    with monkeypatch.context() as patch:
        with caplog.at_level(logging.WARNING, "atrex"):
            enable()
            patch.setattr(module, "torch_chunk_gated_delta_rule", "of somebody else")
            disable()
        assert module.torch_chunk_gated_delta_rule == "of somebody else"
        assert "modeling_qwen3_next.torch_chunk_gated_delta_rule was replaced again" in caplog.text
    module.torch_chunk_gated_delta_rule = OWN[2]


@pytest.mark.parametrize("name", GLOBALS)
def test_a_layer_without_the_global_is_refused(monkeypatch, name):
    with monkeypatch.context() as patch:
        patch.delattr(MODULES[1], name)
        with pytest.raises(RuntimeError, match=rf"do not look up \S+modeling_qwen3_5.{name}; atrex knows those of"):
            enable()
    assert operators() == OWN


def test_a_layer_that_looks_nothing_up_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(MODULES[0].Qwen3NextGatedDeltaNet, "forward", lambda self, x: self.rule(x))
        with pytest.raises(RuntimeError, match="modeling_qwen3_next.torch_chunk_gated_delta_rule"), enabled():
            pass
    assert operators() == OWN


NO_NORM = r"do not look up \S+modeling_qwen3_5_moe.Qwen3_5MoeRMSNormGated.forward\(hidden_states, gate\); atrex knows"


@pytest.mark.parametrize("forward", [lambda self, x, z: x, lambda self, hidden_states, gate: self.weight], ids="ab")
def test_a_norm_of_another_kind_is_refused(monkeypatch, forward):
    with monkeypatch.context() as patch:
        patch.setattr(NORMS[2], "forward", forward)
        with pytest.raises(RuntimeError, match=NO_NORM):
            enable()
    assert operators() == OWN


def test_a_layer_without_the_norm_is_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(MODULES[2], "Qwen3_5MoeRMSNormGated")
        with pytest.raises(RuntimeError, match=NO_NORM):
            enable()
    assert operators() == OWN


def child(code):
    """What ``code`` prints as JSON in a fresh process with the same paths."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return json.loads(subprocess.run(command, check=True, env=env, stdout=subprocess.PIPE).stdout)


def test_import_loads_neither_torch_nor_transformers():
    modules = child("""
        import json, sys
        import atrex.integrations.transformers
        print(json.dumps(sorted({name.split(".")[0] for name in sys.modules} & {"numpy", "torch", "transformers"})))
    """)
    assert modules == []


def test_enable_reaches_modules_that_were_not_imported():
    loaded, ours = child("""
        import json, sys
        import atrex.integrations.transformers
        atrex.integrations.transformers.enable()
        names = [f"transformers.models.{model}.modeling_{model}" for model in ("qwen3_next", "qwen3_5", "qwen3_5_moe")]
        loaded = [name in sys.modules for name in names]
        ours = {sys.modules[name].torch_chunk_gated_delta_rule.__module__ for name in names}
        print(json.dumps([loaded, *ours]))
    """)
    assert loaded == [True] * 3
    assert ours == "atrex.integrations._transformers_hooks"


def without(monkeypatch, *absent):
    """As if the modules `absent` were not installed."""
    found = importlib.import_module

    def import_module(name, package=None):
        if name.startswith(absent):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return found(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)


def test_without_transformers(monkeypatch):
    without(monkeypatch, "transformers")
    with pytest.raises(ImportError, match="^transformers is not installed; atrex knows the layers of 5.17$"):
        enable()


def test_a_transformers_from_before_these_models(monkeypatch):
    models = [f"transformers.models.{name}" for name in CONFIGS]
    with monkeypatch.context() as patch:
        without(patch, *models[1:])
        enable()
        assert operators()[OF_A_MODULE:] == OWN[OF_A_MODULE:]
        assert not set(operators()[:OF_A_MODULE]) & set(OWN[:OF_A_MODULE])
        disable()
    without(monkeypatch, *models)
    with pytest.raises(ImportError, match="has none of qwen3_next, qwen3_5, qwen3_5_moe$"):
        enable()


def test_a_dependency_of_transformers_that_is_missing_is_named(monkeypatch):
    def import_module(name, package=None):
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError, match="tokenizers"):
        enable()
