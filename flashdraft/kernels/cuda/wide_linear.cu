// The kernel of wide_linear.cuh: the loop over items, sums in narrow_linear's order, epilogue.
#include "wide_linear.cuh"

template <typename Type, int WM, int MT, int NT, int WK, int FOLD, int STAGES, bool PARALLEL>
struct WideLinear {
  static constexpr int GROUP = WARPS / WK;  // warps that multiply the same steps
  static constexpr int M = 16 * WM * MT, X = 8 * (GROUP / WM) * NT;
  static constexpr int OWN = NT / WK, RESULTS = 4 * MT * OWN;  // of its rows of x, what a warp adds and stores
  static_assert(WK <= 2 && NT % WK == 0);
  using Queue = StepQueue<M, X, FOLD, WK>;
  const Features& f;
  const Arguments& p;
  Division<M, X, FOLD> division;
  float c[FOLD][MT][NT][4], total[MT][OWN][4];  // of the part, of the parts before
  uint4 a[2], b[NT];                           // the fragments that come next
  const char *weights, *rows;                   // where this lane's fragments begin in slot 0
  float* exchange;                              // sums of a part for the other group: [2][RESULTS][128 threads]
  int slot;
  bool started;  // after the first step of all

  // Of half h of a step, 8 k each: weight rows g and g + 8 of the i-th 16; row g of the j-th 8 of x.
  __device__ __forceinline__ uint4 piece(const char* start, int row, int h) const {
    const int place = slot * Queue::SLOT + (threadIdx.x / 4 + h) % 2 * (Queue::ROW_BYTES / 2);
    return *reinterpret_cast<const uint4*>(start + place + row * Queue::ROW_BYTES);
  }
  __device__ __forceinline__ void load_weights(int i, int h) {
    a[0] = piece(weights, 16 * i, h), a[1] = piece(weights, 16 * i + 8, h);
  }

