// The kernel of hopper_linear.cuh: the ring, the loop over tiles, sums of the parts of K, stores.
#include "hopper_linear.cuh"

template <typename Type, int GROUPS, int DEEP, int WIDTH, int STAGES, int SPLIT, bool GATED>
struct HopperLinear {
  static constexpr int CAPACITY = CHUNK * GROUPS * DEEP;      // rows of x
  static constexpr int OUTPUTS = GATED ? WIDTH / 2 : WIDTH;   // of a tile
  static constexpr int X_BYTES = CAPACITY * LINE, STAGE_BYTES = X_BYTES + WIDTH * LINE;
  static constexpr int CONSUMERS = GROUPS * GROUP_THREADS;
  // Floats of a row of partial sums: an odd number of times 8, so that the rows a warp writes at once lie in different banks.
  static constexpr int SUMS_STRIDE = WIDTH / 8 % 2 == 1 ? WIDTH : WIDTH + 8;
  static constexpr int SUMS_BYTES = SPLIT > 1 ? 4 * CAPACITY * SUMS_STRIDE : 0;
  static constexpr int BARRIERS = STAGES * STAGE_BYTES > SUMS_BYTES ? STAGES * STAGE_BYTES : SUMS_BYTES;  // where they lie
  static_assert(WIDTH % (GATED ? 16 : 8) == 0 && WIDTH <= 256 && CAPACITY <= 256);

  const Features& f;
  const Arguments& p;
  u32 shared, part;  // part: of K

  __device__ __forceinline__ u32 filled(int stage) const { return shared + BARRIERS + 8 * stage; }
  __device__ __forceinline__ u32 emptied(int stage) const { return shared + BARRIERS + 8 * (STAGES + stage); }
  __device__ __forceinline__ u32 place(int stage) const { return shared + stage * STAGE_BYTES; }
  __device__ __forceinline__ int begin() const { return (int)part * (f.k / STEP) / SPLIT; }
  __device__ __forceinline__ int steps() const { return (int)(part + 1) * (f.k / STEP) / SPLIT - begin(); }

  // A cluster takes one tile after another.
  __device__ __forceinline__ int clusters() const { return gridDim.x / SPLIT; }
  __device__ __forceinline__ int first_tile() const { return blockIdx.x / SPLIT; }

