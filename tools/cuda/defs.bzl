"""The rules a kernel target's BUILD.bazel loads."""

load(":cuda_library.bzl", _cuda_library = "cuda_library")
load(":native_extension.bzl", _native_extension = "native_extension")

cuda_library = _cuda_library
native_extension = _native_extension
