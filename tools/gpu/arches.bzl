"""The GPU architectures that have an implementation; each is a constraint value `//tools/gpu:<arch>`."""

GPU_ARCHES = ["sm120", "sm90"]
