"""Whether each test asks a fleet for its own hardware: fleet.py reads `aquery --output=jsonproto` of the test actions.

A test of op_test/<vendor>/<operator> is named like the architecture and must ask for it, every other one for none.
Ends with the line that count.py counts.
"""

import json
import re
import sys

PROPERTY = "gpu_arch"
_GPU_TEST = re.compile(r"//op_test/(?!fallback/|harness\b|package\b)[^/:]+/[^/:]+:(\w+)")


def problems(graph: dict) -> list[str]:
    """One sentence for each test that asks for the wrong hardware; a graph without both kinds of tests is one too."""
    labels = {target["id"]: target["label"] for target in graph.get("targets", [])}
    found, kinds = [], set()
    for action in graph.get("actions", []):
        label = labels[action["targetId"]]
        match = _GPU_TEST.fullmatch(label)
        expected = match[1] if match else None
        kinds.add(match is not None)
        asked = {item["key"]: item.get("value", "") for item in action.get("executionInfo", [])}.get(PROPERTY)
        if asked != expected:
            found.append(f"{label} asks for {PROPERTY} {asked}, expected {expected}")
    if kinds != {True, False}:
        found.append("the query has not both tests of a GPU and others: nothing was checked")
    return found


def main() -> int:
    text = sys.stdin.read()
    found = problems(json.loads(text)) if text.strip() else ["aquery gave nothing"]
    print("".join(f"{problem}\n" for problem in found), end="")
    print(f"lint: fleet properties: {'FAILED' if found else 'ok'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
