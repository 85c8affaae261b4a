"""The inventory of hosts, and what is done on one of them.

A TOML file, by default `~/.config/atrex/hosts.toml`; it names machines and therefore lives with the user:

    [[host]]
    name = "this"
    kind = "local"

    [[host]]
    name = "hopper"                    # as ssh knows it: ssh's own configuration has user, port, key and jump host
    kind = "ssh"
    python = "/opt/venv/bin/python3"   # the Python with torch; python3 if left out
    ssh_options = ["-p", "2222"]       # more options of ssh; none if left out
"""

import io
import json
import pathlib
import shlex
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass

from job import machine, process

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REMOTE = pathlib.Path(__file__).with_name("remote.py").read_text()
# Without a question at the terminal; a silent connection ends after a minute.
SSH = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
_LOST = 255  # ssh's own failure
_LATE = 124
# Beyond the limit that the host keeps by itself: transfers, and a host that keeps nothing any more.
_MARGIN_S = 60


class HostError(Exception):
    """The host did not do what it was asked; the message says what happened."""


@dataclass(frozen=True)
class Host:
    name: str
    kind: str
    python: str = "python3"
    ssh_options: tuple[str, ...] = ()

    def _command(self, arguments: list[str]) -> list[str]:
        if self.kind == "local":
            return arguments
        return ["ssh", *self.ssh_options, *SSH, "--", self.name, shlex.join(arguments)]

    def execute(
        self, program: bytes, name: str, limit: float, report: pathlib.Path | None = None, margin: float = _MARGIN_S
    ) -> tuple[int, bytes]:
        """Runs a Python program there; returns its status and what it printed.

        With ``report`` the program gets ``--report DIR``, what it prints is shown, and the folder comes back.

        Raises:
            HostError: the host is out of reach, broke off, or needed longer than ``limit`` seconds.
        """
        header = {"size": len(program), "name": name, "arguments": [], "limit": limit, "report": report is not None}
        late = threading.Event()
        errors = None if report is not None else subprocess.PIPE
        command = self._command([self.python, "-c", REMOTE])
        with process.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child:
            timer = threading.Timer(limit + margin, lambda: (late.set(), child.kill()))
            timer.start()
            try:
                status, out, message = _talk(child, json.dumps(header).encode() + b"\n" + program)
            finally:
                timer.cancel()
        if late.is_set() or status == _LATE:
            raise HostError(f"did not end within {limit:g} s")
        if self.kind == "ssh" and status == _LOST:
            raise HostError(f"the connection failed or broke off: {message or 'see above'}")
        if report is not None and out:
            with zipfile.ZipFile(io.BytesIO(out)) as archive:
                archive.extractall(report)
        elif status and report is None:
            raise HostError(f"status {status}: {message or 'no message'}")
        return status, out

    def probe(self, device_source: str, limit: float) -> dict:
        """What hardware it has: see machine.py."""
        _, out = self.execute(machine.probe_script(device_source).encode(), "probe.py", limit)
        return machine.read_probe(out.decode(errors="replace"))


def _talk(child: subprocess.Popen, data: bytes) -> tuple[int, bytes, str]:
    """Sends ``data`` and leaves stdin open until the answer is there, because it is the other side's lifeline."""
    errors: list[bytes] = []
    reader = None
    if child.stderr is not None:
        reader = threading.Thread(target=lambda: errors.append(child.stderr.read()), daemon=True)
        reader.start()
    try:
        child.stdin.write(data)
        child.stdin.flush()
    except BrokenPipeError:
        pass  # the status tells
    out = child.stdout.read()
    status = child.wait()
    if reader is not None:
        reader.join(5)
    lines = b"".join(errors).decode(errors="replace").strip().splitlines()
    return status, out, lines[-1] if lines else ""


def read_inventory(file: pathlib.Path) -> list[Host]:
    """The hosts of the file, in its order."""
    if not file.is_file():
        raise HostError(f"no inventory {file}: see tools/gate/hosts.py for what it holds")
    try:
        content = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise HostError(f"{file} is not TOML: {error}") from None
    hosts = []
    for entry in content.get("host", []):
        unknown = set(entry) - {"name", "kind", "python", "ssh_options"}
        if unknown or not entry.get("name") or entry.get("kind") not in ("local", "ssh"):
            raise HostError(f'{file}: host {entry} is not a name, kind "local" or "ssh", python and ssh_options')
        hosts.append(Host(**{**entry, "ssh_options": tuple(entry.get("ssh_options", ()))}))
    if not hosts:
        raise HostError(f"{file} has no [[host]]")
    return hosts
