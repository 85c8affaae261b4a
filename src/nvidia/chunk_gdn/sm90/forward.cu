#include "forward.h"
#include "launch.h"

namespace atrex::chunk_gdn {
namespace {

// Through the runtime, so that nothing links against libcuda.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &found),
          "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(symbol);
  }();
  return function;
}

// [B, T, H, 128] as panels of 64 features of a head, 128-byte swizzled; a box has `panels` of them of 64 tokens.
CUtensorMap encode(const Activation& x, int batch, int tokens, int heads, int panels, bool fp16) {
  CUtensorMap map{};
  if (tokens == 0) return map;                  // no kernel reads it
  constexpr uint64_t kRowBytes = kHeadDim * 2;  // stands in for the stride of a dimension of size 1, which can be any
  const cuuint64_t sizes[] = {64, cuuint64_t(tokens), kHeadDim / 64, cuuint64_t(heads), cuuint64_t(batch)};
  const cuuint64_t strides[] = {tokens > 1 ? uint64_t(x.stride_t) * 2 : kRowBytes, kRowBytes / 2,
                                heads > 1 ? uint64_t(x.stride_h) * 2 : kRowBytes,
                                batch > 1 ? uint64_t(x.stride_b) * 2 : kRowBytes};
  // In the box's order, not in that of growing strides, which the driver does not ask for.
  const cuuint32_t box[] = {64, kChunk, cuuint32_t(panels), 1, 1};
  const cuuint32_t element_strides[] = {1, 1, 1, 1, 1};
  const CUresult result = encode_function()(
      &map, fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(x.data),
      sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(result));
  return map;
}

}  // namespace

void forward(Problem p, const Plan& plan, bool fp16, int device, cudaStream_t stream) {
  const DeviceScope scope(device);
  p.slots = plan.slots;
  p.segments = plan.segments;
  p.overlap = plan.overlap;
  p.offsets = workspace_of(plan.slots, p.heads, p.value_heads, p.sequences, plan.segments);
  // The preparation is on its way before the rest is described.
  ScanMaps maps{};
  maps.k = encode(p.k, p.batch, p.tokens, p.heads, 2, fp16);
  maps.q = encode(p.q, p.batch, p.tokens, p.heads, 2, fp16);
  if (p.tokens > 0) launch_prepare(p, fp16, plan.prepare_blocks, maps.k, maps.q, stream);
  const Activation out = {p.out, int64_t(p.tokens) * p.value_heads * kHeadDim, int64_t(p.value_heads) * kHeadDim,
                          kHeadDim};
  maps.v = encode(p.v, p.batch, p.tokens, p.value_heads, 1, fp16);
  maps.out = encode(out, p.batch, p.tokens, p.value_heads, 1, fp16);
  (fp16 ? launch_scan_fp16 : launch_scan_bf16)(p, plan.warpgroups, plan.scan_blocks, maps, stream);
}

}  // namespace atrex::chunk_gdn
