// The kernel of hopper_attention.cuh: the ring, scores of two blocks, the softmax, partial sums.
#include "hopper_attention.cuh"

template <typename Type, int GROUP, int PAGE>
struct HopperAttention {
  static constexpr int TILE_ROWS = 16, ROWS = 64, KEYS = 64, D = 512, HALF = D / 2, GROUPS = 2;
  static constexpr int POSITIONS = ROWS / GROUP, PARTS = TILE_ROWS / POSITIONS;  // of a warpgroup; warpgroups for a tile
  static constexpr int CHUNK_BYTES = KEYS * LINE, CHUNKS = HALF / 64, PART_BYTES = CHUNKS * CHUNK_BYTES, STAGES = 4;
  static constexpr int BOX = PAGE < KEYS ? PAGE : KEYS;  // keys that are loaded at a time
  static constexpr int RING = GROUPS * PART_BYTES, SCORES = RING + STAGES * PART_BYTES, SCORE_BYTES = 4 * ROWS * KEYS;
  static constexpr int BARRIERS = SCORES + GROUPS * SCORE_BYTES, CONSUMERS = GROUPS * GROUP_THREADS, WARPS = GROUP_THREADS / 32;
  static constexpr int SIGHTS = BARRIERS + 8 * (2 * STAGES + 1 + 2 * GROUPS), SHARED = SIGHTS + 24 * GROUPS;
  static_assert(POSITIONS * GROUP == ROWS && PARTS * POSITIONS == TILE_ROWS && PAGE % BOX == 0 && KEYS % BOX == 0);
  static_assert(CHUNKS == GROUP_THREADS / 32);

  // Rows of a warpgroup: POSITIONS of a tile, from row `start` and position `first` on; `rows` of them are there. They see keys
  // up to `stop`, where the whole tile ends, and their own position. `job_stop`: where the keys of this job end.
  struct Sight {
    int slot, start, first, rows, stop, job_stop;
  };

  const Arguments& p;
  volatile Sight* const sights;  // in shared memory, to be read anew by each job and span: no registers are left to keep them
  u32 shared, rank;
  int head, split, span;

  __device__ __forceinline__ HopperAttention(const Arguments& arguments, char* memory, u32 rank)
      : p(arguments), sights(reinterpret_cast<volatile Sight*>(memory + SIGHTS)), shared(shared_address(memory)), rank(rank) {
    const int program = blockIdx.x / 2 / p.pairs, heads = p.heads / GROUP;
    head = program % heads, split = program / heads, span = *p.span;
  }
  // One thread.
  __device__ __forceinline__ void begin_sights() const {
    static_assert(sizeof(Sight) == 24);
    Sight both[GROUPS];
    for (int group = 0; group < GROUPS; ++group) {
      const int number = blockIdx.x / 2 % p.pairs * GROUPS + group, tile = number / PARTS, before = number % PARTS * POSITIONS;
      const int slot = tile < p.tiles ? p.tile_slot[tile] : -1;
      both[group] = {-1, 0, 0, 0, 0, 0};
      if (slot < 0) continue;
      const int start = p.tile_start[tile], rows = p.tile_rows[tile], first = p.positions[start];
      const int stop = min(p.tile_end[tile], first + rows);
      both[group] = {slot, start + before, first + before, min(max(rows - before, 0), POSITIONS), stop, stop};
    }
    if (both[0].slot == both[1].slot) both[0].job_stop = max(both[0].stop, both[1].stop), both[1].job_stop = 0;
    for (int group = 0; group < GROUPS; ++group) {
      volatile Sight& to = sights[group];
      to.slot = both[group].slot, to.start = both[group].start, to.first = both[group].first;
      to.rows = both[group].rows, to.stop = both[group].stop, to.job_stop = both[group].job_stop;
    }
  }
  __device__ __forceinline__ int stop_of_job(int job) const { return sights[job].job_stop; }
  // A job takes both warpgroups at once if they have the same sequence, else one of them.
  __device__ __forceinline__ bool takes_part(int group, int job) const { return sights[group].slot == sights[job].slot; }

