"""What a public call launches on the GPU, and whether all that it owns is named atrex_*.

Read from the trace of torch.profiler. A launch that PyTorch made for one of its own operators (``aten::...``) is the
framework's; every other one between the call's start and end is the operator's own: kernels, fills and copies.
"""

import json
import pathlib
import tempfile

import torch

PREFIX = "atrex_"
_RANGE = "public call"
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHING = {"cuda_runtime", "cuda_driver", "hip_runtime"}


def observe(call):
    """The launches of ``call()`` as ``{"operator": [names], "framework": [names]}``, in launch order.

    The second of two traces: the first starts the profiler's own machinery, which may lose launches.
    """
    call()
    for _ in range(2):
        trace = _trace(call)
    return classify(trace)


def _trace(call):
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        with torch.profiler.record_function(_RANGE):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text())


def classify(trace):
    """The launches inside the range of the public call, from a trace as ``export_chrome_trace`` writes it."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    ranges = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == _RANGE]
    if len(ranges) != 1:
        raise ValueError(f"the trace has {len(ranges)} ranges named {_RANGE!r}, expected one")
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    launching = {event["args"]["correlation"]: event for event in events if event.get("cat") in _LAUNCHING}
    found = {"operator": [], "framework": []}
    for event in sorted((event for event in events if event.get("cat") in _ON_GPU), key=lambda event: event["ts"]):
        launch = launching.get(event["args"].get("correlation"))
        if launch is not None and not _during(ranges[0], launch):
            continue
        # Without a known launch it counts as the operator's: the strict side.
        around = [operator for operator in operators if launch is not None and _encloses(operator, launch)]
        innermost = max(around, key=lambda operator: operator["ts"], default=None)
        framework = innermost is not None and innermost["name"].startswith("aten::")
        found["framework" if framework else "operator"].append(event["name"])
    return found


def _during(outer, inner):
    return outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]


def _encloses(outer, inner):
    return (outer["pid"], outer["tid"]) == (inner["pid"], inner["tid"]) and _during(outer, inner)


def problems(found):
    """One sentence for each reason why ``observe``'s result does not pass."""
    if not found["operator"]:
        return ["the profiler saw no launch of the operator"]
    return [
        f"launch {name} does not start with {PREFIX}"
        for name in dict.fromkeys(found["operator"])
        if not name.startswith(PREFIX)
    ]