  __device__ __forceinline__ void multiply_wide_step(Queue& queue) {
    const u32 zero = unseen_zero();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const bool last = i == MT - 1;
        if (i == 0 && h == 1) refill(queue);
        float(&sums)[NT][4] = c[FOLD == 1 ? 0 : h][i];
        // ^ zero: plain copies to an operand's registers the compiler would make anew for each product.
        const uint4 low{a[0].x ^ zero, a[1].x ^ zero, a[0].y ^ zero, a[1].y ^ zero};
#pragma unroll
        for (int j = 0; j < NT; ++j) Type::multiply(sums[j], low.x, low.y, low.z, low.w, b[j].x, b[j].y);
        const uint4 high{a[0].z ^ zero, a[1].z ^ zero, a[0].w ^ zero, a[1].w ^ zero};
        if (last && h == 1) next_slot();
        load_weights(last ? 0 : i + 1, last ? 1 - h : h);
#pragma unroll
        for (int j = 0; j < NT; ++j) {
          Type::multiply(sums[j], high.x, high.y, high.z, high.w, b[j].z, b[j].w);
          if (last) b[j] = piece(rows, 8 * j, 1 - h);
        }
      }
    }
  }

  // Into the slot of the step before, which nobody reads any more since the last barrier. Not right behind the barrier: there
  // the products wait for their fragments.
  __device__ __forceinline__ void refill(Queue& queue) {
    if (started) queue.fill(slot == 0 ? STAGES - 1 : slot - 1);
    started = true;
  }
  __device__ __forceinline__ void next_slot() {
    wait_copies<STAGES - 2>();
    __syncthreads();
    slot = slot + 1 == STAGES ? 0 : slot + 1;
  }

  template <typename Use>
  __device__ __forceinline__ void each_result(Use use) {
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < OWN; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) use(total[i][j][e], i, j, e);
  }

  __device__ __forceinline__ static int result(int i, int j, int e) { return ((i * OWN + j) * 4 + e) * THREADS; }

  __device__ __forceinline__ float part_sum(int i, int j, int e) const {
    return FOLD == 1 ? c[0][i][j][e] : c[0][i][j][e] + c[FOLD - 1][i][j][e];
  }

  // The part just summed, with two groups both parts in order, to `total`.
  __device__ __forceinline__ void add_parts() {
    if (WK == 1) return each_result([&](float& sum, int i, int j, int e) { sum += part_sum(i, j, e); });
    constexpr int LANES = THREADS / WK;
    const bool second = threadIdx.x >= LANES;
    float *lane = exchange + threadIdx.x % LANES, *own = lane + (second ? RESULTS * LANES : 0);
    float* other = lane + (second ? 0 : RESULTS * LANES);
    each_result([&](float&, int i, int j, int e) {
      other[result(i, j, e) / WK] = second ? part_sum(i, j, e) : part_sum(i, NT - OWN + j, e);
    });
    __syncthreads();  // the next writes come a step later, behind its barrier
    each_result([&](float& sum, int i, int j, int e) {
      const float mine = second ? part_sum(i, NT - OWN + j, e) : part_sum(i, j, e), theirs = own[result(i, j, e) / WK];
      sum = sum + (second ? theirs : mine) + (second ? mine : theirs);
    });
  }

  // The sums of a slice into `total`.
  __device__ __forceinline__ void sum_slice(int first_tile, int steps, Queue& queue) {
    each_result([](float& sum, int, int, int) { sum = 0.f; });
    for (int part = 0; part < WARPS; part += WK) {
#pragma unroll
      for (int fold = 0; fold < FOLD; ++fold)
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int j = 0; j < NT; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) c[fold][i][j][e] = 0.f;
      const int first = (part - first_tile * steps) & (WARPS - 1);
      for (int step = first; step < steps; step += WARPS) multiply_wide_step(queue);
      add_parts();
    }
  }

  // One slice of several: whether this block is the last for this piece of z; the sums of all slices are then in `total`.
  __device__ __forceinline__ bool complete(const Item& item, int* last) {
    const int slices = division.slices();
    float* partials = p.partials + (long long)item.number * slices * RESULTS * THREADS + threadIdx.x;
    each_result([&](float& sum, int i, int j, int e) { partials[item.slice * RESULTS * THREADS + result(i, j, e)] = sum; });
    __syncthreads();
    if (threadIdx.x == 0) *last = last_to_arrive(p.counters + item.number, slices);
    __syncthreads();
    if (!*last) return false;
    each_result([](float& sum, int, int, int) { sum = 0.f; });
    for (int slice = 0; slice < slices; ++slice)
      each_result([&](float& sum, int i, int j, int e) {
        sum += load_fresh(partials + slice * RESULTS * THREADS + result(i, j, e));
      });
    return true;
  }

  __device__ __forceinline__ void store(const Item& item, const Staging<OWN>& staging) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int height = f.gated ? 8 : 16, m = lane % height;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      staging.put(total[i]);
      const int output = division.output(item.first_tile, 16 * (warp % WM * MT + i) + m);
      if (output >= p.outputs) continue;
      const int first_row = item.first_row + 8 * (warp % GROUP / WM * NT + warp / GROUP * OWN);
      for (int row = lane / height; row < min(8 * OWN, p.rows - first_row); row += 32 / height) {
        const float* sum = staging.own + row * Staging<OWN>::STRIDE + m;
        const float z = epilogue<Type>(f, p, sum[0], f.gated ? sum[8] : 0.f, output, first_row + row);
        const long long place = (long long)(first_row + row) * p.outputs + output;
        reinterpret_cast<unsigned short*>(p.z)[place] = (unsigned short)Type::pack(z, 0.f);
      }
    }
  }

  // Shared memory: queue, results on their way to z, a flag, what groups exchange, sums of the slices before this one.
  __device__ __forceinline__ void run(char* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Staging<OWN> staging{reinterpret_cast<float*>(shared + STAGES * Queue::SLOT) + warp * 8 * OWN * Staging<OWN>::STRIDE};
    int* last = reinterpret_cast<int*>(shared + STAGES * Queue::SLOT + Staging<OWN>::BYTES);
    exchange = reinterpret_cast<float*>(last + 32);
    float* before = exchange + (WK == 1 ? 0 : M * X) + threadIdx.x;
    const char* group = shared + warp / GROUP * Queue::GROUP + lane / 4 * Queue::ROW_BYTES + 16 * (lane % 4);
    weights = group + warp % WM * 16 * MT * Queue::ROW_BYTES;
    rows = group + (M + warp % GROUP / WM * 8 * NT) * Queue::ROW_BYTES;
    slot = 0, started = false;
    Queue queue(division, shared);
    fill_all(queue);
    for (int index = blockIdx.x; index < division.count(); index += gridDim.x) {
      const Item item = division.at(index);
      for (int slice = item.slice; slice < item.end; ++slice) {
        sum_slice(item.first_tile, division.steps(slice), queue);
        if (!f.split || PARALLEL) continue;
        each_result([&](float& sum, int i, int j, int e) {
          if (slice > 0) sum = before[result(i, j, e)] + sum;
          if (slice + 1 < item.end) before[result(i, j, e)] = sum;
        });
      }
      // Computed again, so that it takes no registers in between.
      const Item done = division.at(index + unseen_zero());
      if (!PARALLEL || complete(done, last)) store(done, staging);
    }
  }

  // Weights do not depend on earlier kernels.
  __device__ __forceinline__ void fill_all(Queue& queue) {
    Queue ahead = queue;
    for (int stage = 0; stage < STAGES; ++stage, ahead.advance()) ahead.copy_weights(stage);
    wait_for_earlier_kernels();
    for (int stage = 0; stage < STAGES; ++stage, queue.advance()) {
      queue.copy_x(stage);
      commit_copies();
    }
    wait_copies<STAGES - 1>();
    __syncthreads();
    load_weights(0, 0);
#pragma unroll
    for (int j = 0; j < NT; ++j) b[j] = piece(rows, 8 * j, 0);
  }
};

#ifdef FLASHDRAFT_KERNEL
// wide.constants says what FD_... are.
extern "C" __global__ void __launch_bounds__(THREADS, FD_RESIDENT) wide_linear(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(128) char shared[];
  constexpr Features features{FD_FEATURES};
  WideLinear<FD_TYPE, FD_TILE, FD_FOLD, FD_STAGES, FD_PARALLEL> kernel{features, arguments, {features, arguments, FD_PARALLEL}};
  kernel.run(shared);
}
#endif
