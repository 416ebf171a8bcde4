// What the kernels of sample_rows.cu are made of: reading rows of logits, order of floats, bins and sums over them, noise.
#pragma once
#include "sample_device.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int GROUP = 4;                  // tokens that share a Philox call
constexpr int TILE = 2 * GROUP * THREADS; // tokens that a thread block takes at a time
// Bins of nats below the best, 2**-20 to 2**12: 64 an octave; what lies beyond goes to the outermost.
constexpr int BINS = 2048, BIN_SHIFT = 17;  // the bits that differ inside a bin
constexpr u32 FIRST_BIN = (127 - 20) << 6;
constexpr int DIGITS = 512;
constexpr int LISTED = 8192;              // tokens of a bin; the row with a fuller one is read again
constexpr float GUMBEL_MAX = 16.635533f;  // noise at the largest uniform
constexpr float MARGIN = 1e-3f;           // nats; covers the rounding of a score, under 1e-5, and of quick_exp
constexpr float WEIGHTLESS = 23.f;        // nats below the best from which a weight, exp(-below) 2**32, rounds to 0: 22.9

// Of one row, in the workspace. Zero between calls but for need, bin, limit and list. Mirrored by sample.ROW_BYTES.
struct Row {
  u64 best, score;      // keys: see key_of
  u64 need;             // what the tokens up to the threshold weigh inside the bin that holds it
  u32 bin, limit;       // that bin; nats below the best (bits of a float32) that a token may lie
  u32 arrived, listed;  // thread blocks; tokens
  u32 unused[2];
  u64 weights[BINS];
  u32 counts[BINS];
  float list[LISTED];   // nats below the best
};
static_assert(sizeof(Row) == 57392, "sample.ROW_BYTES");

// Strides are in elements. Mirrored by sample.Arguments.
struct Arguments {
  const void* logits;
  const float *temperature, *limit;
  const u64 *top_k, *top_p;
  const unsigned char* greedy;
  const u64* noise;
  Row* rows;
  u64* ids;
  long long logits_stride;
  int temperature_stride, limit_stride, top_k_stride, top_p_stride, greedy_stride, noise_stride;
  int vocab, segment;  // tokens; of a segment: a multiple of TILE
  bool use_top_k, use_top_p, use_limit;
  bool aligned;        // every row starts at a multiple of 16 bytes
};

// Two groups of four tokens of a thread, as words: where the second group lies, and what the words mean. Neighbouring threads
// read neighbouring pieces of 16 bytes.
template <typename Pair>
struct Half {
  static constexpr int WORDS = GROUP, BESIDE = 2 * GROUP, SECOND = GROUP;
  using Element = unsigned short;
  static __device__ __forceinline__ void put(u32 (&words)[WORDS], int i, u32 bits) { words[i / 2] |= bits << 16 * (i % 2); }
  static __device__ __forceinline__ float value(const u32 (&words)[WORDS], int i) {
    return i % 2 ? Pair::high(words[i / 2]) : Pair::low(words[i / 2]);
  }
};

struct Fp32 {
  static constexpr int WORDS = 2 * GROUP, BESIDE = GROUP, SECOND = GROUP * THREADS;
  using Element = u32;
  static __device__ __forceinline__ void put(u32 (&words)[WORDS], int i, u32 bits) { words[i] = bits; }
  static __device__ __forceinline__ float value(const u32 (&words)[WORDS], int i) { return bits_float(words[i]); }
};

