"""The product: what //python:wheel promises to pip and to a reader of its metadata."""

import base64
import csv
import hashlib
import json
import pathlib
import runpy
import subprocess
import sys
import zipfile

import packaging.metadata
import packaging.tags
import packaging.utils
import pytest
from runfiles import Runfiles

SIZE_BOUND = 20_000_000


def _only_wheel(folder: str) -> pathlib.Path:
    (wheel,) = pathlib.Path(Runfiles.Create().Rlocation(f"_main/{folder}")).iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheel() -> pathlib.Path:
    return _only_wheel("python/wheel")


@pytest.fixture(scope="module")
def archive(wheel):
    with zipfile.ZipFile(wheel) as opened:
        yield opened


def _info(archive: zipfile.ZipFile, name: str) -> bytes:
    (entry,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
    return archive.read(entry)


def test_second_build_from_the_sources_gives_the_same_bytes(wheel):
    second = _only_wheel("tools/wheel/rebuilt")
    assert second.resolve() != wheel.resolve()
    assert second.name == wheel.name
    assert hashlib.sha256(second.read_bytes()).hexdigest() == hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_record_lists_every_file_with_its_hash_and_size(archive):
    rows = list(csv.reader(_info(archive, "RECORD").decode().splitlines()))
    assert sorted(row[0] for row in rows) == sorted(archive.namelist())
    for name, digest, size in rows:
        if name.endswith("/RECORD"):
            assert (digest, size) == ("", "")
            continue
        data = archive.read(name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(data))), name


def test_metadata_names_version_and_requirements(archive):
    parsed = packaging.metadata.Metadata.from_email(_info(archive, "METADATA"))  # raises on an invalid field
    version_file = Runfiles.Create().Rlocation("_main/python/atrex/_version.py")
    assert parsed.name == "atrex"
    assert str(parsed.version) == runpy.run_path(version_file)["__version__"]
    assert [str(requirement) for requirement in parsed.requires_dist] == ["torch"]
    assert str(parsed.requires_python) == ">=3.10"
    assert parsed.license_files and _info(archive, "licenses/LICENSE").lstrip().startswith(b"Apache License")


def test_tags_are_true(wheel, archive):
    _, _, _, tags = packaging.utils.parse_wheel_filename(wheel.name)
    (tag,) = tags
    assert f"Tag: {tag}\n" in _info(archive, "WHEEL").decode()
    if not any(name.endswith(".so") for name in archive.namelist()):
        assert str(tag) == "py3-none-any"
        return
    own = next(packaging.tags.cpython_tags())
    assert (tag.interpreter, tag.abi) == (own.interpreter, own.abi)
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)], capture_output=True, text=True, check=True
    )
    assert tag.platform == json.loads(shown.stdout)["overall_tag"]
    assert tag.platform.startswith("manylinux_") and tag.platform.endswith("_x86_64")


def test_every_kernel_folder_is_a_package(archive):
    names = set(archive.namelist())
    folders = {
        str(parent) for name in names for parent in pathlib.PurePosixPath(name).parents if "kernels" in parent.parts
    }
    assert all(f"{folder}/__init__.py" in names for folder in folders)


def test_size_is_bounded(wheel):
    assert wheel.stat().st_size < SIZE_BOUND
