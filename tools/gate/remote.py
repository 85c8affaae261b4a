"""Runs one program on a host for hosts.py, in one connection: `python3 -c <this file>`, which needs Python alone.

stdin brings a JSON line {"size": bytes, "name": file name, "arguments": [...], "limit": seconds, "report": bool} and
then the program. After that it is the lifeline: when it closes, because the connection broke or the caller gave up,
the program ends. stdout takes what the program prints or, with "report", the folder it was given as --report, as a zip
archive; its prints go to stderr then. The exit status is the program's, or 124 after the limit. Whatever happens, no
process and no file stays.
"""

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile

GRACE_S = 10


def receive(header, path):
    left = header["size"]
    with open(path, "wb") as out:
        while left:
            data = sys.stdin.buffer.read(min(left, 1 << 20))
            if not data:
                sys.exit("the connection ended before the program had arrived")
            out.write(data)
            left -= len(data)


def die_with_the_connection():
    def watch():
        while os.read(0, 1 << 16):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def end(child, folder):
    """The program, politely at first, and then whatever has the folder in its environment, which it inherits."""
    if child is not None and child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    for file in glob.glob("/proc/[0-9]*/environ"):
        with contextlib.suppress(OSError):
            with open(file, "rb") as opened:
                ours = ("TMPDIR=" + folder).encode() in opened.read().split(b"\0")
            if ours:
                os.kill(int(file.split("/")[2]), signal.SIGKILL)
    if child is not None:
        child.wait()


def main():
    header = json.loads(sys.stdin.buffer.readline())
    folder = tempfile.mkdtemp(prefix="atrex-gate-")
    child = None
    try:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(129))
        program, report = os.path.join(folder, header["name"]), os.path.join(folder, "report")
        receive(header, program)
        die_with_the_connection()
        command = [sys.executable, program] + header["arguments"]
        if header["report"]:
            command += ["--report", report]
        out = sys.stderr if header["report"] else sys.stdout
        env = dict(os.environ, TMPDIR=folder)
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out.fileno(), env=env)
        try:
            status = child.wait(header["limit"])
        except subprocess.TimeoutExpired:
            print(f"not ended within {header['limit']:g} s", file=sys.stderr)
            return 124
        if os.path.isdir(report):
            with zipfile.ZipFile(sys.stdout.buffer, "w", zipfile.ZIP_DEFLATED) as archive:
                for file in sorted(glob.glob(os.path.join(report, "**"), recursive=True)):
                    if os.path.isfile(file):
                        archive.write(file, os.path.relpath(file, report))
        return status
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        end(child, folder)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
