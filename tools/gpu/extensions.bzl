"""`@local_gpu`: the platform of this machine, with the constraint of its GPU.

As the default of --platforms it makes `bazel test //...` skip the tests of other GPUs, and makes naming one of them an
error: no test has to decide whether it applies.
"""

load(":arches.bzl", "GPU_ARCHES")
load(":detect.bzl", "NVIDIA_SMI", "ROCMINFO", "arch_from_nvidia_smi", "arch_from_rocminfo")

_BUILD = """\
# The GPU found here: {found}.
platform(
    name = "platform",
    constraint_values = {constraints},
    parents = ["@platforms//host"],
    visibility = ["//visibility:public"],
)
"""

def _detect(rctx):
    for command, arch_from in [(NVIDIA_SMI, arch_from_nvidia_smi), (ROCMINFO, arch_from_rocminfo)]:
        tool = rctx.which(command[0])
        if not tool:
            continue
        result = rctx.execute([tool] + command[1:], timeout = 60)
        if result.return_code != 0:
            # Left unsaid, GPU tests would be skipped on a machine that has one.
            print("%s failed, taking it for no GPU: %s" % (tool, result.stdout + result.stderr))  # buildifier: disable=print
            continue
        arch = arch_from(result.stdout)
        if arch:
            return arch
    return None

def _local_gpu_repository_impl(rctx):
    arch = _detect(rctx)
    constraints = [str(Label("//tools/gpu:" + arch))] if arch in GPU_ARCHES else []
    rctx.file("BUILD.bazel", _BUILD.format(constraints = constraints, found = arch or "none"))

_local_gpu_repository = repository_rule(
    implementation = _local_gpu_repository_impl,
    doc = "Detects the GPU anew with each start of the Bazel server.",
    configure = True,
    local = True,
)

def _local_gpu_impl(_module_ctx):
    _local_gpu_repository(name = "local_gpu")

local_gpu = module_extension(implementation = _local_gpu_impl)
