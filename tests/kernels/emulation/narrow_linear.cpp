// The kernel of flashdraft/kernels/cuda/narrow_linear.cu, block after block on the CPU; loaded by tests/kernels/emulated.py.
#include "narrow_linear.cu"

#include <random>

struct Launch {
  int fp16, tiles_of_rows, fold, depth;  // fp16: 8 rows, fold 1; depth: 3 or 4
  int grid_x, grid_y, shared_bytes, late_copies, seed;
  int nvfp4;  // bf16, fold 1
};

template <typename Type, int NT, typename Weights, int DEPTH>
const char* run(const Launch& launch, const Features& features, const Arguments& arguments) {
  std::vector<int> order(launch.grid_x * launch.grid_y);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(launch.seed));
  constexpr u32 NAN_BITS = 0x7fff7fffu;  // as float32, bf16 and fp16
  constexpr int GUARD = 16;
  std::vector<u32> storage(launch.shared_bytes / 4 + GUARD + 32);
  char* shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(storage.data()) + 127) / 128 * 128);
  gridDim = {(unsigned)launch.grid_x, (unsigned)launch.grid_y};
  emulation::late_copies = launch.late_copies;
  emulation::descending = launch.seed % 2;
  emulation::fault = nullptr;
  for (int block : order) {
    blockIdx = {(unsigned)(block % launch.grid_x), (unsigned)(block / launch.grid_x)};
    std::fill(storage.begin(), storage.end(), NAN_BITS);
    const bool ended = emulation::run_block([&] {
      NarrowLinear<Type, NT, Weights, DEPTH> kernel{features, arguments, {}};
      kernel.run(shared);
    });
    if (!ended) return "threads wait for each other for ever";
    const u32* guard = reinterpret_cast<const u32*>(shared + launch.shared_bytes);
    if (std::any_of(guard, guard + GUARD, [](u32 word) { return word != NAN_BITS; })) return "a write past the shared memory";
  }
  return emulation::fault;
}

template <typename Type, int NT, typename Weights>
const char* choose_depth(const Launch& launch, const Features& features, const Arguments& arguments) {
  return launch.depth == 3 ? run<Type, NT, Weights, 3>(launch, features, arguments)
                           : run<Type, NT, Weights, 4>(launch, features, arguments);
}

template <typename Type, typename Weights>
const char* choose_rows(const Launch& launch, const Features& features, const Arguments& arguments) {
  switch (launch.tiles_of_rows) {
    case 1: return choose_depth<Type, 1, Weights>(launch, features, arguments);
    case 2: return choose_depth<Type, 2, Weights>(launch, features, arguments);
    case 4: return choose_depth<Type, 4, Weights>(launch, features, arguments);
    case 8: return choose_depth<Type, 8, Weights>(launch, features, arguments);
  }
  return "no such number of rows";
}

// Null, or what went wrong. `ranges`: the memory that the kernel may touch.
extern "C" const char* narrow_linear(const Launch* launch, const Features* features, const Arguments* arguments,
                                     const emulation::Range* ranges, int range_count) {
  emulation::ranges.assign(ranges, ranges + range_count);
  if (launch->depth != 3 && launch->depth != 4) return "only queues of 3 and 4 steps are compiled";
  if (launch->fp16 && 10 * launch->tiles_of_rows + launch->fold != 11) return "float16 is compiled for 8 rows and fold 1 only";
  if (launch->nvfp4) return choose_rows<Bf16, Nvfp4>(*launch, *features, *arguments);
  if (launch->fp16) return choose_depth<Fp16, 1, Dense<1>>(*launch, *features, *arguments);
  return launch->fold == 1 ? choose_rows<Bf16, Dense<1>>(*launch, *features, *arguments)
                           : choose_rows<Bf16, Dense<2>>(*launch, *features, *arguments);
}
