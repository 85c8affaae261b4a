"""The report: JSON for machines, Markdown for the hand-off, a plot. It names the hardware and no machine."""

import json
import pathlib
import platform
import re


def public(text: str, private: pathlib.Path) -> str:
    """``text`` without the machine's name, as a whole word, and the job's private folder."""
    text = text.replace(str(private), "JOB")
    host = platform.node()
    return re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", text) if host else text


def write(report: dict, folder: pathlib.Path) -> None:
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(markdown(report))


def markdown(report: dict) -> str:
    machine, gates = report["machine"], report["gates"]
    lines = [
        f"# {report['target']}: {'pass' if report['ok'] else 'FAIL'}",
        "",
        f"- Job {report['job']}, {report['started']}, {report['seconds']:.0f} s",
        f"- Revision {report['revision']}" + (f", baseline {report['baseline']}" if "baseline" in report else ""),
        f"- Hardware {machine['vendor']}/{machine['arch']}, {machine['name']}; "
        f"torch {machine['torch']}, Python {machine['python']}",
    ]
    measured = gates.get("benchmark") or gates.get("parity") or {}
    if "about" in measured:
        contract, about = measured["contract"], measured["about"]
        lines += [
            f"- Contract: `{contract['signature']}`. {contract['summary'].splitlines()[0]}",
            f"- Dispatch and fallback: {about['dispatch']}",
            f"- Compile trigger: {about['compile']}",
            f"- Limits: {about['limits']}",
        ]
    for name, gate in gates.items():
        lines += ["", f"## {name}: {'pass' if gate['ok'] else 'FAIL'}", "", *_SECTIONS[name](gate)]
    if report.get("plot"):
        lines += ["", f"![Latency of each case]({report['plot']})"]
    return "\n".join(lines) + "\n"


def _tests(gate: dict) -> list[str]:
    return [f"{gate['passed']} passed, {len(gate['failures'])} failed or skipped"] + _list(gate["failures"])


def _profiler(gate: dict) -> list[str]:
    lines = [f"Seen by {gate['profiler']}."] if "profiler" in gate else []
    for case in gate.get("cases", []):
        names = [f"`{name}`" for name in dict.fromkeys(case["operator"])]
        other = f"; the framework's: {len(case['framework'])}" if case["framework"] else ""
        lines.append(f"- {case['case']}: {', '.join(names) or 'nothing'}{other}")
    return lines + _list(gate["problems"])


def _benchmark(gate: dict) -> list[str]:
    if "error" in gate:
        return [gate["error"]]
    rows = [
        f"| {case['case']} | {case['median_ms']:.4f} | {case['spread']:.1%} | {'' if case['stable'] else 'unstable'} |"
        for case in gate["cases"]
    ]
    return ["| case | median, ms | spread | |", "|---|---|---|---|", *rows]


def _parity(gate: dict) -> list[str]:
    if "error" in gate:
        return [gate["error"]]
    rows = [
        "| {case} | {baseline_ms:.4f} | {candidate_ms:.4f} | {ratio:.3f} | {spread:.1%} | {verdict} |".format(**case)
        for case in gate["cases"]
    ]
    head = ["| case | baseline, ms | candidate, ms | ratio | spread | verdict |", "|---|---|---|---|---|---|"]
    limits = f"Passes up to a ratio of {gate['max_ratio']:g} at a spread of at most {gate['max_spread']:.0%}."
    return [limits, "", *head, *rows]


def _list(sentences: list[str]) -> list[str]:
    return [f"- {sentence}" for sentence in sentences]


def verdicts(gates: dict[str, dict]) -> list[str]:
    """A line for each gate, and below a failed one what failed: the terminal may be all that comes back."""
    lines = []
    for name, gate in gates.items():
        lines.append(f"{name}: {'pass' if gate['ok'] else 'FAIL'}")
        lines += [f"  {problem}" for problem in (*gate.get("failures", ()), *gate.get("problems", ()))]
    return lines


_SECTIONS = {"tests": _tests, "profiler": _profiler, "benchmark": _benchmark, "parity": _parity}
