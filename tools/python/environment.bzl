"""`@environment`: the one Python that builds the wheel and runs the tests.

The extension must match the interpreter that imports it, and torch, pybind11 and the test tools must be the ones that
interpreter sees. So a single repository rule settles the interpreter and everything else asks it:

- `ATREX_PYTHON` names an interpreter of a prepared environment, which is used as it is, with its torch.
- Otherwise the rule makes a virtual environment from the locked, hashed third_party/python/requirements.txt.

`defs.bzl` of the repository holds the facts (see describe.py), `:pybind11` and `:python_headers` the C++ side, and
`:toolchain` makes py_binary and py_test run with this interpreter. Bazel does not see the interpreter's packages; what
depends on them takes `installed.txt` as an input.
"""

_LOCKED_PYTHON = "3.11"
_MINUTE = 60

# The index of PyTorch's CPU builds: asked only when the machine's own package sources lack the locked torch.
_TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

_BUILD = """\
load("@rules_cc//cc:cc_library.bzl", "cc_library")
load("@rules_python//python:py_runtime.bzl", "py_runtime")
load("@rules_python//python:py_runtime_pair.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["installed.txt"])

cc_library(
    name = "python_headers",
    hdrs = glob(["include/python/**"]),
    includes = ["include/python"],
)

cc_library(
    name = "pybind11",
    hdrs = glob(["include/pybind11/**"]),
    includes = ["include/pybind11"],
    deps = [":python_headers"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtimes",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtimes",
    toolchain_type = "@rules_python//python:toolchain_type",
)
"""

def _locked_interpreter(rctx):
    """The path of a Python of the lock's version on PATH, with venv and the C headers."""
    for name in ["python" + _LOCKED_PYTHON, "python3"]:
        path = rctx.which(name)
        if path and rctx.execute([path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).stdout.strip() == _LOCKED_PYTHON:
            return path
    fail("no Python {v} on PATH, for which third_party/python/requirements.txt is locked. Install it (Debian 12: apt install python3-venv python3-dev), or set ATREX_PYTHON to the interpreter of a prepared environment.".format(v = _LOCKED_PYTHON))

def _make_venv(rctx):
    """Creates the virtual environment `venv` of this repository; returns its interpreter."""
    base = _locked_interpreter(rctx)
    requirements = rctx.path(Label("//third_party/python:requirements.txt"))
    rctx.watch(requirements)

    # Bazel shows no progress of a repository rule, and this one downloads some 280 MB.
    print("Installing third_party/python/requirements.txt into a virtual environment (about a minute)")  # buildifier: disable=print
    made = rctx.execute([base, "-m", "venv", "venv"], timeout = 5 * _MINUTE)
    if made.return_code:
        fail("{} -m venv failed; on Debian: apt install python3-venv\n{}{}".format(base, made.stdout, made.stderr))
    python = str(rctx.path("venv/bin/python"))
    pip = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    pip += ["--require-hashes", "--only-binary", ":all:", "--requirement", str(requirements)]
    for extra in [[], ["--extra-index-url", _TORCH_CPU_INDEX]]:
        installed = rctx.execute(pip + extra, timeout = 60 * _MINUTE)
        if installed.return_code == 0:
            return python
        if "torch==" not in installed.stderr:
            break
    fail("installing third_party/python/requirements.txt failed:\n" + installed.stderr)

def _environment_impl(rctx):
    given = rctx.os.environ.get("ATREX_PYTHON")
    if given and not given.startswith("/"):
        fail("ATREX_PYTHON is '{}', expected the absolute path of a Python interpreter".format(given))
    python = given or _make_venv(rctx)
    describe = rctx.path(Label("//tools/python:describe.py"))
    rctx.watch(describe)
    described = rctx.execute([python, "-I", describe])
    if described.return_code:
        fail("{} cannot be the environment ({}):\n{}".format(
            python,
            "ATREX_PYTHON" if given else "made from third_party/python/requirements.txt",
            described.stderr or "it is no Python interpreter, exit status %d" % described.return_code,
        ))
    facts = json.decode(described.stdout)
    rctx.symlink(facts.pop("include"), "include/python")
    rctx.symlink(facts.pop("pybind11_include"), "include/pybind11")
    rctx.file("installed.txt", facts.pop("installed"))
    rctx.file("defs.bzl", "".join(["%s = %r\n" % item for item in facts.items()]))
    rctx.file("BUILD.bazel", _BUILD.format(python = facts["PYTHON"]))

_environment_repository = repository_rule(
    implementation = _environment_impl,
    environ = ["ATREX_PYTHON"],
    doc = "Makes or adopts the Python environment; see the head of this file.",
)

def _extension_impl(_module_ctx):
    _environment_repository(name = "environment")

environment = module_extension(implementation = _extension_impl)
