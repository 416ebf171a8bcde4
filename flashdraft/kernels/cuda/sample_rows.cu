// The choice of every row of logits with keyed noise: `sample` of the engine, bit for bit. Python side: sample.py.
//
// Two to five kernels, each with a thread block for every (row, segment of the vocabulary):
//   find_best        the greatest logit, of equals the first;
//   fill_bins        with top-k or top-p: how many tokens there are, and how heavy, in 2,048 bins by nats below the best;
//   settle_top_k, settle_top_p  the tokens of the one bin that holds the threshold are listed, and it is found among them;
//   choose           the best of noise less nats below, among the tokens within the limit.
// What concerns a whole row is done by the block of its segments that arrives last. Sums are of integers and all else is a
// maximum, so the order in which blocks run changes nothing.
#include "sample_rows.cuh"

template <typename Type>
struct FindBest {
  u64 of_warps[WARPS];

  __device__ __forceinline__ void run(const Arguments& p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const int start = blockIdx.x * p.segment, end = min(start + p.segment, p.vocab);
    float best = -infinity();
    int token = -1;
    for_each_group<Type>(p, start, end, [&](int first, const float (&x)[GROUP], int count) {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        const float v = x[i] == x[i] ? x[i] : infinity();  // NaN, too, makes the best not finite
        if (i < count && (v > best || token < 0)) best = v, token = first + i;
      }
    });
    const u64 key = block_max(of_warps, token < 0 ? 0 : key_of(best, token));
    if (threadIdx.x == 0) global_max(&p.rows[blockIdx.y].best, key);
  }
};

template <typename Type>
struct FillBins {
  Sums<BINS> weights;
  u32 counts[BINS];
  Scan scan;
  u32 last;

  __device__ __forceinline__ void run(const Arguments& p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Line line(p, blockIdx.y);
    if (!line.top_k && !line.top_p) return;
    Row& row = p.rows[blockIdx.y];
    weights.clear();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) counts[bin] = 0;
    __syncthreads();
    fill(p, line);
    __syncthreads();
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
      if (counts[bin]) global_add(&row.counts[bin], counts[bin]);
      if (weights[bin]) global_add(&row.weights[bin], weights[bin]);
    }
    if (last_to_arrive(row, last)) locate(p, line, row);
  }

  __device__ __forceinline__ void fill(const Arguments& p, const Line& line) {
    const int start = blockIdx.x * p.segment, end = min(start + p.segment, p.vocab);
    Run run;
    const auto flush = [&] {
      if (run.count && line.top_k) shared_add(&counts[run.bin], run.count);
      if (run.weight) weights.add(run.bin, run.weight);
    };
    float last_below = -1.f;
    u64 weight = 0;
    for_each_group<Type>(p, start, end, [&](int, const float (&x)[GROUP], int count) {
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        if (i >= count) continue;
        const float below = line.below(x[i]);
        if (below != last_below) {
          last_below = below;
          if (line.top_p) weight = weight_of(below, line.limit, p.use_limit);
          const u32 bin = bin_of(below);
          if (bin != run.bin) flush(), run = {bin, 0, 0};
        }
        ++run.count;
        run.weight += weight;
      }
    });
    flush();
  }

  // The bin of the first threshold that the row has.
  __device__ __forceinline__ void locate(const Arguments& p, const Line& line, Row& row) {
    if (line.top_k) {
      const u64 top_k = max(fetch(p.top_k + blockIdx.y * p.top_k_stride), 1ull);
      find_bin<BINS>(scan, [&](int bin) { return (u64)fetch(&row.counts[bin]); }, [&](u64) { return top_k; });
    } else {
      const NeedOfTopP need{bits_double(fetch(p.top_p + blockIdx.y * p.top_p_stride))};
      find_bin<BINS>(scan, [&](int bin) { return fetch(&row.weights[bin]); }, need);
    }
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) {
      if (line.top_k) store(&row.counts[bin], 0u);
      else store(&row.weights[bin], 0ull);
    }
    if (threadIdx.x == 0) {
      store(&row.bin, (u32)scan.bin);
      store(&row.need, scan.need);
      store(&row.limit, float_bits(line.limit));
    }
  }
};

template <typename Type, bool TOP_P>
struct Settle {
  Sums<DIGITS> sums;
  Scan scan;
  float list[LISTED];
  u32 listed, start, last;

  __device__ __forceinline__ void run(const Arguments& p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Line line(p, blockIdx.y);
    if (!(TOP_P ? line.top_p : line.top_k)) return;
    Row& row = p.rows[blockIdx.y];
    const u32 bin = fetch(&row.bin);
    gather(p, line, row, bin);
    if (last_to_arrive(row, last)) settle(p, line, row, bin);
  }

