// Host side of a launch, shared by the three kernels.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "params.h"

namespace atrex::chunk_gdn {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// `overlap`: the kernel may start while its predecessor drains; it waits for it in the kernel (griddepcontrol.wait).
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int blocks, int threads, int shared_bytes, bool overlap, cudaStream_t stream,
            const Args&... args) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
        "cudaFuncSetAttribute");
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

void launch_prepare(const Problem& p, bool fp16, int blocks, const CUtensorMap& map_k, const CUtensorMap& map_q,
                    cudaStream_t stream);

struct ScanMaps {
  CUtensorMap k, q, v, out;
};
// `warpgroups`: 64-row value slices that one block serves, 1 or 2.
void launch_scan_bf16(const Problem& p, int warpgroups, int blocks, const ScanMaps& maps, cudaStream_t stream);
void launch_scan_fp16(const Problem& p, int warpgroups, int blocks, const ScanMaps& maps, cudaStream_t stream);

// Copies a [B, T, H, D] tensor of 16-bit elements with any strides into contiguous memory.
struct PackedCopy {
  const void* from;
  int64_t stride_b, stride_t, stride_h, stride_d;
  int batch, tokens, heads;
  void* to;
};
void launch_pack(const PackedCopy& copy, cudaStream_t stream);

}  // namespace atrex::chunk_gdn
