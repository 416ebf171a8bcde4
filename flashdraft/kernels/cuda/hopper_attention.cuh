// Partial softmax attention of many rows over paged keys with heads of 512, on compute capability 9.0 (sm_90a): what `_attend` of
// paged_triton.py gives, for tiles of 16 rows. Python side: hopper_attention.py.
//
// Shape letters: D = 512 of a head. A program has 64 query rows for each of two warpgroups: positions of a tile times the GROUP
// heads of a key head. A warpgroup's sums of 64 x 512 would take all its registers, and those of two warpgroups all there are: so
// two blocks of a cluster share the head. Each takes half of D of the queries and keys, adds the other's part to its scores
// through shared memory, and multiplies the weights by its half of the values. Every key and value is read once for 128 rows.
//
// Keys and values go by TMA, page by page, into a ring of four parts [64 keys, 256]: keys, values, keys, values. Rows of 128 bytes
// hold 64 values of a head, their 16-byte pieces swizzled. Four threads ask for them, two warpgroups multiply. While one waits for
// scores of the other block and takes their softmax, the other one multiplies.
//
// A row's bits depend on its prefix and on how keys are cut in spans.
#pragma once
#include "hopper.cuh"

// What earlier kernels of the step write: read behind the wait for them, as the emulation checks.
#ifdef FLASHDRAFT_EMULATION
using Line = emulation::cluster::Earlier<int>;
#else
using Line = const int*;
#endif

// Mirrored by hopper_attention.Arguments. Lines as in paged.Rows; their partials as in paged_triton.py.
struct Arguments {
  Line positions, tile_slot, tile_start, tile_rows, tile_end, span, table;
  float *sums, *stats;
  long long table_stride;
  int tiles, heads, splits, pairs, max_spans;
  float scale;  // of scores, times log2(e)
};

#ifndef FLASHDRAFT_EMULATION
// hopper_attention.constants says what FD_... are. s (+)= 64 queries times 64 keys, 16 of D.
__device__ __forceinline__ void multiply_scores(float (&s)[32], u64 queries, u64 keys, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " FD_SCORE_ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." FD_FORMATS
               " {" FD_SCORES "}, " FD_SCORE_A ", " FD_SCORE_B ", add, 1, 1, 0, 0;\n}\n"
               : FD_SCORE_OPERANDS(s)
               : "l"(queries), "l"(keys), "r"(add));
}
// o (+)= 64 rows of weights, of 16 keys, in registers, times 256 of D of the values.
__device__ __forceinline__ void multiply_values(float (&o)[128], const u32* weights, u64 values, int add) {
  asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " FD_SUM_ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32." FD_FORMATS
               " {" FD_SUMS "}, {" FD_SUM_A "}, " FD_SUM_B ", add, 1, 1, 1;\n}\n"
               : FD_SUM_OPERANDS(o)
               : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values), "r"(add));
}
#endif
