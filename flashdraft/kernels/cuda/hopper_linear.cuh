// z = epilogue(x weight^T) for up to 256 rows x on compute capability 9.0 (sm_90a). Python side: hopper.py.
//
// Shape letters: T rows of x, K inputs, N outputs. On the tensor cores (wgmma) rows of x are the M side, 64 at a time, and rows
// of the weight the N side, WIDTH of them: any multiple of 8, so that a weight divides evenly over 132 multiprocessors, and
// what a thread holds are neighbouring outputs of a row. Of a gated weight a tile is WIDTH / 2 rows of the gate and as many of
// up, so that a thread holds both of an output.
//
// Tiles go by TMA into a ring of steps of 64 inputs, rows of 128 bytes with their 16-byte pieces swizzled: x [64 CHUNKS, 64],
// then the weight [WIDTH, 64]. One thread asks for them, 1 to 3 warpgroups multiply. Weights are asked for before the wait
// for earlier kernels, x behind it.
//
// SPLIT blocks of a cluster divide K and add their sums through each other's shared memory, ascending. So a row's bits depend
// on SPLIT alone. (Blocks with different rows of the weight that get x together by multicast were no faster.)
#pragma once
#include "narrow_linear.cuh"

using u64 = unsigned long long;

constexpr int GROUP_THREADS = 128, CHUNK = 64;  // of a warpgroup; rows of x that it multiplies at a time
constexpr int LINE = 2 * STEP;                  // bytes of a row in a step
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
__device__ __forceinline__ void fetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// d (+)= 64 rows of a times b^T, 16 inputs; `add` 0: what d held does not count. hopper.constants says what FD_... are.
__device__ __forceinline__ void multiply_matrices(float (&d)[FD_WIDTH / 2], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " FD_ADD
               ", 0;\nwgmma.mma_async.sync.aligned." FD_PRODUCT " {" FD_SUMS "}, " FD_A ", " FD_B ", add, 1, 1, 0, 0;\n}\n"
               : FD_OPERANDS(d)
               : "l"(a), "l"(b), "r"(add));
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

// gelu_tanh(v) = v sigmoid(2u) with u as in `activated`: tanhf would take 2 us of a gate/up product of 128 rows.
__device__ __forceinline__ float quickly_activated(int kind, float v) {
  if (kind == IDENTITY) return v;
  const float steep = kind == SILU ? v : 1.5957691216057308f * (v + 0.044715f * v * v * v);
  return __fdividef(v, 1.f + __expf(-steep));
}

// Four values of a lane, one for each of its quad's lanes: lane t gets the t-th of each, in order.
__device__ __forceinline__ uint4 exchanged(uint4 v) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const u32 first = __shfl_xor_sync(0xffffffffu, odd ? v.x : v.y, 1), second = __shfl_xor_sync(0xffffffffu, odd ? v.z : v.w, 1);
  if (odd)
    v.x = first, v.z = second;
  else
    v.y = first, v.w = second;
  const u32 third = __shfl_xor_sync(0xffffffffu, upper ? v.x : v.z, 2);
  const u32 fourth = __shfl_xor_sync(0xffffffffu, upper ? v.y : v.w, 2);
  if (upper)
    v.x = third, v.y = fourth;
  else
    v.z = third, v.w = fourth;
  return v;
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
