"""Tests of the choice that --//tools/targets makes."""

load("@bazel_skylib//lib:unittest.bzl", "asserts", "unittest")
load(":defs.bzl", "choose")

_KNOWN = ["nvidia/scan/sm90", "amd/scan/gfx942"]

def _choose_test_impl(ctx):
    env = unittest.begin(ctx)
    asserts.equals(env, (["amd/scan/gfx942", "nvidia/scan/sm90"], None), choose(["all"], _KNOWN))
    asserts.equals(env, (["nvidia/scan/sm90"], None), choose(["nvidia/scan/sm90", "nvidia/scan/sm90"], _KNOWN))
    asserts.equals(env, ([], None), choose([], _KNOWN))
    paths, error = choose(["nvidia/scan/sm80", "all"], _KNOWN)
    asserts.equals(env, [], paths)
    asserts.equals(
        env,
        "--//tools/targets names nvidia/scan/sm80, all; accepted are: amd/scan/gfx942, nvidia/scan/sm90, all",
        error,
    )
    return unittest.end(env)

_choose_test = unittest.make(_choose_test_impl)

def choose_test_suite(name):
    unittest.suite(name, _choose_test)
