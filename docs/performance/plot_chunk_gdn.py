"""Draws chunk_gdn_sm90.svg from the measured chunk_gdn_sm90.jsonl; needs matplotlib.

A line of the measurements: peer, gate regime (the plot shows "mixed"), shape (q/k heads, v heads, tokens in all,
sequences), CUDA-graph time and, where it was taken, eager time, ms.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "atrex"  # the same file from the same measurements
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
PEERS = {"atrex": "#1f6f54", "flashinfer": "#b5651d", "fla": "#8a8d91"}
NAMES = {
    "atrex": "atrex",
    "flashinfer": "FlashInfer 0.6.18.post1",
    "fla": "FLA 0.6.0, another H200",
}


def main():
    lines = [json.loads(line) for line in (HERE / "chunk_gdn_sm90.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["gates"] == "mixed"]
    times = {(line["peer"], tuple(line["shape"])): line["graph_ms"] for line in lines}
    shapes = [tuple(line["shape"]) for line in lines if line["peer"] == "atrex"]
    figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
    width = 0.8 / len(PEERS)
    for i, (peer, color) in enumerate(PEERS.items()):
        at = [x + (i - (len(PEERS) - 1) / 2) * width for x in range(len(shapes))]
        values = [times.get((peer, shape), 0) for shape in shapes]
        bars = axes.bar(at, values, width, color=color, label=NAMES[peer])
        if peer == "atrex":
            axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=7)
    labels = [f"{H}/{HV}\n{T}" + (f"\nin {N}" if N > 1 else "") for H, HV, T, N in shapes]
    axes.set_xticks(range(len(shapes)), labels, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel("ms, log scale")
    axes.set_xlabel("q/k heads / v heads, tokens, sequences")
    axes.set_title("chunk_gated_delta_rule on an H200, bf16, CUDA-graph replay, L2 flushed", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(HERE / "chunk_gdn_sm90.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