// body(token, x, count): `count` logits of the tokens from `token` on, for all groups of four of this thread from `start`, a
// multiple of TILE, to `end`, ascending. The next words are under way while the body works.
template <typename Type, typename Body>
__device__ __forceinline__ void for_each_group(const Arguments& p, int start, int end, Body body) {
  using Element = typename Type::Element;
  const Element* row = static_cast<const Element*>(p.logits) + blockIdx.y * p.logits_stride;
  u32 words[Type::WORDS];
  const auto load = [&](int token) {
    if (token >= end) return;
    if (p.aligned && token + Type::SECOND + GROUP <= p.vocab) {
#pragma unroll
      for (int i = 0; i < Type::WORDS; i += 4) {
        const uint4 v = load_fresh(static_cast<const void*>(row + token + i / 4 * Type::SECOND));
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Type::WORDS; ++i) words[i] = 0;
#pragma unroll
      for (int i = 0; i < 2 * GROUP; ++i) {
        const int place = token + i / GROUP * Type::SECOND + i % GROUP;
        if (place < end) Type::put(words, i, fetch(row + place));
      }
    }
  };
  int token = start + (int)threadIdx.x * Type::BESIDE;
  load(token);
  for (; token < end; token += TILE) {
    float x[2][GROUP];
#pragma unroll
    for (int i = 0; i < 2 * GROUP; ++i) x[i / GROUP][i % GROUP] = Type::value(words, i);
    load(token + TILE);
#pragma unroll
    for (int g = 0; g < 2; ++g) body(token + g * Type::SECOND, x[g], end - token - g * Type::SECOND);
  }
}

// Numbers in the order of the floats; 0 is below all. Zeros of both signs are one.
__device__ __forceinline__ u32 ordered(float v) {
  const u32 bits = float_bits(v == 0.f ? 0.f : v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 order) { return bits_float(order >> 31 ? order & 0x7fffffffu : ~order); }
// The greatest key is that of the greatest value, of equals that of the lowest token.
__device__ __forceinline__ u64 key_of(float v, int token) { return (u64)ordered(v) << 32 | (u32)~token; }
__device__ __forceinline__ int token_of(u64 key) { return (int)~(u32)key; }

// To thread 0.
__device__ __forceinline__ u64 block_max(u64 (&of_warps)[WARPS], u64 key) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) key = max(key, shuffle_xor(key, offset));
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < WARPS; ++warp) key = max(key, of_warps[warp]);
  return key;
}

// Whether this thread block is the last of its row to get here; it then sees what the others wrote.
__device__ __forceinline__ bool last_to_arrive(Row& row, u32& flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    flag = global_add(&row.arrived, 1u) == gridDim.x - 1;
    if (flag) store(&row.arrived, 0u);
    __threadfence();
  }
  __syncthreads();
  return flag;
}

// What a row's table line and its best logit say.
struct Line {
  float best, temperature, limit;
  int first;  // token of the best logit
  bool finite, greedy, top_k, top_p;

  __device__ __forceinline__ Line(const Arguments& p, int index) {
    const u64 key = fetch(&p.rows[index].best);
    best = value_of((u32)(key >> 32)), first = token_of(key);
    temperature = fetch(p.temperature + index * p.temperature_stride);
    limit = fetch(p.limit + index * p.limit_stride);
    finite = best < infinity() && best > -infinity();
    greedy = fetch(p.greedy + index * p.greedy_stride);
    const bool sampled = finite && !greedy;
    top_k = sampled && p.use_top_k && (long long)fetch(p.top_k + index * p.top_k_stride) < p.vocab;
    top_p = sampled && p.use_top_p && bits_double(fetch(p.top_p + index * p.top_p_stride)) < 1.0;
  }
  __device__ __forceinline__ float below(float x) const { return (best - x) / temperature; }
};

// Non-negative floats order as their bits do.
__device__ __forceinline__ u32 bin_of(float below) {
  const int bin = (int)(float_bits(below) >> BIN_SHIFT) - (int)FIRST_BIN;
  return (u32)min(max(bin, 0), BINS - 1);
}
// Whether all of a bin begins with the same bits, FIRST_BIN + bin.
__device__ __forceinline__ bool shares_prefix(u32 bin) { return 0 < bin && bin < BINS - 1; }

__device__ __forceinline__ u64 weight_of(float below, float limit, bool use_limit) {
  if (below > WEIGHTLESS || (use_limit && below > limit)) return 0;
  return (u64)rint(exp(-(double)below) * 4294967296.0);
}

