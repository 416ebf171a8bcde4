// z = epilogue(x weight^T) for many rows x with the bits of narrow_linear.cuh: the same products and sums in the same order,
// but by warps that share what they read. Python side: wide.py.
//
// Shape letters: T rows of x, K inputs, N outputs. A *tile* is what it is in narrow_linear.cuh: 16 or 8 (FOLD 2) weight rows. A
// thread block computes *items* of M weight rows by X rows of x; its warps, WM by 8 / WM / WK of them, 16 MT by 8 NT each.
//
// The order of summation: narrow_linear's warp w of a tile sums the steps w, w + 8, ... (from a start that depends on the
// tile), then the sums of its 8 warps are added in order, then those of slices of K. Here every warp goes through these 8
// *parts* one after another with one set of accumulators and adds each part to a total. The tiles of an item start alike: they
// are `period` apart. FOLD 2: the halves of a step have accumulators of their own, added at the end of a part. WK = 2: two
// groups of warps compute two parts at a time, for small items, of which a warp then has a larger piece: 25 % less is read from
// shared memory for 64 by 64. Steps must be a multiple of 8.
//
// Weights and x go through a queue of steps in shared memory (cp.async) that never drains between items. Fragments are one
// load ahead of the products, over the barrier of a step too.
#pragma once
#include "narrow_linear.cuh"

// What a thread block computes at a time, for slices [slice, end) of K. `number` counts the pieces of z.
struct Item {
  int first_tile, first_row, slice, end, number;
};

// The division of a product into items. `parallel`: slices of K are items of their own.
template <int M, int X, int FOLD>
struct Division {
  static constexpr int TILES = M * FOLD / 16;
  static constexpr int BAND = 16;  // tiles of x beside each other: 2,048 rows of 2,560 inputs are 10 MB of L2
  const Features& f;
  const Arguments& p;
  bool parallel;

  __device__ __forceinline__ int slices() const { return (f.k / STEP + f.slice_steps - 1) / f.slice_steps; }
  __device__ __forceinline__ int steps(int slice) const { return min(f.slice_steps, f.k / STEP - slice * f.slice_steps); }

  // Tiles that far apart begin with the same warp: the least of 1, 2, 4, 8 by which both lengths of slices are multiples of 8.
  __device__ __forceinline__ int period() const {
    const int bits = f.slice_steps | steps(slices() - 1) | WARPS;
    return WARPS / (bits & -bits);
  }
  __device__ __forceinline__ int columns() const { return (p.rows + X - 1) / X; }
  __device__ __forceinline__ int groups() const {
    const int each = (p.tiles + period() - 1) / period();
    return period() * ((each + TILES - 1) / TILES);
  }
  __device__ __forceinline__ int count() const { return columns() * groups() * (parallel ? slices() : 1); }

  // Columns of a band in turn, then slices, then groups: weights are read from memory once and then found in L2.
  __device__ __forceinline__ Item at(int index) const {
    const int pieces = parallel ? slices() : 1, band_items = BAND * groups() * pieces;
    const int band = index / band_items, rest = index - band * band_items;
    const int width = min(BAND, columns() - band * BAND), line = rest / width;
    const int group = line / pieces, slice = line % pieces, column = band * BAND + rest % width;
    const int first_tile = group % period() + group / period() * period() * TILES;
    return {first_tile, column * X, slice, parallel ? slice + 1 : slices(), group * columns() + column};
  }

  // The output of an item's weight row; that of a gate also for the value it opens.
  __device__ __forceinline__ int output(int first_tile, int row) const {
    const int height = 16 / FOLD / (f.gated ? 2 : 1), local = f.gated ? row / 16 * 8 + row % 8 : row;
    return (first_tile + local / height * period()) * height + local % height;
  }
};

