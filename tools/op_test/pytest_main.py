"""Runs the pytest module of an op_test against the installed wheel.

Holds each test to the rules that make its result mean something:
- atrex comes from the installed tree, in this process and in its children, or the test fails;
- a skipped or expected failure is a failure: what does not apply to a machine is left out by Bazel, not by the test;
- caches and data bases of the test's libraries live and die with the test.
"""

import importlib.util
import os
import sys

import pytest
from runfiles import Runfiles


def set_environment(runfiles_dir: str, tree: str) -> None:
    """Leaves the installed tree and op_test (for `harness`) as the only additions to the interpreter's own path."""
    scratch = os.environ["TEST_TMPDIR"]
    os.environ.update(
        HOME=scratch,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        HYPOTHESIS_STORAGE_DIRECTORY=os.path.join(scratch, "hypothesis"),
        TORCHINDUCTOR_CACHE_DIR=os.path.join(scratch, "inductor"),
        TRITON_CACHE_DIR=os.path.join(scratch, "triton"),
        PYTHONDONTWRITEBYTECODE="1",
        PYTHONNOUSERSITE="1",
        PYTHONSAFEPATH="1",
    )
    added = [tree, os.path.join(runfiles_dir, "_main", "op_test")]
    os.environ["PYTHONPATH"] = os.pathsep.join(added)
    here = os.path.dirname(os.path.realpath(__file__))  # Python's own first entry: the folder of the script
    inherited = [entry for entry in sys.path if os.path.realpath(entry) != here and not _inside(entry, runfiles_dir)]
    sys.path[:] = added + inherited
    sys.dont_write_bytecode = True


def _inside(path: str, folder: str) -> bool:
    # By name and not by real path: in Bazel's sandbox each single file of the tree is a link to somewhere else.
    path, folder = os.path.abspath(path), os.path.abspath(folder)
    return os.path.commonpath([path, folder]) == folder


class Rules:
    """A pytest plugin; `tree` is where atrex must come from."""

    def __init__(self, tree: str):
        self.tree = tree

    def pytest_sessionstart(self) -> None:
        spec = importlib.util.find_spec("atrex")
        if spec is None or not _inside(spec.origin, self.tree):
            found = spec.origin if spec else "nothing"
            raise pytest.UsageError(f"import atrex would find {found}, expected the installed wheel in {self.tree}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        return self._no_skip((yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        return self._no_skip((yield))

    def _no_skip(self, report):
        if report.outcome == "skipped" or hasattr(report, "wasxfail"):
            reason = getattr(report, "wasxfail", None) or report.longrepr
            report.outcome, report.longrepr = "failed", f"skips and expected failures are not allowed: {reason}"
            vars(report).pop("wasxfail", None)
        return report

    def pytest_sessionfinish(self, session) -> None:
        ours = {name: module for name, module in sorted(sys.modules.items()) if name.split(".")[0] == "atrex"}
        files = {name: module.__file__ for name, module in ours.items() if getattr(module, "__file__", None)}
        outside = [f"{name} from {file}" for name, file in files.items() if not _inside(file, self.tree)]
        if outside:
            print(f"\nimported from outside the installed wheel: {'; '.join(outside)}", file=sys.stderr)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def main() -> int:
    runfiles = Runfiles.Create()
    module = runfiles.Rlocation(os.environ["OP_TEST_MODULE"])
    tree = os.path.abspath(runfiles.Rlocation(os.environ["OP_TEST_TREE"]))
    runfiles_dir = os.path.abspath(runfiles.EnvVars()["RUNFILES_DIR"])
    set_environment(runfiles_dir, tree)
    arguments = ["--import-mode=importlib", "--config-file", os.devnull, f"--rootdir={runfiles_dir}/_main"]
    arguments += ["-p", "no:cacheprovider", "--strict-markers", "-ra", "--durations=5"]
    # Only the one plugin that the lock brings on purpose; its seed, because a cached result must not be luck.
    arguments += ["-p", "hypothesispytest", "--hypothesis-seed=0"]
    if "XML_OUTPUT_FILE" in os.environ:
        arguments += ["--junitxml", os.environ["XML_OUTPUT_FILE"]]
    if "TESTBRIDGE_TEST_ONLY" in os.environ:  # bazel test --test_filter
        arguments += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    return pytest.main([*arguments, *sys.argv[1:], module], plugins=[Rules(tree)])


if __name__ == "__main__":
    sys.exit(main())