// Sums of 64 bits from 32-bit atomics, of which shared memory has real ones: every overflow of the low word is carried by the
// thread that caused it.
template <int SIZE>
struct Sums {
  u32 low[SIZE], high[SIZE];

  __device__ __forceinline__ void clear() {
    for (int bin = threadIdx.x; bin < SIZE; bin += THREADS) low[bin] = high[bin] = 0;
  }
  __device__ __forceinline__ void add(u32 bin, u64 v) {
    const u32 part = (u32)v, before = shared_add(&low[bin], part);
    const u32 rest = (u32)(v >> 32) + (before + part < before);
    if (rest) shared_add(&high[bin], rest);
  }
  __device__ __forceinline__ u64 operator[](int bin) const { return (u64)high[bin] << 32 | low[bin]; }
};

// What a thread has yet to add to a bin: equal tokens in a row (flat logits, ties of 16-bit types) take one addition.
struct Run {
  u32 bin = 0, count = 0;
  u64 weight = 0;
};

struct Scan {
  u64 of_threads[THREADS], of_groups[16], need;
  int bin;
};

// The first bin at which the sum of the values reaches the need, and what of it is left to reach inside that bin.
template <int SIZE, typename Value, typename Need>
__device__ __forceinline__ void find_bin(Scan& s, Value value, Need need_of_total) {
  constexpr int OWN = SIZE / THREADS;
  const int own = threadIdx.x, group = own / 16;
  u64 values[OWN], sum = 0;
#pragma unroll
  for (int i = 0; i < OWN; ++i) sum += values[i] = value(own * OWN + i);
  s.of_threads[own] = sum;
  __syncthreads();
  if (own == 0) s.bin = SIZE - 1, s.need = 1;
  if (own < 16) {
    u64 of_group = 0;
    for (int i = 0; i < 16; ++i) of_group += s.of_threads[own * 16 + i];
    s.of_groups[own] = of_group;
  }
  __syncthreads();
  u64 total = 0, before = 0;
  for (int i = 0; i < 16; ++i) {
    total += s.of_groups[i];
    if (i < group) before += s.of_groups[i];
  }
  for (int i = group * 16; i < own; ++i) before += s.of_threads[i];
  const u64 need = need_of_total(total);
#pragma unroll
  for (int i = 0; i < OWN; ++i) {
    if (before < need && need <= before + values[i]) s.bin = own * OWN + i, s.need = need - before;
    before += values[i];
  }
  __syncthreads();
}

struct NeedOfTopP {
  double top_p;
  __device__ __forceinline__ u64 operator()(u64 total) const {
    const double need = ceil((double)total * top_p);
    return need < 1.0 ? 1 : (u64)need;
  }
};

// Philox 4x32-10 (Salmon et al., SC'11).
struct Noise {
  u32 low, high, choice, index;

  __device__ __forceinline__ Noise(const Arguments& p, int row) {
    const u64* words = p.noise + (long long)row * p.noise_stride;
    low = (u32)fetch(words), high = (u32)fetch(words + 1);
    choice = (u32)fetch(words + 2), index = (u32)fetch(words + 3);
  }
  // Of the four tokens of a group.
  __device__ __forceinline__ void words(u32 group, u32 (&w)[GROUP]) const {
    w[0] = group, w[1] = index, w[2] = choice, w[3] = 0;
    u32 k0 = low, k1 = high;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      const u64 p0 = (u64)w[0] * 0xD2511F53u, p1 = (u64)w[2] * 0xCD9E8D57u;
      w[0] = (u32)(p1 >> 32) ^ w[1] ^ k0, w[1] = (u32)p1;
      w[2] = (u32)(p0 >> 32) ^ w[3] ^ k1, w[3] = (u32)p0;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
  }
};

__device__ __forceinline__ float gumbel(u32 word) {
  const double uniform = ((double)(word >> 9) + 0.5) * (1.0 / 8388608.0);
  return (float)-log(-log(uniform));
}
// 1 less the uniform, exact.
__device__ __forceinline__ float missing(u32 word) { return (8388607.5f - (float)(word >> 9)) * (1.f / 8388608.f); }
