"""The house rules of the source tree that a machine can check.

`violations(root)` gives one sentence for each breach; kernels.py holds the rule on kernel names.
"""

import ast
import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import kernels

# What an architecture's folder is called, for each vendor that the tree may name.
ARCH_OF_VENDOR = {
    "amd": re.compile(r"gfx[0-9a-f]+"),
    "nvidia": re.compile(r"sm[0-9]+"),
    "ppu": re.compile(r"[a-z]+[0-9]+[a-z]?"),
}
LANGUAGES = {"ck", "cuda", "cute", "cutedsl", "cutlass", "flydsl", "gluon", "hip", "tilelang", "triton"}
NO_SEMANTICS = LANGUAGES | {"backend", "dsl", "rocm", "runtime"} | set(ARCH_OF_VENDOR)
TESTS_OF_NO_TARGET = {"fallback", "harness", "integrations", "package"}
COMMON = "common_utils"


def folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and p.name != "__pycache__") if path.is_dir() else []


def calls(build_file: Path, rule: str) -> list[dict[str, object]]:
    """The keyword arguments, where they are plain literals, of each call of `rule` in a BUILD file."""
    if not build_file.is_file():
        return []
    found = []
    for node in ast.walk(ast.parse(build_file.read_text())):  # BUILD files are a subset of Python's grammar
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == rule:
            arguments = {}
            for keyword in node.keywords:
                with contextlib.suppress(ValueError):
                    arguments[keyword.arg] = ast.literal_eval(keyword.value)
            found.append(arguments)
    return found


def targets(root: Path) -> list[Path]:
    """The folders of src/<vendor>/<operator>/<arch>, relative to src."""
    src = root / "src"
    return [
        arch.relative_to(src)
        for vendor in folders(src)
        for operator in folders(vendor)
        for arch in folders(operator)
        if arch.name != COMMON
    ]


def check_vendors(root: Path) -> Iterator[str]:
    for top, others in (("src", set()), ("op_test", TESTS_OF_NO_TARGET)):
        for folder in folders(root / top):
            if folder.name not in set(ARCH_OF_VENDOR) | others:
                known = ", ".join(sorted(set(ARCH_OF_VENDOR) | others))
                yield f"{top}/{folder.name}: unknown folder, accepted are {known}"


def check_target_folders(root: Path) -> Iterator[str]:
    """Each folder is one target: named like the architecture, declared once, and known to the wheel."""
    for target in targets(root):
        pattern = ARCH_OF_VENDOR.get(target.parts[0])
        if (pattern and not pattern.fullmatch(target.name)) or target.name in LANGUAGES:
            yield f"src/{target}: {target.name} is no architecture of {target.parts[0]}"
    declared = {}
    for build_file in sorted((root / "src").rglob("BUILD.bazel")):
        folder = build_file.parent.relative_to(root / "src")
        declared[folder] = [call.get("name") for call in calls(build_file, "kernel_target")]
        if folder not in targets(root) and declared[folder]:
            yield f"src/{folder}: a kernel_target outside of src/<vendor>/<operator>/<arch>"
    for target in targets(root):
        if declared.get(target, []) != [target.name]:
            yield f"src/{target}: has kernel_target {declared.get(target, [])}, expected one named {target.name}"
    known = [
        label
        for call in calls(root / "tools/targets/BUILD.bazel", "selected_targets")
        for label in call.get("known", [])
    ]
    if sorted(known) != [f"//src/{target}" for target in targets(root)]:
        yield f"tools/targets/BUILD.bazel: known is {known}, expected the folders of src/<vendor>/<operator>/<arch>"


def check_gpu_arches(root: Path) -> Iterator[str]:
    """A constraint stands only for an architecture with an implementation, and each of those has one."""
    file = root / "tools/gpu/arches.bzl"
    values = [
        ast.literal_eval(node.value)
        for node in (ast.parse(file.read_text()).body if file.is_file() else [])
        if isinstance(node, ast.Assign) and [getattr(name, "id", "") for name in node.targets] == ["GPU_ARCHES"]
    ]
    expected = sorted({target.name for target in targets(root)})
    if [sorted(value) for value in values] != [expected]:
        yield f"tools/gpu/arches.bzl: GPU_ARCHES is {values}, expected {expected}"


def check_tests(root: Path) -> Iterator[str]:
    """Each target has one test file, which one op_test runs on its architecture, and no other file lies there."""
    expected = {}
    for target in targets(root):
        vendor, operator, arch = target.parts
        expected[Path("op_test", vendor, operator, f"test_{operator}_{arch}.py")] = arch
    for file, arch in expected.items():
        if not (root / file).is_file():
            yield f"{file}: missing, the one test file of its target"
        op_tests = calls(root / file.parent / "BUILD.bazel", "op_test")
        gpus = [call.get("gpu") for call in op_tests if call.get("src") == file.name]
        if gpus != [arch]:
            yield f"{file}: {len(gpus)} op_test of it in BUILD.bazel, expected exactly one with gpu = {arch}"
    for vendor in ARCH_OF_VENDOR:
        for file in sorted((root / "op_test" / vendor).rglob("*.py")):
            if file.relative_to(root) not in expected:
                yield f"{file.relative_to(root)}: not the one test file test_<operator>_<arch>.py of a target"


def check_api_names(root: Path) -> Iterator[str]:
    for file in sorted((root / "python/atrex/api").rglob("*.py")):
        words = {word for word in file.stem.lower().split("_") if word}
        bad = sorted(word for word in words if word in NO_SEMANTICS or re.fullmatch(r"sm\d+\w?|gfx[0-9a-f]+", word))
        if bad:
            yield f"{file.relative_to(root)}: named by {', '.join(bad)}, expected the operator's semantics"


def check_common(root: Path) -> Iterator[str]:
    for common in sorted((root / "src").glob(f"*/*/{COMMON}")):
        users = [
            arch.name
            for arch in folders(common.parent)
            if arch != common and (arch / "BUILD.bazel").is_file() and COMMON in (arch / "BUILD.bazel").read_text()
        ]
        if len(users) < 2:
            yield f"{common.relative_to(root)}: used by {users or 'no architecture'}, expected at least two"


def check_empty(root: Path) -> Iterator[str]:
    for top in folders(root):
        if top.name.startswith((".", "bazel-")):
            continue
        for path, names, files in os.walk(top):
            names[:] = [name for name in names if name != "__pycache__"]
            if not names and not files:
                yield f"{Path(path).relative_to(root)}: empty folder"


def check_kernel_names(root: Path) -> Iterator[str]:
    for target in sorted((root / "src").glob("*/*/*")):
        sources = [path for path in sorted(target.rglob("*")) if kernels.is_source(path)]
        yield from kernels.misnamed({str(path.relative_to(root)): path.read_text() for path in sources})


def violations(root: Path) -> list[str]:
    """Every breach of the rules below `root`; a tree without any kernel target or API module is one too."""
    found = []
    if not targets(root):
        found.append(f"{root} has no src/<vendor>/<operator>/<arch>: the rules were checked on nothing")
    if not list((root / "python/atrex/api").glob("*.py")):
        found.append(f"{root} has no python/atrex/api/*.py: the rules were checked on nothing")
    for check in (
        check_vendors,
        check_target_folders,
        check_gpu_arches,
        check_tests,
        check_api_names,
        check_common,
        check_empty,
        check_kernel_names,
    ):
        found += check(root)
    return found
