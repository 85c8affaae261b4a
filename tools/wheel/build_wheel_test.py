"""The wheel builder on small inputs: what may and what may not change the archive."""

import hashlib
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest
from runfiles import Runfiles

BUILDER = Runfiles.Create().Rlocation("_main/tools/wheel/build_wheel.py")


def _shared_object() -> str:
    """Some small extension module that the environment has anyway."""
    files = importlib.metadata.files("markupsafe")
    return str(next(file for file in files if file.suffix == ".so").locate())


def _inputs(folder: pathlib.Path) -> list[list[str]]:
    """Writes the sources into the folder and returns the builder's --file pairs."""
    sources = {"atrex/__init__.py": "x = 1\n", "atrex/_version.py": '__version__ = "1.2.3"\n', "LICENSE": "Apache\n"}
    pairs = []
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.startswith("atrex"):
            pairs.append([name, str(path)])
    return pairs


def _build(folder: pathlib.Path, pairs: list[list[str]], umask: int = 0o022, **env: str) -> pathlib.Path:
    out = folder / "out"
    out.mkdir()
    command = [sys.executable, BUILDER, "--out", str(out)]
    command += ["--version-file", str(folder / "atrex/_version.py"), "--license", str(folder / "LICENSE")]
    for pair in pairs:
        command += ["--file", *pair]
    subprocess.run(command, check=True, umask=umask, env={**os.environ, **env}, capture_output=True, text=True)
    (wheel,) = out.iterdir()
    return wheel


def _digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


NATIVE_ENTRY = "atrex/kernels/vendor/operator/arch/_native.so"


def test_clock_umask_order_and_folder_do_not_reach_the_archive(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b" / "deeper"
    pairs = _inputs(first) + [[NATIVE_ENTRY, _shared_object()]]
    again = _inputs(second) + [[NATIVE_ENTRY, _shared_object()]]
    for _, path in again[:-1]:
        os.chmod(path, 0o600)
        os.utime(path, (1_000_000_000, 1_000_000_000))
    one = _build(first, pairs)
    other = _build(
        second, again[::-1], umask=0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="7", SOURCE_DATE_EPOCH="1500000000"
    )
    assert (one.name, _digest(one)) == (other.name, _digest(other))


def test_a_changed_source_changes_the_archive(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    one, pairs = _build(first, _inputs(first)), _inputs(second)
    (second / "atrex/__init__.py").write_text("x = 2\n")
    assert _digest(one) != _digest(_build(second, pairs))


def test_tag_follows_the_contents(tmp_path):
    pure, native = tmp_path / "pure", tmp_path / "native"
    assert _build(pure, _inputs(pure)).name == "atrex-1.2.3-py3-none-any.whl"
    name = _build(native, _inputs(native) + [[NATIVE_ENTRY, _shared_object()]]).name
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert name.startswith(f"atrex-1.2.3-{python}-{python}-manylinux_2_") and name.endswith("_x86_64.whl")


def test_shared_object_that_keeps_no_manylinux_tag_is_refused(tmp_path):
    (tmp_path / "links.c").write_text("int strange(void); int call(void) { return strange(); }\n")
    (tmp_path / "strange.c").write_text("int strange(void) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libstrange.so", "strange.c"], check=True, cwd=tmp_path)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", "links.so", "links.c", "-L.", "-lstrange"], check=True, cwd=tmp_path
    )
    pairs = _inputs(tmp_path) + [[NATIVE_ENTRY, str(tmp_path / "links.so")]]
    with pytest.raises(subprocess.CalledProcessError) as error:
        _build(tmp_path, pairs)
    assert "keep no manylinux tag" in error.value.stderr and "libstrange.so" in error.value.stderr


def test_two_files_for_one_entry_are_refused(tmp_path):
    pairs = _inputs(tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as error:
        _build(tmp_path, pairs + pairs[:1])
    assert "two files for the wheel's entry atrex/__init__.py" in error.value.stderr
