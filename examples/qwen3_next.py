"""HF transformers' Qwen3-Next with `atrex` in its linear attention.

One period of Qwen3-Next (three linear-attention layers, one full-attention layer) with random weights reads the
opening of "Alice's Adventures in Wonderland" (Lewis Carroll, 1865, in the public domain), a byte a token, and writes on
greedily: once with transformers' own gated delta rules, once with those of `atrex`, which
`atrex.integrations.transformers` puts in their place. The example prints which implementation served, how far the
logits are apart, how many of the written tokens are the same, and both times. On a GPU the layers have the sizes of
Qwen3-Next-80B and compute in bfloat16; on a CPU they have a quarter of the heads and of the width, in float32.

    python qwen3_next.py [--device cpu|cuda]

Exits with 1 if the logits are too far apart, if tokens that were written in float32 differ, or if a linear-attention
layer was not served by `atrex`.
"""

import argparse
import collections
import contextlib
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
PROMPT, WRITTEN = 100, 16  # tokens of the text that writing starts from, and that it adds


class Setup(NamedTuple):
    """What a device can do in a few seconds."""

    dtype: torch.dtype
    width: float  # 1 is Qwen3-Next-80B
    tokens: int | None  # how much of the text; None is all of it
    # Accepted difference of the logits, as a part of the largest one. The operators add up in different orders, and in
    # bfloat16 each layer rounds what it hands on: that alone takes transformers 2e-2 away from its float32 logits.
    bound: float


SETUPS = {
    "cpu": Setup(torch.float32, width=1 / 4, tokens=1000, bound=1e-5),
    "cuda": Setup(torch.bfloat16, width=1, tokens=None, bound=4e-2),
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
def recorded(name):
    """The calls that reach the public operator `name`, and go on to it."""
    operator = inspect.unwrap(getattr(atrex, name))  # before its first use a proxy stands there
    with mock.patch.object(atrex, name, wraps=operator) as record:
        yield record.call_args_list


def implementation(call):
    """What serves the call of a layer, in words."""
    with torch.inference_mode():
        answer = atrex.can_use_chunk_gated_delta_rule(*call.args, **call.kwargs)
    return f"kernel {answer.target}" if answer else f"fallback, because {answer.reason}"


def compare_times(label, own, ours, device):
    """Prints a line of the table: the medians of both functions, called in turns; a dot shows each round."""
    print(f"{label} ", end="", flush=True)
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

    expected = read(model, ids)
    with enabled(), recorded("chunk_gated_delta_rule") as calls:
        logits = read(model, ids)
    for served, count in collections.Counter(map(implementation, calls)).items():
        print(f"served  {count} of {layers} layers by atrex: {served}")
    difference = ((logits - expected).abs().max() / expected.abs().max()).item()
    print(f"logits  at most {difference:.1e} of the largest apart, accepted {setup.bound:.0e}", flush=True)
    expected = write(model, ids)
    with enabled(), recorded("fused_recurrent_gated_delta_rule") as steps:
        same = (write(model, ids) == expected).sum().item()
    print(f"tokens  {same} of {WRITTEN} written ones are the same", flush=True)
    # The first written token comes of reading.
    if len(calls) != layers or len(steps) != layers * (WRITTEN - 1):
        print(
            f"FAILED: atrex served {len(calls)} of {layers} layers in reading and {len(steps)} of "
            f"{layers * (WRITTEN - 1)} in writing",
            file=sys.stderr,
        )
        return 1
    if not difference <= setup.bound:  # so that NaN fails too
        print("FAILED: the logits are too far apart", file=sys.stderr)
        return 1
    if setup.dtype is torch.float32 and same != WRITTEN:  # in bfloat16 two likely tokens may be closer than the bound
        print("FAILED: the written tokens differ", file=sys.stderr)
        return 1

    def rules(operator):
        for call in calls:
            operator(*call.args, **call.kwargs)

    print(f"\n{f'median of {REPEATS} runs':32}{'transformers':>15} {'atrex':>12}")
    own = modeling_qwen3_next.torch_chunk_gated_delta_rule
    for label, before, after in (
        ("whole forward pass        ", lambda: read(model, ids), enabled()(lambda: read(model, ids))),
        ("its gated delta rules only", lambda: rules(own), lambda: rules(atrex.chunk_gated_delta_rule)),
        (f"reading {PROMPT}, writing {WRITTEN}   ", lambda: write(model, ids), enabled()(lambda: write(model, ids))),
    ):
        compare_times(label, before, after, device)

    return 0


if __name__ == "__main__":
    sys.exit(main())
