"""Tests of detect.bzl on what the tools print on known machines."""

load("@bazel_skylib//lib:unittest.bzl", "asserts", "unittest")
load(":detect.bzl", "arch_from_nvidia_smi", "arch_from_rocminfo")

_ROCMINFO_MI300X = """\
ROCk module is loaded
=====================
HSA Agents
=====================
*******
Agent 1
*******
  Name:                    AMD EPYC 9654 96-Core Processor
  Device Type:             CPU
*******
Agent 2
*******
  Name:                    gfx942
  Marketing Name:          AMD Instinct MI300X
  Device Type:             GPU
  ISA Info:
    ISA 1
      Name:                    amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-
"""

def _nvidia_smi_test_impl(ctx):
    env = unittest.begin(ctx)
    for output, arch in {
        "NVIDIA H200, 9.0\n": "sm90",
        "NVIDIA H200, 9.0\nNVIDIA H200, 9.0\n": "sm90",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0\n": "sm120",
        "No devices were found\n": None,
        "ZW-M890P, 8.9\n": None,
        "": None,
    }.items():
        asserts.equals(env, arch, arch_from_nvidia_smi(output))
    return unittest.end(env)

def _rocminfo_test_impl(ctx):
    env = unittest.begin(ctx)
    asserts.equals(env, "gfx942", arch_from_rocminfo(_ROCMINFO_MI300X))
    asserts.equals(env, None, arch_from_rocminfo("ROCk module is NOT loaded, possibly no GPU devices\n"))
    return unittest.end(env)

_nvidia_smi_test = unittest.make(_nvidia_smi_test_impl)
_rocminfo_test = unittest.make(_rocminfo_test_impl)

def detect_test_suite(name):
    unittest.suite(name, _nvidia_smi_test, _rocminfo_test)
