// Python's view of the kernels: pointers, strides and sizes in, nothing of torch.
//
// A tensor crosses as the tuple (data_ptr, *strides), strides in elements; an absent one as None.
#include <pybind11/pybind11.h>

#include "forward.h"

namespace py = pybind11;
using namespace atrex::causal_conv1d;

namespace {

int64_t item(const py::tuple& tensor, int i) { return PyLong_AsLongLong(PyTuple_GET_ITEM(tensor.ptr(), i)); }
void* pointer(const py::tuple& tensor) { return reinterpret_cast<void*>(item(tensor, 0)); }

// (data_ptr, is int64, stride)
Indices indices(const py::object& x) {
  if (x.is_none()) return {};
  const auto tensor = py::reinterpret_borrow<py::tuple>(x);
  return {pointer(tensor), item(tensor, 2), item(tensor, 1) != 0};
}

// (data_ptr, rows, stride_row, stride_c, stride_column)
States states(const py::object& x) {
  if (x.is_none()) return {};
  const auto tensor = py::reinterpret_borrow<py::tuple>(x);
  return {pointer(tensor), item(tensor, 1), item(tensor, 2), item(tensor, 3), item(tensor, 4)};
}

// sizes: (B, T, C, N); x: (data_ptr, stride_b, stride_t)
Problem problem(const py::tuple& sizes, bool silu, const py::tuple& x, uintptr_t weight, uintptr_t bias, uintptr_t out,
                const py::object& offsets, int64_t padding) {
  Problem p{};
  p.batch = int(item(sizes, 0));
  p.tokens = int(item(sizes, 1));
  p.channels = int(item(sizes, 2));
  p.sequences = int(item(sizes, 3));
  p.silu = silu;
  p.x = {pointer(x), item(x, 1), item(x, 2)};
  p.weight = reinterpret_cast<void*>(weight);
  p.bias = reinterpret_cast<void*>(bias);
  p.out = reinterpret_cast<void*>(out);
  p.offsets = indices(offsets);
  p.padding = padding;
  return p;
}

void prefill_binding(const py::tuple& sizes, int dtype, bool silu, const py::tuple& x, uintptr_t weight, uintptr_t bias,
                     uintptr_t out, const py::object& offsets, int64_t padding, const py::object& initial,
                     const py::object& read, const py::object& has_initial, const py::object& final,
                     const py::object& write, bool pool, int device, uintptr_t stream) {
  Problem p = problem(sizes, silu, x, weight, bias, out, offsets, padding);
  p.initial = states(initial);
  p.read = indices(read);
  const Indices has = indices(has_initial);
  p.has_initial = static_cast<const uint8_t*>(has.data);
  p.stride_has_initial = has.stride;
  p.final = states(final);
  p.write = indices(write);
  p.pool = pool;
  if (PyErr_Occurred()) throw py::error_already_set();
  prefill(p, DataType(dtype), device, reinterpret_cast<cudaStream_t>(stream));
}

void update_binding(const py::tuple& sizes, int dtype, bool silu, const py::tuple& x, uintptr_t weight, uintptr_t bias,
                    uintptr_t out, const py::object& offsets, int64_t padding, const py::object& state, int columns,
                    const py::object& read, const py::object& write, const py::object& accepted, int device,
                    uintptr_t stream) {
  Problem p = problem(sizes, silu, x, weight, bias, out, offsets, padding);
  p.initial = p.final = states(state);
  p.columns = columns;
  p.read = indices(read);
  p.write = indices(write);
  p.accepted = indices(accepted);
  if (PyErr_Occurred()) throw py::error_already_set();
  update(p, DataType(dtype), device, reinterpret_cast<cudaStream_t>(stream));
}

void pack_binding(const py::tuple& from, int batch, int tokens, int channels, int dtype, uintptr_t to, int device,
                  uintptr_t stream) {
  pack({pointer(from), item(from, 1), item(from, 2), item(from, 3), batch, tokens, channels,
        reinterpret_cast<void*>(to)},
       DataType(dtype), device, reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.def("prefill", &prefill_binding);
  m.def("update", &update_binding);
  m.def("pack", &pack_binding);
}