  __device__ __forceinline__ void begin_ring() const {
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(filled(stage), 1);
      init_barrier(emptied(stage), CONSUMERS / 32);
    }
    show_barriers();
  }

  __device__ __forceinline__ void ask_for_weights(const TensorMap& map, int stage, int tile, int step) const {
    expect_bytes(filled(stage), STAGE_BYTES);  // those of x, too
    load_weights(place(stage) + X_BYTES, map, (begin() + step) * STEP, tile * OUTPUTS, filled(stage));
  }
  __device__ __forceinline__ void ask_for_rows(const TensorMap& map, int stage, int step) const {
    load_rows(place(stage), map, (begin() + step) * STEP, 0, filled(stage));
  }

  // Weights of the first STAGES steps; how many of them there are.
  __device__ __forceinline__ int ask_ahead(const TensorMap& weight) const {
    int stage = 0;
    for (int tile = first_tile(); tile < p.tiles && stage < STAGES; tile += clusters())
#pragma unroll 1
      for (int step = 0; step < steps() && stage < STAGES; ++step) ask_for_weights(weight, stage++, tile, step);
    return stage;
  }

  // All steps of all tiles of this block, by one thread; the weights of the first `ahead` are under way.
  __device__ __forceinline__ void produce(const TensorMap& weight, const TensorMap& x, int ahead) const {
    const int count = steps();
    Turn<STAGES> turn{0, 1};
    int number = 0;
    for (int tile = first_tile(); tile < p.tiles; tile += clusters()) {
#pragma unroll 1
      for (int step = 0; step < count; ++step, ++number, turn.advance()) {
        if (number >= ahead) {
          wait_for(emptied(turn.stage), turn.parity);
          ask_for_weights(weight, turn.stage, tile, step);
        }
        ask_for_rows(x, turn.stage, step);
      }
    }
  }

  // Each warp.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(emptied(stage));
  }

  __device__ __forceinline__ void multiply_tile(float (&d)[DEEP][WIDTH / 2], Turn<STAGES>& turn) const {
    const int count = steps(), group = threadIdx.x / GROUP_THREADS;
    int previous = 0;
    for (int step = 0; step < count; ++step) {
      wait_for(filled(turn.stage), turn.parity);
      const u64 a = matrix_at(place(turn.stage) + group * DEEP * CHUNK * LINE), b = matrix_at(place(turn.stage) + X_BYTES);
#pragma unroll
      for (int i = 0; i < DEEP; ++i) hold(d[i]);
      begin_products();
#pragma unroll
      for (int k = 0; k < STEP / K_OF_PRODUCT; ++k) {
        const int along = 2 * k * K_OF_PRODUCT;
#pragma unroll
        for (int i = 0; i < DEEP; ++i)
          multiply_matrices(d[i], a + ((i * CHUNK * LINE + along) >> 4), b + (along >> 4), step + k);
      }
      commit_products();
      wait_for_products<1>();
      if (step > 0) release(previous);
      previous = turn.stage;
      turn.advance();
    }
    wait_for_products<0>();
#pragma unroll
    for (int i = 0; i < DEEP; ++i) hold(d[i]);
    release(previous);
  }

  // What stands beside an output: 0 where there is none. Loads alone are guarded: branches around the rest would keep the
  // values of a thread from being computed side by side.
  __device__ __forceinline__ float bias(int output, int half) const {
    if (!f.bias || output >= p.outputs) return 0.f;
    return Type::low(reinterpret_cast<const unsigned short*>(p.bias)[output + half * p.outputs]);
  }
  __device__ __forceinline__ float factor(int output, int row) const {
    if (!f.multiply || output >= p.outputs || row >= p.rows) return 0.f;
    return Type::low(load_fresh(reinterpret_cast<const unsigned short*>(p.multiply) + row * p.multiply_stride + output));
  }
  // PyTorch's roundings, as in `epilogue`, but the last.
  __device__ __forceinline__ float finished(float sum, float up, float factor, int output) const {
    float y = rounded<Type>(f.bias ? sum + bias(output, 0) : sum);
    if (f.activation == IDENTITY) return y;
    y = rounded<Type>(quickly_activated(f.activation, y));
    if (GATED) return y * rounded<Type>(f.bias ? up + bias(output, 1) : up);
    return f.multiply ? y * factor : y;
  }
  // Two neighbouring outputs.
  __device__ __forceinline__ u32 pair(float2 sums, float2 ups, float2 factors, int output) const {
    return Type::pack(finished(sums.x, ups.x, factors.x, output), finished(sums.y, ups.y, factors.y, output + 1));
  }
  __device__ __forceinline__ float2 factors(int output, int row) const {
    return float2{factor(output, row), factor(output + 1, row)};
  }
  __device__ __forceinline__ unsigned short* z(int output, int row) const {
    return reinterpret_cast<unsigned short*>(p.z) + (long long)row * p.outputs + output;
  }
  __device__ __forceinline__ void store_pair(u32 values, int output, int row) const {
    if (row >= p.rows) return;
    if (output < p.outputs) *z(output, row) = (unsigned short)values;
    if (output + 1 < p.outputs) *z(output + 1, row) = (unsigned short)(values >> 16);
  }

  // From the registers of a product: of a chunk, lane (g, t) = (lane / 4, lane % 4) of warp w has rows 16 w + g and + 8, and of
  // each 8 outputs 2 t and + 1. Of 32 outputs a lane stores 8.
  __device__ __forceinline__ void store_tile(const float (&d)[DEEP][WIDTH / 2], int first) const {
    constexpr int PAIRS = OUTPUTS / 8;
    const int t = threadIdx.x % 4;
    const bool in_pieces = p.outputs % 8 == 0;  // of 16 bytes
#pragma unroll
    for (int begin = 0; begin < PAIRS; begin += 4) {
      const int count = min(PAIRS - begin, 4), output = first + 8 * begin;
#pragma unroll
      for (int half = 0; half < 2 * DEEP; ++half) {
        const int row = row_of(half);
        u32 values[4] = {};
#pragma unroll
        for (int i = 0; i < count; ++i) values[i] = pair_at(d, half, begin + i, output + 8 * i + 2 * t, row);
        if (count == 4 && in_pieces) {
          const uint4 piece = exchanged({values[0], values[1], values[2], values[3]});
          if (row < p.rows && output + 8 * t < p.outputs) *reinterpret_cast<uint4*>(z(output + 8 * t, row)) = piece;
          continue;
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
          const int own = output + 8 * i + 2 * t;
          if (!in_pieces)
            store_pair(values[i], own, row);
          else if (row < p.rows && own < p.outputs)
            *reinterpret_cast<u32*>(z(own, row)) = values[i];
        }
      }
    }
  }
  // The row of x of this thread's sums: two halves of each chunk.
  __device__ __forceinline__ int row_of(int half) const {
    const int chunk = threadIdx.x / GROUP_THREADS * DEEP + half / 2, thread = threadIdx.x % GROUP_THREADS;
    return chunk * CHUNK + thread / 32 * 16 + half % 2 * 8 + thread % 32 / 4;
  }
  __device__ __forceinline__ u32 pair_at(const float (&d)[DEEP][WIDTH / 2], int half, int eight, int output, int row) const {
    const int i = 4 * eight + half % 2 * 2, up = i + (GATED ? OUTPUTS / 2 : 0);
    const float(&sums)[WIDTH / 2] = d[half / 2];
    return pair({sums[i], sums[i + 1]}, {sums[up], sums[up + 1]}, factors(output, row), output);
  }

  // Partial sums [row][weight row] where the ring was, whose steps all have been used.
  __device__ __forceinline__ void keep_sums(const float (&d)[DEEP][WIDTH / 2], char* memory) const {
    meet_consumers<CONSUMERS>();
#pragma unroll
    for (int half = 0; half < 2 * DEEP; ++half) {
      const int row = row_of(half);
      if (row >= p.rows) continue;
      float* sums = reinterpret_cast<float*>(memory) + row * SUMS_STRIDE + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < WIDTH / 8; ++j) {
        const float* pair = d[half / 2] + 4 * j + half % 2 * 2;
        *reinterpret_cast<float2*>(sums + 8 * j) = float2{pair[0], pair[1]};
      }
    }
  }

  // Every SPLIT-th row, from all blocks of these weight rows.
  __device__ __forceinline__ void store_sums(int first) const {
    constexpr int PIECES = OUTPUTS / 4;
    u32 source[SPLIT];
#pragma unroll
    for (int i = 0; i < SPLIT; ++i) source[i] = address_in(i, shared);
    for (int index = threadIdx.x;; index += CONSUMERS) {
      const int row = index / PIECES * SPLIT + (int)part, column = index % PIECES * 4, output = first + column;
      if (row >= p.rows) break;
      const u32 offset = 4 * (row * SUMS_STRIDE + column);
      const float2 left = factors(output, row), right = factors(output + 2, row);  // asked for beside the sums
      float4 sums[SPLIT], ups[SPLIT];
#pragma unroll
      for (int i = 0; i < SPLIT; ++i) {
        sums[i] = load_from_cluster(source[i] + offset);
        if (GATED) ups[i] = load_from_cluster(source[i] + offset + 4 * OUTPUTS);
      }
      float4 sum = sums[0], up = GATED ? ups[0] : float4{};
#pragma unroll
      for (int i = 1; i < SPLIT; ++i) {
        sum.x += sums[i].x, sum.y += sums[i].y, sum.z += sums[i].z, sum.w += sums[i].w;
        if (GATED) up.x += ups[i].x, up.y += ups[i].y, up.z += ups[i].z, up.w += ups[i].w;
      }
      const u32 low = pair({sum.x, sum.y}, {up.x, up.y}, left, output);
      const u32 high = pair({sum.z, sum.w}, {up.z, up.w}, right, output + 2);
      if (p.outputs % 4 == 0 && output < p.outputs) {
        *reinterpret_cast<uint2*>(z(output, row)) = uint2{low, high};
      } else {
        store_pair(low, output, row);
        store_pair(high, output + 2, row);
      }
    }
  }

  __device__ __forceinline__ void consume(char* memory) const {
    Turn<STAGES> turn{0, 0};
    float d[DEEP][WIDTH / 2];
    for (int tile = first_tile(); tile < p.tiles; tile += clusters()) {
      multiply_tile(d, turn);
      if constexpr (SPLIT == 1) store_tile(d, tile * OUTPUTS);
    }
    if constexpr (SPLIT > 1) {
      keep_sums(d, memory);
      meet<true>();
      store_sums(first_tile() * OUTPUTS);
    }
    leave();
  }

  // All threads of the block, and of the cluster.
  template <bool WRITTEN>
  __device__ __forceinline__ void meet() const {
    if constexpr (SPLIT == 1) {
      __syncthreads();
    } else {
      arrive_at_cluster<WRITTEN>();
      wait_for_whole_cluster();
    }
  }
  // The shared memory of a block must be there as long as others write or read it.
  __device__ __forceinline__ void leave() const {
    if constexpr (SPLIT > 1) meet<false>();
  }
};

