#include <algorithm>

#include "forward.h"
#include "launch.h"

namespace atrex::causal_conv1d {
namespace {

constexpr int64_t kWave = 132 * kPrefillBlocks;  // blocks of prefill that an H200 runs at once
constexpr int64_t kLongestTile = 32, kShortestTile = 4;
static_assert(kShortestTile > kBefore);

int64_t ceil_div(int64_t x, int64_t y) { return (x + y - 1) / y; }

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

int groups_of(int channels, DataType dtype) {
  const int vector = dtype == DataType::kFloat32 ? 4 : 8;
  return (channels + kThreads * vector - 1) / (kThreads * vector);
}

}  // namespace

void prefill(Problem p, DataType dtype, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  p.groups = groups_of(p.channels, dtype);
  // As few waves as the longest tiles need, and tiles that fill the last of them: half a wave takes as long as a whole.
  const int64_t rows = int64_t(p.batch) * p.groups;
  const int64_t waves = ceil_div(std::max(ceil_div(p.tokens, kLongestTile), int64_t{1}) * rows, kWave);
  p.tile = int(std::max(ceil_div(p.tokens, waves * kWave / rows), kShortestTile));
  p.tiles = int(std::max(ceil_div(p.tokens, p.tile), int64_t{1}));
  launch_prefill(p, dtype, stream);
}

void update(Problem p, DataType dtype, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  p.groups = groups_of(p.channels, dtype);
  launch_update(p, dtype, stream);
}

void pack(const PackedCopy& x, DataType dtype, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  launch_pack(x, dtype, stream);
}

}  // namespace atrex::causal_conv1d
