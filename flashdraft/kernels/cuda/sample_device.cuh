// What sample_rows.cu asks of the machine beyond device.cuh. tests/kernels/emulation/sample_emulation.h is its twin for the
// CPU.
#pragma once
#include "device.cuh"

using u64 = unsigned long long;

#ifdef FLASHDRAFT_EMULATION
#include "sample_emulation.h"
#else

__device__ __forceinline__ u32 float_bits(float v) { return __float_as_uint(v); }
__device__ __forceinline__ float bits_float(u32 v) { return __uint_as_float(v); }
__device__ __forceinline__ double bits_double(u64 v) { return __longlong_as_double((long long)v); }
// Good to 2**-20, and quick.
__device__ __forceinline__ float quick_exp(float v) { return __expf(v); }

// Through L2, past L1, as load_fresh of device.cuh.
__device__ __forceinline__ u32 fetch(const unsigned char* global) {
  u32 v;
  asm volatile("ld.global.cg.u8 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(global)) : "memory");
  return v;
}
__device__ __forceinline__ u32 fetch(const unsigned short* global) {
  unsigned short v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(__cvta_generic_to_global(global)) : "memory");
  return v;
}
__device__ __forceinline__ u32 fetch(const u32* global) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(__cvta_generic_to_global(global)) : "memory");
  return v;
}
__device__ __forceinline__ float fetch(const float* global) { return load_fresh(global); }
__device__ __forceinline__ u64 fetch(const u64* global) {
  u64 v;
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(__cvta_generic_to_global(global)) : "memory");
  return v;
}

template <typename Word>
__device__ __forceinline__ void store(Word* global, Word v) {
  *global = v;
}

__device__ __forceinline__ u32 shared_add(u32* shared, u32 v) { return atomicAdd(shared, v); }
__device__ __forceinline__ void shared_max(u32* shared, u32 v) { atomicMax(shared, v); }
__device__ __forceinline__ u32 load_shared(const u32* shared) { return *static_cast<const volatile u32*>(shared); }
__device__ __forceinline__ u32 global_add(u32* global, u32 v) { return atomicAdd(global, v); }
__device__ __forceinline__ void global_add(u64* global, u64 v) { atomicAdd(global, v); }
__device__ __forceinline__ void global_max(u64* global, u64 v) { atomicMax(global, v); }

__device__ __forceinline__ u64 shuffle_xor(u64 v, int offset) { return __shfl_xor_sync(0xffffffffu, v, offset); }
#endif