// What goes through shared memory: steps of all items of this block, in slots of WK of them, [M + X rows][64 k].
template <int M, int X, int FOLD, int WK>
struct StepQueue {
  static constexpr int ROW_BYTES = 2 * STEP, GROUP = (M + X) * ROW_BYTES, SLOT = WK * GROUP;
  static constexpr int TOGETHER = THREADS / 8;  // rows that the threads copy at a time, 16 bytes each
  const Division<M, X, FOLD>& division;
  char* own;  // where this thread's first piece goes in slot 0
  int output, row;  // of this thread's first pieces; the others are computed when they are copied: fewer registers
  int index, slice, end, first_tile, steps, turn, part, step;

  __device__ __forceinline__ StepQueue(const Division<M, X, FOLD>& division, char* shared) : division(division) {
    const int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
    own = shared + row * ROW_BYTES + 16 * (chunk ^ row % 2 * 4);  // as in WeightQueue::place
    index = blockIdx.x;
    open();
    step -= WARPS;
    advance();
  }

  __device__ __forceinline__ bool more() const { return index < division.count(); }

  __device__ __forceinline__ void open() {
    part = step = 0;
    if (!more()) return let_next_kernel_start();
    const Item item = division.at(index);
    slice = item.slice, end = item.end, first_tile = item.first_tile;
    output = division.output(first_tile, threadIdx.x / 8), row = item.first_row + threadIdx.x / 8;
    open_slice();
  }

  __device__ __forceinline__ void open_slice() {
    steps = division.steps(slice);
    turn = first_tile * steps;
    step = -turn & (WARPS - 1);
  }

  __device__ __forceinline__ void advance() {
    step += WARPS;
    while (step >= steps && more()) {
      if ((part += WK) < WARPS) {
        step = (part - turn) & (WARPS - 1);
      } else if (++slice < end) {
        part = 0, open_slice();
      } else {
        index += gridDim.x, open();
      }
    }
  }

  // 16 bytes of a row at the step, and at the next one for the second group of warps.
  __device__ __forceinline__ void copy(char* to, const void* from, int index, long long stride) const {
    const int k = (slice * division.f.slice_steps + step) * STEP + threadIdx.x % 8 * LANE_CHUNK;
    const char* start = reinterpret_cast<const char*>(from) + 2 * k + 16ll * index * (int)(stride / LANE_CHUNK);
#pragma unroll
    for (int group = 0; group < WK; ++group) copy_async(to + group * GROUP, start + group * ROW_BYTES);
  }

  __device__ __forceinline__ void copy_weights(int slot) const {
    if (!more()) return;
    const Arguments& p = division.p;
    const bool up = division.f.gated && threadIdx.x / 8 % 16 >= 8;
#pragma unroll
    for (int i = 0; i < M / TOGETHER; ++i) {
      const int near = min(output + i * TOGETHER / (division.f.gated ? 2 : 1) * division.period(), p.outputs - 1);
      copy(own + slot * SLOT + i * TOGETHER * ROW_BYTES, p.weight, up ? near + p.outputs : near, p.weight_stride);
    }
  }
  __device__ __forceinline__ void copy_x(int slot) const {
    if (!more()) return;
    const Arguments& p = division.p;
#pragma unroll
    for (int i = 0; i < X / TOGETHER; ++i) {
      const int near = min(row + i * TOGETHER, p.rows - 1);
      copy(own + slot * SLOT + (M + i * TOGETHER) * ROW_BYTES, p.x, near, p.x_stride);
    }
  }
  __device__ __forceinline__ void fill(int slot) {
    copy_weights(slot);
    copy_x(slot);
    commit_copies();
    advance();
  }
};

// A warp's results of 16 weight rows by 8 NT rows of x on their way to z: [row of x][weight row].
template <int NT>
struct Staging {
  static constexpr int STRIDE = 20, BYTES = WARPS * 8 * NT * STRIDE * 4;  // 20: neither writes nor reads meet in a bank
  float* own;

  __device__ __forceinline__ void put(const float (&sums)[NT][4]) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // what lay here has been read
#pragma unroll
    for (int j = 0; j < NT; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) own[(8 * j + lane % 4 * 2 + e % 2) * STRIDE + lane / 4 + e / 2 * 8] = sums[j][e];
    __syncwarp();
  }
};
