"""Prints, as JSON, what the build needs to know about the interpreter that runs it.

Keys in capitals become constants of `@environment//:defs.bzl`, `installed` its installed.txt. Exits with a message when
something is missing.
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


def installed_distributions() -> dict[str, str]:
    """Normalised name to version of each distribution that the interpreter sees."""
    found = importlib.metadata.distributions()
    return dict(sorted((dist.metadata["Name"].lower().replace("_", "-"), dist.version) for dist in found))


def main() -> None:
    if sys.version_info < (3, 10) or sys.implementation.name != "cpython":
        sys.exit(f"it is {sys.implementation.name} {sys.version.split()[0]}, accepted is CPython 3.10 or later")
    installed = installed_distributions()
    missing = [name for name in REQUIRED if name not in installed]
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
            "installed": "".join(f"{name}=={version}\n" for name, version in installed.items()),
            "include": include,
            "pybind11_include": pybind11.get_include(),
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
