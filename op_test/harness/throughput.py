"""How fast calls bound by memory or by the host are: on a GPU, which copies for comparison, and in turns on a CPU."""

import contextlib
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


@contextlib.contextmanager
def one_thread():
    """Two threads that share a busy machine wait for each other, which measures the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cpu_ratio(mine, theirs, turns=15, count=5):
    """Time of ``mine`` over that of ``theirs`` on one thread of a CPU: medians of turns, each of ``count`` calls."""
    times = {mine: [], theirs: []}
    with torch.inference_mode(), one_thread():
        for _ in range(1 + turns):
            for call, seconds in times.items():
                start = time.perf_counter()
                for _ in range(count):
                    call()
                seconds.append(time.perf_counter() - start)
    medians = [statistics.median(seconds[1:]) for seconds in times.values()]  # the first turn allocates and warms up
    print(f"{medians[0] / count * 1e6:.0f} us a call, {medians[0] / medians[1]:.2f} of the other")
    return medians[0] / medians[1]
