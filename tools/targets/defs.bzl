"""`kernel_target`: one implementation of an operator, and the choice of those that the wheel packs.

The wheel packs what `//tools/targets:selected` says, and that follows the flag `--//tools/targets`: a service that
runs on one architecture builds `--//tools/targets=nvidia/chunk_gdn/sm90` and carries no other machine code.
"""

load("@bazel_skylib//rules:common_settings.bzl", "BuildSettingInfo")

_ALL = "all"

KernelTargetInfo = provider(
    doc = "One implementation of an operator for one architecture.",
    fields = {
        "files": "depset of its files in the wheel: the runtime module and the extension",
        "path": "<vendor>/<operator>/<arch>: its folder below atrex/kernels in the wheel",
    },
)

SelectedTargetsInfo = provider(
    doc = "The kernel targets that the flag --//tools/targets selects.",
    fields = {"targets": "depset of KernelTargetInfo"},
)

def _kernel_target_impl(ctx):
    files = depset([ctx.file.runtime], transitive = [ctx.attr.native.files])
    return [
        DefaultInfo(files = files),
        KernelTargetInfo(files = files, path = ctx.label.package.removeprefix("src/")),
    ]

kernel_target = rule(
    implementation = _kernel_target_impl,
    doc = "Declared once in src/<vendor>/<operator>/<arch>/BUILD.bazel and named like the architecture.",
    attrs = {
        "native": attr.label(mandatory = True, doc = "the native_extension"),
        "runtime": attr.label(mandatory = True, allow_single_file = [".py"]),
    },
)

def choose(names, known):
    """Which of the known targets the flag's names choose.

    Args:
      names: the flag's value.
      known: paths of all kernel targets.

    Returns:
      the chosen paths, sorted and each once, and the error in words or None.
    """
    if names == [_ALL]:
        return sorted(known), None
    unknown = [name for name in names if name not in known]
    if unknown:
        accepted = ", ".join(sorted(known) + [_ALL])
        return [], "--//tools/targets names %s; accepted are: %s" % (", ".join(unknown), accepted)
    return sorted({name: None for name in names}), None

def _selected_targets_impl(ctx):
    known = {target[KernelTargetInfo].path: target[KernelTargetInfo] for target in ctx.attr.known}
    paths, error = choose(ctx.attr.flag[BuildSettingInfo].value, known.keys())
    if error:
        fail(error)
    return [SelectedTargetsInfo(targets = depset([known[path] for path in paths]))]

selected_targets = rule(
    implementation = _selected_targets_impl,
    doc = "Those of `known` that the flag names. An empty flag selects none.",
    attrs = {
        "flag": attr.label(providers = [BuildSettingInfo], mandatory = True),
        "known": attr.label_list(providers = [KernelTargetInfo]),
    },
)
