// Twin of flashdraft/kernels/cuda/device.cuh for the CPU: the threads of a block are fibers that take turns at barriers.
//
// Asynchronous copies take place as late as the program allows (when it waits for them) or at once, so that both a missing wait
// and a piece that is overwritten too early give wrong results. Every access to global memory is checked against the ranges the
// caller declared. Shared memory starts as NaN.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#define __device__
#define __forceinline__ inline

using u32 = uint32_t;
using std::max;
using std::min;

struct uint4 {
  u32 x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
struct Dim {
  unsigned x, y;
};

namespace emulation {

constexpr int BLOCK = 256, LANES = 32;
constexpr size_t STACK = 128 << 10;

struct Range {
  const char* start;
  int64_t bytes;
};
struct Copy {
  void* to;
  const void* from;
};
struct Barrier {
  int size = 0, arrived = 0, generation = 0;
};
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool done, waited;
  std::deque<std::vector<Copy>> groups;  // committed; the last one is open
};
struct Warp {
  Barrier barrier;
  u32 values[LANES][8];
};

inline ucontext_t scheduler;
inline Thread threads[BLOCK];
inline Warp warps[BLOCK / LANES];
inline Barrier block_barrier;
inline int current;
inline bool late_copies, descending;
inline std::vector<Range> ranges;
inline Range from_earlier;  // what earlier kernels write
inline const std::function<void()>* program;
inline const char* fault;

inline void fail(const char* message) {
  if (!fault) fault = message;
}

inline void check(const void* pointer, int64_t bytes) {
  const char* start = static_cast<const char*>(pointer);
  for (const Range& range : ranges)
    if (range.start <= start && start + bytes <= range.start + range.bytes) return;
  fail("an access outside of every tensor");
}

inline void yield() { swapcontext(&threads[current].context, &scheduler); }

inline void meet(Barrier& barrier) {
  const int generation = barrier.generation;
  if (++barrier.arrived == barrier.size) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == generation) yield();
}

inline Warp& warp() { return warps[current / LANES]; }

inline void entry() {
  (*program)();
  threads[current].done = true;
  yield();
}

// Runs a block to its end; false if its threads wait for each other for ever.
inline bool run_block(const std::function<void()>& body) {
  program = &body;
  block_barrier = {BLOCK, 0, 0};
  for (Warp& w : warps) w.barrier = {LANES, 0, 0};
  for (Thread& thread : threads) {
    if (!thread.stack) thread.stack.reset(new char[STACK]);
    thread.done = thread.waited = false;
    thread.groups.assign(1, {});
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, entry, 0);
  }
  for (int round = 0; round < 1 << 20; ++round) {
    bool all_done = true;
    for (int turn = 0; turn < BLOCK; ++turn) {
      current = descending ? BLOCK - 1 - turn : turn;
      if (threads[current].done) continue;
      all_done = false;
      swapcontext(&scheduler, &threads[current].context);
    }
    if (all_done) return true;
  }
  return false;
}

inline void perform(std::vector<Copy>& group) {
  for (const Copy& copy : group) std::memcpy(copy.to, copy.from, 16);
  group.clear();
}

inline float from_bits(u32 bits) {
  float v;
  std::memcpy(&v, &bits, 4);
  return v;
}
inline u32 to_bits(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}

inline u32 to_bf16(float v) {
  const u32 bits = to_bits(v);
  return v != v ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 to_fp16(float v) {
  const u32 sign = (to_bits(v) >> 16) & 0x8000;
  const float size = std::fabs(v);
  if (size != size) return 0x7e00;
  if (size >= 65520.f) return sign | 0x7c00;
  if (size < 0x1p-14f) return sign | static_cast<u32>(std::nearbyint(std::ldexp(size, 24)));
  int exponent;
  std::frexp(size, &exponent);
  return sign | ((static_cast<u32>(exponent + 13) << 10) + static_cast<u32>(std::nearbyint(std::ldexp(size, 11 - exponent))));
}
inline float from_fp16(u32 bits) {
  const int exponent = (bits >> 10) & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : std::ldexp(exponent ? fraction + 1024.f : fraction, exponent ? exponent - 25 : -24);
  return bits & 0x8000 ? -size : size;
}

// The product of a warp: every lane gives its registers and computes its own four results, k ascending.
template <typename Type>
void multiply(float (&c)[4], const u32 (&registers)[6]) {
  Warp& w = warp();
  const int lane = current % LANES, g = lane / 4, t = lane % 4;
  std::copy(registers, registers + 6, w.values[lane]);
  meet(w.barrier);
  const auto element = [](u32 pair, int k) { return k % 2 ? Type::high(pair) : Type::low(pair); };
  for (int i = 0; i < 4; ++i) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32(&a)[8] = w.values[row % 8 * 4 + k % 8 / 2], (&b)[8] = w.values[column * 4 + k % 8 / 2];
      c[i] += element(a[row / 8 + k / 8 * 2], k) * element(b[4 + k / 8], k);
    }
  }
  meet(w.barrier);
}

}  // namespace emulation

