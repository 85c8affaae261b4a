"""`example`: a script that `bazel run` starts with the environment's interpreter on the installed wheel.

Not on py_binary, for the reasons that tools/op_test/defs.bzl gives: its launcher may hide the interpreter's packages.
The script is the same that a user of the wheel starts with plain Python, so it knows nothing of Bazel.
"""

load("@environment//:defs.bzl", "PYTHON")

_LAUNCHER = """\
#!/bin/sh
runfiles="${{RUNFILES_DIR:-$0.runfiles}}"
export PYTHONPATH="$runfiles/{wheel}" PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
exec '{python}' "$runfiles/{script}" "$@"
"""

def _rlocation(ctx, file):
    return ctx.workspace_name + "/" + file.short_path

def _example_impl(ctx):
    launcher = ctx.actions.declare_file(ctx.label.name)
    content = _LAUNCHER.format(
        python = PYTHON,
        script = _rlocation(ctx, ctx.file.src),
        wheel = _rlocation(ctx, ctx.file._wheel),
    )
    ctx.actions.write(launcher, content, is_executable = True)
    files = [ctx.file.src, ctx.file._wheel] + ctx.files.data
    return [DefaultInfo(executable = launcher, runfiles = ctx.runfiles(files))]

example = rule(
    implementation = _example_impl,
    doc = "A Python script on the installed wheel.",
    attrs = {
        "data": attr.label_list(allow_files = True, doc = "Files that the script finds beside itself."),
        "src": attr.label(allow_single_file = [".py"], mandatory = True),
        "_wheel": attr.label(allow_single_file = True, default = "//python:installed_wheel"),
    },
    executable = True,
)
