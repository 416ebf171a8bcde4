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
  std::vector<int> order(launch->blocks / split);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  emulation::cluster::chance.seed(launch->seed);
  std::shuffle(order.begin(), order.end(), emulation::cluster::chance);
  emulation::ranges.assign(ranges, ranges + range_count);
  emulation::fault = nullptr;
  emulation::cluster::percent_late = launch->percent_late;
  emulation::cluster::product = product;
  gridDim = {(unsigned)launch->blocks, 1};
  for (int cluster : order) {
    const auto body = [&, run = kernel] { run(*weight, *x, *arguments); };
    emulation::cluster::run(body, cluster * split, split, launch->threads, launch->shared_bytes);
    if (emulation::fault) break;
  }
  return emulation::fault;
}
