// What the kernels for compute capability 9.0 (sm_90a) ask of the machine beyond device.cuh: barriers that count bytes, clusters,
// the copy engine (TMA), matrices in shared memory for wgmma.
#pragma once
#include "device.cuh"

using u64 = unsigned long long;

constexpr int GROUP_THREADS = 128, CHUNK = 64;  // of a warpgroup; rows that it multiplies at a time
constexpr int LINE = 128;                       // bytes of a swizzled row in shared memory: 64 values
constexpr int K_OF_PRODUCT = 16;                // wgmma's inputs at a time

// What plain CUDA C++ does not have. tests/kernels/emulation/hopper_emulation.h is the twin of this part for the CPU.
#ifdef FLASHDRAFT_EMULATION
#include "hopper_emulation.h"
#else

struct __align__(64) TensorMap {
  u64 opaque[16];
};

// Of the block.
#define SHARED_MEMORY(name) extern __shared__ __align__(1024) char name[]
__device__ __forceinline__ u32 shared_address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// Barriers in shared memory count arrivals and bytes; a phase ends when all have come, and the phases' parities alternate.
__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// For the other blocks of the cluster, and for TMA.
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  asm volatile(
      "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @!done bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Blocks of a cluster. An address in the shared memory of another, from the same place in one's own.
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ u32 address_in(u32 rank, u32 shared) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
  return there;
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ float4 load_from_cluster(u32 there) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there)
               : "memory");
  return v;
}
// 16 bytes, whenever they come: the barrier there counts them.
__device__ __forceinline__ void send(u32 there, float4 v, u32 barrier_there) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
               "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier_there)
               : "memory");
}
__device__ __forceinline__ void arrive_in_cluster(u32 barrier_there) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier_there) : "memory");
}
// All threads. What they wrote to shared memory before `arrive_at_cluster` is seen behind; with WRITTEN false it need not be,
// which spares a wait for all that has been written to memory.
template <bool WRITTEN>
__device__ __forceinline__ void arrive_at_cluster() {
  if constexpr (WRITTEN)
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  else
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void wait_for_whole_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// A block's threads that hold sums.
template <int COUNT>
__device__ __forceinline__ void meet_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(COUNT) : "memory");
}

// The first or second warpgroup.
__device__ __forceinline__ void meet_group(int group) {
  if (group == 0)
    asm volatile("bar.sync 2, %0;" ::"n"(GROUP_THREADS) : "memory");
  else
    asm volatile("bar.sync 3, %0;" ::"n"(GROUP_THREADS) : "memory");
}
__device__ __forceinline__ void store_zeros(u32 shared) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(shared), "r"(0) : "memory");
}
// What this thread has written to shared memory is there for the wgmma of those it meets next.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// TMA: a box of a tensor to shared memory, whole; what lies outside of the tensor is zero. The barrier counts its bytes.
__device__ __forceinline__ void load_weights(u32 shared, const TensorMap& map, int k, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
               "l"(&map), "r"(k), "r"(row), "r"(0), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void load_rows(u32 shared, const TensorMap& map, int k, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared),
               "l"(&map), "r"(k), "r"(row), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void load_queries(u32 shared, const TensorMap& map, int d, int head, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
               "l"(&map), "r"(d), "r"(head), "r"(row), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void load_page(u32 shared, const TensorMap& map, int d, int key, int head, int unit, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared),
               "l"(&map), "r"(d), "r"(key), "r"(head), "r"(unit), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Whatever is done to these registers stays on its side of this line: to the compiler they are ready when wgmma is issued.
template <int COUNT>
__device__ __forceinline__ void hold(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void hold(u32 (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
__device__ __forceinline__ float quick_exp2(float v) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y;
}
// What is the same in all lanes of a warp, so that the compiler knows.
__device__ __forceinline__ int of_warp(int v) { return __shfl_sync(0xffffffffu, v, 0); }
__device__ __forceinline__ bool of_any_lane(bool v) { return __any_sync(0xffffffffu, v); }

// Registers of a thread: warpgroups with sums take what the one that only asks for tiles gives. COUNT: of the former, 0: as is.
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  if constexpr (COUNT > 0) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  if constexpr (COUNT > 0) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
}

#endif

// A matrix in shared memory as wgmma reads it: rows of 128 bytes, swizzled, 1024 bytes from 8 rows to the next 8.
__device__ __forceinline__ u64 matrix_at(u32 shared) {
  return (u64)(shared >> 4 & 0x3fff) | 1ull << 16 | (u64)(8 * LINE >> 4) << 32 | 1ull << 62;
}

// A matrix whose columns lie as rows: 64 of them in a row of 128 bytes, CHUNK_BYTES to the next 64, and 1024 bytes from 8 of its
// rows to the next 8. Its 16-byte pieces are swizzled, too.
template <int CHUNK_BYTES>
__device__ __forceinline__ u64 transposed_at(u32 shared) {
  return (u64)(shared >> 4 & 0x3fff) | (u64)(CHUNK_BYTES >> 4) << 16 | (u64)(8 * LINE >> 4) << 32 | 1ull << 62;
}

// A step of the ring, and the parity of the phase in which it is filled.
template <int STAGES>
struct Turn {
  int stage;
  u32 parity;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};
