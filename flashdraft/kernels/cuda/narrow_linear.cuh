// z = epilogue(prologue(x) weight^T) for few rows x, limited by the reading of `weight` [., K] alone. Python side: narrow.py.
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

enum NormKind { NO_NORM, NORM_UNWEIGHTED, NORM_THEN_ROUND, NORM_ROUND_FIRST };
enum Activation { IDENTITY, SILU, GELU_TANH };

// Constants of a compiled kernel.
struct Features {
  int k, slice_steps;  // inputs; steps of 64 of them in a slice (the last slice may be shorter)
  bool split;          // several slices of K, in different thread blocks
  bool add, scale;
  int post_norm, norm; // NormKind
  bool bias;
  int activation;      // Activation
  bool gated, multiply;
  bool argmax;         // the lowest index of the greatest z instead of z
  bool prefetch;       // ask for the second tile, too, before the wait for earlier kernels
};

// Strides are in elements. Mirrored by narrow.Arguments.
struct Arguments {
  const void *weight, *x, *add, *bias, *multiply;
  const float *post_weight, *norm_weight;
  void *r, *z;
  float *partials;     // split: [tiles, slices, 8 NT * rows of a tile]; argmax: [blocks, 8 NT]
  int *counters;       // zero before and after: [tiles], argmax: [1]
  int *candidates;     // argmax: [blocks, 8 NT]
  int *ids;            // argmax: [T]
  long long weight_stride, x_stride, add_stride, multiply_stride;
  int rows, outputs, tiles;
  float post_eps, eps, scale;
};

template <typename Type>
__device__ __forceinline__ float rounded(float v) {
  return Type::low(Type::pack(v, 0.f));
}

template <typename Type>
__device__ __forceinline__ void widen(const uint4& v, float (&out)[8]) {
  out[0] = Type::low(v.x), out[1] = Type::high(v.x), out[2] = Type::low(v.y), out[3] = Type::high(v.y);
  out[4] = Type::low(v.z), out[5] = Type::high(v.z), out[6] = Type::low(v.w), out[7] = Type::high(v.w);
}

template <typename Type>
__device__ __forceinline__ uint4 narrowed(const float (&v)[8]) {
  return {Type::pack(v[0], v[1]), Type::pack(v[2], v[3]), Type::pack(v[4], v[5]), Type::pack(v[6], v[7])};
}

__device__ __forceinline__ float sum_of_squares(const float (&v)[8]) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += v[i] * v[i];
  return sum;
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}

// RMSNorm of 8 values whose row has this inverse root mean square; rounded to the type.
template <typename Type>
__device__ __forceinline__ uint4 normed(int kind, const uint4& packed, float inverse, const float* weight) {
  float v[8];
  widen<Type>(packed, v);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= inverse;
  if (kind == NORM_UNWEIGHTED) return narrowed<Type>(v);
  if (kind == NORM_ROUND_FIRST) widen<Type>(narrowed<Type>(v), v);
  const float4 low = load_constant(weight), high = load_constant(weight + 4);
  v[0] *= low.x, v[1] *= low.y, v[2] *= low.z, v[3] *= low.w;
  v[4] *= high.x, v[5] *= high.y, v[6] *= high.z, v[7] *= high.w;
  return narrowed<Type>(v);
}