  // The tokens of the bin in this segment to the row's list, behind those of other segments.
  __device__ __forceinline__ void gather(const Arguments& p, const Line& line, Row& row, u32 bin) {
    if (threadIdx.x == 0) listed = 0;
    __syncthreads();
    const int from = blockIdx.x * p.segment, end = min(from + p.segment, p.vocab);
    for_each_group<Type>(p, from, end, [&](int, const float (&x)[GROUP], int count) {
      float below[GROUP];
      int found = 0;
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        below[i] = line.below(x[i]);
        if (i < count && bin_of(below[i]) == bin) found |= 1 << i;
      }
      if (!found) return;
      u32 place = shared_add(&listed, (u32)((found & 1) + (found >> 1 & 1) + (found >> 2 & 1) + (found >> 3)));
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        if (!(found >> i & 1)) continue;
        if (place < LISTED) list[place] = below[i];
        ++place;
      }
    });
    __syncthreads();
    if (threadIdx.x == 0 && listed) start = global_add(&row.listed, listed);
    __syncthreads();
    if (!listed || start + listed > LISTED) return;
    for (u32 i = threadIdx.x; i < listed; i += THREADS) store(&row.list[start + i], list[i]);
  }

  // body(below) for every token of the bin: from the list, or where it was too short from the logits.
  template <typename Body>
  __device__ __forceinline__ void for_each_token(const Arguments& p, const Line& line, u32 bin, Body body) {
    if (listed <= LISTED) {
      for (u32 i = threadIdx.x; i < listed; i += THREADS) body(list[i]);
    } else {
      for_each_group<Type>(p, 0, p.vocab, [&](int, const float (&x)[GROUP], int count) {
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
          const float below = line.below(x[i]);
          if (i < count && bin_of(below) == bin) body(below);
        }
      });
    }
  }

  __device__ __forceinline__ void settle(const Arguments& p, const Line& line, Row& row, u32 bin) {
    if (threadIdx.x == 0) listed = fetch(&row.listed);
    __syncthreads();
    if (listed <= LISTED)
      for (u32 i = threadIdx.x; i < listed; i += THREADS) list[i] = fetch(&row.list[i]);
    const u64 need = fetch(&row.need);
    float limit = bits_float(fetch(&row.limit));
    const float found = threshold(p, line, bin, limit, need);
    limit = found < limit ? found : limit;
    if (!TOP_P && line.top_p) locate_top_p(p, line, row, bin, limit);
    if (threadIdx.x == 0) {
      store(&row.limit, float_bits(limit));
      store(&row.listed, 0u);
    }
  }

  // The least number such that the tokens of the bin up to it weigh what is needed, digit by digit: each time a histogram over
  // the numbers that begin with the bits found so far.
  __device__ __forceinline__ float threshold(const Arguments& p, const Line& line, u32 bin, float limit, u64 need) {
    const bool inner = shares_prefix(bin);
    u32 found = inner ? FIRST_BIN + bin : 0;
    for (int shift = inner ? BIN_SHIFT - 9 : 26; shift >= 0; shift -= shift == 8 ? 8 : 9) {  // of 31 bits 5, 9, 9 and 8
      const u32 width = shift == 26 ? 5 : shift == 0 ? 8 : 9;
      sums.clear();
      __syncthreads();
      Run run;
      float last_below = -1.f;
      u64 weight = 0;
      for_each_token(p, line, bin, [&](float below) {
        const u32 digits = float_bits(below) >> shift;
        if (digits >> width != found) return;
        if (below != last_below) last_below = below, weight = TOP_P ? weight_of(below, limit, p.use_limit) : 1;
        const u32 digit = digits & ((1u << width) - 1);
        if (digit != run.bin) {
          if (run.weight) sums.add(run.bin, run.weight);
          run = {digit, 0, 0};
        }
        run.weight += weight;
      });
      if (run.weight) sums.add(run.bin, run.weight);
      __syncthreads();
      find_bin<DIGITS>(scan, [&](int digit) { return sums[digit]; }, [&](u64) { return need; });
      found = found << width | (u32)scan.bin;
      need = scan.need;
    }
    return bits_float(found);
  }

  // The bin of top-p's threshold, among the tokens that top-k leaves: all of lighter bins, of its own those within the limit.
  __device__ __forceinline__ void locate_top_p(const Arguments& p, const Line& line, Row& row, u32 bin, float limit) {
    __syncthreads();
    if (threadIdx.x == 0) sums.low[0] = sums.high[0] = 0;
    __syncthreads();
    u64 own = 0;
    for_each_token(p, line, bin, [&](float below) { own += weight_of(below, limit, true); });
    if (own) sums.add(0, own);
    __syncthreads();
    const u64 of_bin = sums[0];
    const NeedOfTopP need{bits_double(fetch(p.top_p + blockIdx.y * p.top_p_stride))};
    const auto weight = [&](u32 other) { return other < bin ? fetch(&row.weights[other]) : other == bin ? of_bin : 0ull; };
    find_bin<BINS>(scan, weight, need);
    for (int other = threadIdx.x; other < BINS; other += THREADS) store(&row.weights[other], 0ull);
    if (threadIdx.x == 0) {
      store(&row.bin, (u32)scan.bin);
      store(&row.need, scan.need);
    }
  }
};

