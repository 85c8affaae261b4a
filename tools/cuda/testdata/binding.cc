#include <pybind11/pybind11.h>

#include "kernels.h"

PYBIND11_MODULE(_native, module) {
  module.def("launch_kernels", [](uintptr_t x, uintptr_t stream) {
    launch_kernels(reinterpret_cast<float*>(x), reinterpret_cast<cudaStream_t>(stream));
  });
}