// 8 values of the residual stream (x + post_norm(add)) * scale, rounded after each operation as PyTorch does.
template <typename Type>
__device__ __forceinline__ uint4 residual(const Features& f, const Arguments& p, uint4 x, uint4 add, float inverse,
                                          const float* post_weight) {
  float v[8], a[8];
  if (f.add) {
    if (f.post_norm != NO_NORM) add = normed<Type>(f.post_norm, add, inverse, post_weight);
    widen<Type>(x, v);
    widen<Type>(add, a);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += a[i];
    x = narrowed<Type>(v);
  }
  if (f.scale) {
    widen<Type>(x, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= p.scale;
    x = narrowed<Type>(v);
  }
  return x;
}

// One row of x by one warp: its residual stream into r (if `write`), its normed values of this slice into shared memory, where
// they also lie between the passes. ALL > 0: for rows of at most 256 ALL, of which x and `add` are asked for at once; kept in
// registers to the end they would be 80 of 128 for K = 2560. Pointers are this lane's.
template <typename Type, int ALL>
struct RowPrologue {
  static constexpr int BATCH = ALL ? ALL : 5, CHUNK_BYTES = 2 * WARP_CHUNK;
  const Features& f;
  const Arguments& p;
  const char *x, *add;
  char *r, *shared;  // shared: of k = 0, whether or not that is in the slice
  int slice_start, slice_end, k;  // k: of this lane in chunk 0
  uint4 x_held[BATCH], add_held[BATCH];

  __device__ __forceinline__ bool in_row(int chunk) const {
    return (ALL && (chunk + 1) * WARP_CHUNK <= f.k) || k + chunk * WARP_CHUNK < f.k;
  }
  __device__ __forceinline__ bool in_slice(int chunk) const {
    return !f.split || (slice_start <= k + chunk * WARP_CHUNK && k + chunk * WARP_CHUNK < slice_end);
  }
  __device__ __forceinline__ uint4* place(int chunk) const { return reinterpret_cast<uint4*>(shared + chunk * CHUNK_BYTES); }

  __device__ __forceinline__ void load(uint4 (&held)[BATCH], const char* row, int first) const {
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (in_row(first + i)) held[i] = load_fresh(row + (first + i) * CHUNK_BYTES);
  }

  __device__ __forceinline__ float inverse_rms(float squares, float eps) const {
    return inverse_root(warp_sum(squares) * (1.f / (float)f.k) + eps);
  }

  // The inverse root mean square of `add`, which goes to shared memory on the way.
  __device__ __forceinline__ float post_inverse() {
    float squares = 0.f, v[8];
    for (int first = 0; first * WARP_CHUNK < f.k; first += BATCH) {
      load(add_held, add, first);
      if (ALL) load(x_held, x, first);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (!in_row(first + i)) continue;
        if (!f.split) *place(first + i) = add_held[i];
        widen<Type>(add_held[i], v);
        squares += sum_of_squares(v);
      }
    }
    forget_memory();
    return inverse_rms(squares, p.post_eps);
  }

  // The residual stream; its sum of squares.
  __device__ __forceinline__ float stream(bool write) {
    const bool post = f.add && f.post_norm != NO_NORM, add_placed = post && !f.split;
    const float inverse = post ? post_inverse() : 0.f;
    float squares = 0.f, v[8];
    for (int first = 0; first * WARP_CHUNK < f.k; first += BATCH) {
      if (f.add && !add_placed) load(add_held, add, first);
      if (!(ALL && post)) load(x_held, x, first);
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        const int c = first + i;
        if (!in_row(c)) continue;
        if (add_placed) add_held[i] = *place(c);
        x_held[i] = residual<Type>(f, p, x_held[i], add_held[i], inverse, p.post_weight + k + c * WARP_CHUNK);
        if (write && (f.add || f.scale)) *reinterpret_cast<uint4*>(r + c * CHUNK_BYTES) = x_held[i];
        if (in_slice(c)) *place(c) = x_held[i];
        widen<Type>(x_held[i], v);
        squares += sum_of_squares(v);
      }
    }
    return squares;
  }

  __device__ __forceinline__ void run(bool write) {
    const float squares = stream(write);
    if (f.norm == NO_NORM) return;
    const float inverse = inverse_rms(squares, p.eps);
    forget_memory();
    for (int first = 0; first * WARP_CHUNK < f.k; first += 5) {  // from shared memory and L1: few at a time hide the latency
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        const int c = first + i;
        if (in_row(c) && in_slice(c)) *place(c) = normed<Type>(f.norm, *place(c), inverse, p.norm_weight + k + c * WARP_CHUNK);
      }
    }
  }
};

// Norm weights into L1, where 8 warps will look for them, while this block waits for x.
__device__ __forceinline__ void warm_up(const float* weight, int k) {
  for (int i = 4 * threadIdx.x; i < k; i += 4 * THREADS) touch(weight + i);
}

