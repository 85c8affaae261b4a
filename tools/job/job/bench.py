"""Latencies: workers that measure on request, rounds in alternating order, medians, spreads, and the parity gate."""

import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from . import process
from .payload import JobError, Payload, environment

ROUNDS = 8  # even, so that each worker goes first equally often
MAX_RATIO = 1.05
MAX_SPREAD = 0.03
ATTEMPTS = 3
_LIMIT_S = 600


class Worker:
    """A child that runs the test file's ``--bench`` on the package of one tree."""

    def __init__(self, role: str, child: subprocess.Popen, tree: pathlib.Path):
        self.role, self._child = role, child
        self.hello = self._read()
        imported = pathlib.Path(self.hello["atrex"]).resolve()
        if tree.resolve() not in imported.parents:
            raise JobError(f"the {role} imported atrex from {imported}, expected the wheel installed in {tree}")

    def measure(self, case: str) -> float:
        """The median of one measurement, ms."""
        with contextlib.suppress(BrokenPipeError):
            print(case, file=self._child.stdin, flush=True)
        return statistics.median(self._read()["ms"])

    def _read(self) -> dict:
        timer = threading.Timer(_LIMIT_S, process.stop, [self._child])
        timer.start()
        line = self._child.stdout.readline()
        timer.cancel()
        if not line:
            raise JobError(f"the {self.role}'s benchmark ended without an answer, see its messages above")
        return json.loads(line)


@contextlib.contextmanager
def worker(payload: Payload, role: str, tree: pathlib.Path) -> Iterator[Worker]:
    command = [sys.executable, str(payload.module), "--bench"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with process.start(command, env=environment(payload, tree), **pipes) as child:
        yield Worker(role, child, tree)


def summary(medians: list[float]) -> dict:
    """Median and spread, which is the distance between the quartiles by the median."""
    first, median, third = statistics.quantiles(medians, n=4)
    return {"median_ms": median, "spread": (third - first) / median}


def rounds(measures: dict[str, Callable[[], float]]) -> dict[str, dict]:
    """Each role's summary after ROUNDS turns; who goes first changes from turn to turn."""
    found: dict[str, list[float]] = {role: [] for role in measures}
    for turn in range(ROUNDS):
        for role in list(measures)[:: -1 if turn % 2 else 1]:
            found[role].append(measures[role]())
    return {role: summary(medians) for role, medians in found.items()}


def run(payload: Payload, tree: pathlib.Path, say: Callable[[str], None]) -> dict:
    """The latency of every case of the candidate. Bounds on it are the test file's; here it is evidence."""
    results = []
    with worker(payload, "candidate", tree) as measured:
        cases = measured.hello["cases"]
        for case in cases:
            result = rounds({"candidate": lambda case=case: measured.measure(case)})["candidate"]
            results.append({"case": case, **result, "stable": result["spread"] <= MAX_SPREAD})
            say(f"{case}: {result['median_ms']:.4g} ms, spread {result['spread']:.1%}")
    return {
        "ok": bool(cases),
        "cases": results,
        "contract": measured.hello["contract"],
        "about": measured.hello["about"],
    }


def compare(case: str, measures: dict[str, Callable[[], float]]) -> dict:
    """One case of the parity gate. Too wide a spread is measured again, and never passes."""
    attempts, spread = 0, float("inf")
    while spread > MAX_SPREAD and attempts < ATTEMPTS:
        found = rounds(measures)
        spread = max(result["spread"] for result in found.values())
        attempts += 1
    baseline, candidate = found["baseline"]["median_ms"], found["candidate"]["median_ms"]
    ratio = candidate / baseline
    verdict = "unstable" if spread > MAX_SPREAD else "slower" if ratio > MAX_RATIO else "pass"
    return {
        "case": case, "baseline_ms": baseline, "candidate_ms": candidate, "ratio": ratio, "spread": spread,
        "attempts": attempts, "verdict": verdict,
    }  # fmt: skip


def parity(payload: Payload, trees: dict[str, pathlib.Path], say: Callable[[str], None]) -> dict:
    """The candidate's own test file on both packages, in two processes that take turns."""
    results = []
    with contextlib.ExitStack() as stack:
        workers = {role: stack.enter_context(worker(payload, role, tree)) for role, tree in trees.items()}
        hello = workers["candidate"].hello
        for case in hello["cases"]:
            result = compare(case, {role: lambda w=w, case=case: w.measure(case) for role, w in workers.items()})
            results.append(result)
            say("{case}: {baseline_ms:.4g} -> {candidate_ms:.4g} ms, ratio {ratio:.3f}, {verdict}".format(**result))
    ok = bool(results) and all(result["verdict"] == "pass" for result in results)
    return {
        "ok": ok, "cases": results, "max_ratio": MAX_RATIO, "max_spread": MAX_SPREAD, "rounds": ROUNDS,
        "contract": hello["contract"], "about": hello["about"],
    }  # fmt: skip
