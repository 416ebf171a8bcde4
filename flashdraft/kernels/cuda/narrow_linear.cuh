// z = epilogue(x weight^T) for few rows x, limited by the reading of `weight` [., K] alone. Python side: narrow.py.
//
// Shape letters: T rows of x, K inputs, N outputs. A thread block of 8 warps works through tiles of 16 (FOLD 1) or 8 (FOLD 2)
// rows of `weight`; a tile is cut along K into steps of 64, which the warps take in turn. On the tensor cores weight rows are
// the M side and the rows of x the N side, 8 at a time (NT of them).
//
// Weights go through a queue in shared memory, DEPTH steps a warp, that never drains between tiles: a warp copies (cp.async)
// and later reads only its own steps, so no barrier is needed, and no register waits for memory. 64 KB are under way per
// multiprocessor; 4.3 TB/s over 132 of them at 1 us of latency need 33. The first DEPTH steps are asked for before the wait
// for earlier kernels: weights do not depend on them.
//
// A lane takes 16 bytes, 8 consecutive k, of a weight row; they fill the k slots that m16n8k16 gives the lane in two products.
// x is read by the same permutation, so nothing is shuffled. FOLD 2 halves the tile for small N: rows g and g + 8 of the A side
// are two halves of a step of the same weight row, and of the two products with x only the matching halves are kept.
//
// The order of summation depends on N and K, never on T: steps of a warp ascending, then warps, then slices of K.
#pragma once
#include "device.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int STEP = 64;        // k
constexpr int LANE_CHUNK = 8;   // k that a lane holds in 16 bytes
constexpr int WARP_CHUNK = 256; // k that a warp holds in 16 bytes a lane

enum Activation { IDENTITY, SILU, GELU_TANH };

// Constants of a compiled kernel.
struct Features {
  int k, slice_steps;  // inputs; steps of 64 of them in a slice (the last slice may be shorter)
  bool split;          // several slices of K, in different thread blocks
  bool bias;
  int activation;      // Activation
  bool gated, multiply;
  bool argmax;         // the lowest index of the greatest z instead of z
};

// Strides are in elements. Mirrored by narrow.Arguments.
struct Arguments {
  const void *weight, *x, *bias, *multiply;
  void* z;
  float *partials;     // split: [tiles, slices, 8 NT * rows of a tile]; argmax: [blocks, 8 NT]
  int *counters;       // zero before and after: [tiles], argmax: [1]
  int *candidates;     // argmax: [blocks, 8 NT]
  int *ids;            // argmax: [T]
  long long weight_stride, x_stride, multiply_stride;
  int rows, outputs, tiles;
  const float* scales;  // [tiles], what sums are multiplied by; of weights that are SCALED
};

template <typename Type>
__device__ __forceinline__ float rounded(float v) {
  return Type::low(Type::pack(v, 0.f));
}

// This slice of the rows of x into shared memory; rows T and up are zero.
template <int NT>
__device__ __forceinline__ void take_rows(const Features& f, const Arguments& p, char* shared, int row_bytes) {
  constexpr int BATCH = 10;  // loads in flight: a row of 2560 at once
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int whole = f.slice_steps * STEP, start = f.split ? blockIdx.y * whole : 0;
  const int length = f.k % whole == 0 ? whole : min(whole, f.k - start);  // a constant where it can be
  for (int row = warp; row < 8 * NT; row += WARPS) {
    char* place = shared + row * row_bytes;
    const char* x = reinterpret_cast<const char*>(p.x) + 2 * (row * p.x_stride + start);
    for (int k = lane * LANE_CHUNK; k < length; k += BATCH * WARP_CHUNK) {
      uint4 v[BATCH] = {};
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (row < p.rows && k + i * WARP_CHUNK < length) v[i] = load_fresh(x + 2 * (k + i * WARP_CHUNK));
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (k + i * WARP_CHUNK < length) *reinterpret_cast<uint4*>(place + 2 * (k + i * WARP_CHUNK)) = v[i];
    }
  }
}

// Where a block begins with the tiles, of which the first blocks by this count may have one more than the last. The two blocks
// of a multiprocessor should not both be of the first: they are neighbours, or one of each half of the grid. So in one half the
// even blocks come first, in the other the odd ones.
__device__ __forceinline__ int first_tile(const Features& f) {
  const int n = gridDim.x, x = blockIdx.x;
  if (!f.split && n % 4 != 0) return x;
  const int late = f.split ? 2 * blockIdx.y >= gridDim.y : 2 * x >= n;
  return x / 2 + (x % 2 == late ? 0 : f.split && !late ? (n + 1) / 2 : n / 2);
}

// Weights as they are, 16 bits each: a step is 128 bytes of each row.
template <int FOLD_>
struct Dense {
  static constexpr int FOLD = FOLD_, ROWS = 16 / FOLD, PIECES = ROWS / 4;  // rows of a tile; a lane's 16-byte pieces of a step
  static constexpr int STEP_BYTES = 2 * STEP * ROWS;
  static constexpr bool SCALED = false;
  const Features& f;
  const Arguments& p;
  char* own;  // the warp's part of slot 0
  int lane;
  const char* rows[PIECES];  // what this lane copies from, at step 0: rows lane / 8, + 4, ...

  __device__ __forceinline__ const char* row(int tile, int m) const {
    const int half = ROWS / 2;
    const long long index = f.gated ? min(tile * half + m % half, p.outputs - 1) + (m < half ? 0 : p.outputs)
                                    : min(tile * ROWS + m, p.outputs - 1);
    const long long k = (long long)blockIdx.y * f.slice_steps * STEP;
    return reinterpret_cast<const char*>(p.weight) + 2 * (index * p.weight_stride + k);
  }

