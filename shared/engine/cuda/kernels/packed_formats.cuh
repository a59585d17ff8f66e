// Weights as a file packs them, read and made bfloat16 in registers, and their product by tensor cores: what the kernels of
// experts share, for few rows (packed_experts.cu) and for many (packed_many.cu).
//
// Three formats. MXFP4: 16 bytes of 32 numbers and a power of two. FP8 (e4m3): a float32 scale for 128 inputs or for all,
// of so many outputs. INT4: numbers whose groups have a scale and a zero. A scale of MXFP4 is multiplied with each number,
// which is exact; one of FP8 with the sum of 128 products; of INT4 each weight is rounded to bfloat16 once, as those of
// linears are (shared/engine/quantized/int4.py).

#pragma once

#include "numbers16.cuh"
#include "overlap.cuh"

typedef unsigned char u8;

#define CHUNK 32         // numbers of a weight's row that a lane reads: all with one scale
#define LANES_A_ROW 4    // that read neighbouring chunks
#define SPAN (CHUNK * LANES_A_ROW)
#define SIDE 16          // outputs of a product of tensor cores …
#define COLUMN 8         // … and rows of x
#define QUARTER 8        // numbers that are unpacked at once
#define TILE_WORDS 3     // expert, its first row in the order, its rows

struct alignas(16) Words4 {
  unsigned of[4];
};

__device__ static inline Words4 load_packed(const u8* from) {
  Words4 words;
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.of[0]), "=r"(words.of[1]), "=r"(words.of[2]), "=r"(words.of[3])
               : "l"(from));
#else
  __builtin_memcpy(&words, from, sizeof words);
#endif
  return words;
}

__device__ static inline Words4 load_row(const BFloat16* from) {
  return *reinterpret_cast<const Words4*>(from);
}

// What two numbers of bfloat16 are multiplied with, and what is added.
struct Factors {
  unsigned by, plus;
};

#define NOTHING 0x80008000u  // twice -0, which added changes no sign
#define TWICE 0x00010001u    // a number of 16 bits times this stands in both halves

// Two numbers of bfloat16, each times its factor and plus its addend, rounded once.
__device__ static inline unsigned times(unsigned pair, Factors factors) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  unsigned found;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(pair), "r"(factors.by), "r"(factors.plus));
  return found;
#else
  unsigned found = 0;
  for (int half = 0; half < 32; half += 16) {
    const BFloat16 a = {(u16)(pair >> half)}, b = {(u16)(factors.by >> half)}, c = {(u16)(factors.plus >> half)};
    BFloat16 both;
    narrow(wide(a) * wide(b) + wide(c), both);  // numbers of 4 bits times 8: exact in float32, and so are such sums
    found |= (unsigned)both.bits << half;
  }
  return found;
#endif
}

// Bytes of two words, by four numbers of 4 bits: 0 to 3 are those of `low`.
__device__ static inline unsigned bytes_of(unsigned low, unsigned high, unsigned places) {
#ifdef __CUDA_ARCH__
  unsigned found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(places));
  return found;
#else
  const unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (unsigned)(both >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return found;
#endif
}

// sums [16, 8] += a [16, 16] · b [16, 8], spread over a warp: lane 4 r + c has of a the numbers 2c, 2c + 1 of rows r and
// r + 8, then 2c + 8, 2c + 9 of both; of column r of b the same numbers; of sums those of columns 2c, 2c + 1.
__device__ static inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
#else
  multiply_add_on_cpu(sums, a, b);
#endif
}

// The weights of all experts of a layer: values [experts, outputs, inputs], packed. MXFP4: scales [experts, outputs,
// inputs / 32] of bytes. FP8: scales [experts, ⌈outputs / scale_rows⌉, scale_columns] of float32, where scale_columns is
// 1 or ⌈inputs / 128⌉. INT4: scales [experts, outputs, scale_columns] of float32, and as many zeros of bytes.
struct Bank {
  const u8* values;
  const void* scales;
  const u8* zeros;
  int scale_rows, scale_columns;
  int inputs, outputs;
};

__device__ static inline float scale_of(const Bank& bank, int expert, int output, int span) {
  const i64 rows = (bank.outputs + bank.scale_rows - 1) / bank.scale_rows;
  const i64 row = expert * rows + output / bank.scale_rows;
  return ((const float*)bank.scales)[row * bank.scale_columns + (bank.scale_columns > 1 ? span : 0)];
}

