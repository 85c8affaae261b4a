"""`op_test`: the one macro for Python tests of the installed wheel.

Each test is a pytest module that runs against //python:installed_wheel and never against the source tree; the rules it
is held to are in pytest_main.py. A test with `gpu` is incompatible with machines that lack that architecture:
`bazel test //...` reports it SKIPPED there, and naming it is an error. No test decides to skip.
"""

load("@rules_python//python:py_test.bzl", "py_test")

_MAIN = Label("//tools/op_test:pytest_main.py")
_HARNESS = Label("//op_test/harness")

def op_test(name, src, gpu = None, data = [], deps = [], wheel = "//python:installed_wheel", tags = [], **kwargs):
    """A pytest module on the installed wheel.

    Args:
      name: name of the target.
      src: the test module.
      gpu: an architecture of //tools/gpu that the test needs, such as "sm90"; None for a test that runs anywhere.
      data: files that the test finds with bazel-runfiles.
      deps: py_library targets beside the harness, which every test can import as `harness`.
      wheel: the installed_wheel to import atrex from.
      tags: more tags.
      **kwargs: timeout, size, visibility and the like.
    """
    py_test(
        name = name,
        srcs = [src, _MAIN],
        main = _MAIN,
        data = data + [wheel, src, Label("@environment//:installed.txt")],
        deps = deps + [_HARNESS],
        env = {
            "OP_TEST_MODULE": "$(rlocationpath %s)" % src,
            "OP_TEST_TREE": "$(rlocationpath %s)" % wheel,
        },
        tags = tags + (["gpu", "resources:gpu:1"] if gpu else []),
        target_compatible_with = [Label("//tools/gpu:" + gpu)] if gpu else [],
        **kwargs
    )
