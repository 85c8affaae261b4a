// Brings x into a form that the kernels read in 16-byte vectors: [B, T, C], contiguous, on the 16-byte grid.
#include "launch.h"
#include "vector.cuh"

namespace atrex::causal_conv1d {
namespace {

constexpr int kSide = 32;  // of a square of tokens and channels

// Through shared memory, so that reads and writes run along what is contiguous.
template <class Element>
__device__ __forceinline__ void pack_square(const PackedCopy& x) {
  __shared__ Element square[kSide][kSide + 1];
  const int across = (x.channels + kSide - 1) / kSide, down = (x.tokens + kSide - 1) / kSide;
  const int first_c = blockIdx.x % across * kSide, first_t = blockIdx.x / across % down * kSide;
  const int64_t batch = blockIdx.x / across / down;
  const int lane = threadIdx.x % kSide;
  const bool along_t = x.stride_t < x.stride_c;
  wait_for_kernel_before();
  for (int i = threadIdx.x / kSide; i < kSide; i += kThreads / kSide) {
    const int t = along_t ? lane : i, c = along_t ? i : lane;
    if (first_t + t < x.tokens && first_c + c < x.channels) {
      square[t][c] = static_cast<const Element*>(
          x.from)[batch * x.stride_b + (first_t + t) * x.stride_t + (first_c + c) * x.stride_c];
    }
  }
  __syncthreads();
  for (int t = threadIdx.x / kSide; t < kSide; t += kThreads / kSide) {
    if (first_t + t < x.tokens && first_c + lane < x.channels) {
      static_cast<Element*>(x.to)[(batch * x.tokens + first_t + t) * x.channels + first_c + lane] = square[t][lane];
    }
  }
}

}  // namespace
}  // namespace atrex::causal_conv1d

using atrex::causal_conv1d::kThreads;
using atrex::causal_conv1d::PackedCopy;

extern "C" __global__ void __launch_bounds__(kThreads)
    atrex_causal_conv1d_pack_16(const __grid_constant__ PackedCopy x) {
  atrex::causal_conv1d::pack_square<uint16_t>(x);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    atrex_causal_conv1d_pack_32(const __grid_constant__ PackedCopy x) {
  atrex::causal_conv1d::pack_square<uint32_t>(x);
}

void atrex::causal_conv1d::launch_pack(const PackedCopy& x, DataType dtype, cudaStream_t stream) {
  const int64_t blocks = int64_t(x.batch) * ((x.tokens + kSide - 1) / kSide) * ((x.channels + kSide - 1) / kSide);
  launch(dtype == DataType::kFloat32 ? atrex_causal_conv1d_pack_32 : atrex_causal_conv1d_pack_16, x, blocks, stream);
}
