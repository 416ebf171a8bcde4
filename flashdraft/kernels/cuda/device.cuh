// What the kernels ask of the machine beyond plain CUDA C++: asynchronous copies, tensor-core products, 16-bit conversions,
// programmatic dependent launch. NVRTC ships no headers, so cuda_bf16.h is not used. tests/kernels/emulation/emulation.h is the
// twin of this file for the CPU.
#pragma once

#ifdef FLASHDRAFT_EMULATION
#include "emulation.h"
#else

using u32 = unsigned int;

// 16 bytes from global to shared memory past the registers and L1; fetches the whole 128-byte line into L2. Without a cache
// policy: with one from createpolicy (evict_first) an H200 stopped at an illegal instruction.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(shared)),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most PENDING of this thread's groups of copies are under way; its own copies are then visible to it.
template <int PENDING>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Through L2, past L1: what another kernel or thread block has just written.
__device__ __forceinline__ uint4 load_fresh(const void* global) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(__cvta_generic_to_global(global))
               : "memory");
  return v;
}
__device__ __forceinline__ float load_fresh(const float* global) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(__cvta_generic_to_global(global)) : "memory");
  return v;
}
__device__ __forceinline__ unsigned short load_fresh(const unsigned short* global) {
  unsigned short v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(__cvta_generic_to_global(global)) : "memory");
  return v;
}
// Programmatic dependent launch (compute capability 9.0 on): wait until the kernels before this one have finished and their
// writes are visible; allow the next kernel to start. Without the launch attribute both do nothing.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// 0 in a one- or two-dimensional grid, but not to the compiler.
__device__ __forceinline__ u32 unseen_zero() { return gridDim.z - 1; }

// 16-bit types: two values in a register, the first in the low half; m16n8k16 products with float32 accumulators. Lane (g, t) =
// (lane / 4, lane % 4) holds of A rows g and g + 8, of B column g, of C rows g (c[0], c[1]) and g + 8 at columns 2t and 2t + 1.
struct Bf16 {
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
  }
  static __device__ __forceinline__ float low(u32 v) { return __uint_as_float(v << 16); }
  static __device__ __forceinline__ float high(u32 v) { return __uint_as_float(v & 0xffff0000u); }
  // Products of both values, subnormal factors as they are.
  static __device__ __forceinline__ u32 times(u32 a, u32 b) {
    u32 v;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
    return v;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

struct Fp16 {
  static __device__ __forceinline__ u32 pack(float low, float high) {
    u32 v;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
  }
  static __device__ __forceinline__ float widen(unsigned short bits) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
  }
  static __device__ __forceinline__ float low(u32 v) { return widen((unsigned short)v); }
  static __device__ __forceinline__ float high(u32 v) { return widen((unsigned short)(v >> 16)); }
  static __device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
};

// The kernel at the end of the .cu: what varies is fixed by macros when it is compiled.
#define FLASHDRAFT_KERNEL
#endif
