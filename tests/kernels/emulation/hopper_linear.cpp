// The kernel of flashdraft/kernels/cuda/hopper_linear.cu, cluster after cluster on the CPU; loaded by hopper_emulation.py.
#include "hopper_linear.cuh"

// The kernel compiled for a plan.
struct Variant {
  void (*kernel)(TensorMap, TensorMap, Arguments);
  const char* product;  // the name of its wgmma
  int split;            // blocks of a cluster
};
struct Launch {
  int variant, blocks, threads, shared_bytes, percent_late, seed;
};

#include "variants.h"  // const Variant variants[], written by hopper_emulation.py

// Null, or what went wrong. `ranges`: the memory that copies and fresh loads may touch.
extern "C" const char* hopper_linear(const Launch* launch, const TensorMap* weight, const TensorMap* x,
                                     const Arguments* arguments, const emulation::Range* ranges, int range_count) {
  const auto [kernel, product, split] = variants[launch->variant];
  const auto body = [&, run = kernel] { run(*weight, *x, *arguments); };
  return emulation::cluster::run_all(body, *launch, split, product, ranges, range_count);
}