template <typename Type>
struct Choose {
  u64 of_warps[WARPS];
  u32 bound, last;  // bound: the best score so far, ordered

  __device__ __forceinline__ void run(const Arguments& p) {
    wait_for_earlier_kernels();
    let_next_kernel_start();
    const Line line(p, blockIdx.y);
    Row& row = p.rows[blockIdx.y];
    if (line.finite && !line.greedy) {
      const u64 key = block_max(of_warps, best_of_thread(p, line, row));
      if (threadIdx.x == 0) global_max(&row.score, key);
    }
    if (!last_to_arrive(row, last) || threadIdx.x != 0) return;
    const int chosen = line.greedy ? line.first : token_of(fetch(&row.score));
    store(p.ids + blockIdx.y, line.finite ? (u64)chosen : ~0ull);
    store(&row.best, 0ull);
    store(&row.score, 0ull);
  }

  // A token has no chance if even the greatest noise would leave it behind the best score so far, and hardly one if its uniform
  // is too small: noise over s needs -log(uniform) < exp(-s), and 1 - uniform is less than that. So few tokens take logarithms,
  // and far from the best even Philox is left out.
  __device__ __forceinline__ u64 best_of_thread(const Arguments& p, const Line& line, const Row& row) {
    const Noise noise(p, blockIdx.y);
    const bool filtered = line.top_k || line.top_p;
    const float limit = filtered ? bits_float(fetch(&row.limit)) : line.limit;
    u32 words[GROUP];
    noise.words(line.first / GROUP, words);
    const int lane = line.first % GROUP;
    float reached = gumbel(lane < 2 ? (lane == 0 ? words[0] : words[1]) : lane == 2 ? words[2] : words[3]);
    const u64 of_others = fetch(&row.score);
    if (of_others) reached = fmaxf(reached, value_of((u32)(of_others >> 32)));
    if (threadIdx.x == 0) bound = ordered(reached);
    __syncthreads();
    const int start = blockIdx.x * p.segment, end = min(start + p.segment, p.vocab);
    u64 best = 0;
    for_each_group<Type>(p, start, end, [&](int first, const float (&x)[GROUP], int count) {
      reached = fmaxf(reached, value_of(load_shared(&bound)));
      const float reach = fminf(limit, GUMBEL_MAX + MARGIN - reached);
      float below[GROUP];
      bool any = false;
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        below[i] = i < count ? line.below(x[i]) : infinity();
        any |= below[i] <= reach;
      }
      if (!any) return;
      noise.words(first / GROUP, words);
#pragma unroll
      for (int i = 0; i < GROUP; ++i) {
        if (below[i] > reach || missing(words[i]) > quick_exp(MARGIN - reached - below[i])) continue;
        const float score = gumbel(words[i]) - below[i];
        best = max(best, key_of(score, first + i));
        if (score > reached) reached = score, shared_max(&bound, ordered(score));
      }
    });
    return best;
  }
};

// The type of the logits is fixed when this is compiled. Four thread blocks a multiprocessor leave a thread 64 registers: enough.
#ifdef FLASHDRAFT_KERNEL
#define FD_KERNEL(name, Program)                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS, 4) name(const __grid_constant__ Arguments arguments) { \
    __shared__ Program program;                                                                                \
    program.run(arguments);                                                                                    \
  }
using Logits = FD_LOGITS;
using SettleTopK = Settle<Logits, false>;
using SettleTopP = Settle<Logits, true>;
FD_KERNEL(find_best, FindBest<Logits>)
FD_KERNEL(fill_bins, FillBins<Logits>)
FD_KERNEL(settle_top_k, SettleTopK)
FD_KERNEL(settle_top_p, SettleTopP)
FD_KERNEL(choose, Choose<Logits>)
#endif
