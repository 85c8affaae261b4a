// What crosses the line between the binding and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace atrex::gated_rms_norm {

enum class DataType : int { kFloat32, kBFloat16, kFloat16 };

// Rows of 128 16-bit elements, each contiguous and on the 16-byte grid. Row r lies at
// r / inner * stride_outer + r % inner * stride_inner; strides in elements.
struct Rows {
  const void* data;
  unsigned inner;
  int64_t stride_outer, stride_inner;
};

struct Problem {
  unsigned rows;
  Rows x, z;
  const void* weight;  // [128], contiguous and on the 16-byte grid
  DataType weight_type;
  void* out;  // [rows, 128], contiguous
  float eps;
  bool is_sigmoid;    // of the gate; else silu
  bool cast_normal;   // round the normalised x to its type,
  bool cast_product;  // and its product with the weight too
};

// On `stream` of `device`; `fp16`: x, z and out are float16, not bfloat16. Throws std::runtime_error.
void forward(const Problem& p, bool fp16, int device, cudaStream_t stream);

}  // namespace atrex::gated_rms_norm
