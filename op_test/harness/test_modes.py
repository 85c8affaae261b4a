"""What jobs ask of a test module: timing, the private command line, and the reading of traces."""

import json
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import atrex
from harness import launches, timing

MODULE = """
    import sys, time
    from harness import modes
    def sleeping(seconds):
        print("noise on stdout")
        return lambda: time.sleep(seconds)
    if __name__ == "__main__":
        sys.exit(modes.main(
            api="chunk_gated_delta_rule", about={"dispatch": "d"}, device="cpu",
            bench={"short": lambda: sleeping(0.002), "long": lambda: sleeping(0.02)},
            profile={"cpu": lambda: sleeping(0)},
        ))
"""


@pytest.fixture
def module(tmp_path):
    (tmp_path / "m.py").write_text(textwrap.dedent(MODULE))
    return [sys.executable, str(tmp_path / "m.py")]


def test_cpu_samples_are_milliseconds_without_the_warm_up():
    calls = []

    def call():
        calls.append(len(calls))
        time.sleep(0.2 if len(calls) <= 1 else 0.01)

    samples = timing.samples(call, "cpu")
    assert len(samples) == len(calls) - 1
    assert all(10 <= sample < 200 for sample in samples)


def test_bench_answers_case_by_case(module):
    asked = "long\nshort\nlong\n"
    done = subprocess.run([*module, "--bench"], input=asked, capture_output=True, text=True, check=True)
    hello, *answers = map(json.loads, done.stdout.splitlines())
    assert hello["cases"] == ["short", "long"] and hello["about"] == {"dispatch": "d"}
    assert hello["contract"]["signature"].startswith("atrex.chunk_gated_delta_rule(q:")
    assert hello["atrex"] == atrex.__file__
    assert [answer["case"] for answer in answers] == ["long", "short", "long"]
    assert min(answers[0]["ms"]) >= 20 > min(answers[1]["ms"]) >= 2
    assert "noise on stdout" in done.stderr


def test_bench_writes_every_case(module, tmp_path):
    subprocess.run([*module, "--bench", "--json", str(tmp_path / "b.json")], check=True)
    short, long = json.loads((tmp_path / "b.json").read_text())["cases"]
    assert (short["case"], long["case"]) == ("short", "long")
    assert 2 <= short["median_ms"] < long["median_ms"] and short["spread"] >= 0


def test_profile_without_any_launch_is_a_problem(module, tmp_path):
    subprocess.run([*module, "--profile", "--json", str(tmp_path / "p.json")], check=True)
    (case,) = json.loads((tmp_path / "p.json").read_text())["cases"]
    assert case["operator"] == [] and case["problems"] == ["the profiler saw no launch of the operator"]


def test_no_mode_is_wrong_usage(module):
    assert subprocess.run(module, capture_output=True).returncode == 2


def event(category, name, start, length=1, thread=1, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": length, "args": args}


def launched(category, name, start, correlation):
    """A launch by the CPU at `start` and what it makes the GPU do later."""
    runtime = event("cuda_runtime", "cudaLaunchKernel", start, correlation=correlation)
    return [runtime, event(category, name, start + 1000, thread=7, correlation=correlation)]


def trace(*groups):
    call = event("user_annotation", "public call", 100, 100)
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, call, *(item for group in groups for item in group)]}


def test_launches_are_the_operators_unless_an_aten_operator_made_them():
    found = launches.classify(
        trace(
            launched("kernel", "before", 50, 1),
            launched("kernel", "atrex_own", 110, 2),
            [event("cpu_op", "aten::fill_", 120, 10)],
            launched("kernel", "vectorized_fill", 125, 3),
            [event("cpu_op", "atrex::operator", 140, 30), event("cpu_op", "aten::empty", 141, 2)],
            launched("gpu_memset", "Memset (Device)", 150, 4),
            launched("kernel", "after", 250, 5),
        )
    )
    assert found == {"operator": ["atrex_own", "Memset (Device)"], "framework": ["vectorized_fill"]}
    assert launches.problems(found) == ["launch Memset (Device) does not start with atrex_"]


def test_launches_of_other_threads_count():
    launch, kernel = launched("kernel", "elementwise", 110, 2)
    found = launches.classify(trace([event("cpu_op", "aten::fill_", 105, 20), {**launch, "tid": 5}, kernel]))
    assert found == {"operator": ["elementwise"], "framework": []}


def test_launch_of_unknown_origin_is_the_operators():
    lost = launched("kernel", "elementwise", 110, 2)[1:]
    assert launches.classify(trace(lost))["operator"] == ["elementwise"]


def test_own_names_alone_pass():
    assert launches.problems({"operator": ["atrex_a", "atrex_b"], "framework": ["vectorized_fill"]}) == []


def test_trace_of_this_torch_has_the_range_of_the_call():
    """The format is torch's: a trace without the range would make every launch vanish."""
    with pytest.raises(ValueError, match="0 ranges"):
        launches.classify({"traceEvents": []})
    assert launches.observe(lambda: torch.ones(3).add_(1)) == {"operator": [], "framework": []}
