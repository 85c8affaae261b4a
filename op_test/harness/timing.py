"""How long a call takes, in milliseconds: the samples of one measurement, warm-up excluded."""

import time

import torch

_WARM_UP = {"cuda": 3, "cpu": 1}
_GPU_SAMPLES, _CPU_SAMPLES = 50, 3
_RAMP_UP_S = 0.2  # the clocks of an idle GPU are low, and it idles while another process measures
_FLUSH_BYTES = 512 << 20  # several times the last-level cache of any GPU here


def samples(call, device):
    """``call`` measured on ``device``: replays of a CUDA graph with a cold L2, or plain calls on a CPU."""
    for _ in range(_WARM_UP[device]):
        call()
    return _graph_replays(call) if device == "cuda" else _calls(call)


def _calls(call):
    times = []
    for _ in range(_CPU_SAMPLES):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def _graph_replays(call):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_GPU_SAMPLES)]
    begin = time.perf_counter()
    while time.perf_counter() - begin < _RAMP_UP_S:
        graph.replay()
        torch.cuda.synchronize()
    for start, end in events:
        flush.zero_()  # keeps the GPU busy meanwhile: the replay is enqueued before the start is reached
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
