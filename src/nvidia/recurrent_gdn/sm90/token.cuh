// What a token brings: its loads, and the numbers that do not depend on the state.
#pragma once

#include "tile.cuh"

namespace atrex::recurrent_gdn {

inline constexpr float kNormEpsilon = 1e-6f;
inline constexpr float kSoftplusThreshold = 20.f;  // softplus(x) is x to the last bit from here on

// ---- loads --------------------------------------------------------------------------------------------------------

// kCount features from `first` on, in pairs; `at` is where the row lies.
template <int kCount>
__device__ __forceinline__ void load_features(const Activation& x, int64_t at, int first, uint32_t* out) {
  const uint16_t* features = static_cast<const uint16_t*>(x.data) + at + first;
  if constexpr (kCount == 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(features);
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  } else if constexpr (kCount == 4) {
    const uint2 v = *reinterpret_cast<const uint2*>(features);
    out[0] = v.x, out[1] = v.y;
  } else {
    static_assert(kCount == 2);
    out[0] = *reinterpret_cast<const uint32_t*>(features);
  }
}

__device__ __forceinline__ int64_t row_of(const Activation& x, int64_t b, int64_t t, int64_t h) {
  return b * x.stride_b + t * x.stride_t + h * x.stride_h;
}

// The bits of a gate: what they mean is asked only when they are needed, so that a load holds up no other.
__device__ __forceinline__ uint32_t load_bits(const Gate& x, int64_t b, int64_t t, int64_t h) {
  const int64_t at = b * x.stride_b + t * x.stride_t + h * x.stride_h;
  return x.dtype == DataType::kFloat32 ? static_cast<const uint32_t*>(x.data)[at]
                                       : static_cast<const uint16_t*>(x.data)[at];
}
__device__ __forceinline__ float value_of(uint32_t bits, DataType dtype) {
  switch (dtype) {
    case DataType::kFloat32:
      return __uint_as_float(bits);
    case DataType::kBFloat16:
      return unpack2<__nv_bfloat16>(bits).x;
    default:
      return unpack2<__half>(bits).x;
  }
}

// ---- a token ------------------------------------------------------------------------------------------------------

template <class Tile>
struct Token {
  uint32_t k[Tile::kKeys / 2], q[Tile::kKeys / 2], v[Tile::kValues / 2];  // as the lane's elements need them
  // K first: a warp has a quarter of the keys, so for the norms each lane loads four features more.
  uint32_t norm_k[2], norm_q[2];
  uint32_t g, beta;

  __device__ __forceinline__ void load(const Problem& p, int batch, int token, int head, int value_head, int slice) {
    const int64_t at_k = row_of(p.k, batch, token, head), at_q = row_of(p.q, batch, token, head);
    constexpr int kRun = Tile::kRun;
#pragma unroll
    for (int run = 0; run < Tile::kKeys / kRun; ++run) {
      load_features<kRun>(p.k, at_k, Tile::first_key(run), k + run * kRun / 2);
      load_features<kRun>(p.q, at_q, Tile::first_key(run), q + run * kRun / 2);
    }
    if constexpr (!Tile::kVFirst) {
      load_features<4>(p.k, at_k, 4 * Tile::lane(), norm_k);
      load_features<4>(p.q, at_q, 4 * Tile::lane(), norm_q);
    }
    load_features<Tile::kValues>(p.v, row_of(p.v, batch, token, value_head),
                                 slice * Tile::kBlockV + Tile::first_value(), v);
    g = load_bits(p.g, batch, token, value_head);
    beta = load_bits(p.beta, batch, token, value_head);
  }
};

// Feature i of a lane's pairs.
template <class Act>
__device__ __forceinline__ float feature(const uint32_t* pairs, int i) {
  const float2 pair = unpack2<Act>(pairs[i / 2]);
  return i % 2 == 0 ? pair.x : pair.y;
}

// Parameters of a head for fused gating, as bits.
struct HeadParameters {
  uint32_t a_log, dt_bias;

  __device__ __forceinline__ void load(const Problem& p, int value_head) {
    if (p.a_log.data == nullptr) return;
    a_log = load_bits(p.a_log, 0, 0, value_head);
    dt_bias = load_bits(p.dt_bias, 0, 0, value_head);
  }
};

// With r the reciprocal norms (1 without l2norm), S the state before the token and k, q as they came:
//   u = norm_k beta (v - decay norm_k S^T k),  o = scale_q (decay S^T q + kq u),  S <- decay S + k u^T
struct Scalars {
  float decay, beta, norm_k, scale_q, kq;
};

// Called by a full warp.
template <class Act, class Tile>
__device__ __forceinline__ Scalars scalars_of(const Problem& p, const Token<Tile>& token,
                                              const HeadParameters& parameters) {
  constexpr int kPairs = Tile::kVFirst ? Tile::kKeys / 2 : 2, kLanes = Tile::kVFirst ? 8 : 32;
  const uint32_t* pairs_k = Tile::kVFirst ? token.k : token.norm_k;
  const uint32_t* pairs_q = Tile::kVFirst ? token.q : token.norm_q;
  float kk = 0.f, qq = 0.f, kq = 0.f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 k = unpack2<Act>(pairs_k[i]), q = unpack2<Act>(pairs_q[i]);
    kk = fmaf(k.x, k.x, fmaf(k.y, k.y, kk));
    qq = fmaf(q.x, q.x, fmaf(q.y, q.y, qq));
    kq = fmaf(k.x, q.x, fmaf(k.y, q.y, kq));
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) {
    kq += __shfl_xor_sync(kFullWarp, kq, step);
    kk += __shfl_xor_sync(kFullWarp, kk, step);
    qq += __shfl_xor_sync(kFullWarp, qq, step);
  }
  Scalars x;
  x.kq = kq;
  x.norm_k = p.l2norm ? rsqrtf(kk + kNormEpsilon) : 1.f;
  x.scale_q = p.l2norm ? p.scale * rsqrtf(qq + kNormEpsilon) : p.scale;
  float g = value_of(token.g, p.g.dtype);
  x.beta = value_of(token.beta, p.beta.dtype);
  if (p.a_log.data != nullptr) {
    const float a = g + value_of(parameters.dt_bias, p.dt_bias.dtype);
    const float softplus = a > kSoftplusThreshold ? a : log1pf(expf(a));  // expf(a) overflows from 89 on
    g = -expf(value_of(parameters.a_log, p.a_log.dtype)) * softplus;
    x.beta = __fdividef(1.f, 1.f + expf(-x.beta));
  }
  x.decay = expf(g);
  return x;
}

}  // namespace atrex::recurrent_gdn