inline Dim blockIdx, gridDim;
#define threadIdx (Dim{(unsigned)emulation::current, 0})

inline void __syncthreads() { emulation::meet(emulation::block_barrier); }
inline void __syncwarp() { emulation::meet(emulation::warp().barrier); }
inline void __threadfence() {}

template <typename Value>
Value __shfl_xor_sync(u32, Value value, int offset) {
  emulation::Warp& w = emulation::warp();
  const int lane = emulation::current % emulation::LANES;
  std::memcpy(&w.values[lane][0], &value, 4);
  emulation::meet(w.barrier);
  std::memcpy(&value, &w.values[lane ^ offset][0], 4);
  emulation::meet(w.barrier);
  return value;
}

inline int atomicAdd(int* address, int value) {
  emulation::check(address, 4);
  *address += value;
  return *address - value;
}

inline int __float_as_int(float v) { return static_cast<int>(emulation::to_bits(v)); }

inline void copy_async(void* shared, const void* global) {
  emulation::check(global, 16);
  if ((reinterpret_cast<uintptr_t>(global) | reinterpret_cast<uintptr_t>(shared)) % 16) emulation::fail("an unaligned copy");
  const auto [start, bytes] = emulation::from_earlier;
  if (start <= global && global < start + bytes && !emulation::threads[emulation::current].waited)
    emulation::fail("x was copied before the wait for earlier kernels");
  if (emulation::late_copies)
    emulation::threads[emulation::current].groups.back().push_back({shared, global});
  else
    std::memcpy(shared, global, 16);
}
inline void commit_copies() { emulation::threads[emulation::current].groups.emplace_back(); }
template <int PENDING>
void wait_copies() {
  auto& groups = emulation::threads[emulation::current].groups;
  for (; groups.size() > PENDING + 1; groups.pop_front()) emulation::perform(groups.front());
}

inline uint4 load_fresh(const void* global) {
  emulation::check(global, 16);
  if (!emulation::threads[emulation::current].waited) emulation::fail("x was read before the wait for earlier kernels");
  uint4 v;
  std::memcpy(&v, global, 16);
  return v;
}
inline float load_fresh(const float* global) {
  emulation::check(global, 4);
  return *global;
}
inline unsigned short load_fresh(const unsigned short* global) {
  emulation::check(global, 2);
  return *global;
}
inline void wait_for_earlier_kernels() { emulation::threads[emulation::current].waited = true; }
inline void let_next_kernel_start() {}
inline float infinity() { return INFINITY; }
inline u32 unseen_zero() { return 0; }

struct Bf16 {
  static u32 pack(float low, float high) { return emulation::to_bf16(high) << 16 | emulation::to_bf16(low); }
  static float low(u32 v) { return emulation::from_bits(v << 16); }
  static float high(u32 v) { return emulation::from_bits(v & 0xffff0000u); }
  static u32 times(u32 a, u32 b) { return pack(low(a) * low(b), high(a) * high(b)); }
  static void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulation::multiply<Bf16>(c, {a0, a1, a2, a3, b0, b1});
  }
};

struct Fp16 {
  static u32 pack(float low, float high) { return emulation::to_fp16(high) << 16 | emulation::to_fp16(low); }
  static float low(u32 v) { return emulation::from_fp16(v); }
  static float high(u32 v) { return emulation::from_fp16(v >> 16); }
  static void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulation::multiply<Fp16>(c, {a0, a1, a2, a3, b0, b1});
  }
};
