// The kernel of flashdraft/kernels/cuda/wide_linear.cu, block after block on the CPU; loaded by wide_emulation.py.
#include "wide_linear.cu"

#include <random>

struct Launch {
  int fp16, high, deep, wide, groups, fold, stages, parallel;
  int blocks, shared_bytes, late_copies, seed;
};

template <typename Type, int WM, int MT, int NT, int WK, int FOLD, int STAGES, bool PARALLEL>
const char* run(const Launch& launch, const Features& features, const Arguments& arguments) {
  std::vector<int> order(launch.blocks);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(launch.seed));
  constexpr u32 NAN_BITS = 0x7fff7fffu;  // as float32, bf16 and fp16
  constexpr int GUARD = 16;
  std::vector<u32> storage(launch.shared_bytes / 4 + GUARD + 32);
  char* shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(storage.data()) + 127) / 128 * 128);
  gridDim = {(unsigned)launch.blocks, 1};
  emulation::late_copies = launch.late_copies;
  emulation::descending = launch.seed % 2;
  emulation::fault = nullptr;
  for (int block : order) {
    blockIdx = {(unsigned)block, 0};
    std::fill(storage.begin(), storage.end(), NAN_BITS);
    const bool ended = emulation::run_block([&] {
      WideLinear<Type, WM, MT, NT, WK, FOLD, STAGES, PARALLEL> kernel{features, arguments, {features, arguments, PARALLEL}};
      kernel.run(shared);
    });
    if (!ended) return "threads wait for each other for ever";
    const u32* guard = reinterpret_cast<const u32*>(shared + launch.shared_bytes);
    if (std::any_of(guard, guard + GUARD, [](u32 word) { return word != NAN_BITS; })) return "a write past the shared memory";
  }
  return emulation::fault;
}

template <typename Type, int WM, int MT, int NT, int WK, int STAGES>
const char* choose_order(const Launch& launch, const Features& features, const Arguments& arguments) {
  if (launch.stages != STAGES) return "no such queue is compiled for this tile";
  if (launch.fold == 1)
    return launch.parallel ? run<Type, WM, MT, NT, WK, 1, STAGES, true>(launch, features, arguments)
                           : run<Type, WM, MT, NT, WK, 1, STAGES, false>(launch, features, arguments);
  return launch.parallel ? run<Type, WM, MT, NT, WK, 2, STAGES, true>(launch, features, arguments)
                         : run<Type, WM, MT, NT, WK, 2, STAGES, false>(launch, features, arguments);
}

template <typename Type>
const char* choose_tile(const Launch& launch, const Features& features, const Arguments& arguments) {
  switch (1000 * launch.high + 100 * launch.deep + 10 * launch.wide + launch.groups) {
    case 2111: return choose_order<Type, 2, 1, 1, 1, 4>(launch, features, arguments);
    case 2321: return choose_order<Type, 2, 3, 2, 1, 3>(launch, features, arguments);
    case 2122: return choose_order<Type, 2, 1, 2, 2, 2>(launch, features, arguments);
    case 4242: return choose_order<Type, 4, 2, 4, 2, 3>(launch, features, arguments);
  }
  return "no such tile is compiled";
}

// Null, or what went wrong. `ranges`: the memory that the kernel may touch.
extern "C" const char* wide_linear(const Launch* launch, const Features* features, const Arguments* arguments,
                                   const emulation::Range* ranges, int range_count) {
  emulation::ranges.assign(ranges, ranges + range_count);
  emulation::from_earlier = ranges[1];  // x
  const char* fault = launch->fp16 ? choose_tile<Fp16>(*launch, *features, *arguments)
                                   : choose_tile<Bf16>(*launch, *features, *arguments);
  emulation::from_earlier = {};  // other emulations in this process have the same variables
  return fault;
}
