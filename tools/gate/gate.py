"""Runs a target's job on a host of its hardware: `bazel run //tools/gate -- nvidia/chunk_gdn/sm90`.

Hosts come from the inventory (hosts.py). Each is probed with the detection that dispatch uses; the first of the
target's vendor and architecture gets the job, and its report comes back. No such host is a failure, which lists what
was found.
"""

import argparse
import concurrent.futures
import os
import pathlib
import sys

from runfiles import Runfiles

import workspace
from hosts import Host, HostError, read_inventory
from job import machine
from job.payload import JobError

_PROBE_LIMIT_S = 120
_JOB_LIMIT_S = 2 * 3600


def default_inventory() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config", "atrex", "hosts.toml")


def probe_all(hosts: list[Host], device_source: str, limit: float) -> list[tuple[Host, dict | None, str]]:
    """Each host with what its probe found, and that or the failure in words."""

    def one(host: Host) -> tuple[Host, dict | None, str]:
        try:
            found = host.probe(device_source, limit)
        except (HostError, JobError) as error:
            return host, None, f"no answer: {error}"
        return host, found, machine.describe(found)

    with concurrent.futures.ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(one, hosts))


def run(
    target: str, job: pathlib.Path, hosts: list[Host], device_source: str, report: pathlib.Path, job_limit: float,
    probe_limit: float = _PROBE_LIMIT_S,
) -> int:  # fmt: skip
    """Exit status of the job on the first host that matches, or 1."""
    probed = probe_all(hosts, device_source, probe_limit)
    for host, _, words in probed:
        print(f"gate: {host.name}: {words}", flush=True)
    chosen = next((host for host, found, _ in probed if found and machine.matches(target, found)), None)
    if chosen is None:
        print(f"gate: no host has the hardware of {target}")
        return 1
    print(f"gate: {target} on {chosen.name}", flush=True)
    try:
        status, _ = chosen.execute(job.read_bytes(), job.name, job_limit, report)
    except (HostError, OSError) as error:
        print(f"gate: {chosen.name}: {error}")
        return 1
    if not (report / "report.json").is_file():
        print(f"gate: {chosen.name}: the job ended with status {status} and no report")
        return status or 1
    print(f"gate: status {status}, report in {report}")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="gate", description="Runs a target's gates on a host of its hardware.")
    parser.add_argument("target", help="<vendor>/<operator>/<arch> or fallback/<operator>")
    parser.add_argument("--job", type=pathlib.Path, help="a job that exists, such as a parity job; else it is built")
    parser.add_argument("--inventory", type=pathlib.Path, default=default_inventory())
    parser.add_argument("--report", type=pathlib.Path, default=pathlib.Path("gate-report"))
    parser.add_argument("--limit", type=float, default=_JOB_LIMIT_S, help="seconds for the job")
    options = parser.parse_args()
    device_source = pathlib.Path(Runfiles.Create().Rlocation("_main/python/atrex/_device.py")).read_text()
    try:
        hosts = read_inventory(workspace.here(options.inventory))
        if options.job is not None:
            job = workspace.here(options.job)
        else:
            job = workspace.build(workspace.root(), workspace.job_label(options.target), options.target)
    except (HostError, workspace.BuildError) as error:
        print(f"gate: {error}")
        return 1
    return run(options.target, job, hosts, device_source, workspace.here(options.report), options.limit)


if __name__ == "__main__":
    sys.exit(main())
