"""`native_extension`: the Python extension module `_native` of one kernel target.

A cc_binary with the settings that let one file serve every process of its Python version: nothing but the module's
init function is exported (no clash with the C++ symbols of torch or of another target), and the C++ runtime and the
CUDA runtime are inside (no demand on what the machine has installed beyond glibc).
"""

load("@environment//:defs.bzl", "EXT_SUFFIX")
load("@rules_cc//cc:cc_binary.bzl", "cc_binary")

def native_extension(name, srcs, deps, **kwargs):
    """Builds `_native<EXT_SUFFIX>`.

    Args:
      name: name of the target; its one file is the extension.
      srcs: C++ sources with `PYBIND11_MODULE(_native, ...)`, and their private headers.
      deps: the cuda_library targets that the sources call.
      **kwargs: visibility and the like.
    """
    extension = "_native" + EXT_SUFFIX
    exports = "//tools/cuda:native_extension.lds"
    cc_binary(
        name = extension,
        srcs = srcs,
        additional_linker_inputs = [exports],
        copts = [
            "-O2",
            "-std=c++17",
            "-fvisibility=hidden",
        ],
        # bfd, chosen below, has no --start-lib.
        features = ["-supports_start_end_lib"],
        linkopts = [
            "-Wl,--version-script=$(location %s)" % exports,
            "-Wl,--strip-all",
            # The toolchain names -lstdc++ at the end of every link. The archive comes first and resolves all of it,
            # and --as-needed keeps the then unused shared one out of the list of needed libraries. libgcc_s stays
            # shared: its archive would ask for a newer glibc than everything else here does.
            "-Wl,--as-needed",
            # gold keeps the glibc symbols of sections that it drops, among them one of glibc 2.36; bfd asks for 2.34.
            "-fuse-ld=bfd",
            "-Wl,--gc-sections",
            "-l:libstdc++.a",
        ],
        linkshared = True,
        deps = deps + ["@environment//:pybind11"],
        **kwargs
    )
    native.filegroup(
        name = name,
        srcs = [extension],
        **kwargs
    )
