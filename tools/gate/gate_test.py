"""The gate over ssh: a real sshd on loopback, with hosts that differ, break off and hang.

All hosts are this machine. Each has a Python of its own, which finds a torch with a made-up GPU and a folder for
temporary files, so that what a run leaves behind can be seen.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile

import pytest
from runfiles import Runfiles

MAIN = pathlib.Path(Runfiles.Create().Rlocation("_main/tools/gate/gate.py")).parents[2]
sys.path[:0] = [str(MAIN / "tools/gate"), str(MAIN / "tools/job")]
import gate  # noqa: E402
import hosts  # noqa: E402

TARGET = "nvidia/toy/sm90"
DEVICE = (MAIN / "python/atrex/_device.py").read_text()
TORCH = """
from types import SimpleNamespace
__version__, version = "9", SimpleNamespace(hip={hip!r}, cuda={cuda!r})
class device:
    def __init__(self, kind, index=0):
        self.type, self.index = kind, index
properties = SimpleNamespace(name={name!r}, major={capability[0]}, minor={capability[1]}, gcnArchName="gfx942:x")
cuda = SimpleNamespace(device_count=lambda: {count}, get_device_name=lambda _: {name!r},
                       get_device_properties=lambda _: properties)
"""
JOB = """
import argparse, os, pathlib, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--report", type=pathlib.Path)
report = parser.parse_args().report
report.mkdir(parents=True)
print("the job speaks", flush=True)
{body}
(report / "report.json").write_text("{{}}")
(report / "latency.png").write_bytes(bytes(range(256)))
sys.exit({status})
"""
# A child in a session of its own, as the tests of a job are, that says when it runs.
ENDLESS = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path({flag!r}).write_text("started")
time.sleep(600)
"""


def program(name: str) -> str:
    path = shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
    if path is None:
        pytest.fail(
            f"{name} is not installed, and these tests need a real ssh server (Debian: apt install openssh-server)"
        )
    return path


