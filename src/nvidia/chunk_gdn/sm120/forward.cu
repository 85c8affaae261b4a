#include "forward.h"
#include "launch.h"

namespace atrex::chunk_gdn {
namespace {

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

void forward(Problem p, const Plan& plan, bool fp16, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  p.slots = plan.slots;
  p.segments = plan.segments;
  p.offsets = workspace_of(plan.slots, p.value_heads, p.sequences, plan.segments);
  if (p.tokens > 0) launch_prepare(p, fp16, stream);
  (fp16 ? launch_scan_fp16 : launch_scan_bf16)(p, plan.warps, stream);
}

void pack(const PackedCopy& copy, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  launch_pack(copy, stream);
}

}  // namespace atrex::chunk_gdn
