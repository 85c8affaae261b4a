#include "forward.h"
#include "launch.h"

namespace atrex::recurrent_gdn {
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

void forward(Problem p, const Variant& variant, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  p.group = p.value_heads / p.heads;
  p.reciprocal_group = unsigned((uint64_t{1} << 32) / p.group) + 1;
  (variant.v_first ? launch_v_first : launch_k_first)(p, variant, stream);
}

void pack(const PackedCopy& x, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  launch_pack(x, stream);
}

}  // namespace atrex::recurrent_gdn
