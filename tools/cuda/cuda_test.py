"""Tests of the CUDA rules: what they build from testdata/, and the checks that kernel_report makes of it."""

import os
import sys

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from runfiles import Runfiles

import kernel_report
from kernel_report import problems

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'atrex_a' for 'sm_90a'
ptxas info    : Function properties for atrex_a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 1 barriers, 128 bytes smem
"""
ATREX_A = {("atrex_a", "sm_90a")}


def data(variable: str) -> str:
    return Runfiles.Create().Rlocation(os.environ[variable])


def text(variable: str) -> str:
    with open(data(variable)) as file:
        return file.read()


def test_kernels_of_the_library_pass(capsys):
    assert kernel_report.main(data("CUOBJDUMP"), data("NATIVE"), data("KERNELS_REPORT")) == 0
    printed = capsys.readouterr().out
    assert "atrex_test_scale (sm_90a)" in printed
    assert "atrex_test_shared (sm_90a)" in printed


def test_spills_of_the_compiler_fail(capsys):
    assert kernel_report.main(data("CUOBJDUMP"), data("SPILLS"), data("SPILLS_REPORT")) == 1
    printed = capsys.readouterr().out
    assert "kernel spilling (_Z8spillingPf) does not start with atrex_" in printed
    assert "bytes spill stores" in printed


def test_stale_reports_fail(capsys):
    assert kernel_report.main(data("CUOBJDUMP"), data("NATIVE"), data("SPILLS_REPORT")) == 1
    printed = capsys.readouterr().out
    assert "atrex_test_shared (sm_90a) is in the library and in no ptxas report" in printed
    assert "_Z8spillingPf (sm_90a) is in a ptxas report and not in the library" in printed


def test_clean_report_passes():
    assert problems([REPORT], ATREX_A) == []


def test_architectures_are_told_apart():
    spilling = REPORT.replace("0 bytes spill stores", "4 bytes spill stores")
    reports = [spilling + REPORT.replace("sm_90a", "sm_120a")]
    found = problems(reports, ATREX_A)
    assert "atrex_a (sm_120a) is in a ptxas report and not in the library" in found
    assert any("atrex_a (sm_90a) has" in problem for problem in found)
    assert len(found) == 2


@pytest.mark.parametrize(
    ("report", "library", "words"),
    [
        ("", set(), "no kernel"),
        (REPORT.replace("0 bytes stack", "8 bytes stack"), ATREX_A, "8 bytes stack frame"),
        (REPORT.replace("0 bytes spill stores", "4 bytes spill stores"), ATREX_A, "4 bytes spill stores"),
        (REPORT.replace("0 bytes spill loads", "4 bytes spill loads"), ATREX_A, "4 bytes spill loads"),
        (REPORT.replace("atrex_a", "other"), {("other", "sm_90a")}, "kernel other (other) does not start with atrex_"),
        (
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async is serialized\n" + REPORT,
            ATREX_A,
            "C7510",
        ),
        (
            REPORT + "ptxas info    : Function properties for helper\n"
            "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n",
            ATREX_A,
            "helper (sm_90a) has 16 bytes stack frame",
        ),
    ],
)
def test_each_fault_is_found(report, library, words):
    found = problems([report], library)
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("atrex_two", "atrex_two"),
        ("_Z9atrex_onePf", "atrex_one"),
        ("_ZN5atrex11atrex_scaleILi3EEEvPfi", "atrex_scale"),
        ("_ZN5atrex30_GLOBAL__N__93969eab_4_a_cu_c010atrex_anonEPf", "atrex_anon"),
        ("_ZL9atrex_onePf", "atrex_one"),
        ("_ZN5atrex4scanEPf", "scan"),
    ],
)
def test_base_name(symbol, name):
    assert kernel_report.base_name(symbol) == name


def test_extension_exports_its_init_function_only():
    with open(data("NATIVE"), "rb") as file:
        elf = ELFFile(file)
        exported = {
            symbol.name
            for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
            if symbol["st_shndx"] != "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_LOCAL"
        }
        dynamic = next(section for section in elf.iter_sections() if isinstance(section, DynamicSection))
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
        assert elf.get_section_by_name(".symtab") is None
    assert exported == {"PyInit__native"}
    of_glibc = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}
    assert needed <= of_glibc | {"libgcc_s.so.1"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-p", "no:cacheprovider"]))
