"""The private command line of a test module, for jobs that run it in child processes.

``python test_<operator>_<arch>.py``

- ``--bench``: one JSON line about the module, then for each case named on a line of stdin one JSON line with its
  samples. A job that compares two packages starts two such processes and takes turns.
- ``--bench --json FILE``: every case once; median and spread.
- ``--profile [--json FILE]``: what each case launches on the GPU (launches.py); without a file on the last line of
  stdout.
"""

import argparse
import inspect
import json
import os
import pathlib
import statistics
import sys

import atrex

from . import launches, timing


def main(*, api, about, device, bench, profile=None):
    """Serve the command line; returns the exit status.

    Args:
        api: name of the public function that the cases call.
        about: ``dispatch``, ``compile`` and ``limits`` in a sentence each, for the hand-off report.
        device: "cuda" or "cpu".
        bench: name of each production case to a function that makes its inputs and returns the call to measure.
        profile: the same for what the profiler shall see; None without kernels.
    """
    parser = argparse.ArgumentParser(description="Private modes of a test module; run it with pytest to test.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--bench", action="store_true")
    mode.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if options.profile:
        cases = [{"case": name, **launches.observe(make())} for name, make in (profile or {}).items()]
        for case in cases:
            case["problems"] = launches.problems(case)
        evidence = json.dumps({"profiler": "torch.profiler", "cases": cases})
        print(evidence) if options.json is None else options.json.write_text(evidence)
    elif options.json is not None:
        cases = [_summary(name, timing.samples(make(), device)) for name, make in bench.items()]
        options.json.write_text(json.dumps({"cases": cases}))
    else:
        function = getattr(atrex, api)
        contract = {"signature": f"atrex.{api}{inspect.signature(function)}", "summary": inspect.getdoc(function)}
        _serve({"atrex": atrex.__file__, "contract": contract, "about": about}, bench, device)
    return 0


def _summary(name, samples):
    first, median, third = statistics.quantiles(samples, n=4)
    return {"case": name, "median_ms": median, "spread": (third - first) / median}


def _serve(hello, bench, device):
    # Whatever a library prints goes to stderr: this pipe speaks JSON lines alone.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        print(json.dumps({**hello, "cases": list(bench)}), file=out, flush=True)
        name, call = None, None
        for line in sys.stdin:
            if line.strip() != name:
                call = None  # frees the inputs of the case before
                name = line.strip()
                call = bench[name]()
            print(json.dumps({"case": name, "ms": timing.samples(call, device)}), file=out, flush=True)
