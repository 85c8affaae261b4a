// Brings q, k or v into a form that the kernels read in 16-byte vectors: contiguous, on the 16-byte grid.
#include "launch.h"

namespace atrex::recurrent_gdn {
namespace {
constexpr int kVector = 8;                                      // elements of a 16-byte store
constexpr int kRowsPerBlock = kThreads / (kHeadDim / kVector);  // rows of 128 features
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) atrex_recurrent_gdn_pack(const __grid_constant__ PackedCopy x) {
  const int64_t rows = int64_t(x.batch) * x.tokens * x.heads;
  const int d = threadIdx.x % (kHeadDim / kVector) * kVector;
  for (int64_t row = int64_t(blockIdx.x) * kRowsPerBlock + threadIdx.x / (kHeadDim / kVector); row < rows;
       row += int64_t(gridDim.x) * kRowsPerBlock) {
    const int64_t token = row / x.heads;
    const auto* from = static_cast<const uint16_t*>(x.from) + token / x.tokens * x.stride_b +
                       token % x.tokens * x.stride_t + row % x.heads * x.stride_h + d * x.stride_d;
    uint32_t pairs[kVector / 2];
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      pairs[i / 2] = from[i * x.stride_d] | uint32_t(from[(i + 1) * x.stride_d]) << 16;
    }
    static_cast<uint4*>(x.to)[(row * kHeadDim + d) / kVector] = {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
}

void launch_pack(const PackedCopy& x, cudaStream_t stream) {
  const int64_t rows = int64_t(x.batch) * x.tokens * x.heads;
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  atrex_recurrent_gdn_pack<<<unsigned(blocks < 4096 ? blocks : 4096), kThreads, 0, stream>>>(x);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace atrex::recurrent_gdn
