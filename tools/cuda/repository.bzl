"""`@cuda`: a CUDA toolkit put together from hashed Python wheels.

Wheels rather than an installed toolkit: every machine that can install the Python requirements can compile the
kernels, and all of them run the same nvcc, which reproducible wheels need. rules_cuda would be the ordinary choice,
but it expects an installed toolkit and is not packaged where the Bazel Central Registry is out of reach.
"""

load("@environment//:defs.bzl", "PYTHON")

_FOLDER_IN_WHEEL = "nvidia/cu13"

def _cuda_repository_impl(rctx):
    if rctx.os.name != "linux" or rctx.os.arch not in ("amd64", "x86_64"):
        fail("@cuda has wheels for linux x86_64 only, this machine is %s %s" % (rctx.os.name, rctx.os.arch))
    rctx.report_progress("downloading the CUDA compiler wheels")
    result = rctx.execute([
        PYTHON,
        "-m",
        "pip",
        "download",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
        "--quiet",
        "--dest=wheels",
        "--requirement",
        rctx.path(rctx.attr._requirements),
    ], timeout = 1800)
    if result.return_code != 0:
        fail("pip could not download the CUDA compiler wheels:\n" + result.stderr)
    for wheel in rctx.path("wheels").readdir():
        archive = "wheels/%s.zip" % wheel.basename  # Bazel 7 tells an archive's type by its name only.
        rctx.symlink(wheel, archive)
        rctx.extract(archive, "toolkit", _FOLDER_IN_WHEEL)
    rctx.delete("wheels")
    rctx.symlink(rctx.attr._build_file, "BUILD.bazel")

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    doc = "Downloads the wheels of third_party/cuda/requirements.txt and unpacks them into one toolkit tree.",
    attrs = {
        "_build_file": attr.label(default = "//tools/cuda:toolkit.BUILD"),
        "_requirements": attr.label(default = "//third_party/cuda:requirements.txt"),
    },
)
