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
// Behind it: the emulation of this one redefines what that one uses.
#include "hopper.cuh"

static_assert(LINE == 2 * STEP);

#ifndef FLASHDRAFT_EMULATION
// d (+)= 64 rows of a times b^T, 16 inputs; `add` 0: what d held does not count. hopper.constants says what FD_... are.
__device__ __forceinline__ void multiply_matrices(float (&d)[FD_WIDTH / 2], u64 a, u64 b, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " FD_ADD
               ", 0;\nwgmma.mma_async.sync.aligned." FD_PRODUCT " {" FD_SUMS "}, " FD_A ", " FD_B ", add, 1, 1, 0, 0;\n}\n"
               : FD_OPERANDS(d)
               : "l"(a), "l"(b), "r"(add));
}
#endif

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
