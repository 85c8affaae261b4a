"""How fast calls bound by memory or by the host are: on a GPU, which copies for comparison, and in turns on a CPU."""

import contextlib
import functools
import statistics
import time

import torch

_L2_BYTES = 64 << 20
# Clocks of a GPU that has idled are low, and what is measured follows work on the host alone.
_WARM_UP_S = 0.05


def _event_us(run, repeats):
    """GPU times of ``run``, which enqueues work: the GPU is warm, and never waits for the host within one of them."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_UP_S:
        run()
        torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for _ in range(3):  # keeps the GPU busy until the first start and what follows it are enqueued
        run()
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def cold_sets(size, most, least=4):
    """How many sets of tensors of ``size`` bytes calls take in turns, so that none finds its own in the L2."""
    return max(least, min(most, 4 * _L2_BYTES // size))


def graph_us(calls, repeats=9):
    """GPU time of one of ``calls``, which together move several times the L2 and so find nothing of theirs in it."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _results = [call() for call in calls]  # held, or later calls would write where earlier ones have
    return statistics.median(_event_us(graph.replay, repeats)) / len(calls)


@functools.cache
def copy_bandwidth():
    """Bytes read and written a second by a copy of 2 GiB within the GPU: the best of a plain copy and of a kernel."""
    x = torch.zeros(1 << 29, device="cuda")
    y = torch.empty_like(x)
    times = [us for copy in (lambda: y.copy_(x), lambda: torch.neg(x, out=y)) for us in _event_us(copy, 12)]
    return 2 * x.numel() * x.itemsize / (min(times) * 1e-6)


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