#ifdef FLASHDRAFT_KERNEL
// hopper.constants says what FD_... are.
extern "C" __global__ void FD_CLUSTER __launch_bounds__((FD_GROUPS + 1) * GROUP_THREADS, 1)
    hopper_linear(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x,
                  const __grid_constant__ Arguments arguments) {
  SHARED_MEMORY(memory);
  constexpr Features features{FD_FEATURES};
  using Kernel = HopperLinear<FD_TYPE, FD_GROUPS, FD_DEEP, FD_WIDTH, FD_STAGES, FD_SPLIT, features.gated>;
  const Kernel kernel{features, arguments, shared_address(memory), FD_SPLIT > 1 ? cluster_rank() : 0};
  const bool asks = threadIdx.x == Kernel::CONSUMERS;
  let_next_kernel_start();
  int ahead = 0;
  if (asks) {
    if (kernel.shared % 1024 != 0) __trap();  // the swizzle goes by address
    fetch_map(x);
    kernel.begin_ring();
    ahead = kernel.ask_ahead(weight);
  }
  __syncwarp();
  kernel.meet<false>();
  // Nothing behind the two branches: what both came to would have to do with the registers of the second.
  if (threadIdx.x < Kernel::CONSUMERS) {
    take_registers<FD_CONSUMER_REGISTERS>();
    wait_for_earlier_kernels();
    kernel.consume(memory);
  } else {
    give_registers<FD_CONSUMER_REGISTERS>();
    if (asks) {
      wait_for_earlier_kernels();
      kernel.produce(weight, x, ahead);
    }
    __syncwarp();
    if constexpr (FD_SPLIT > 1) kernel.meet<true>();
    kernel.leave();
  }
}
#endif