  __device__ __forceinline__ u32 barrier(int number) const { return shared + BARRIERS + 8 * number; }
  __device__ __forceinline__ u32 filled(int stage) const { return barrier(stage); }
  __device__ __forceinline__ u32 emptied(int stage) const { return barrier(STAGES + stage); }
  __device__ __forceinline__ u32 asked() const { return barrier(2 * STAGES); }                   // queries are there
  __device__ __forceinline__ u32 came(int group) const { return barrier(2 * STAGES + 1 + group); }  // the other block's scores
  __device__ __forceinline__ u32 taken(int group) const { return barrier(2 * STAGES + 1 + GROUPS + group); }  // own ones, there
  __device__ __forceinline__ u32 place(int stage) const { return shared + RING + stage * PART_BYTES; }
  __device__ __forceinline__ u32 queries(int group) const { return shared + group * PART_BYTES; }

  __device__ __forceinline__ void begin_barriers() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      init_barrier(filled(stage), 1);
      init_barrier(emptied(stage), GROUPS * WARPS);
    }
    init_barrier(asked(), 1);
    for (int group = 0; group < GROUPS; ++group) {
      init_barrier(came(group), 1);
      init_barrier(taken(group), WARPS);
    }
    show_barriers();
  }

  // One thread in each of four warps: its quarter of this block's half of the queries, then of all keys and values in turn. One
  // warp alone, which takes some 100 cycles for each box of a page, would be slower than the products.
  __device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& keys, const TensorMap& values) const {
    const int chunk = of_warp((threadIdx.x - CONSUMERS) / 32), d = (int)rank * HALF + 64 * chunk;
    if (threadIdx.x % 32 != 0) return;
    if (chunk == 0) expect_bytes(asked(), ((sights[0].slot >= 0) + (sights[1].slot >= 0)) * PART_BYTES);
    for (int group = 0; group < GROUPS; ++group)
      if (sights[group].slot >= 0)
        load_queries(queries(group) + chunk * CHUNK_BYTES, q, d, head * GROUP, sights[group].start, asked());
    Turn<STAGES> turn{0, 1};
    for (int job = 0; job < GROUPS; ++job) {
      const Line units = p.table + p.table_stride * sights[job].slot;
      for (int low = split * span; low < stop_of_job(job); low += p.splits * span)
#pragma unroll 1
        for (int begin = low, high = min(low + span, stop_of_job(job)); begin < high; begin += KEYS)
#pragma unroll
          for (int of_values = 0; of_values < 2; ++of_values, turn.advance()) {
            wait_for(emptied(turn.stage), turn.parity);
            if (chunk == 0) expect_bytes(filled(turn.stage), PART_BYTES);
            for (int key = 0; key < KEYS; key += BOX) {
              // What lies behind the text is masked, wherever it comes from.
              const int unit = begin + key < high ? units[(begin + key) / PAGE] : 0;
              const u32 to = place(turn.stage) + chunk * CHUNK_BYTES + key * LINE;
              load_page(to, of_values ? values : keys, d, (begin + key) % PAGE, head, unit, filled(turn.stage));
            }
          }
    }
  }

  // Each warp.
  __device__ __forceinline__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) arrive(emptied(stage));
  }
  __device__ __forceinline__ u32 in_other(u32 address) const { return address_in(rank ^ 1, address); }

  // Half of the products of queries and keys.
  __device__ __forceinline__ void multiply_keys(float (&s)[32], int group, int stage) const {
    const u64 a = matrix_at(queries(group)), b = matrix_at(place(stage));
    hold(s);
    begin_products();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; ++chunk)
