#include "binding.h"

namespace {

using namespace atrex::chunk_gdn;

Plan plan_of(const py::tuple& plan) {
  return {int(item(plan, 0)), int(item(plan, 1)), int(item(plan, 2)), item(plan, 3)};
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  // Called as every target's plan(): the heads of q and k do not matter to this one.
  m.def("plan", [](int batch, int tokens, int, int value_heads, int sequences, bool packed, int multiprocessors) {
    const Plan plan = make_plan(batch, tokens, value_heads, sequences, packed, multiprocessors);
    return py::make_tuple(plan.slots, plan.segments, plan.warps, plan.workspace_bytes);
  });
  m.def("forward", &forward_binding<plan_of>);
  m.def("pack", &pack_binding);
}
