// Copies of inputs that the kernels cannot read as they lie.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace atrex::chunk_gdn {

// A [B, T, H, 128] tensor of 16-bit elements with any strides, and contiguous memory for it.
struct PackedCopy {
  const void* from;
  int64_t stride_b, stride_t, stride_h, stride_d;
  int batch, tokens, heads;
  void* to;
};
void pack(const PackedCopy& copy, int device, cudaStream_t stream);

}  // namespace atrex::chunk_gdn
