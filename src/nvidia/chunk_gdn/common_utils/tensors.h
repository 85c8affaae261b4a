// Sizes and tensors as the host gives them to the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cstdint>

namespace atrex::chunk_gdn {

inline constexpr int kChunk = 64;     // tokens of a chunk
inline constexpr int kHeadDim = 128;  // K = V

enum class DataType : int { kFloat32, kBFloat16, kFloat16 };

// A [B, T, H, 128] activation; strides in elements, the last dimension is contiguous.
struct Activation {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
};

// A [B, T, HV] gate; strides in elements.
struct Gate {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
  DataType dtype;
};

// States [rows, HV, K, V] or [rows, HV, V, K], fp32 or bf16; strides in elements.
struct States {
  void* data;  // null: absent
  int64_t stride_row, stride_h, stride_k, stride_v;
  DataType dtype;
};

}  // namespace atrex::chunk_gdn
