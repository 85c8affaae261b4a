// What crosses the line between the binding and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace atrex::gdn_prepare {

enum class DataType : int { kFloat32, kBFloat16, kFloat16 };

// [B, T, HV]; a parameter [HV] has strides 0, 0, stride_h. Strides in elements.
struct Gate {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
  DataType dtype;
};

struct Problem {
  unsigned batch, tokens;
  unsigned heads;  // of q and of k, 128 features each; 0: only the gates
  unsigned value_heads;
  const void* qk;  // [B, T, 2 * heads * 128] of 16-bit elements, rows on the 16-byte grid
  int64_t stride_b, stride_t;
  void *q, *k;  // [B, T, heads, 128], contiguous
  Gate a, b, a_log, dt_bias;
  float *g, *beta;      // [B, T, HV], contiguous
  unsigned row_blocks;  // blocks for q and k, set by `forward`; those for the gates follow
};

// On `stream` of `device`; `fp16`: qk, q and k are float16, not bfloat16. Throws std::runtime_error.
void forward(Problem p, bool fp16, int device, cudaStream_t stream);

}  // namespace atrex::gdn_prepare
