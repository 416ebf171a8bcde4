// The kernel of narrow_linear.cuh: the loop over tiles, sums across warps and across slices of K, epilogue.
#include "nvfp4.cuh"

// Sums of one tile and 8 rows of x, [weight row][row of x]: a patch for each warp, two sets in turn, so that one barrier for a
// tile and 8 rows is enough. Unpadded: bank conflicts cost some 100 cycles of the 4,000 that a tile of 16 x 2560 takes to load,
// and two blocks of a multiprocessor have 512 bytes to spare.
template <int ROWS>
struct Patches {
  static constexpr int PATCH = 8 * ROWS, BYTES = 2 * WARPS * PATCH * 4;
  float* all;
  int set;

  __device__ __forceinline__ float* of_warp(int warp) const { return all + (set * WARPS + warp) * PATCH; }

  template <int FOLD>
  __device__ __forceinline__ void put(const float (&c)[FOLD][4]) const {
    float* patch = of_warp(threadIdx.x / 32) + threadIdx.x % 32 / 4 * 8 + threadIdx.x % 4 * 2;
    patch[0] = FOLD == 1 ? c[0][0] : c[0][0] + c[FOLD - 1][2];
    patch[1] = FOLD == 1 ? c[0][1] : c[0][1] + c[FOLD - 1][3];
    if (FOLD == 1) patch[8 * 8] = c[0][2], patch[8 * 8 + 1] = c[0][3];
  }

  __device__ __forceinline__ float sum(int m, int row) const {
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += of_warp(warp)[m * 8 + row];
    return total;
  }
};

// A thread's best value so far at row i % 8 of each group of 8 rows of x; NaN counts as infinity.
template <int NT>
struct Best {
  float value[NT];
  int id[NT];

  __device__ __forceinline__ void take(int j, float v, int candidate) {
    v = v == v ? v : infinity();
    if (v > value[j] || (v == value[j] && candidate < id[j])) value[j] = v, id[j] = candidate;
  }
};

template <typename Type, int NT, typename Weights, int DEPTH>
struct NarrowLinear {
  static constexpr int FOLD = Weights::FOLD, ROWS = Weights::ROWS;
  static constexpr int OUTPUTS = 8 * ROWS;  // results of a tile and 8 rows of x
  const Features& f;
  const Arguments& p;
  Best<NT> best;

  // Weight rows of a tile that are outputs: of a gated one the first half, gates; `up` of an output lies that much further on.
  __device__ __forceinline__ int height() const { return f.gated ? ROWS / 2 : ROWS; }

  // Result `index` of a tile and the j-th 8 rows of x, from its sum over K.
  __device__ __forceinline__ void finish(int tile, int j, int index, float sum, float up) {
    const int m = index % ROWS, row = j * 8 + index / ROWS, output = tile * height() + m;
    if (m >= height() || output >= p.outputs || row >= p.rows) return;
    if (Weights::SCALED) sum *= p.scales[tile], up *= p.scales[tile];
    const float z = epilogue<Type>(f, p, sum, up, output, row);
    if (f.argmax) {
#pragma unroll
      for (int i = 0; i < NT; ++i)  // j is not a constant everywhere: as the index it would move the array to memory
        if (i == j) best.take(i, z, output);
    } else {
      reinterpret_cast<unsigned short*>(p.z)[(long long)row * p.outputs + output] = (unsigned short)Type::pack(z, 0.f);
    }
  }

  __device__ __forceinline__ void tiles(char* x_shared, int row_bytes, WeightQueue<Weights, DEPTH>& queue, float* patches_shared) {
    const int lane = threadIdx.x % 32;
    const char* x = x_shared + lane / 4 * row_bytes + 16 * (lane % 4);
    Patches<ROWS> patches{patches_shared, 0};
    for (int tile = first_tile(f); tile < p.tiles; tile += gridDim.x) {
      float c[NT][FOLD][4] = {};
      for (int step = queue.first_step(tile); step < queue.steps; step += WARPS) {
        uint4 w[4 / FOLD];
        queue.template take<Type>(w);
        multiply_step<Type, NT, FOLD>(c, w, x + 2 * STEP * step, row_bytes);
        __syncwarp();  // every lane has what it needs from the slot
        queue.fill();
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        patches.template put<FOLD>(c[j]);
        __syncthreads();
        const int index = (int)threadIdx.x - j % 2 * (THREADS / 2);  // the halves of the block finish in turn
        if (0 <= index && index < OUTPUTS) {
          const int m = index % ROWS, row = index / ROWS;
          const float sum = patches.sum(m, row);
          if (f.split) {
            partials(tile, j)[blockIdx.y * NT * OUTPUTS + index] = sum;
          } else {
            finish(tile, j, index, sum, f.gated && m < height() ? patches.sum(m + height(), row) : 0.f);
          }
        }
        patches.set ^= 1;
      }
    }
  }

  __device__ __forceinline__ float* partials(int tile, int j) const {
    return p.partials + ((long long)tile * gridDim.y * NT + j) * OUTPUTS;
  }

