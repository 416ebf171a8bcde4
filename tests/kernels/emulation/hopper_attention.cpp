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
  std::vector<int> order(launch->blocks / 2);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  emulation::cluster::chance.seed(launch->seed);
  std::shuffle(order.begin(), order.end(), emulation::cluster::chance);
  emulation::ranges.assign(ranges, ranges + range_count);
  emulation::fault = nullptr;
  emulation::cluster::percent_late = launch->percent_late;
  emulation::cluster::product = formats;
  gridDim = {(unsigned)launch->blocks, 1};
  const std::function<void()> body = [&, run = kernel] { run(*q, *keys, *values, *arguments); };
  for (int cluster : order) {
    emulation::cluster::run(body, cluster * 2, 2, launch->threads, launch->shared_bytes);
    if (emulation::fault) break;
  }
  return emulation::fault;
}
