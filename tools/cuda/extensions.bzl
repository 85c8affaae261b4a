"""Module extension that makes `@cuda`."""

load(":repository.bzl", "cuda_repository")

def _cuda_impl(_module_ctx):
    cuda_repository(name = "cuda")

cuda = module_extension(implementation = _cuda_impl)