#pragma unroll
      for (int k = 0; k < 64 / K_OF_PRODUCT; ++k) {
        const int along = (chunk * CHUNK_BYTES + 2 * k * K_OF_PRODUCT) >> 4;
        multiply_scores(s, a + along, b + along, chunk + k);
      }
    commit_products();
  }

  // The other half is added: the same threads have it there. Sums of two are the same in both blocks.
  __device__ __forceinline__ void add_others(float (&s)[32], int group, u32 parity) const {
    const u32 own = shared + SCORES + group * SCORE_BYTES + threadIdx.x % GROUP_THREADS * 16;
    const u32 there = in_other(own), barrier = in_other(came(group));
    if (threadIdx.x % GROUP_THREADS == 0) expect_bytes(came(group), SCORE_BYTES);
    wait_for(taken(group), parity ^ 1);
#pragma unroll
    for (int i = 0; i < 32; i += 4) send(there + i * 4 * GROUP_THREADS, {s[i], s[i + 1], s[i + 2], s[i + 3]}, barrier);
    wait_for(came(group), parity);
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      const float4 v = load_from_cluster(own + i * 4 * GROUP_THREADS);
      s[i] += v.x, s[i + 1] += v.y, s[i + 2] += v.z, s[i + 3] += v.w;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive_in_cluster(in_other(taken(group)));
  }

  // Of the row of this thread's first or second sums.
  __device__ __forceinline__ int row_of(int half) const {
    return threadIdx.x % GROUP_THREADS / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
  }

  // Scores of keys from `begin` on become weights, those from `limit` of a row on 0. `peak` and `total` go on; what sums so far
  // are to be multiplied by.
  __device__ __forceinline__ float2 weigh(float (&s)[32], int begin, const int (&limit)[2], float (&peak)[2],
                                          float (&total)[2]) const {
    float decay[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int seen = limit[half] - begin - threadIdx.x % 4 * 2;
      float highest = peak[half];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = s[i / 2 * 4 + half * 2 + i % 2];
        score = i / 2 * 8 + i % 2 < seen ? score * p.scale : -infinity();
        highest = max(highest, score);
      }
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
      highest = max(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
      const float level = highest == -infinity() ? 0.f : highest;
      decay[half] = quick_exp2(peak[half] - level);
      total[half] *= decay[half];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& score = s[i / 2 * 4 + half * 2 + i % 2];
        score = quick_exp2(score - level);
        total[half] += score;
      }
      peak[half] = highest;
    }
    return {decay[0], decay[1]};
  }

  // Values behind the text, which may be NaN: a weight of 0 does not silence that. Each warpgroup for itself.
  __device__ __forceinline__ void clear_values(int stage, int from, int group) const {
    for (int i = threadIdx.x % GROUP_THREADS; i < (KEYS - from) * CHUNKS * 8; i += GROUP_THREADS) {
      const int piece = i % 8, chunk = i / 8 % CHUNKS, key = from + i / 8 / CHUNKS;
      store_zeros(place(stage) + chunk * CHUNK_BYTES + key * LINE + piece * 16);
    }
    show_to_products();
    meet_group(group);
  }

  __device__ __forceinline__ void multiply_by_values(float (&o)[128], u32 (&weights)[16], int stage, int add) const {
    const u64 b = transposed_at<CHUNK_BYTES>(place(stage));
    hold(o);
    hold(weights);
    begin_products();
#pragma unroll
    for (int k = 0; k < KEYS / K_OF_PRODUCT; ++k)
      multiply_values(o, weights + 4 * k, b + (k * K_OF_PRODUCT * LINE >> 4), add + k);
    commit_products();
  }

  // Sums of a span: of warp w, lane (g, t) = (lane / 4, lane % 4) has rows 16 w + g and + 8, of each 8 columns 2 t and + 1.
  __device__ __forceinline__ void store(const float (&o)[128], const float (&peak)[2], const float (&total)[2], int group,
                                        int low) const {
    const int number = low / span, start = sights[group].start, rows = sights[group].rows, stop = sights[group].stop;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = total[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int row = row_of(half), t = threadIdx.x % 4;
      if (row / GROUP >= rows || number >= p.max_spans || low >= stop) continue;
      const long long at =
          ((long long)(start + row / GROUP) * p.heads + head * GROUP + row % GROUP) * p.max_spans + number;
      float2* const to = reinterpret_cast<float2*>(p.sums + at * D + rank * HALF + 2 * t);
#pragma unroll
      for (int i = 0; i < HALF / 8; ++i) to[4 * i] = float2{o[4 * i + 2 * half], o[4 * i + 2 * half + 1]};
      if (rank == 0 && t == 0) *reinterpret_cast<float2*>(p.stats + 2 * at) = float2{peak[half], sum};
    }
  }

  __device__ __forceinline__ void consume() const {
    const int group = of_warp(threadIdx.x / GROUP_THREADS);  // 60 bytes a thread were spilled without
    u32 number = 0;  // of tiles of keys so far: a tile's keys and values have two stages of the ring, the next tile's the others
    float s[32], o[128];
    u32 weights[16];
    wait_for(asked(), 0);
#pragma unroll 1
    for (int job = 0; job < GROUPS; ++job) {
      int limit[2];  // of this thread's rows, the first key that they do not see
#pragma unroll
      for (int half = 0; half < 2; ++half)
        limit[half] = takes_part(group, job) ? min(sights[group].first + row_of(half) / GROUP + 1, (int)sights[group].stop) : 0;
#pragma unroll 1
      for (int low = split * span; low < stop_of_job(job); low += p.splits * span) {
        const int high = min(low + span, stop_of_job(job));
        float peak[2] = {-infinity(), -infinity()}, total[2] = {};
#pragma unroll 1
        for (int begin = low; begin < high; begin += KEYS, ++number) {
          const int keys = number % 2 * 2, values = keys + 1;
          wait_for(filled(keys), number / 2 % 2);
          multiply_keys(s, group, keys);
          wait_for_products<0>();
          hold(s);
          hold(o);
          hold(weights);
          if (begin > low) release(values ^ 2);
          release(keys);
          add_others(s, group, number % 2);
          const float2 decay = weigh(s, begin, limit, peak, total);
#pragma unroll
          for (int i = 0; i < 16; ++i) weights[i] = Type::pack(s[2 * i], s[2 * i + 1]);
          if (of_any_lane(decay.x != 1.f || decay.y != 1.f)) {
#pragma unroll
            for (int i = 0; i < 128; ++i) o[i] *= i / 2 % 2 ? decay.y : decay.x;
          }
          wait_for(filled(values), number / 2 % 2);
          if (begin + KEYS > high) clear_values(values, high - begin, group);
          multiply_by_values(o, weights, values, begin - low);
        }
        wait_for_products<0>();
        hold(o);
        hold(weights);
        release((number - 1) % 2 * 2 + 1);
        if (takes_part(group, job)) store(o, peak, total, group, low);
      }
    }
  }
};