// ---- formats: a chunk of a row of a weight, and what its numbers are ------------------------------------------------
// A quarter of a chunk, eight numbers in order, becomes four pairs: of NEIGHBOURS (0, 1), (2, 3), (4, 5), (6, 7), else
// (0, 4), (1, 5), (2, 6), (3, 7), which lie as far apart as halves of a word.

struct Mxfp4 {
  static const int BYTES = 16, AHEAD = 2;
  static const bool SCALED_SUMS = false, NEIGHBOURS = false;
  // Scales are powers of two from 2^-127 on; a factor is one divided by 2^20, times the 2^126 that bits of exponents
  // lack when they are moved: 148 is the largest that bfloat16 holds so. Sums get the 2^20 at last.
  static __device__ float last() { return 1048576.0f; }
  static __device__ int scales_a_row(const Bank& bank) { return bank.inputs / CHUNK; }
  static __device__ int chunks_a_scale_log2(const Bank&) { return 0; }
  static __device__ Factors factors(const Bank& bank, i64 place) {
    return {(unsigned)(((const u8*)bank.scales)[place] + 106) * 0x00800080u, NOTHING};
  }
  static __device__ unsigned pair(const Words4* chunk, int quarter, int i, Factors factors) {
    const unsigned codes = chunk[0].of[quarter] << (12 - 4 * i);
    return times((codes & 0x80008000u) | ((codes >> 6) & 0x01c001c0u), factors);
  }
};

struct Fp8 {
  static const int BYTES = 32, AHEAD = 1;
  static const bool SCALED_SUMS = true, NEIGHBOURS = true;
  static __device__ float last() { return 1.0f; }
  static __device__ int scales_a_row(const Bank&) { return 0; }
  static __device__ int chunks_a_scale_log2(const Bank&) { return 0; }
  static __device__ Factors factors(const Bank&, i64) { return {0x7b807b80u, NOTHING}; }  // 2^120, which exponents lack
  static __device__ unsigned pair(const Words4* chunk, int quarter, int i, Factors factors) {
    const unsigned word = chunk[quarter / 2].of[quarter % 2 * 2 + i / 2];
    const unsigned codes = bytes_of(word, word, i % 2 ? 0x3020u : 0x1000u);  // in the upper bytes of both halves
    return times((codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u), factors);
  }
};

// A weight is (number - 8) * scale + zero: scale and zero are rounded to bfloat16, and their sum once more.
struct Int4 {
  static const int BYTES = 16, AHEAD = 2;
  static const bool SCALED_SUMS = false, NEIGHBOURS = false;
  static __device__ float last() { return 1.0f; }
  static __device__ int scales_a_row(const Bank& bank) { return bank.scale_columns; }
  static __device__ int chunks_a_scale_log2(const Bank& bank) {
    int log2 = 0;
    while (bank.scale_columns << log2 < bank.inputs / CHUNK) ++log2;
    return log2;
  }
  static __device__ Factors factors(const Bank& bank, i64 place) {
    BFloat16 scale, zero;
    narrow(((const float*)bank.scales)[place], scale);
    narrow((float)(8 - bank.zeros[place]) * wide(scale), zero);
    return {scale.bits * TWICE, zero.bits * TWICE};
  }
  // The first of two numbers lies in the upper half of its byte. 128 and a number of 4 bits are bits of bfloat16.
  static __device__ unsigned pair(const Words4* chunk, int quarter, int i, Factors factors) {
    const unsigned numbers = chunk[0].of[quarter] >> 4 * (i ^ 1) & 0x000f000fu;
    return times(times(numbers | 0x43004300u, {0x3f803f80u, 0xc308c308u}), factors);  // less 136
  }
};

// Two pairs of eight numbers of a row of x, those of a step of two, as a quarter of a weight has them.
template <class Format>
__device__ static inline void pairs_of(const Words4& words, int step, unsigned (&b)[2]) {
  b[0] = Format::NEIGHBOURS ? words.of[2 * step] : bytes_of(words.of[step], words.of[step + 2], 0x5410u);
  b[1] = Format::NEIGHBOURS ? words.of[2 * step + 1] : bytes_of(words.of[step], words.of[step + 2], 0x7632u);
}

// What a kernel that multiplies by packed weights is given, and the weights among it.
#define PACKED_ARGUMENTS                                                                                             \
  const BFloat16 *x, i64 x_stride, int chosen, const int *order, const int *tiles, const u8 *values,                 \
      const void *scales, const u8 *zeros, int scale_rows, int scale_columns, const BFloat16 *bias, int inputs,      \
      int outputs, BFloat16 *y
#define PACKED_BANK                                                                                                  \
  { values, scales, zeros, scale_rows, scale_columns, inputs, outputs }
