"""Prints, as JSON, what the build needs to know about the interpreter that runs it.

Keys in capitals become constants of `@environment//:defs.bzl`. Exits with a message when something is missing.
"""

import importlib.metadata
import json
import os
import sys
import sysconfig

# What the wheel rule, the extension and every op_test need. Linters and examples name their own lack.
REQUIRED = (
    "auditwheel",
    "bazel-runfiles",
    "hypothesis",
    "numpy",
    "packaging",
    "pip",
    "pybind11",
    "pytest",
    "torch",
    "wheel",
)


def missing_distributions() -> list[str]:
    """Names of REQUIRED that the interpreter does not have."""
    installed = {dist.metadata["Name"].lower().replace("_", "-") for dist in importlib.metadata.distributions()}
    return [name for name in REQUIRED if name not in installed]


def main() -> None:
    if sys.version_info < (3, 10) or sys.implementation.name != "cpython":
        sys.exit(f"it is {sys.implementation.name} {sys.version.split()[0]}, accepted is CPython 3.10 or later")
    missing = missing_distributions()
    if missing:
        sys.exit(f"it lacks {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}")
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        sys.exit(f"it has no Python.h in {include}; on Debian: apt install python3-dev")

    import packaging.tags
    import pybind11

    tag = next(packaging.tags.cpython_tags())
    json.dump(
        {
            "PYTHON": sys.executable,
            "PYTHON_TAG": tag.interpreter,
            "ABI_TAG": tag.abi,
            "EXT_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
            "SITE_PACKAGES": sysconfig.get_path("purelib"),
            "include": include,
            "pybind11_include": pybind11.get_include(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
