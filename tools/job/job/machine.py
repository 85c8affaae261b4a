"""Which hardware a machine has, by the detection that dispatch uses: the source of atrex/_device.py itself."""

import json
import subprocess

from .payload import JobError

_MARK = "atrex probe: "

# Follows the source of _device.py in one script, so that it runs where no wheel is installed yet.
_PROBE = f"""

def _probe():
    import json, platform
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] or [torch.device("cpu")]
    targets = [device_target(device) for device in devices]
    is_gpu = devices[0].type == "cuda"
    names = [torch.cuda.get_device_name(device) if is_gpu else platform.machine() for device in devices]
    found = [dict(vendor=t.vendor, arch=t.arch, name=n) for t, n in zip(targets, names)]
    return json.dumps(dict(devices=found, torch=torch.__version__, python=platform.python_version()))

print("\\n{_MARK}" + _probe())
"""


def probe_script(device_source: str) -> str:
    return device_source + _PROBE


def read_probe(output: str) -> dict:
    """What a probe printed; a login banner or a warning before it does no harm."""
    for line in output.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    raise JobError(f"the probe did not answer: {output.strip()[-500:]!r}")


def probe(command: list[str], device_source: str, timeout: float, **options) -> dict:
    """Runs the probe in ``command``, a Python that reads a program from stdin."""
    try:
        done = subprocess.run(
            command, input=probe_script(device_source), capture_output=True, text=True, timeout=timeout, **options
        )
    except subprocess.TimeoutExpired:
        raise JobError(f"the probe did not answer within {timeout:g} s") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise JobError(f"the probe ended with status {done.returncode}: {last}")
    return read_probe(done.stdout)


def describe(found: dict) -> str:
    return ", ".join(f"{device['vendor']}/{device['arch']} ({device['name']})" for device in found["devices"])


def matches(target: str, found: dict) -> bool:
    """Whether the machine is of the target's hardware. The first GPU decides: the tests run on it."""
    vendor, *_, arch = target.split("/")
    if vendor == "fallback":  # runs anywhere
        return True
    first = found["devices"][0]
    return (first["vendor"], first["arch"]) == (vendor, arch)
