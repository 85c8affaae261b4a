"""The job's parts, each shown to tell good from bad evidence."""

import contextlib
import json
import os
import pathlib
import platform
import sys
import time
import types

import pytest
from runfiles import Runfiles

sys.path.insert(0, Runfiles.Create().Rlocation("_main/tools/job"))
from job import bench, functional, machine, payload, plot, process, profiler, report  # noqa: E402


def fake_worker(*times):
    """A measurement that gives these times in turn, the last one forever."""
    left = list(times)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


@pytest.mark.parametrize(
    "candidate, verdict", [(1.0, "pass"), (0.5, "pass"), (1.0499, "pass"), (1.0501, "slower"), (2.0, "slower")]
)
def test_parity_allows_five_percent(candidate, verdict):
    result = bench.compare("c", {"baseline": fake_worker(1.0), "candidate": fake_worker(candidate)})
    assert (result["verdict"], result["ratio"], result["attempts"]) == (verdict, candidate, 1)


def test_unstable_case_is_measured_again_and_never_passes():
    alternating = iter([1.0, 1.4] * 1000)
    result = bench.compare("c", {"baseline": fake_worker(1.0), "candidate": lambda: next(alternating)})
    assert (result["verdict"], result["attempts"]) == ("unstable", bench.ATTEMPTS)
    first = [1.0, 1.4] * (bench.ROUNDS // 2)
    result = bench.compare("c", {"baseline": fake_worker(1.0), "candidate": fake_worker(*first, 1.0)})
    assert (result["verdict"], result["attempts"]) == ("pass", 2)


def test_roles_take_turns_and_go_first_equally_often():
    order = []
    bench.rounds({role: lambda role=role: order.append(role) or 1.0 for role in ("baseline", "candidate")})
    firsts = order[::2]
    assert len(order) == 2 * bench.ROUNDS and firsts.count("baseline") == firsts.count("candidate")
    assert all(set(order[i : i + 2]) == {"baseline", "candidate"} for i in range(0, len(order), 2))


def junit(*cases):
    return f'<testsuites><testsuite hostname="h">{"".join(cases)}</testsuite></testsuites>'


PASSED = '<testcase classname="m" name="a"/>'


@pytest.mark.parametrize(
    "cases, status, words",
    [
        (
            [PASSED, '<testcase classname="m" name="b"><failure message="no"/></testcase>'],
            "status 1",
            "m::b: failure: no",
        ),
        ([PASSED, '<testcase classname="m" name="b"><skipped message="x"/></testcase>'], "status 0", "skipped"),
        ([PASSED, '<testcase classname="m" name="b"><error/></testcase>'], "status 1", "error"),
        ([], "status 5", "pytest ended with status 5"),
        ([], "status 0", "no test ran"),
        ([PASSED], "a timeout after 1 s", "a timeout"),
    ],
)
def test_functional_gate_fails(cases, status, words):
    result = functional.judge(junit(*cases), status)
    assert not result["ok"] and words in " ".join(result["failures"])


def test_functional_gate_passes():
    assert functional.judge(junit(PASSED, PASSED), "status 0") == {"ok": True, "passed": 2, "failures": []}


def test_results_name_no_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(platform, "node", lambda: "vm")
    text = functional.without_host(junit(f'<testcase name="on vm kvm {tmp_path}/x"/>'))
    cleaned = report.public(text, tmp_path)
    assert cleaned == '<testsuites><testsuite><testcase name="on HOST kvm JOB/x" /></testsuite></testsuites>'


def evidence(*cases):
    return {"profiler": "p", "cases": [{"case": "c", "framework": [], "problems": [], **case} for case in cases]}


@pytest.mark.parametrize(
    "cases", [[], [{"operator": []}], [{"operator": ["atrex_a"]}, {"operator": ["b"], "problems": ["launch b ..."]}]]
)
def test_profiler_gate_fails(cases):
    result = profiler.judge(evidence(*cases))
    assert not result["ok"] and result["problems"]


def test_profiler_gate_passes():
    assert profiler.judge(evidence({"operator": ["atrex_a"]}))["ok"]


DEVICE = """
from types import SimpleNamespace
class torch:
    __version__ = "9"
    device = lambda *where: SimpleNamespace(type=where[0])
    class cuda:
        device_count = lambda: {count}
        get_device_name = lambda device: "NVIDIA X"
def device_target(device):
    return SimpleNamespace(vendor="{vendor}", arch="{arch}")
"""


@pytest.mark.parametrize(
    "target, vendor, arch, matches",
    [
        ("nvidia/chunk_gdn/sm90", "nvidia", "sm90", True),
        ("nvidia/chunk_gdn/sm90", "nvidia", "sm120", False),
        ("nvidia/chunk_gdn/sm90", "ppu", "sm90", False),
        ("fallback/chunk_gdn", "nvidia", "sm120", True),
    ],
)
def test_probe_asks_the_given_detection(target, vendor, arch, matches):
    source = "print('Welcome!')\n" + DEVICE.format(count=1, vendor=vendor, arch=arch)
    found = machine.probe([sys.executable, "-"], source, 60)
    assert machine.matches(target, found) is matches
    assert machine.describe(found) == f"{vendor}/{arch} (NVIDIA X)"


@pytest.mark.parametrize(
    "source, words", [("raise SystemExit('no torch')", "no torch"), ("import time; time.sleep(60)", "within 1 s")]
)
def test_probe_that_does_not_answer_is_an_error(source, words):
    with pytest.raises(payload.JobError, match=words):
        machine.probe([sys.executable, "-"], source, 1)


def test_timeout_ends_a_child_with_all_it_started(tmp_path):
    pid_file = tmp_path / "pid"
    command = ["/bin/sh", "-c", f"sleep 60 & echo $! >{pid_file}; wait"]
    assert process.run(command, env=dict(os.environ), limit=2) == "a timeout after 2 s"
    wait_until(lambda: not alive(int(pid_file.read_text())))


def alive(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not after {seconds} s"
        time.sleep(0.05)


def worker_payload(tmp_path, module):
    (tmp_path / "runfiles/candidate").mkdir(parents=True)
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runfiles/m.py").write_text(module)
    return payload.Payload({"module": "m.py"}, tmp_path), tmp_path / "runfiles/candidate"


@pytest.mark.parametrize(
    "module, words",
    [
        ("pass", "ended without an answer"),
        ("""print('{"atrex": "/elsewhere/atrex/__init__.py", "cases": []}')""", "imported atrex from /elsewhere"),
    ],
)
def test_worker_that_measures_nothing_or_something_else_is_an_error(tmp_path, module, words):
    job, tree = worker_payload(tmp_path, module)
    with pytest.raises(payload.JobError, match=words), bench.worker(job, "candidate", tree):
        pass


def test_benchmark_without_cases_fails(tmp_path):
    hello = {"atrex": str(tmp_path / "runfiles/candidate/atrex/__init__.py"), "cases": [], "contract": {}, "about": {}}
    job, tree = worker_payload(tmp_path, f"print({json.dumps(hello)!r})\ninput()")
    assert not bench.run(job, tree, print)["ok"]
    assert not bench.parity(job, {"baseline": tree, "candidate": tree}, print)["ok"]


def full_report(gates):
    machine_facts = {"vendor": "nvidia", "arch": "sm90", "name": "NVIDIA X", "torch": "9", "python": "3.12"}
    return {
        "job": "j1", "ok": False, "target": "nvidia/scan/sm90", "revision": "r1", "baseline": "r0", "started": "now",
        "seconds": 1.0, "machine": machine_facts, "gates": gates, "plot": "latency.png",
    }  # fmt: skip


def test_report_holds_what_a_hand_off_needs():
    about = {"dispatch": "D", "compile": "C", "limits": "L"}
    measured = {"contract": {"signature": "atrex.f(x)", "summary": "Sums.\nMore."}, "about": about}
    bench_case = {"case": "long", "median_ms": 1.25, "spread": 0.1, "stable": False}
    gates = {
        "tests": {"ok": False, "passed": 3, "failures": ["m::b: failure: no"]},
        "profiler": profiler.judge(evidence({"operator": ["atrex_a", "atrex_a"], "framework": ["x"]})),
        "benchmark": {"ok": True, "cases": [bench_case], **measured},
    }
    text = report.markdown(full_report(gates))
    for words in (
        "FAIL", "j1", "r1", "r0", "nvidia/sm90, NVIDIA X", "`atrex.f(x)`. Sums.", "fallback: D", "trigger: C",
        "Limits: L", "3 passed, 1 failed", "m::b", "`atrex_a`; the framework's: 1",
        "| long | 1.2500 | 10.0% | unstable |",
        "(latency.png)",
    ):  # fmt: skip
        assert words in text, words


def test_terminal_names_what_failed():
    gates = {
        "tests": {"ok": False, "passed": 3, "failures": ["m::b: failure: no"]},
        "profiler": {"ok": False, "problems": ["c: an empty list of launches"]},
        "benchmark": {"ok": True, "cases": []},
    }
    assert report.verdicts(gates) == [
        "tests: FAIL", "  m::b: failure: no", "profiler: FAIL", "  c: an empty list of launches", "benchmark: pass",
    ]  # fmt: skip


def test_report_of_parity_names_ratio_and_verdict(tmp_path):
    case = bench.compare("long", {"baseline": fake_worker(1.0), "candidate": fake_worker(2.0)})
    gate = {"ok": False, "cases": [case], "max_ratio": 1.05, "max_spread": 0.03}
    result = full_report({"parity": gate})
    report.write(result, tmp_path)
    assert "| long | 1.0000 | 2.0000 | 2.000 | 0.0% | slower |" in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text()) == result
    assert "FAIL" in report.markdown(full_report({"parity": {"ok": False, "cases": [], "error": "no baseline"}}))


def test_plot_shows_each_case_and_role(monkeypatch, tmp_path):
    drawn = []
    font = types.SimpleNamespace(getlength=len)
    pen = types.SimpleNamespace(
        text=lambda at, text, *_: drawn.append(text), rectangle=lambda box, colour: drawn.append((box, colour))
    )
    image = types.SimpleNamespace(save=lambda file: file.write_text(""))
    pil = types.SimpleNamespace(
        Image=types.SimpleNamespace(new=lambda *_: image),
        ImageDraw=types.SimpleNamespace(Draw=lambda _: pen),
        ImageFont=types.SimpleNamespace(load_default=lambda _: font),
    )
    monkeypatch.setitem(sys.modules, "PIL", pil)
    plot.draw("t", [{"case": "c", "baseline_ms": 1.0, "candidate_ms": 2.0}], tmp_path / "x.png")
    boxes = [item[0] for item in drawn if isinstance(item, tuple)]
    widths = [box[2] - box[0] for box in boxes]
    assert {"t", "c", "1 ms", "2 ms"} <= {item for item in drawn if isinstance(item, str)}
    assert widths[1] == 2 * widths[0]
