"""Each house rule is shown to fail on a tree that breaks it."""

import shutil
import sys
from pathlib import Path

import pytest

import layout

GOOD = {
    "python/atrex/api/scan.py": "",
    "python/atrex/api/_scan_call.py": "",
    "src/nvidia/scan/sm90/BUILD.bazel": 'kernel_target(\n    name = "sm90",\n    native = ":native",\n)\n',
    "src/nvidia/scan/sm90/scan.cu": (
        "// __global__ void comment(int);\n"
        "template <int N>\n__global__ void __launch_bounds__(Sizes<(N > 1)>::k, 1)\n    atrex_scan(float* x) {}\n"
        "#define KERNEL(T, NAME) \\\n  __global__ void NAME(T x) {}\n"
        "KERNEL(float, atrex_scan_float)\n"
    ),
    "src/nvidia/scan/sm120/BUILD.bazel": 'kernel_target(name = "sm120")\n',
    "op_test/harness/compare.py": "",
    "op_test/nvidia/scan/BUILD.bazel": (
        'op_test(name = "sm90", src = "test_scan_sm90.py", gpu = "sm90")\n'
        'op_test(name = "sm120", src = "test_scan_sm120.py", gpu = "sm120")\n'
    ),
    "op_test/nvidia/scan/test_scan_sm90.py": "",
    "op_test/nvidia/scan/test_scan_sm120.py": "",
    "tools/gpu/arches.bzl": '"""Docstring."""\n\nGPU_ARCHES = ["sm120", "sm90"]\n',
    "tools/targets/BUILD.bazel": 'selected_targets(known = ["//src/nvidia/scan/sm120", "//src/nvidia/scan/sm90"])\n',
}


def write(root: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.fixture
def tree(tmp_path):
    return write(tmp_path, GOOD)


def test_good_tree_passes(tree):
    assert layout.violations(tree) == []


def test_empty_tree_fails(tmp_path):
    found = layout.violations(tmp_path)
    assert any("no src/<vendor>/<operator>/<arch>" in violation for violation in found)
    assert any("no python/atrex/api" in violation for violation in found)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"src/NVIDIA/scan/sm90/scan.cu": ""}, "src/NVIDIA: unknown folder"),
        ({"src/intel/scan/xe2/scan.cc": ""}, "src/intel: unknown folder"),
        ({"op_test/benchmarks/run.py": ""}, "op_test/benchmarks: unknown folder"),
        ({"src/nvidia/scan/triton/BUILD.bazel": 'kernel_target(name = "triton")'}, "triton is no architecture"),
        ({"src/amd/scan/sm90/BUILD.bazel": 'kernel_target(name = "sm90")'}, "sm90 is no architecture of amd"),
        ({"src/nvidia/scan/sm80/scan.cu": ""}, "src/nvidia/scan/sm80: has kernel_target []"),
        ({"src/nvidia/scan/sm90/BUILD.bazel": 'kernel_target(name = "x")'}, "has kernel_target ['x']"),
        (
            {"src/nvidia/scan/sm90/BUILD.bazel": 'kernel_target(name = "sm90")\nkernel_target(name = "two")'},
            "has kernel_target ['sm90', 'two']",
        ),
        ({"src/nvidia/scan/BUILD.bazel": 'kernel_target(name = "scan")'}, "src/nvidia/scan: a kernel_target outside"),
        ({"tools/targets/BUILD.bazel": "selected_targets(known = [])"}, "known is []"),
        ({"tools/gpu/arches.bzl": 'GPU_ARCHES = ["gfx942", "sm120", "sm90"]'}, "GPU_ARCHES is [['gfx942'"),
        ({"tools/gpu/arches.bzl": ""}, "GPU_ARCHES is []"),
        ({"op_test/nvidia/scan/BUILD.bazel": ""}, "0 op_test of it"),
        (
            {"op_test/nvidia/scan/BUILD.bazel": GOOD["op_test/nvidia/scan/BUILD.bazel"].replace(', gpu = "sm90"', "")},
            "test_scan_sm90.py: 1 op_test of it in BUILD.bazel, expected exactly one with gpu = sm90",
        ),
        ({"op_test/nvidia/scan/benchmark_scan.py": ""}, "benchmark_scan.py: not the one test file"),
        ({"op_test/nvidia/scan/test_scan_sm80.py": ""}, "test_scan_sm80.py: not the one test file"),
        ({"python/atrex/api/scan_triton.py": ""}, "named by triton"),
        ({"python/atrex/api/nvidia_scan.py": ""}, "named by nvidia"),
        ({"python/atrex/api/scan_sm90.py": ""}, "named by sm90"),
        ({"src/nvidia/scan/common_utils/tile.h": ""}, "used by no architecture"),
        (
            {
                "src/nvidia/scan/common_utils/tile.h": "",
                "src/nvidia/scan/sm90/BUILD.bazel": 'kernel_target(name = "sm90", deps = ["//src/x/common_utils"])',
            },
            "used by ['sm90'], expected at least two",
        ),
        ({"src/nvidia/scan/sm90/other.cu": "__global__ void scan(float* x) {}"}, "__global__ scan does not start"),
        (
            {"src/nvidia/scan/sm90/a.cuh": "__global__ void\n__launch_bounds__(f(1), 2) /* why */ scan(int x);"},
            "__global__ scan does not start",
        ),
        (
            {"src/nvidia/scan/sm90/use.cu": "KERNEL(half, scan_half)"},
            "__global__ scan_half, made by KERNEL, does not start",
        ),
        ({"src/nvidia/scan/sm90/m.cu": "#define K() __global__ void scan(int x)"}, "__global__ scan, made by K,"),
    ],
)
def test_each_breach_is_found(tree, files, words):
    found = layout.violations(write(tree, files))
    assert any(words in violation for violation in found), found


def test_missing_test_file_is_found(tree):
    (tree / "op_test/nvidia/scan/test_scan_sm90.py").unlink()
    assert layout.violations(tree) == [
        "op_test/nvidia/scan/test_scan_sm90.py: missing, the one test file of its target"
    ]


def test_test_without_target_is_found(tree):
    shutil.rmtree(tree / "src/nvidia/scan/sm120")
    found = layout.violations(tree)
    assert any("test_scan_sm120.py: not the one test file" in violation for violation in found)


def test_empty_folder_is_found(tree):
    (tree / "src/amd/scan").mkdir(parents=True)
    assert layout.violations(tree) == ["src/amd/scan: empty folder"]


def test_common_utils_of_two_architectures_pass(tree):
    deps = 'deps = ["//src/nvidia/scan/common_utils"])'
    files = {
        "src/nvidia/scan/common_utils/tile.h": "",
        "src/nvidia/scan/sm90/BUILD.bazel": f'kernel_target(name = "sm90", {deps}',
        "src/nvidia/scan/sm120/BUILD.bazel": f'kernel_target(name = "sm120", {deps}',
    }
    assert layout.violations(write(tree, files)) == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-p", "no:cacheprovider"]))
