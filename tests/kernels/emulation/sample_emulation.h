// Twin of flashdraft/kernels/cuda/sample_device.cuh for the CPU.
#pragma once

using std::max;

inline u32 float_bits(float v) { return emulation::to_bits(v); }
inline float bits_float(u32 v) { return emulation::from_bits(v); }
inline double bits_double(u64 v) {
  double value;
  std::memcpy(&value, &v, 8);
  return value;
}
// As far off as the GPU's may be.
inline float quick_exp(float v) { return std::exp(v) * (1.f - 1e-6f); }

template <typename Word>
Word checked_load(const Word* global) {
  emulation::check(global, sizeof(Word));
  if (!emulation::threads[emulation::current].waited) emulation::fail("memory was read before the wait for earlier kernels");
  return *global;
}
inline u32 fetch(const unsigned char* global) { return checked_load(global); }
inline u32 fetch(const unsigned short* global) { return checked_load(global); }
inline u32 fetch(const u32* global) { return checked_load(global); }
inline float fetch(const float* global) { return checked_load(global); }
inline u64 fetch(const u64* global) { return checked_load(global); }

template <typename Word>
void store(Word* global, Word v) {
  emulation::check(global, sizeof(Word));
  *global = v;
}

template <typename Word>
Word add(Word* address, Word v) {
  *address += v;
  return *address - v;
}
inline u32 shared_add(u32* shared, u32 v) { return add(shared, v); }
inline void shared_max(u32* shared, u32 v) { *shared = max(*shared, v); }
inline u32 load_shared(const u32* shared) { return *shared; }
inline u32 global_add(u32* global, u32 v) {
  emulation::check(global, 4);
  return add(global, v);
}
inline void global_add(u64* global, u64 v) {
  emulation::check(global, 8);
  add(global, v);
}
inline void global_max(u64* global, u64 v) {
  emulation::check(global, 8);
  *global = max(*global, v);
}

inline u64 shuffle_xor(u64 v, int offset) {
  const u32 low = __shfl_xor_sync(0xffffffffu, (u32)v, offset);
  return (u64)__shfl_xor_sync(0xffffffffu, (u32)(v >> 32), offset) << 32 | low;
}