#ifdef FLASHDRAFT_KERNEL
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(3 * GROUP_THREADS, 1)
    hopper_attention(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap keys,
                     const __grid_constant__ TensorMap values, const __grid_constant__ Arguments arguments) {
  SHARED_MEMORY(memory);
  using Kernel = HopperAttention<FD_TYPE, FD_GROUP, FD_PAGE>;
  let_next_kernel_start();
  // Before the span and the tiles, too: two blocks of a cluster that see different ones would wait for each other for ever.
  wait_for_earlier_kernels();
  const Kernel kernel{arguments, memory, cluster_rank()};
  if (threadIdx.x == Kernel::CONSUMERS) {
    if (kernel.shared % 1024 != 0) __trap();  // the swizzle goes by address
    fetch_map(q);
    fetch_map(keys);
    fetch_map(values);
    kernel.begin_barriers();
    kernel.begin_sights();
  }
  __syncwarp();
  arrive_at_cluster<true>();
  wait_for_whole_cluster();
  // Nothing behind the two branches: what both came to would have to do with the registers of the second.
  if (threadIdx.x < Kernel::CONSUMERS) {
    take_registers<FD_CONSUMER_REGISTERS>();
    kernel.consume();
    arrive_at_cluster<false>();  // the shared memory of a block must be there as long as the other writes to it
    wait_for_whole_cluster();
  } else {
    give_registers<FD_CONSUMER_REGISTERS>();
    kernel.produce(q, keys, values);
    __syncwarp();
    arrive_at_cluster<false>();
    wait_for_whole_cluster();
  }
}
#endif
