"""What a kernel target's BUILD.bazel loads."""

load(":cuda_library.bzl", _cuda_library = "cuda_library")
load(":kernel_report_test.bzl", _kernel_report_test = "kernel_report_test")
load(":native_extension.bzl", _native_extension = "native_extension")

cuda_library = _cuda_library
kernel_report_test = _kernel_report_test
native_extension = _native_extension
