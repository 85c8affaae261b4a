// RMS norm of rows of 128, with a weight and a gate.
//
// Bound by memory: a row's x and z are read once, in 16-byte vectors by half a warp, and its result is written once.
// Each half warp has two rows, so a thread has four loads under way before it needs any of them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "norm.h"

namespace atrex::gated_rms_norm {
namespace {

constexpr int kD = 128;
constexpr int kThreads = 128;
constexpr int kVector = 8;            // elements of 16 bytes
constexpr int kLanes = kD / kVector;  // of a row
constexpr int kGroups = kThreads / kLanes;
constexpr int kRows = 2;  // of a thread
constexpr int kRowsPerBlock = kRows * kGroups;
constexpr unsigned kFullWarp = 0xffffffffu;

// Loads must not be __ldg ones: the compiler may move those up across this wait.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_kernel_be_placed() { asm volatile("griddepcontrol.launch_dependents;"); }

template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t packed) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

template <class T>
__device__ __forceinline__ void unpack(const uint4& vector, float (&elements)[kVector]) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack2<T>(words[i]);
    elements[2 * i] = pair.x;
    elements[2 * i + 1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ uint4 pack(const float (&elements)[kVector]) {
  return {pack2<T>(elements[0], elements[1]), pack2<T>(elements[2], elements[3]), pack2<T>(elements[4], elements[5]),
          pack2<T>(elements[6], elements[7])};
}

template <class T>
__device__ __forceinline__ void round_to(float (&elements)[kVector]) {
  unpack<T>(pack<T>(elements), elements);
}

// In the fewest instructions: they are what comes next after memory. The exponential becomes inf below -88, and its
// reciprocal 0.
__device__ __forceinline__ float sigmoid(float x) {
  float exponential, reciprocal;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(-1.44269504f * x));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.f + exponential));
  return reciprocal;
}

__device__ __forceinline__ const uint4* vector_of(const Rows& x, unsigned row, int lane) {
  int64_t at = row * x.stride_inner;
  if (x.inner != 0) {  // two strides
    const unsigned outer = row / x.inner;
    at = outer * x.stride_outer + (row - outer * x.inner) * x.stride_inner;
  }
  return reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x.data) + at) + lane;
}

__device__ __forceinline__ void load_weight(const Problem& p, int lane, float (&weight)[kVector]) {
  if (p.weight_type == DataType::kFloat32) {
    const float4* vectors = static_cast<const float4*>(p.weight) + 2 * lane;
    const float4 a = vectors[0], b = vectors[1];
    weight[0] = a.x, weight[1] = a.y, weight[2] = a.z, weight[3] = a.w;
    weight[4] = b.x, weight[5] = b.y, weight[6] = b.z, weight[7] = b.w;
    return;
  }
  const uint4 vector = static_cast<const uint4*>(p.weight)[lane];
  p.weight_type == DataType::kBFloat16 ? unpack<__nv_bfloat16>(vector, weight) : unpack<__half>(vector, weight);
}

template <class T>
__device__ __forceinline__ void norm(const Problem& p) {
  const int lane = threadIdx.x % kLanes;
  const unsigned first = blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  wait_for_kernel_before();
  uint4 x[kRows], z[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const unsigned row = first + i * kGroups;
    x[i] = z[i] = uint4{};
    if (row < p.rows) {  // streamed: nobody reads them again
      x[i] = __ldcs(vector_of(p.x, row, lane));
      z[i] = __ldcs(vector_of(p.z, row, lane));
    }
  }
  float weight[kVector];
  load_weight(p, lane, weight);
  let_next_kernel_be_placed();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float y[kVector], gate[kVector];
    unpack<T>(x[i], y);
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum = fmaf(y[e], y[e], sum);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    const float scale = rsqrtf(sum * (1.f / kD) + p.eps);
#pragma unroll
    for (int e = 0; e < kVector; ++e) y[e] *= scale;
    if (p.cast_normal) round_to<T>(y);
#pragma unroll
    for (int e = 0; e < kVector; ++e) y[e] *= weight[e];
    if (p.cast_product) round_to<T>(y);
    unpack<T>(z[i], gate);
#pragma unroll
    for (int e = 0; e < kVector; ++e) {
      const float s = sigmoid(gate[e]);
      y[e] *= p.is_sigmoid ? s : gate[e] * s;
    }
    const unsigned row = first + i * kGroups;
    if (row < p.rows) static_cast<uint4*>(p.out)[int64_t{row} * kLanes + lane] = pack<T>(y);
  }
}

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes `device` current while it lives.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = previous_ != device;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) atrex_gated_rms_norm_bf16(const __grid_constant__ Problem p) {
  norm<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) atrex_gated_rms_norm_fp16(const __grid_constant__ Problem p) {
  norm<__half>(p);
}

void forward(const Problem& p, bool fp16, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  // The blocks may be placed while the kernel before drains; they wait for it before they touch memory.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3((p.rows + kRowsPerBlock - 1) / kRowsPerBlock);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, fp16 ? atrex_gated_rms_norm_fp16 : atrex_gated_rms_norm_bf16, p), "kernel launch");
}

}  // namespace atrex::gated_rms_norm