  // Of every tile of this block: if the other slices are there, sum them in order.
  __device__ __forceinline__ void combine(int* last) {
    for (int first = first_tile(f); first < p.tiles; first += THREADS * gridDim.x) {
      __syncthreads();
      const int own = first + threadIdx.x * gridDim.x;
      last[threadIdx.x] = own < p.tiles && last_to_arrive(p.counters + own, gridDim.y);
      __syncthreads();
      constexpr int BATCH = 4, TOGETHER = THREADS / OUTPUTS;  // sums by one thread at a time; threads beside each other
      const int own_tiles = min(THREADS, (p.tiles - first + (int)gridDim.x - 1) / (int)gridDim.x);
      const int index = threadIdx.x % OUTPUTS, up_offset = f.gated && index % ROWS < height() ? height() : 0;
      for (int start = threadIdx.x / OUTPUTS; start < NT * own_tiles; start += BATCH * TOGETHER) {
        float sum[BATCH] = {}, up[BATCH] = {};
        const float* partial[BATCH];
        int number[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          number[b] = start + b * TOGETHER;
          const int valid = min(number[b], NT * own_tiles - 1);  // loads without a condition are all under way at once
          partial[b] = partials(first + valid / NT * gridDim.x, valid % NT) + index;
        }
#pragma unroll 4
        for (int slice = 0; slice < (int)gridDim.y; ++slice) {
#pragma unroll
          for (int b = 0; b < BATCH; ++b) {
            sum[b] += load_fresh(partial[b] + slice * NT * OUTPUTS);
            if (f.gated) up[b] += load_fresh(partial[b] + slice * NT * OUTPUTS + up_offset);
          }
        }
#pragma unroll
        for (int b = 0; b < BATCH; ++b) {
          if (number[b] >= NT * own_tiles || !last[number[b] / NT]) continue;
          finish(first + number[b] / NT * gridDim.x, number[b] % NT, index, sum[b], up[b]);
        }
      }
    }
  }

  // The best of this block to memory; the last block to arrive takes the best of all blocks.
  __device__ __forceinline__ void arg_max(int* last) {
    const int index = threadIdx.x % (THREADS / 2), half = threadIdx.x / (THREADS / 2), lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
#pragma unroll
      for (int offset = ROWS / 2; offset > 0; offset /= 2) {
        const float value = __shfl_xor_sync(0xffffffffu, best.value[j], offset);
        best.take(j, value, __shfl_xor_sync(0xffffffffu, best.id[j], offset));
      }
      if (half == j % 2 && index < OUTPUTS && index % ROWS == 0) {
        const int place = (blockIdx.x * NT + j) * 8 + index / ROWS;
        p.partials[place] = best.value[j];
        p.candidates[place] = best.id[j];
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) *last = last_to_arrive(p.counters, gridDim.x);
    __syncthreads();
    if (!*last) return;
    for (int row = threadIdx.x / 32; row < p.rows; row += WARPS) {
      Best<1> found{{-infinity()}, {0x7fffffff}};
      for (int block = lane; block < (int)gridDim.x; block += 32) {
        const int place = block * NT * 8 + row;
        const float id_bits = load_fresh(reinterpret_cast<const float*>(p.candidates) + place);
        found.take(0, load_fresh(p.partials + place), __float_as_int(id_bits));
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        const float value = __shfl_xor_sync(0xffffffffu, found.value[0], offset);
        found.take(0, value, __shfl_xor_sync(0xffffffffu, found.id[0], offset));
      }
      const bool finite = found.value[0] < infinity() && found.value[0] > -infinity();
      if (lane == 0) p.ids[row] = finite ? found.id[0] : -1;
    }
  }

  // Shared memory: sums of warps, rows of x, queue of weights.
  __device__ __forceinline__ void run(char* shared) {
    const int row_bytes = 2 * (f.slice_steps * STEP) + 64;  // 64: 8 lanes that read 16 bytes of two rows hit different banks
    char* x_shared = shared + Patches<ROWS>::BYTES;
    const int steps = min(f.slice_steps, f.k / STEP - (int)blockIdx.y * f.slice_steps);
    WeightQueue<Weights, DEPTH> queue(f, p, x_shared + 8 * NT * row_bytes, steps);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) queue.fill();
    wait_for_earlier_kernels();
    take_rows<NT>(f, p, x_shared, row_bytes);
    __syncthreads();
    if (f.argmax)
#pragma unroll
      for (int j = 0; j < NT; ++j) best.value[j] = -infinity(), best.id[j] = 0x7fffffff;
    tiles(x_shared, row_bytes, queue, reinterpret_cast<float*>(shared));
    if (f.split) combine(reinterpret_cast<int*>(shared));
    if (f.argmax) arg_max(reinterpret_cast<int*>(shared));
  }
};

#ifdef FLASHDRAFT_KERNEL
// narrow.constants says what FD_... are.
extern "C" __global__ void __launch_bounds__(THREADS, FD_RESIDENT) narrow_linear(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(128) char shared[];
  constexpr Features features{FD_FEATURES};
  NarrowLinear<FD_TYPE, FD_TILES_OF_ROWS, FD_WEIGHTS, FD_DEPTH> kernel{features, arguments, {}};
  kernel.run(shared);
}
#endif
