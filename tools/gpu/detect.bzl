"""Reads a machine's first GPU from what the vendors' tools print. Pure functions, tested in detect_test.bzl."""

NVIDIA_SMI = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
ROCMINFO = ["rocminfo"]

def arch_from_nvidia_smi(output):
    """The architecture of the first GPU that NVIDIA_SMI lists.

    Args:
      output: what it printed, lines such as "NVIDIA H200, 9.0".

    Returns:
      "smXY", or None without a GPU of NVIDIA: others answer to the same tool, with a capability that stands for
      something else (a ZW-M890P says 8.9).
    """
    for line in output.splitlines():
        name, _, capability = line.rpartition(",")
        major, dot, minor = capability.strip().partition(".")
        if name.strip().startswith("NVIDIA") and dot and major.isdigit() and minor.isdigit():
            return "sm" + major + minor
    return None

def arch_from_rocminfo(output):
    """The architecture of the first GPU agent that ROCMINFO lists.

    Args:
      output: what it printed, with a line such as "  Name:                    gfx942" for each agent.

    Returns:
      "gfx...", or None without a GPU.
    """
    for line in output.splitlines():
        key, _, value = line.strip().partition(":")
        if key == "Name" and value.strip().startswith("gfx"):
            return value.strip()
    return None
