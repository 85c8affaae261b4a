#include "forward.h"
#include "launch.h"

namespace atrex::causal_conv1d {
namespace {

// Enough for a wave of the GPU; with fewer, a block takes fewer tokens.
constexpr int64_t kWantedBlocks = 2 * 132 * 6;
constexpr int kLongestTile = 32, kShortestTile = 4;
static_assert(kShortestTile > kBefore);

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
  p.tile = kLongestTile;
  const auto tiles = [&p] { return p.tokens > p.tile ? (p.tokens + p.tile - 1) / p.tile : 1; };
  while (p.tile > kShortestTile && int64_t(tiles()) * p.batch * p.groups < kWantedBlocks) p.tile /= 2;
  p.tiles = tiles();
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
