// The kernel of flashdraft/kernels/cuda/hopper_attention.cu, cluster after cluster on the CPU; loaded by attention_emulation.py.
#include "hopper_attention.cuh"

// The kernel compiled for a layer.
struct Variant {
  void (*kernel)(TensorMap, TensorMap, TensorMap, Arguments);
  const char* formats;  // of the operands of its wgmma
};
struct Launch {
  int variant, blocks, threads, shared_bytes, percent_late, seed;
};

#include "variants.h"  // const Variant variants[], written by hopper_emulation.py

// Null, or what went wrong. `ranges`: the memory that loads of queries, keys and values may touch.
extern "C" const char* hopper_attention(const Launch* launch, const TensorMap* q, const TensorMap* keys, const TensorMap* values,
                                        const Arguments* arguments, const emulation::Range* ranges, int range_count) {
  const auto [kernel, formats] = variants[launch->variant];
  const auto body = [&, run = kernel] { run(*q, *keys, *values, *arguments); };
  return emulation::cluster::run_all(body, *launch, 2, formats, ranges, range_count);
}
