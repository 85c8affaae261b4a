"""`runs_on`: the machines that a test of a GPU architecture is compatible with."""

def runs_on(arch):
    """The value of a test's target_compatible_with.

    Args:
      arch: a value of arches.bzl.

    Returns:
      the architecture's constraint here; none with --//tools/gpu:fleet, where this machine's GPU says nothing.
    """
    return select({
        Label("//tools/gpu:on_fleet"): [],
        "//conditions:default": [Label("//tools/gpu:" + arch)],
    })
