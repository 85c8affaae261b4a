"""HF transformers' Qwen3-Next with `atrex` in its linear attention.

One period of Qwen3-Next (three linear-attention layers, one full-attention layer) with random weights reads the
opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, in the public domain), a byte a token, and writes on
greedily: once with transformers' own convolution, gated delta rules and gated norm, once with those of `atrex`, which
`atrex.integrations.transformers` puts in their place. The example prints which implementation served each operator, how
far the logits are apart, how many of the written tokens are the same, and the times of both, of the model and of one
linear-attention layer. On a GPU the layers have the sizes of Qwen3-Next-80B and compute in bfloat16; on a CPU they have
a quarter of the heads and of the width, in float32.

    python qwen3_next.py [--device cpu|cuda]

Exits with 1 if the logits are too far apart, if tokens that were written in float32 differ, or if an operator of a
linear-attention layer was not served by `atrex`. Needs PyTorch, transformers 5.17 and the wheel of `atrex`, no more.
"""

import argparse
import collections
import contextlib
import importlib.util
import inspect
import math
import pathlib
import statistics
import sys
import time
from typing import NamedTuple
from unittest import mock

import torch
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next

import atrex
from atrex.integrations.transformers import enabled

TEXT = pathlib.Path(__file__).with_name("alice.txt")
REPEATS = 3
STEPS = 20  # decode steps in a row, for one is too short to be timed
PROMPT, WRITTEN = 100, 16  # tokens of the text that writing starts from, and that it adds
# How often a linear-attention layer calls each operator while the model reads, and while it reads and writes.
READING = {"causal_conv1d_fn": 1, "chunk_gated_delta_rule": 1, "gated_rms_norm": 1}
WRITING = {  # the first written token comes of reading
    "causal_conv1d_fn": 1,
    "causal_conv1d_update": WRITTEN - 1,
    "chunk_gated_delta_rule": 1,
    "fused_recurrent_gated_delta_rule": WRITTEN - 1,
    "gated_rms_norm": WRITTEN,
}


class Setup(NamedTuple):
    """What a device can do in a few seconds."""

    dtype: torch.dtype
    width: float  # 1 is Qwen3-Next-80B
    tokens: int | None  # how much of the text; None is all of it
    layer_tokens: int  # that one linear-attention layer reads for its time
    batches: tuple[int, ...]  # sequences in its decode steps
    # Accepted difference of the logits, as a part of the largest one. The operators add up in different orders, and in
    # bfloat16 each layer rounds what it hands on: that alone takes transformers 2e-2 away from its float32 logits.
    bound: float


SETUPS = {
    "cpu": Setup(torch.float32, width=1 / 4, tokens=1000, layer_tokens=1000, batches=(1,), bound=1e-5),
    "cuda": Setup(torch.bfloat16, width=1, tokens=None, layer_tokens=8192, batches=(1, 32, 128), bound=4e-2),
}


