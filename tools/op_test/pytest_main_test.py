"""The rules of pytest_main.py, each shown to fail a test that breaks it."""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from runfiles import Runfiles

MAIN = Runfiles.Create().Rlocation("_main/tools/op_test/pytest_main.py")


class Result:
    def __init__(self, exit_code: int, output: str, xml: pathlib.Path):
        self.passed, self.output = exit_code == 0, output
        self.counts = dict(ElementTree.parse(xml).find("testsuite").attrib) if xml.exists() else {}


@pytest.fixture
def run(tmp_path):
    """Runs a test module under pytest_main in made-up runfiles that hold an atrex, a harness and a foreign atrex."""
    runfiles = tmp_path / "runfiles"
    for folder in ("tree/atrex", "op_test/harness", "foreign/atrex", "empty"):
        (runfiles / "_main" / folder).mkdir(parents=True)
    for package in ("tree/atrex", "op_test/harness", "foreign/atrex"):
        (runfiles / "_main" / package / "__init__.py").write_text(f"origin = {package!r}\n")

    def call(source: str, tree: str = "tree") -> Result:
        (runfiles / "_main" / "the_test.py").write_text(source)
        xml = tmp_path / "test.xml"
        env = {
            "PATH": os.environ["PATH"],
            "RUNFILES_DIR": str(runfiles),
            "TEST_TMPDIR": str(tmp_path),
            "XML_OUTPUT_FILE": str(xml),
            "OP_TEST_MODULE": "_main/the_test.py",
            "OP_TEST_TREE": f"_main/{tree}",
            # As Bazel's launcher does; a source tree on this path must not win.
            "PYTHONPATH": f"{runfiles}/_main:{runfiles}/_main/foreign",
        }
        done = subprocess.run([sys.executable, MAIN], env=env, capture_output=True, text=True, check=False)
        return Result(done.returncode, done.stdout + done.stderr, xml)

    return call


def test_installed_tree_and_harness_are_found_by_the_test_and_its_children(run):
    result = run(
        "import subprocess, sys, atrex, harness\n"
        "def test():\n"
        "    assert (atrex.origin, harness.origin) == ('tree/atrex', 'op_test/harness')\n"
        "    child = [sys.executable, '-c', 'import atrex; print(atrex.origin)']\n"
        "    assert subprocess.check_output(child, text=True).strip() == 'tree/atrex'\n"
    )
    assert result.passed, result.output
    assert result.counts["tests"] == "1"


@pytest.mark.parametrize(
    "source",
    [
        "import pytest\ndef test(): pytest.skip('why not')\n",
        "import pytest\n@pytest.mark.skip(reason='why not')\ndef test(): pass\n",
        "import pytest\npytest.skip('why not', allow_module_level=True)\n",
        "import pytest\npytest.importorskip('no_such_module')\n",
        "import pytest\n@pytest.mark.xfail\ndef test(): assert False\n",
        "import pytest\n@pytest.mark.xfail\ndef test(): pass\n",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.skipTest('why not')\n",
    ],
    ids=["call", "mark", "module", "importorskip", "xfail", "xpass", "unittest"],
)
def test_skip_and_expected_failure_fail(run, source):
    result = run(source)
    assert not result.passed and "are not allowed" in result.output
    assert int(result.counts["failures"]) + int(result.counts["errors"]) == 1
    assert result.counts["skipped"] == "0"


def test_atrex_from_elsewhere_fails(run):
    result = run(
        "import os, sys\n"
        "sys.path.insert(0, os.environ['RUNFILES_DIR'] + '/_main/foreign')\n"
        "import atrex\n"
        "def test(): assert atrex.origin == 'foreign/atrex'\n"
    )
    assert not result.passed and "imported from outside the installed wheel: atrex from" in result.output
    assert result.counts["failures"] == "0"  # the rule failed it, not the assertion


def test_tree_without_atrex_fails(run):
    result = run("def test(): pass\n", tree="empty")
    assert not result.passed and "import atrex would find nothing" in result.output


def test_module_without_tests_fails(run):
    assert not run("x = 1\n").passed
