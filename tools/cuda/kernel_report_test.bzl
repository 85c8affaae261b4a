"""`kernel_report_test`: the build-time gate on a target's machine code; see kernel_report.py for what it holds."""

load("@rules_python//python:py_test.bzl", "py_test")

_CUOBJDUMP = "@cuda//:toolkit/bin/cuobjdump"
_MAIN = Label("//tools/cuda:kernel_report.py")

def kernel_report_test(name, kernels, library, **kwargs):
    """Fails on kernels that spill, are misnamed or are missing; runs without a GPU.

    Args:
      name: name of the test.
      kernels: the cuda_library, for its ptxas reports.
      library: what is shipped, the native_extension: the kernels' names are read back from it.
      **kwargs: tags and the like.
    """
    reports = name + ".ptxas"
    native.filegroup(
        name = reports,
        srcs = [kernels],
        output_group = "ptxas_report",
        testonly = True,
    )
    py_test(
        name = name,
        size = "small",
        srcs = [_MAIN],
        args = ["$(rlocationpath %s)" % label for label in [_CUOBJDUMP, library]] + ["$(rlocationpaths :%s)" % reports],
        data = [_CUOBJDUMP, library, ":" + reports],
        main = _MAIN,
        **kwargs
    )
