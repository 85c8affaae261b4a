"""Checks what the CUDA compiler made of a library's kernels.

Usage (arguments are runfiles paths): kernel_report.py CUOBJDUMP LIBRARY PTXAS_REPORT...

Prints a table of the kernels and fails if
- the library holds no kernel, or others than the reports tell of;
- a kernel's name does not start with atrex_ (profiles must tell the operator's kernels from everybody else's);
- a function spills registers or has a stack frame, or ptxas serialised its wgmma instructions.
"""

import re
import subprocess
import sys
from dataclasses import dataclass

from runfiles import Runfiles

PREFIX = "atrex_"

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\S+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_MEMORY = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_PERFORMANCE_REMARK = re.compile(r"\(C75\d\d\)|Potential Performance Loss")
_LIBRARY_ARCH = re.compile(r"^arch = (\S+)$")
_LIBRARY_ENTRY = re.compile(r"^ Function (\S+):$")


@dataclass
class Function:
    """A function of the machine code; `registers` is None for one that is no kernel."""

    symbol: str
    arch: str
    registers: int | None = None
    shared: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


def base_name(symbol: str) -> str:
    """The name that a kernel has in its source: the last plain name of a mangled one, without scopes and arguments."""
    prefix = re.match(r"_ZN?", symbol)
    if not prefix:
        return symbol
    rest, name = symbol[prefix.end() :], ""
    while part := re.match(r"L?(\d+)", rest):
        end = part.end() + int(part[1])
        name, rest = rest[part.end() : end], rest[end:]
    return name


def read_report(text: str) -> list[Function]:
    """The functions that a `ptxas -v` report tells of, those of each architecture by themselves."""
    functions: list[Function] = []
    arch = ""
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            arch = match[2]
        elif match := _FUNCTION.search(line):
            functions.append(Function(match[1], arch))
        elif functions and (match := _MEMORY.search(line)):
            functions[-1].stack, functions[-1].spill_stores, functions[-1].spill_loads = map(int, match.groups())
        elif functions and (match := _REGISTERS.search(line)):
            functions[-1].registers = int(match[1])
            shared = _SHARED.search(line)
            functions[-1].shared = int(shared[1]) if shared else 0
    return functions


def read_library(resource_usage: str) -> set[tuple[str, str]]:
    """Symbol and architecture of the kernels in the output of `cuobjdump --dump-resource-usage`."""
    kernels = set()
    arch = ""
    for line in resource_usage.splitlines():
        if match := _LIBRARY_ARCH.match(line):
            arch = match[1]
        elif match := _LIBRARY_ENTRY.match(line):
            kernels.add((match[1], arch))
    return kernels


def problems(reports: list[str], library: set[tuple[str, str]]) -> list[str]:
    """What is wrong with the kernels, one sentence each."""
    functions = [function for report in reports for function in read_report(report)]
    kernels = {(function.symbol, function.arch) for function in functions if function.registers is not None}
    found = []
    if not library:
        found.append("the library holds no kernel")
    found += [f"{name} ({arch}) is in the library and in no ptxas report" for name, arch in sorted(library - kernels)]
    found += [
        f"{name} ({arch}) is in a ptxas report and not in the library" for name, arch in sorted(kernels - library)
    ]
    found += [
        f"kernel {base_name(symbol)} ({symbol}) does not start with {PREFIX}"
        for symbol in sorted({symbol for symbol, _ in library | kernels})
        if not base_name(symbol).startswith(PREFIX)
    ]
    for function in functions:
        if function.stack or function.spill_stores or function.spill_loads:
            found.append(
                f"{function.symbol} ({function.arch}) has {function.stack} bytes stack frame, {function.spill_stores} "
                f"bytes spill stores and {function.spill_loads} bytes spill loads; accepted is 0 of each"
            )
    found += [line.strip() for report in reports for line in report.splitlines() if _PERFORMANCE_REMARK.search(line)]
    return found


def table(reports: list[str]) -> str:
    """The kernels' resources, one a line; shared memory is the static part only."""
    lines = [f"{'registers':>9} {'static shared':>13} {'stack':>5} {'spilled':>7}  kernel"]
    for function in (function for report in reports for function in read_report(report)):
        if function.registers is not None:
            spilled = function.spill_stores + function.spill_loads
            lines.append(
                f"{function.registers:>9} {function.shared:>13} {function.stack:>5} {spilled:>7}  "
                f"{base_name(function.symbol)} ({function.arch})"
            )
    return "\n".join(lines)


def main(cuobjdump: str, library: str, *report_paths: str) -> int:
    usage = subprocess.run([cuobjdump, "--dump-resource-usage", library], capture_output=True, text=True)
    if usage.returncode:
        print(f"cuobjdump cannot read {library}: {usage.stderr}")
        return 1
    reports = []
    for path in report_paths:
        with open(path) as file:
            reports.append(file.read())
    print(table(reports))
    found = problems(reports, read_library(usage.stdout))
    for problem in found:
        print("FAILED:", problem)
    return 1 if found else 0


if __name__ == "__main__":
    runfiles = Runfiles.Create()
    sys.exit(main(*(runfiles.Rlocation(path) for path in sys.argv[1:])))
