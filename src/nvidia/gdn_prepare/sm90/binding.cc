// Python's view of the kernels: pointers, strides and sizes in, nothing of torch.
#include <pybind11/pybind11.h>

#include "prepare.h"

namespace py = pybind11;
using namespace atrex::gdn_prepare;

namespace {

int64_t item(const py::tuple& tensor, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tensor.ptr(), i)); }
void* pointer(const py::tuple& tensor) { return reinterpret_cast<void*>(item(tensor, 0)); }

// (data_ptr, dtype, stride_b, stride_t, stride_h), strides in elements
Gate gate(const py::tuple& x) { return {pointer(x), item(x, 2), item(x, 3), item(x, 4), DataType(item(x, 1))}; }

void forward_binding(const py::tuple& sizes, const py::tuple& qk, uintptr_t q, uintptr_t k, const py::tuple& a,
                     const py::tuple& b, const py::tuple& a_log, const py::tuple& dt_bias, uintptr_t g, uintptr_t beta,
                     bool fp16, int device, uintptr_t stream) {
  Problem p{};
  p.batch = unsigned(item(sizes, 0));
  p.tokens = unsigned(item(sizes, 1));
  p.heads = unsigned(item(sizes, 2));
  p.value_heads = unsigned(item(sizes, 3));
  p.qk = pointer(qk);
  p.stride_b = item(qk, 1);
  p.stride_t = item(qk, 2);
  p.q = reinterpret_cast<void*>(q);
  p.k = reinterpret_cast<void*>(k);
  p.a = gate(a);
  p.b = gate(b);
  p.a_log = gate(a_log);
  p.dt_bias = gate(dt_bias);
  p.g = reinterpret_cast<float*>(g);
  p.beta = reinterpret_cast<float*>(beta);
  if (PyErr_Occurred()) throw py::error_already_set();
  forward(p, fp16, device, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

PYBIND11_MODULE(_native, m) { m.def("forward", &forward_binding); }
