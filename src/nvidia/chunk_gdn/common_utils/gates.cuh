// Gates of a chunk: loads of any type and stride, cumulative decays with exact resets.
#pragma once

#include <cuda_fp16.h>

#include "params.h"  // the target's own

namespace atrex::chunk_gdn {

// exp(-100) is below float32's range: such a decay is an exact reset, and -inf is one of them.
inline constexpr float kResetDecay = -100.f;
// Stands for a reset in log2: below what the other decays of a chunk can make up for, so that exp2 gives exact zero.
inline constexpr float kResetLog2 = -16384.f;
static_assert(-kResetLog2 > kChunk * -kResetDecay * 1.45f + 150.f);
inline constexpr float kLog2E = 1.4426950408889634f;

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A gate as it lies in memory: one of the two is loaded, without a branch and without a use, so that several loads are
// under way at a time. Zero if not loaded.
struct RawGate {
  uint32_t wide;
  uint16_t half;
};
__device__ __forceinline__ RawGate load_gate(const Gate& gate, int64_t b, int64_t t, int64_t h, bool on) {
  const int64_t at = b * gate.stride_b + t * gate.stride_t + h * gate.stride_h;
  const bool wide = gate.dtype == DataType::kFloat32;
  RawGate raw;
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0; mov.b32 %0, 0;\n"
      "@p ld.global.nc.b32 %0, [%1];}"
      : "=&r"(raw.wide)
      : "l"(static_cast<const char*>(gate.data) + at * (wide ? 4 : 2)), "r"(int(on && wide)));
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %2, 0; mov.b16 %0, 0;\n"
      "@p ld.global.nc.b16 %0, [%1];}"
      : "=&h"(raw.half)
      : "l"(static_cast<const char*>(gate.data) + at * (wide ? 4 : 2)), "r"(int(on && !wide)));
  return raw;
}
__device__ __forceinline__ float gate_value(const RawGate& raw, DataType dtype) {
  if (dtype == DataType::kFloat32) return __uint_as_float(raw.wide);
  return dtype == DataType::kBFloat16 ? __uint_as_float(uint32_t(raw.half) << 16)
                                      : __half2float(__ushort_as_half(raw.half));
}

// The gates of one v-head, two tokens a lane.
struct LaneGates {
  RawGate g[2], beta[2];
};

// One warp: asks for the gates of one v-head of a work item.
template <class Item>
__device__ __forceinline__ LaneGates load_gates(const Problem& p, const Item& item, int member) {
  LaneGates gates;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = threadIdx.x % 32 * 2 + i;
    gates.g[i] = load_gate(p.g, item.batch, item.token + t, item.first_head + member, t < item.live);
    gates.beta[i] = load_gate(p.beta, item.batch, item.token + t, item.first_head + member, t < item.live);
  }
  return gates;
}

// One warp: decays and beta of one v-head into shared memory.
__device__ __forceinline__ void share_gates(const Problem& p, float2* decays, float* betas, const LaneGates& gates) {
  const int lane = threadIdx.x % 32;
  float decay[2], reset[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float g = gate_value(gates.g[i], p.g.dtype);
    reset[i] = g <= kResetDecay ? kResetLog2 : 0.f;
    decay[i] = g <= kResetDecay ? 0.f : g * kLog2E;
  }
  float sum = decay[0] + decay[1];
  float resets = reset[0] + reset[1];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float left_sum = __shfl_up_sync(0xffffffffu, sum, step);
    const float left_resets = __shfl_up_sync(0xffffffffu, resets, step);
    if (lane >= step) {
      sum += left_sum;
      resets += left_resets;
    }
  }
  *reinterpret_cast<float4*>(decays + 2 * lane) = {sum - decay[1], resets - reset[1], sum, resets};
  *reinterpret_cast<float2*>(betas + 2 * lane) = {gate_value(gates.beta[0], p.beta.dtype),
                                                  gate_value(gates.beta[1], p.beta.dtype)};
}

// exp2 of the decay between the tokens of a row and of two neighbouring columns. Capped, so that zeros above the
// diagonal, where the decay is a growth, stay zero when they are multiplied by it.
__device__ __forceinline__ float2 decay_between(const float2& row, const float4& columns) {
  return {exp2_approximate(fminf(row.x - columns.x + (row.y - columns.y), 126.f)),
          exp2_approximate(fminf(row.x - columns.z + (row.y - columns.w), 126.f))};
}

}  // namespace atrex::chunk_gdn
