// Host side of a launch: the device it is for, the call, its errors.
#pragma once

#include <cuda_runtime.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace atrex::chunk_gdn {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Makes `device` current while it lives, and its context too: a new host thread may have the device by default but no
// context yet, and the driver's calls want one.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
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

// Lets `kernel` have `bytes` of dynamic shared memory on the current device. It keeps that leave, so the runtime is
// asked once, not before every launch: that takes host time, and can wait for copies under way (intel/llvm#16928).
inline void allow_shared_memory(const void* kernel, int bytes) {
  thread_local std::map<std::pair<const void*, int>, int> allowed;  // by kernel and device
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  int& known = allowed[{kernel, device}];
  if (bytes <= known) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  known = bytes;
}

struct Grid {
  int blocks, threads, shared_bytes;
  // Blocks of a cluster. To ask for clusters of one is not the same as to ask for none: the blocks land on other
  // multiprocessors, which a long scan beside its preparation likes better (docs/performance/chunk_gdn_sm90.md, 51).
  int cluster = 1;
};

// `overlap`: the kernel may start while its predecessor drains; it waits for it in the kernel (griddepcontrol.wait).
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const Grid& grid, bool overlap, cudaStream_t stream, const Args&... args) {
  allow_shared_memory(reinterpret_cast<const void*>(kernel), grid.shared_bytes);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {unsigned(grid.cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.blocks);
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = overlap ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

}  // namespace atrex::chunk_gdn
