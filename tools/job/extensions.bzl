"""`@job_wheels`: what a job carries beside the atrex wheel, as wheels for the environment's Python.

The GPU machine has no network, so the wheels travel; it runs the interpreter version that the atrex wheel is for.
"""

load("@environment//:defs.bzl", "PYTHON")

_BUILD = """\
filegroup(
    name = "wheels",
    srcs = glob(["*.whl"]),
    visibility = ["//visibility:public"],
)
"""

def _job_wheels_impl(rctx):
    rctx.report_progress("downloading the wheels that a job carries")
    command = [PYTHON, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    command += ["--no-deps", "--only-binary=:all:", "--dest=.", "--requirement", rctx.path(rctx.attr._requirements)]
    result = rctx.execute(command, timeout = 600)
    if result.return_code != 0:
        fail("pip could not download the wheels of third_party/job/requirements.txt:\n" + result.stderr)
    rctx.file("BUILD.bazel", _BUILD)

_job_wheels_repository = repository_rule(
    implementation = _job_wheels_impl,
    doc = "Downloads the wheels of third_party/job/requirements.txt.",
    attrs = {"_requirements": attr.label(default = "//third_party/job:requirements.txt")},
)

def _job_wheels_extension_impl(_module_ctx):
    _job_wheels_repository(name = "job_wheels")

job_wheels = module_extension(implementation = _job_wheels_extension_impl)
