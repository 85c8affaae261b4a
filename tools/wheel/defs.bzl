"""`atrex_wheel` and `installed_wheel`: the product and the tree that tests import.

py_wheel of rules_python takes native files as opaque data under tags somebody else must get right, and Debian's
package leaves its builder out. So the wheel is made by build_wheel.py on PyPI's `wheel` and `auditwheel`. Its name
holds the version and a manylinux tag that only the compiled files tell, hence the output is a directory with one
wheel.
"""

load("@environment//:defs.bzl", "PYTHON")
load("//tools/targets:defs.bzl", "SelectedTargetsInfo")

# What the interpreter has installed is an input like any other: without it a new lock would reuse old outputs.
_INSTALLED = attr.label(default = "@environment//:installed.txt", allow_single_file = True)

def _tool(name):
    return attr.label(default = "//tools/wheel:" + name, allow_single_file = True)

def _wheel_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    args = ctx.actions.args().use_param_file("@%s", use_always = True).set_param_file_format("multiline")
    args.add_all(["--out", out.path, "--version-file", ctx.file.version_file, "--license", ctx.file.license])
    inputs = [ctx.files.srcs]
    prefix = ctx.label.package + "/"
    for file in ctx.files.srcs:
        args.add_all(["--file", file.short_path.removeprefix(prefix), file])
    if ctx.attr.targets:
        for target in ctx.attr.targets[SelectedTargetsInfo].targets.to_list():
            files = target.files.to_list()
            inputs.append(files)
            for file in files:
                args.add_all(["--file", "atrex/kernels/%s/%s" % (target.path, file.basename), file])
    ctx.actions.run(
        executable = PYTHON,
        arguments = ["-I", ctx.file._builder.path, args],
        inputs = depset([ctx.file._builder, ctx.file._installed, ctx.file.version_file, ctx.file.license] +
                        [file for files in inputs for file in files]),
        outputs = [out],
        mnemonic = "AtrexWheel",
        progress_message = "Building wheel %{label}",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

atrex_wheel = rule(
    implementation = _wheel_impl,
    doc = "A directory with one wheel: the package's Python files and the selected kernel targets.",
    attrs = {
        "license": attr.label(allow_single_file = True, mandatory = True),
        "srcs": attr.label_list(allow_files = True, doc = "Files of this package; their path below it is their path in the wheel."),
        "targets": attr.label(providers = [SelectedTargetsInfo], doc = "Kernel targets to pack; none gives a pure wheel."),
        "version_file": attr.label(allow_single_file = True, mandatory = True),
        "_builder": _tool("build_wheel.py"),
        "_installed": _INSTALLED,
    },
)

def _installed_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = PYTHON,
        arguments = ["-I", ctx.file._installer.path, ctx.file.wheel.path, out.path],
        inputs = [ctx.file._installer, ctx.file._installed, ctx.file.wheel],
        outputs = [out],
        mnemonic = "AtrexInstall",
        progress_message = "Installing wheel %{label}",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

installed_wheel = rule(
    implementation = _installed_impl,
    doc = "The wheel installed with pip into one tree.",
    attrs = {
        "wheel": attr.label(allow_single_file = True, mandatory = True),
        "_installed": _INSTALLED,
        "_installer": _tool("install_wheel.py"),
    },
)
