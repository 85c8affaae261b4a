// What crosses the line between the host launcher and the kernels: plain data, no torch, no pybind11.
#pragma once

#include <cstdint>

namespace atrex::recurrent_gdn {

inline constexpr int kHeadDim = 128;  // K = V

enum class DataType : int { kFloat32, kBFloat16, kFloat16 };

// [B, T, heads, 128] of 16-bit elements; the last dimension is contiguous and on the 16-byte grid. Strides in elements.
struct Activation {
  const void* data;
  int64_t stride_b, stride_t, stride_h;
};

// [B, T, HV]; a parameter [HV] has strides 0, 0, stride_h. Strides in elements.
struct Gate {
  const void* data;  // null: absent
  int64_t stride_b, stride_t, stride_h;
  DataType dtype;
};

// [N] or [N, S], int32 or int64; strides in elements.
struct Indices {
  const void* data;  // null: absent
  int64_t stride_n, stride_s;
  bool is_int64;
};

// States [rows, HV, 128, 128] or [rows, steps, HV, 128, 128], each head contiguous; strides in elements.
struct States {
  void* data;  // null: absent
  int64_t rows, stride_row, stride_step, stride_h;
};

enum class Store : int {
  kNone,
  kLast,       // after the last token of a sequence
  kEachToken,  // after every token
};

struct Problem {
  int tokens, heads, value_heads, sequences;
  int group;                  // value heads of a head
  unsigned reciprocal_group;  // floor(2^32 / group) + 1: __umulhi(head, it) is head / group, for group > 1
  const void* cu_seqlens;     // null: one sequence a batch entry
  bool cu_seqlens_int64;
  float scale;
  bool l2norm;

  Activation q, k, v;
  Gate g, beta;         // or, with fused gating, a and b; then
  Gate a_log, dt_bias;  // g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b)
  void* out;            // [B, T, HV, 128], contiguous

  States initial;
  Indices read;      // slot of `initial`; absent: row n belongs to sequence n
  Indices accepted;  // column of `read` plus one; absent: the first column
  int64_t read_columns;
  int64_t padding_index;  // an index that is no slot, as all outside of [0, rows)

  Store store;
  States stored;
  Indices write;          // row of `stored` for (sequence, token), or for the sequence where stride_s is 0
  int64_t write_padding;  // as padding_index
  int64_t steps;          // tokens of a sequence that have a place in `stored`, for kEachToken
};

// A copy of [B, T, heads, 128] 16-bit elements with any strides into contiguous memory.
struct PackedCopy {
  const void* from;
  int64_t stride_b, stride_t, stride_h, stride_d;
  int batch, tokens, heads;
  void* to;
};

}  // namespace atrex::recurrent_gdn
