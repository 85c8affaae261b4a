// Python's view of the kernels: pointers, strides and sizes in, nothing of torch.
#include <pybind11/pybind11.h>

#include "norm.h"

namespace py = pybind11;
using namespace atrex::gated_rms_norm;

namespace {

int64_t item(const py::tuple& tensor, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tensor.ptr(), i)); }

// (data_ptr, inner, stride_outer, stride_inner), strides in elements
Rows rows_of(const py::tuple& x) {
  return {reinterpret_cast<const void*>(item(x, 0)), unsigned(item(x, 1)), item(x, 2), item(x, 3)};
}

void forward_binding(unsigned rows, const py::tuple& x, const py::tuple& z, uintptr_t weight, int weight_type,
                     uintptr_t out, float eps, bool is_sigmoid, bool cast_normal, bool cast_product, bool fp16,
                     int device, uintptr_t stream) {
  const Problem p{rows,
                  rows_of(x),
                  rows_of(z),
                  reinterpret_cast<const void*>(weight),
                  DataType(weight_type),
                  reinterpret_cast<void*>(out),
                  eps,
                  is_sigmoid,
                  cast_normal,
                  cast_product};
  if (PyErr_Occurred()) throw py::error_already_set();
  forward(p, fp16, device, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

PYBIND11_MODULE(_native, m) { m.def("forward", &forward_binding); }