// Rows of x into shared memory, normed; rows T and up are zero.
template <typename Type, int NT, int ALL>
__device__ __forceinline__ void prologue(const Features& f, const Arguments& p, char* shared, int row_bytes) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int whole = f.slice_steps * STEP, start = f.split ? blockIdx.y * whole : 0;
  const int length = f.k % whole == 0 ? whole : min(whole, f.k - start);  // a constant where it can be
  const int blocks = gridDim.x * gridDim.y, block = blockIdx.y * gridDim.x + blockIdx.x;
  for (int row = warp; row < 8 * NT; row += WARPS) {
    char* place = shared + row * row_bytes;
    const char* x = reinterpret_cast<const char*>(p.x) + 2 * row * p.x_stride;
    if (row >= p.rows) {
      for (int k = lane * LANE_CHUNK; k < length; k += WARP_CHUNK) *reinterpret_cast<uint4*>(place + 2 * k) = uint4{};
    } else if (!f.add && !f.scale && f.norm == NO_NORM) {
      constexpr int BATCH = 10;  // loads in flight: a row of 2560 at once
      for (int k = lane * LANE_CHUNK; k < length; k += BATCH * WARP_CHUNK) {
        uint4 v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
          if (k + i * WARP_CHUNK < length) v[i] = load_fresh(x + 2 * (start + k + i * WARP_CHUNK));
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
          if (k + i * WARP_CHUNK < length) *reinterpret_cast<uint4*>(place + 2 * (k + i * WARP_CHUNK)) = v[i];
      }
    } else {
      const int k = lane * LANE_CHUNK;
      const char* add = reinterpret_cast<const char*>(p.add) + 2 * (row * p.add_stride + k);
      char* r = reinterpret_cast<char*>(p.r) + 2 * ((long long)row * f.k + k);
      RowPrologue<Type, ALL> of_row{f, p, x + 2 * k, add, r, place + 2 * (k - start), start, start + length, k, {}, {}};
      of_row.run(row % blocks == block);
    }
  }
}

// A warp's queue of weights: what it copies to shared memory, in the order of its use. A step is 128 bytes of each row.
template <int FOLD, int DEPTH>
struct WeightQueue {
  static constexpr int ROWS = 16 / FOLD, PIECES = ROWS / 4;  // weight rows of a tile; 16-byte pieces of a step for each lane
  const Features& f;
  const Arguments& p;
  uint4* own;  // the warp's part of slot 0
  int steps, warp, lane;
  int tile, step, filled;
  const char* rows[PIECES];  // what this lane copies from, at step 0: rows lane / 8, + 4, ...

  __device__ __forceinline__ WeightQueue(const Features& f, const Arguments& p, char* shared, int steps)
      : f(f), p(p), steps(steps), warp(threadIdx.x / 32), lane(threadIdx.x % 32), tile(blockIdx.x), step(0), filled(0) {
    own = reinterpret_cast<uint4*>(shared) + warp * ROWS * 8;
    seek();
  }

  // Steps are counted on through all tiles and dealt to the warps in turn, so that few steps a tile burden all warps alike.
  __device__ __forceinline__ int first_step(int of_tile) const { return (warp - of_tile * steps) & (WARPS - 1); }

  __device__ __forceinline__ const char* row(int of_tile, int m) const {
    const int half = ROWS / 2;
    const long long index = f.gated ? min(of_tile * half + m % half, p.outputs - 1) + (m < half ? 0 : p.outputs)
                                    : min(of_tile * ROWS + m, p.outputs - 1);
    const long long k = (long long)blockIdx.y * f.slice_steps * STEP;
    return reinterpret_cast<const char*>(p.weight) + 2 * (index * p.weight_stride + k);
  }

  // From `tile` on, the first tile with a step for this warp. Behind the last one the next kernel may start: its first copies
  // then overlap with the end of this kernel.
  __device__ __forceinline__ void seek() {
    for (; tile < p.tiles; tile += gridDim.x) {
      step = first_step(tile);
      if (step >= steps) continue;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) rows[i] = row(tile, 4 * i + lane / 8) + 16 * (lane % 8);
      return;
    }
    let_next_kernel_start();
  }

  // Where a 16-byte chunk of a step's row lies in the slot being filled. Rows in turn start with their other half, for a lane
  // quarter reads half of two rows.
  __device__ __forceinline__ uint4* place(int row, int chunk) const {
    return own + filled * WARPS * ROWS * 8 + row * 8 + (chunk ^ row % 2 * 4);
  }

  __device__ __forceinline__ void fill() {
    if (tile < p.tiles) {
#pragma unroll
      for (int i = 0; i < PIECES; ++i) copy_async(place(4 * i + lane / 8, lane % 8), rows[i] + 2 * STEP * step);
      step += WARPS;
      if (step >= steps) tile += gridDim.x, seek();
    }
    filled = filled + 1 == DEPTH ? 0 : filled + 1;
    commit_copies();
  }

  // The oldest step, which lies where the next one goes: of row g, then row g + 8 (FOLD 1), 8 k of each half.
  __device__ __forceinline__ void take(uint4 (&pieces)[4 / FOLD]) {
    wait_copies<DEPTH - 1>();
    __syncwarp();  // each lane waited for its own copies
#pragma unroll
    for (int i = 0; i < 4 / FOLD; ++i) pieces[i] = *place(lane / 4 + i / 2 * 8, i % 2 * 4 + lane % 4);
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
