"""`op_test`: the one macro for Python tests of the installed wheel.

Each test is a pytest module that runs against //python:installed_wheel and never against the source tree; the rules it
is held to are in pytest_main.py. A test with `gpu` is incompatible with machines that lack that architecture:
`bazel test //...` reports it SKIPPED there, and naming it is an error. No test decides to skip.

Not on py_test: its launchers differ between versions, put the runfiles on the import path, and may put an environment
of their own between the test and the interpreter that has torch.
"""

load("@environment//:defs.bzl", "PYTHON")
load("//tools/gpu:defs.bzl", "runs_on")
load("//tools/job:defs.bzl", "job")

_LAUNCHER = """\
#!/bin/sh
export RUNFILES_DIR="${{TEST_SRCDIR:-$0.runfiles}}"
exec '{python}' "$RUNFILES_DIR/{main}" "$@"
"""

def _rlocation(ctx, file):
    return ctx.workspace_name + "/" + file.short_path

def _op_test_impl(ctx):
    launcher = ctx.actions.declare_file(ctx.label.name)
    content = _LAUNCHER.format(python = PYTHON, main = _rlocation(ctx, ctx.file._main))
    ctx.actions.write(launcher, content, is_executable = True)
    own = [ctx.file.src, ctx.file.wheel, ctx.file._main, ctx.file._installed] + ctx.files.data
    depended = [target[DefaultInfo].default_runfiles for target in ctx.attr.data + ctx.attr.deps]
    return [
        DefaultInfo(executable = launcher, runfiles = ctx.runfiles(own).merge_all(depended)),
        RunEnvironmentInfo({
            "OP_TEST_MODULE": _rlocation(ctx, ctx.file.src),
            "OP_TEST_TREE": _rlocation(ctx, ctx.file.wheel),
        }),
    ]

_op_test = rule(
    implementation = _op_test_impl,
    attrs = {
        "data": attr.label_list(allow_files = True),
        "deps": attr.label_list(),
        "src": attr.label(allow_single_file = [".py"], mandatory = True),
        "wheel": attr.label(allow_single_file = True, mandatory = True),
        "_installed": attr.label(allow_single_file = True, default = "@environment//:installed.txt"),
        "_main": attr.label(allow_single_file = True, default = "//tools/op_test:pytest_main.py"),
    },
    test = True,
)

def _target(package, gpu):
    """What a test of op_test/<vendor>/<operator>, or of op_test/fallback/<operator>, gates; None for other tests."""
    folders = package.split("/")
    if len(folders) != 3 or folders[0] != "op_test":
        return None
    return "/".join(folders[1:] + ([gpu] if gpu else []))

def op_test(name, src, gpu = None, deps = [], tags = [], wheel = "//python:installed_wheel", **kwargs):
    """A pytest module on the installed wheel.

    The test of an operator target also gets `<name>_job`, its gates in one file for machines without Bazel.

    Args:
      name: name of the target.
      src: the test module.
      gpu: an architecture of //tools/gpu that the test needs, such as "sm90"; None for a test that runs anywhere.
      deps: py_library targets beside the harness, which every test can import as `harness`.
      tags: more tags.
      wheel: the installed_wheel to import atrex from.
      **kwargs: data (files that the test finds with bazel-runfiles), timeout, size, visibility and the like.
    """
    deps = deps + ["//op_test/harness"]
    target = _target(native.package_name(), gpu)
    if target:
        job(
            name = name + "_job",
            src = src,
            data = kwargs.get("data", []),
            target = target,
            visibility = ["//visibility:public"],
            wheel = "//python:wheel",
            deps = deps,
        )
    _op_test(
        name = name,
        src = src,
        tags = tags + (["gpu", "resources:gpu:1"] if gpu else []),
        # For a fleet (--config=remote): the property that the test's worker must have. Only the test action asks for it.
        exec_properties = {"test.gpu_arch": gpu} if gpu else {},
        target_compatible_with = runs_on(gpu) if gpu else [],
        wheel = wheel,
        deps = deps,
        **kwargs
    )
