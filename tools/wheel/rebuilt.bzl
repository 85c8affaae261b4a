"""`rebuilt_wheel`: a wheel built a second time, from the sources on.

A Starlark transition gives the second build its own configuration, so Bazel runs every compiler, the wheel builder
included, once more and in other output folders. Comparing both wheels tells whether a build from clean repeats, which
running the last step twice would not.
"""

def _second_build_impl(_settings, _attr):
    return {"//tools/wheel:build": "second"}

_second_build = transition(
    implementation = _second_build_impl,
    inputs = [],
    outputs = ["//tools/wheel:build"],
)

def _rebuilt_wheel_impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.symlink(output = out, target_file = ctx.files.wheel[0])
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

rebuilt_wheel = rule(
    implementation = _rebuilt_wheel_impl,
    doc = "The output of `wheel`, from a second build of all its inputs.",
    attrs = {
        "wheel": attr.label(cfg = _second_build, mandatory = True),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
)
