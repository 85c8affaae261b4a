"""``python3 <name>_job.pyz --report DIR``: see ``main``."""

import argparse
import datetime
import pathlib
import signal
import sys
import tempfile
import time
import uuid
import zipfile

from . import bench, functional, machine, payload, plot, profiler, report

_PROBE_LIMIT_S = 300
GATES_HOLD, GATE_FAILED, WRONG_MACHINE = 0, 1, 3


def main(archive: pathlib.Path) -> int:
    """Runs the gates of the job's target on this machine and writes the report.

    Exit status: 0 all gates hold, 1 a gate failed, 2 wrong usage, 3 not the target's hardware.
    """
    parser = argparse.ArgumentParser(prog=archive.name, description="The gates of one operator target.")
    parser.add_argument("--report", type=pathlib.Path, required=True, help="folder for the report, made if missing")
    folder = parser.parse_args().report.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the private folder goes
    with tempfile.TemporaryDirectory(prefix="atrex-job-") as private:
        return _run(payload.unpack(archive, pathlib.Path(private)), folder)


def _run(job: payload.Payload, folder: pathlib.Path) -> int:
    spec, begin = job.spec, time.monotonic()
    started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    roles = ["baseline", "candidate"] if "baseline" in spec else ["candidate"]
    try:
        _say(f"{spec['target']} at {spec['revision']}: installing")
        trees = {role: payload.install(job, role) for role in roles}
        env = payload.environment(job, trees["candidate"])
        found = machine.probe([sys.executable, "-"], _device_source(job), _PROBE_LIMIT_S, env=env)
    except payload.JobError as error:
        _say(str(error))
        return GATE_FAILED
    if not machine.matches(spec["target"], found):
        _say(f"this machine has {machine.describe(found)}; the job is for {spec['target']}")
        return WRONG_MACHINE
    _say(f"machine: {machine.describe(found)}, torch {found['torch']}")

    gates: dict[str, dict] = {}
    if "baseline" in spec:
        _say(f"parity with {spec['baseline']}")
        gates["parity"] = _guarded(bench.parity, job, trees, _say)
    else:
        _say("functional tests")
        gates["tests"] = functional.run(job, trees["candidate"], folder / "junit.xml")
        if not spec["target"].startswith("fallback/"):  # which claims no kernel
            _say("profiler gate")
            gates["profiler"] = profiler.run(job, trees["candidate"])
        _say("benchmark")
        gates["benchmark"] = _guarded(bench.run, job, trees["candidate"], _say)
    cases = next((gate["cases"] for name, gate in gates.items() if name in ("benchmark", "parity")), [])
    result = {
        "job": uuid.uuid4().hex[:12],
        "ok": all(gate["ok"] for gate in gates.values()),
        "target": spec["target"],
        **{key: spec[key] for key in ("revision", "baseline") if key in spec},
        "started": started,
        "seconds": time.monotonic() - begin,
        "machine": {**found["devices"][0], "torch": found["torch"], "python": found["python"]},
        "gates": gates,
    }
    if cases:
        sys.path.insert(0, str(trees["candidate"]))
        plot.draw(f"{spec['target']}, {found['devices'][0]['name']}: median latency", cases, folder / "latency.png")
        result["plot"] = "latency.png"
    report.write(result, folder)
    for line in report.verdicts(gates):
        _say(line)
    _say(f"job {result['job']}: report in {folder}")
    return GATES_HOLD if result["ok"] else GATE_FAILED


def _guarded(gate, job: payload.Payload, *arguments) -> dict:
    try:
        return gate(job, *arguments)
    except payload.JobError as error:
        _say(str(error))
        return {"ok": False, "error": report.public(str(error), job.folder), "cases": []}


def _device_source(job: payload.Payload) -> str:
    (wheel,) = job.folder.glob("wheels/candidate/*.whl")
    with zipfile.ZipFile(wheel) as opened:
        return opened.read("atrex/_device.py").decode()


def _say(text: str) -> None:
    print(f"[job] {text}", flush=True)