  __device__ __forceinline__ void aim(int tile) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) rows[i] = row(tile, 4 * i + lane / 8) + 16 * (lane % 8);
  }

  // Where a 16-byte chunk of a step's row lies in a slot. Rows in turn start with their other half, for a lane quarter reads
  // half of two rows.
  __device__ __forceinline__ uint4* place(int slot, int row, int chunk) const {
    return reinterpret_cast<uint4*>(own + slot * WARPS * STEP_BYTES) + row * 8 + (chunk ^ row % 2 * 4);
  }

  __device__ __forceinline__ void copy(int slot, int step) const {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) copy_async(place(slot, 4 * i + lane / 8, lane % 8), rows[i] + 2 * STEP * step);
  }

  // Of row g, then row g + 8 (FOLD 1), 8 k of each half of the step.
  template <typename Type>
  __device__ __forceinline__ void read(int slot, uint4 (&pieces)[4 / FOLD]) const {
#pragma unroll
    for (int i = 0; i < 4 / FOLD; ++i) pieces[i] = *place(slot, lane / 4 + i / 2 * 8, i % 2 * 4 + lane % 4);
  }
};

// A warp's queue of weights: what it copies to shared memory, in the order of its use.
template <typename Weights, int DEPTH>
struct WeightQueue {
  const Arguments& p;
  Weights weights;
  int steps, warp;
  int tile, step, filled;

  __device__ __forceinline__ WeightQueue(const Features& f, const Arguments& p, char* shared, int steps)
      : p(p),
        weights{f, p, shared + threadIdx.x / 32 * Weights::STEP_BYTES, (int)threadIdx.x % 32, {}},
        steps(steps),
        warp(threadIdx.x / 32),
        tile(first_tile(f)),
        step(0),
        filled(0) {
    seek();
  }

  // Steps are counted on through all tiles and dealt to the warps in turn, so that few steps a tile burden all warps alike.
  __device__ __forceinline__ int first_step(int of_tile) const { return (warp - of_tile * steps) & (WARPS - 1); }

  // From `tile` on, the first tile with a step for this warp. Behind the last one the next kernel may start: its first copies
  // then overlap with the end of this kernel.
  __device__ __forceinline__ void seek() {
    for (; tile < p.tiles; tile += gridDim.x) {
      step = first_step(tile);
      if (step >= steps) continue;
      weights.aim(tile);
      return;
    }
    let_next_kernel_start();
  }

  __device__ __forceinline__ void fill() {
    if (tile < p.tiles) {
      weights.copy(filled, step);
      step += WARPS;
      if (step >= steps) tile += gridDim.x, seek();
    }
    filled = filled + 1 == DEPTH ? 0 : filled + 1;
    commit_copies();
  }

  // The oldest step, which lies where the next one goes.
  template <typename Type>
  __device__ __forceinline__ void take(uint4 (&pieces)[4 / Weights::FOLD]) {
    wait_copies<DEPTH - 1>();
    __syncwarp();  // each lane waited for its own copies
    weights.template read<Type>(filled, pieces);
  }
};

// One step of a warp: weight rows times the rows of x; x points at this lane's row and k of the step.
template <typename Type, int NT, int FOLD>
__device__ __forceinline__ void multiply_step(float (&c)[NT][FOLD][4], const uint4 (&w)[4 / FOLD], const char* x,
                                              int row_bytes) {
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 b = *reinterpret_cast<const uint4*>(x + j * 8 * row_bytes + h * STEP);
      const uint4 top = w[FOLD == 1 ? h : 0], bottom = w[FOLD == 1 ? 2 + h : 1];
      Type::multiply(c[j][FOLD == 1 ? 0 : h], top.x, bottom.x, top.y, bottom.y, b.x, b.y);
      Type::multiply(c[j][FOLD == 1 ? 0 : h], top.z, bottom.z, top.w, bottom.w, b.z, b.w);
    }
  }
}

// Whether this thread's block is the last of `blocks` to get here. Behind a barrier, for what its other threads wrote.
__device__ __forceinline__ bool last_to_arrive(int* counter, int blocks) {
  __threadfence();
  const bool last = atomicAdd(counter, 1) == blocks - 1;
  if (last) *counter = 0;
  __threadfence();
  return last;
}

__device__ __forceinline__ float activated(int kind, float v) {
  if (kind == SILU) return v / (1.f + expf(-v));
  if (kind == GELU_TANH) return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
  return v;
}

// The value of z at an output and a row from the float32 sums; PyTorch's roundings.
template <typename Type>
__device__ __forceinline__ float epilogue(const Features& f, const Arguments& p, float sum, float up, int output, int row) {
  const auto* bias = reinterpret_cast<const unsigned short*>(p.bias) + output;
  float y = rounded<Type>(f.bias ? sum + Type::low(*bias) : sum);
  if (f.activation == IDENTITY) return y;
  y = rounded<Type>(activated(f.activation, y));
  if (f.gated) return rounded<Type>(y * rounded<Type>(f.bias ? up + Type::low(bias[p.outputs]) : up));
  if (!f.multiply) return y;
  const auto* factor = reinterpret_cast<const unsigned short*>(p.multiply) + row * p.multiply_stride + output;
  return rounded<Type>(y * Type::low(load_fresh(factor)));
}
