"""How fast a GPU serves calls that are bound by memory or by the host, and how fast it copies."""

import functools
import statistics
import time

import torch

L2_BYTES = 64 << 20


def graph_us(calls, repeats=9):
    """GPU time of one of ``calls``, which together move several times the L2 and so find nothing of theirs in it."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _results = [call() for call in calls]  # held, or later calls would write where earlier ones have
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


@functools.cache
def copy_bandwidth():
    """Bytes read and written a second by a copy of 2 GiB within the GPU: the best of a plain copy and of a kernel."""
    x = torch.zeros(1 << 29, device="cuda")
    y = torch.empty_like(x)
    times = []
    for copy in (lambda: y.copy_(x), lambda: torch.neg(x, out=y)):
        for _ in range(12):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            copy()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
    return 2 * x.numel() * x.itemsize / min(times)


def host_us(call, count=400):
    """Host time of an eager call, launch included: the best of 15 means."""
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return min(times)
