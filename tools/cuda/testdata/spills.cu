// 64 live values in the 32 registers that 2048 threads of a multiprocessor leave each thread.
__global__ void __launch_bounds__(1024, 2) spilling(float* x) {
  float values[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) values[i] = x[threadIdx.x + 1024 * i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) x[threadIdx.x * 64 + i] = values[63 - i] * values[i];
}
