// The kernels of flashdraft/kernels/cuda/sample_rows.cu, block after block on the CPU; loaded by test_sample.py.
#include "sample_rows.cu"

#include <random>

struct Launch {
  int kernel, type, segments, rows, seed;
};

template <typename Program>
const char* run(const Launch& launch, const Arguments& arguments) {
  std::vector<int> order(launch.segments * launch.rows);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(launch.seed));
  gridDim = {(unsigned)launch.segments, (unsigned)launch.rows};
  emulation::descending = launch.seed % 2;
  emulation::fault = nullptr;
  const auto program = std::make_unique<Program>();
  for (int block : order) {
    blockIdx = {(unsigned)(block % launch.segments), (unsigned)(block / launch.segments)};
    std::memset(static_cast<void*>(program.get()), 0xff, sizeof(Program));
    if (!emulation::run_block([&] { program->run(arguments); })) return "threads wait for each other for ever";
  }
  return emulation::fault;
}

template <typename Type>
const char* choose_kernel(const Launch& launch, const Arguments& arguments) {
  switch (launch.kernel) {
    case 0: return run<FindBest<Type>>(launch, arguments);
    case 1: return run<FillBins<Type>>(launch, arguments);
    case 2: return run<Settle<Type, false>>(launch, arguments);
    case 3: return run<Settle<Type, true>>(launch, arguments);
    case 4: return run<Choose<Type>>(launch, arguments);
  }
  return "no such kernel";
}

// Null, or what went wrong. `ranges`: the memory that the kernel may touch.
extern "C" const char* sample_rows(const Launch* launch, const Arguments* arguments, const emulation::Range* ranges,
                                   int range_count) {
  emulation::ranges.assign(ranges, ranges + range_count);
  switch (launch->type) {
    case 0: return choose_kernel<Half<Bf16>>(*launch, *arguments);
    case 1: return choose_kernel<Half<Fp16>>(*launch, *arguments);
    case 2: return choose_kernel<Fp32>(*launch, *arguments);
  }
  return "no such type";
}