class Server:
    """An sshd that listens on loopback, and the hosts behind it, told apart by the name that ssh is given."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        for key in ("host_key", "user_key"):
            subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        shutil.copyfile(folder / "user_key.pub", folder / "authorized_keys")
        self._configure()
        command = [program("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
        self._log = (folder / "sshd.log").open("w")
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=self._log, start_new_session=True)
        self._wait_for_port()

    def _configure(self):
        settings = f"""
            Port {self.port}
            ListenAddress 127.0.0.1
            HostKey {self.folder}/host_key
            AuthorizedKeysFile {self.folder}/authorized_keys
            PidFile {self.folder}/pid
            StrictModes no
            UsePAM no
            PasswordAuthentication no
            KbdInteractiveAuthentication no
        """
        (self.folder / "sshd_config").write_text("\n".join(line.strip() for line in settings.splitlines()))

    def _wait_for_port(self):
        end = time.monotonic() + 30
        while time.monotonic() < end and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                if connection.recv(4) == b"SSH-":
                    return
            time.sleep(0.1)
        pytest.fail(f"sshd does not listen: {(self.folder / 'sshd.log').read_text()}")

    def host(self, name, *, hip=None, cuda="13.0", gpu="NVIDIA X", capability=(9, 0), count=1, python=None):
        """A host of the inventory whose Python has a torch that reports this GPU."""
        home = self.folder / name
        (home / "tmp").mkdir(parents=True)
        (home / "torch.py").write_text(TORCH.format(hip=hip, cuda=cuda, name=gpu, capability=capability, count=count))
        launcher = home / "python3"
        launcher.write_text(
            f'#!/bin/sh\nTMPDIR={home}/tmp PYTHONPATH={home} PYTHONSAFEPATH=1 exec {python or sys.executable} "$@"\n'
        )
        launcher.chmod(0o755)
        options = ["-F", "none", "-p", str(self.port), "-i", str(self.folder / "user_key"), "-o", "HostName=127.0.0.1"]
        options += ["-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={self.folder}/known_hosts"]
        options += ["-o", "StrictHostKeyChecking=accept-new", "-o", "LogLevel=ERROR"]
        return hosts.Host(name, "ssh", str(launcher), tuple(options))

    def left_behind(self, name):
        """Files of a host, and processes of it."""
        home = self.folder / name
        running = []
        for file in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{home}/tmp".encode() in file.read_bytes():
                    running.append((file.parent / "cmdline").read_bytes())
        return [*(home / "tmp").iterdir(), *running]

    def break_connections(self):
        """Kills the children of sshd that serve connections, as a machine that reboots would."""
        serving = self._children(self._process.pid)
        assert serving
        for pid in serving:
            for each in (*self._children(pid), pid):  # sshd's own two; the second may go with the first
                with contextlib.suppress(OSError):
                    if b"sshd" in pathlib.Path(f"/proc/{each}/cmdline").read_bytes():
                        os.kill(each, signal.SIGKILL)

    @staticmethod
    def _children(pid):
        return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self):
        self._process.terminate()
        self._process.wait()
        self._log.close()


@pytest.fixture
def server(tmp_path):
    if os.getuid() == 0:  # the package's service makes it when it starts
        os.makedirs("/run/sshd", exist_ok=True)
    (tmp_path / "ssh").mkdir()
    started = Server(tmp_path / "ssh")
    yield started
    started.stop()


@pytest.fixture
def job(tmp_path):
    def make(body="", status=0):
        file = tmp_path / "toy_job.pyz"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("__main__.py", JOB.format(body=body, status=status))
        return file

    return make


def run(job, inventory, tmp_path, job_limit=100.0, probe_limit=100.0):
    return gate.run(TARGET, job, inventory, DEVICE, tmp_path / "report", job_limit, probe_limit)


def wait_until(condition, seconds=40):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still not after {seconds} s"
        time.sleep(0.1)


def test_matching_host_runs_the_job_and_its_report_comes_back(server, job, tmp_path, capfd):
    inventory = [
        server.host("amd", hip="7.0", cuda=None, gpu="AMD Instinct"),
        server.host("other-arch", capability=(12, 0)),
        server.host("ppu", gpu="ZW-M890P", capability=(8, 9)),
        server.host("match"),
        server.host("second-match"),
    ]
    assert run(job(), inventory, tmp_path) == 0
    out, err = capfd.readouterr()
    for words in ("amd: amd/gfx942", "other-arch: nvidia/sm120", "ppu: ppu/zwm890p", "match: nvidia/sm90 (NVIDIA X)"):
        assert words in out
    assert "nvidia/toy/sm90 on match" in out and "the job speaks" in err
    assert (tmp_path / "report/latency.png").read_bytes() == bytes(range(256))
    for host in inventory:
        assert server.left_behind(host.name) == []


def test_status_of_the_job_is_the_gates(server, job, tmp_path):
    assert run(job(status=1), [server.host("match")], tmp_path) == 1
    assert (tmp_path / "report/report.json").exists()


def test_no_matching_host_fails_and_lists_what_was_found(server, job, tmp_path, capsys):
    without_python = hosts.Host("gone", "ssh", "/no/such/python", server.host("x").ssh_options)
    closed = hosts.Host("closed", "ssh", "python3", ("-F", "none", "-p", "1", "-o", "HostName=127.0.0.1"))
    inventory = [server.host("other-arch", capability=(12, 0)), without_python, closed]
    assert run(job(), inventory, tmp_path) == 1
    out = capsys.readouterr().out
    assert "other-arch: nvidia/sm120" in out and "gone: no answer: status 127" in out
    assert "closed: no answer: the connection failed" in out and "refused" in out
    assert "no host has the hardware of nvidia/toy/sm90" in out
    assert not (tmp_path / "report").exists()


def test_connection_that_breaks_mid_run_fails_and_leaves_nothing(server, job, tmp_path, capsys):
    flag, result = tmp_path / "flag", []
    endless = job(ENDLESS.format(flag=str(flag)))
    host = server.host("match")
    thread = threading.Thread(target=lambda: result.append(run(endless, [host], tmp_path)))
    thread.start()
    wait_until(flag.exists)
    assert server.left_behind("match")  # the watch itself works
    server.break_connections()
    thread.join(60)
    assert result == [1] and "the connection failed or broke off" in capsys.readouterr().out
    wait_until(lambda: server.left_behind("match") == [])


def test_job_that_hangs_ends_at_its_limit_and_leaves_nothing(server, job, tmp_path, capsys):
    flag = tmp_path / "flag"
    assert run(job(ENDLESS.format(flag=str(flag))), [server.host("match")], tmp_path, job_limit=4) == 1
    assert flag.exists() and "match: did not end within 4 s" in capsys.readouterr().out
    assert server.left_behind("match") == []


def test_host_that_hangs_in_the_probe_is_passed_over(server, job, tmp_path, capsys):
    hanging = server.host("hanging")
    (server.folder / "hanging/torch.py").write_text("import time; time.sleep(600)\n")
    assert run(job(), [hanging, server.host("match")], tmp_path, probe_limit=8) == 0
    assert "hanging: no answer: did not end within 8 s" in capsys.readouterr().out
    assert server.left_behind("hanging") == []


def test_host_that_never_answers_is_given_up(server, tmp_path):
    """Not even Python runs there: the limit is kept on this side."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    host = hosts.Host("silent", "ssh", str(silent), server.host("x").ssh_options)
    with pytest.raises(hosts.HostError, match="did not end within 1 s"):
        host.execute(b"", "x.py", 1, margin=2)


def test_local_host(job, tmp_path, capfd):
    """This machine's own Python and torch, for a target that runs anywhere."""
    inventory = [hosts.Host("this", "local", sys.executable)]
    assert gate.run("fallback/toy", job(), inventory, DEVICE, tmp_path / "report", 100, 100) == 0
    assert "this: " in capfd.readouterr().out


def test_inventory(tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text('[[host]]\nname="a"\nkind="local"\n[[host]]\nname="b"\nkind="ssh"\nssh_options=["-v"]\n')
    assert hosts.read_inventory(file) == [hosts.Host("a", "local"), hosts.Host("b", "ssh", "python3", ("-v",))]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "has no"),
        ("host = 1 2", "is not TOML"),
        ('[[host]]\nname="a"\nkind="telnet"', 'kind "local" or "ssh"'),
        ('[[host]]\nname="a"\nkind="ssh"\nport=2', "'port': 2"),
        ('[[host]]\nkind="ssh"', "is not a name"),
    ],
)
def test_wrong_inventory_is_refused(tmp_path, text, words):
    file = tmp_path / "hosts.toml"
    file.write_text(text)
    with pytest.raises(hosts.HostError, match=words):
        hosts.read_inventory(file)


def test_missing_inventory_is_named(tmp_path):
    with pytest.raises(hosts.HostError, match="no inventory"):
        hosts.read_inventory(tmp_path / "none.toml")
