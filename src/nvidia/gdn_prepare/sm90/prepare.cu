// From the convolution's output to the delta rule: norms of q and k, and the gates, in one launch.
//
// Bound by memory: q and k are read once, in 16-byte vectors by half a warp a head, and written once. v is not touched:
// the delta rules read it where it lies. Each half warp has two heads. The gates are a fortieth of the bytes, and have
// blocks of their own behind those of q and k.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "prepare.h"

namespace atrex::gdn_prepare {
namespace {

constexpr int kD = 128;
constexpr int kThreads = 128;
constexpr int kVector = 8;            // elements of 16 bytes
constexpr int kLanes = kD / kVector;  // of a head
constexpr int kGroups = kThreads / kLanes;
constexpr int kRows = 2;  // of a thread
constexpr int kRowsPerBlock = kRows * kGroups;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr float kNormEpsilon = 1e-6f;
constexpr float kSoftplusThreshold = 20.f;  // softplus(x) is x to the last bit from here on

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

// A head of a token.
struct Row {
  unsigned batch, token, head;
};

__device__ __forceinline__ Row row_of(unsigned row, unsigned heads, unsigned tokens) {
  const unsigned token = row / heads, batch = token / tokens;
  return {batch, token - batch * tokens, row - token * heads};
}

template <class T>
__device__ __forceinline__ void normalise(const Problem& p) {
  const int lane = threadIdx.x % kLanes;
  const unsigned first = blockIdx.x * kRowsPerBlock + threadIdx.x / kLanes;
  const unsigned rows = p.batch * p.tokens * 2 * p.heads;
  uint4 x[kRows];
  uint4* out[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    x[i] = uint4{};
    out[i] = nullptr;
    const unsigned row = first + i * kGroups;
    if (row < rows) {
      const Row at = row_of(row, 2 * p.heads, p.tokens);
      const auto* from = static_cast<const uint16_t*>(p.qk) + at.batch * p.stride_b + at.token * p.stride_t;
      x[i] = __ldcs(reinterpret_cast<const uint4*>(from) + at.head * kLanes + lane);
      const bool is_q = at.head < p.heads;
      const int64_t to = (int64_t{at.batch} * p.tokens + at.token) * p.heads + (is_q ? at.head : at.head - p.heads);
      out[i] = static_cast<uint4*>(is_q ? p.q : p.k) + to * kLanes + lane;
    }
  }
  let_next_kernel_be_placed();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    float y[kVector];
    unpack<T>(x[i], y);
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum = fmaf(y[e], y[e], sum);
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
    const float scale = rsqrtf(sum + kNormEpsilon);
#pragma unroll
    for (int e = 0; e < kVector; ++e) y[e] *= scale;
    if (out[i] != nullptr) *out[i] = pack<T>(y);
  }
}

__device__ __forceinline__ float load(const Gate& x, const Row& at) {
  const int64_t i = at.batch * x.stride_b + at.token * x.stride_t + at.head * x.stride_h;
  switch (x.dtype) {
    case DataType::kFloat32:
      return static_cast<const float*>(x.data)[i];
    case DataType::kBFloat16:
      return unpack2<__nv_bfloat16>(static_cast<const uint16_t*>(x.data)[i]).x;
    default:
      return unpack2<__half>(static_cast<const uint16_t*>(x.data)[i]).x;
  }
}

__device__ __forceinline__ void gate(const Problem& p) {
  const unsigned i = (blockIdx.x - p.row_blocks) * kThreads + threadIdx.x;
  if (i >= p.batch * p.tokens * p.value_heads) return;
  const Row at = row_of(i, p.value_heads, p.tokens);
  const float a = load(p.a, at) + load(p.dt_bias, at), b = load(p.b, at), a_log = load(p.a_log, at);
  const float softplus = a > kSoftplusThreshold ? a : log1pf(expf(a));  // expf(a) overflows from 89 on
  p.g[i] = -expf(a_log) * softplus;
  p.beta[i] = 1.f / (1.f + expf(-b));
}

template <class T>
__device__ __forceinline__ void prepare(const Problem& p) {
  wait_for_kernel_before();
  blockIdx.x < p.row_blocks ? normalise<T>(p) : gate(p);
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

extern "C" __global__ void __launch_bounds__(kThreads) atrex_gdn_prepare_bf16(const __grid_constant__ Problem p) {
  prepare<__nv_bfloat16>(p);
}
extern "C" __global__ void __launch_bounds__(kThreads) atrex_gdn_prepare_fp16(const __grid_constant__ Problem p) {
  prepare<__half>(p);
}

void forward(Problem p, bool fp16, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  // The blocks may be placed while the kernel before drains; they wait for it before they touch memory.
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  const unsigned rows = p.batch * p.tokens * 2 * p.heads, gates = p.batch * p.tokens * p.value_heads;
  p.row_blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  config.gridDim = dim3(p.row_blocks + (gates + kThreads - 1) / kThreads);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, fp16 ? atrex_gdn_prepare_fp16 : atrex_gdn_prepare_bf16, p), "kernel launch");
}

}  // namespace atrex::gdn_prepare
