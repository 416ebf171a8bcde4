// Weights of NVFP4 for narrow_linear.cu: four-bit codes (E2M1) and a scale for 16 of them, as nvfp4.repacked lays them out.
//
// A step of a tile, 16 weight rows by 64 k, is 576 bytes: for each lane the 32 codes that it multiplies, then the scales. A lane
// copies, waits for and reads its own 16 bytes of codes. They become bf16 in registers: a code's sign goes to bit 15 and its
// three other bits to 8 to 6, which is its value times 2^-126, subnormal ones too; times the scale, kept as bf16 times 2^74,
// that is exact, and 2^-52 too small. nvfp4.SHIFT makes up for it.
#pragma once
#include "narrow_linear.cuh"

struct Nvfp4 {
  static constexpr int FOLD = 1, ROWS = 16, CODE_BYTES = 512, SCALE_BYTES = 64, STEP_BYTES = CODE_BYTES + SCALE_BYTES;
  static constexpr bool SCALED = true;
  const Features& f;
  const Arguments& p;
  char* own;  // the warp's part of slot 0
  int lane;
  const char* from;  // step 0 of the tile and slice

  __device__ __forceinline__ void aim(int tile) {
    const long long first = (long long)tile * (f.k / STEP) + blockIdx.y * f.slice_steps;
    from = reinterpret_cast<const char*>(p.weight) + first * STEP_BYTES + 16 * lane;
  }

  __device__ __forceinline__ char* place(int slot) const { return own + slot * WARPS * STEP_BYTES; }

  __device__ __forceinline__ void copy(int slot, int step) const {
    copy_async(place(slot) + 16 * lane, from + step * STEP_BYTES);
    if (lane < SCALE_BYTES / 16) copy_async(place(slot) + CODE_BYTES + 16 * lane, from + CODE_BYTES + step * STEP_BYTES);
  }

  // Eight codes times their scale. In both halves of a word the same bits hold codes 0 and 1, 2 and 3, 4 and 5, 6 and 7: those of
  // three pairs move to their places together, the last pair's in three parts.
  template <typename Type>
  static __device__ __forceinline__ uint4 unpacked(u32 codes, u32 scale) {
    constexpr u32 ALL = 0x81c081c0u;
    const u32 last = (codes << 1 & 0x80008000u) | (codes >> 3 & 0x01800180u) | (codes >> 7 & 0x00400040u);
    return {Type::times(codes & ALL, scale), Type::times(codes << 3 & ALL, scale), Type::times(codes << 6 & ALL, scale),
            Type::times(last, scale)};
  }

  // A scale is 5 bits of exponent and 3 of mantissa; 0x6000 adds the exponent's offset, and the halves of the result are equal.
  static __device__ __forceinline__ u32 scale(u32 four, int index) {
    return (four >> 8 * index & 0xffu) * 0x00100010u + 0x60006000u;
  }

  template <typename Type>
  __device__ __forceinline__ void read(int slot, uint4 (&pieces)[4]) const {
    const char* step = place(slot);
    const uint4 codes = *reinterpret_cast<const uint4*>(step + 16 * lane);
    const u32 four = *reinterpret_cast<const u32*>(step + CODE_BYTES + 4 * (lane / 2));
    pieces[0] = unpacked<Type>(codes.x, scale(four, 0));
    pieces[1] = unpacked<Type>(codes.y, scale(four, 1));
    pieces[2] = unpacked<Type>(codes.z, scale(four, 2));
    pieces[3] = unpacked<Type>(codes.w, scale(four, 3));
  }
};
