"""`job`: the gates of one operator target in one file, `<name>.pyz`.

GPU machines are often images with Python and torch, without Bazel and network, so what runs there is a zip file with
the wheel, the test file, the harness and the libraries they need. op_test makes one beside each test of a target.
"""

load("@environment//:defs.bzl", "PYTHON")

def _job_impl(ctx):
    out = ctx.actions.declare_file(ctx.label.name + ".pyz")
    runfiles = depset(
        [ctx.file.src, ctx.file._runner] + ctx.files.data,
        transitive = [target[DefaultInfo].default_runfiles.files for target in ctx.attr.data + ctx.attr.deps],
    )
    module = ctx.workspace_name + "/" + ctx.file.src.short_path
    args = ctx.actions.args().use_param_file("@%s", use_always = True).set_param_file_format("multiline")
    args.add_all(["--out", out, "--status", ctx.info_file, "--target", ctx.attr.target, "--module", module])
    args.add_all(["--wheel", ctx.file.wheel.path])
    args.add_all(ctx.files._carried, before_each = "--carried")
    args.add_all(ctx.files._sources, before_each = "--source")
    for file in runfiles.to_list():
        if not file.is_directory:
            args.add_all(["--file", ctx.workspace_name + "/" + file.short_path, file])
    ctx.actions.run(
        executable = PYTHON,
        arguments = ["-I", ctx.file._packer.path, args],
        inputs = depset(
            [ctx.file._packer, ctx.file.wheel, ctx.info_file] + ctx.files._carried + ctx.files._sources,
            transitive = [runfiles],
        ),
        outputs = [out],
        mnemonic = "AtrexJob",
        progress_message = "Packing job %{label}",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

job = rule(
    implementation = _job_impl,
    doc = "One file that runs a test module's gates on a machine without Bazel.",
    attrs = {
        "data": attr.label_list(allow_files = True, doc = "Files that the test finds with bazel-runfiles."),
        "deps": attr.label_list(doc = "py_library targets that the test imports."),
        "src": attr.label(allow_single_file = [".py"], mandatory = True, doc = "The test module."),
        "target": attr.string(mandatory = True, doc = "<vendor>/<operator>/<arch>, or fallback/<operator>."),
        "wheel": attr.label(allow_single_file = True, mandatory = True),
        "_carried": attr.label(default = "@job_wheels//:wheels"),
        "_packer": attr.label(allow_single_file = True, default = "//tools/job:pack.py"),
        "_runner": attr.label(allow_single_file = True, default = "//tools/op_test:pytest_main.py"),
        "_sources": attr.label(default = "//tools/job:sources"),
    },
)