def build_model(device, dtype, width):
    """One period of Qwen3-Next, `width` times as wide, with random weights; the linear heads keep K = V = 128."""
    config = transformers.Qwen3NextConfig(
        vocab_size=256,
        num_hidden_layers=4,
        hidden_size=int(2048 * width),
        intermediate_size=int(5120 * width),
        num_attention_heads=int(16 * width),
        num_key_value_heads=max(1, int(2 * width)),
        linear_num_key_heads=int(16 * width),
        linear_num_value_heads=int(32 * width),
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        # Dense layers instead of experts: where a rounding difference tips a router's choice, logits jump.
        mlp_only_layers=[0, 1, 2, 3],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for layer in model.modules():
            if isinstance(layer, modeling_qwen3_next.Qwen3NextGatedDeltaNet):
                # As for training, time steps log-uniform in [0.001, 0.1]. With what transformers puts here until a
                # checkpoint is loaded, a state forgets within a few tokens, and most of the operator is not put to use.
                steps = torch.empty(layer.num_v_heads).uniform_(math.log(0.001), math.log(0.1)).exp()
                layer.dt_bias.data.copy_(steps.expm1().log())  # the inverse of softplus
    return model


def read(model, ids, **inputs):
    """The logits of `ids`."""
    with torch.inference_mode():
        return model(ids, **inputs).logits.float()


def write(model, ids):
    """What the model writes after the start of `ids`, always its likeliest token."""
    with torch.inference_mode():
        text = model.generate(ids[:, :PROMPT], max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False)
    return text[:, PROMPT:]


@contextlib.contextmanager
def recorded(names):
    """By name, the calls that reach public operators, and go on to them."""
    with contextlib.ExitStack() as stack:
        calls = {}
        for name in names:
            operator = inspect.unwrap(getattr(atrex, name))  # before its first use a proxy stands there
            calls[name] = stack.enter_context(mock.patch.object(atrex, name, wraps=operator)).call_args_list
        yield calls


def served(what, calls, expected):
    """Prints what served the calls of each operator; whether there were as many as ``expected``."""
    for name, made in calls.items():
        can_use = getattr(atrex, f"can_use_{name}")
        with torch.inference_mode():
            answers = collections.Counter(can_use(*call.args, **call.kwargs) for call in made)
        by = [f"kernel {answer.target}" if answer else f"fallback, because {answer.reason}" for answer in answers]
        print(f"served  {what}: {len(made)} of {expected[name]} {name}: {'; '.join(by)}")
    missing = [name for name, made in calls.items() if len(made) != expected[name]]
    if missing:
        print(f"FAILED: in {what} atrex did not serve each call of {', '.join(missing)}", file=sys.stderr)
    return not missing


def compare_times(label, own, ours, device):
    """Prints a line of the table: the medians of both functions, called in turns; a dot shows each round."""
    print(f"{label:40} ", end="", flush=True)
    rounds = []
    for _ in range(1 + REPEATS):
        seconds = []
        for run in (own, ours):
            start = time.perf_counter()
            with torch.inference_mode():
                run()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        rounds.append(seconds)
        print(".", end="", flush=True)
    before, after = (statistics.median(column) for column in zip(*rounds[1:], strict=True))  # the first one warms up
    print(f" {before * 1e3:12.2f} ms {after * 1e3:9.2f} ms {before / after:7.2f}x", flush=True)


def decode_steps(model, batch, device, dtype):
    """A function that does STEPS decode steps of one linear-attention layer, for ``batch`` sequences with a cache."""
    layer, cache = model.model.layers[0].linear_attn, transformers.DynamicCache(config=model.config)
    hidden = torch.randn(batch, 8, model.config.hidden_size, device=device, dtype=dtype)
    with torch.inference_mode():
        layer(hidden, cache)

    def steps():
        for _ in range(STEPS):
            layer(hidden[:, :1], cache)

    return steps


def main(arguments=None):
    """Runs the example; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=SETUPS, default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args(arguments).device
    setup = SETUPS[device]
    transformers.logging.set_verbosity_error()  # it would warn that its own operators are the slow ones

    model = build_model(device, setup.dtype, setup.width)
    text = TEXT.read_bytes()[: setup.tokens]
    ids = torch.tensor([list(text)], device=device)
    config = model.config
    layers = config.layer_types.count("linear_attention")
    place = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    heads = f"{config.linear_num_key_heads} q/k and {config.linear_num_value_heads} v heads of 128"
    print(f"model   Qwen3-Next, {layers} linear-attention layers ({heads}), 1 full-attention layer")
    print(f"text    {text.partition(b' by ')[0].decode()} ... ({len(text)} bytes, a token each)")
    print(f"device  {place}, {str(setup.dtype).removeprefix('torch.')}", flush=True)

    found = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name)]
    print(f"own     transformers' operators, which use {' and '.join(found) or 'PyTorch alone'}", flush=True)

    expected = read(model, ids)
    with enabled(), recorded(READING) as calls:
        logits = read(model, ids)
    complete = served("reading", calls, {name: count * layers for name, count in READING.items()})
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    print(f"logits  at most {difference:.1e} of the largest apart, accepted {setup.bound:.0e}", flush=True)
    expected = write(model, ids)
    with enabled(), recorded(WRITING) as calls:
        same = (write(model, ids) == expected).sum().item()
    complete &= served("writing", calls, {name: count * layers for name, count in WRITING.items()})
    print(f"tokens  {same} of {WRITTEN} written ones are the same", flush=True)
    if not complete:
        return 1
    if not difference <= setup.bound:  # so that NaN fails too
        print("FAILED: the logits are too far apart", file=sys.stderr)
        return 1
    if setup.dtype is torch.float32 and same != WRITTEN:  # in bfloat16 two likely tokens may be closer than the bound
        print("FAILED: the written tokens differ", file=sys.stderr)
        return 1

    layer = model.model.layers[0].linear_attn
    hidden = torch.randn(1, setup.layer_tokens, config.hidden_size, device=device, dtype=setup.dtype)
    cases = {
        f"model: reading {ids.shape[1]}": lambda: read(model, ids),
        f"model: reading {PROMPT}, writing {WRITTEN}": lambda: write(model, ids),
        f"linear layer: reading {setup.layer_tokens}": lambda: layer(hidden),
    }
    for batch in setup.batches:
        steps = decode_steps(model, batch, device, setup.dtype)
        cases[f"linear layer: {STEPS} decode steps, batch {batch}"] = steps
    print(f"\n{f'median of {REPEATS} runs':{41 + 1 + REPEATS}} {'transformers':>15} {'atrex':>12}")
    for label, case in cases.items():
        compare_times(label, case, enabled()(case), device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
