// The products of a layer's experts from weights as a file packs them: y = x Wᵀ + b, each row by its own expert.
//
// Rows are sorted by expert and cut into tiles of one expert each. A block multiplies a tile with 32 outputs: its warps
// share the inputs, and each weight is read once, unpacked to bfloat16 in registers and multiplied by tensor cores, the
// outputs of a weight as their rows and the rows of x as their columns. Sums are of float32, in an order that depends on
// nothing but the shape of the weight: a row's bits are the same in any batch. Which expert a row chose is read on the
// device alone, and blocks are as many as the worst choice needs; those left over end at once.
//
// Three formats. MXFP4: 16 bytes of 32 numbers and a power of two. FP8 (e4m3): a float32 scale for 128 inputs or for all,
// of so many outputs. INT4: numbers whose groups have a scale and a zero. A scale of MXFP4 is multiplied with each number,
// which is exact; one of FP8 with the sum of 128 products; of INT4 each weight is rounded to bfloat16 once, as those of
// linears are (shared/engine/quantized/int4.py).

#include "numbers16.cuh"
#include "overlap.cuh"

typedef unsigned char u8;

#define CHUNK 32         // numbers of a weight's row that a lane reads: all with one scale
#define LANES_A_ROW 4    // that read neighbouring chunks
#define SPAN (CHUNK * LANES_A_ROW)
#define SIDE 16          // outputs of a product of tensor cores …
#define COLUMN 8         // … and rows of x
#define SIDES 2          // such products of a warp, one above the other
#define OUTPUTS (SIDE * SIDES)
#define WARPS 4          // of a block
#define QUARTER 8        // numbers that are unpacked at once
#define ITEMS 1024       // parts of rows that `plan_experts` counts
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
// A quarter of a chunk, eight numbers in order, becomes four pairs: (0, 4), (1, 5), (2, 6), (3, 7).

struct Mxfp4 {
  static const int BYTES = 16, AHEAD = 2;
  static const bool SCALED_SUMS = false;
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
  static const bool SCALED_SUMS = true;
  static __device__ float last() { return 1.0f; }
  static __device__ int scales_a_row(const Bank&) { return 0; }
  static __device__ int chunks_a_scale_log2(const Bank&) { return 0; }
  static __device__ Factors factors(const Bank&, i64) { return {0x7b807b80u, NOTHING}; }  // 2^120, which exponents lack
  static __device__ unsigned pair(const Words4* chunk, int quarter, int i, Factors factors) {
    const unsigned* words = chunk[quarter / 2].of + quarter % 2 * 2;
    const unsigned codes = bytes_of(words[0], words[1], 0x4000u + 0x1010u * i);
    return times((codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u), factors);
  }
};

// A weight is (number - 8) * scale + zero: scale and zero are rounded to bfloat16, and their sum once more.
struct Int4 {
  static const int BYTES = 16, AHEAD = 2;
  static const bool SCALED_SUMS = false;
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

// ---- products -------------------------------------------------------------------------------------------------------

// A place in `order` is of a row of x, divided by `chosen`, and of a row of y; x [rows / chosen, inputs], y [rows,
// outputs], bias [experts, outputs] or null. A tile has at most COLUMN * COLUMNS rows.
template <class Format, int COLUMNS>
__device__ static inline void multiply(const BFloat16* x, i64 x_stride, int chosen, const int* order, const int* tiles,
                                       Bank bank, const BFloat16* bias, BFloat16* y) {
  const int ROWS = COLUMN * COLUMNS;
  __shared__ float parts[WARPS][COLUMN * COLUMNS][OUTPUTS + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_of_lane = lane / 4, chunk_of_lane = lane % 4;
  const int across = (bank.outputs + OUTPUTS - 1) / OUTPUTS;
  const int* tile = tiles + (i64)(blockIdx.x / across) * TILE_WORDS;
  const int first_output = blockIdx.x % across * OUTPUTS, chunks = bank.inputs / CHUNK;
  let_next_begin();
  wait_for_previous();
  const int expert = tile[0], first = tile[1], rows = tile[2];
  if (!rows) return;
  const BFloat16* x_of[COLUMNS];
  for (int c = 0; c < COLUMNS; ++c) {
    const int row = c * COLUMN + row_of_lane;  // of those that a tile lacks nothing is kept
    x_of[c] = x + order[first + (row < rows ? row : 0)] / chosen * x_stride;
  }
  const u8* values_of[SIDES][2];
  i64 scales_of[SIDES][2];
  for (int side = 0; side < SIDES; ++side)
    for (int half = 0; half < 2; ++half) {
      const int output = first_output + side * SIDE + half * 8 + row_of_lane;
      const i64 row = (i64)expert * bank.outputs + (output < bank.outputs ? output : 0);
      values_of[side][half] = bank.values + row * chunks * Format::BYTES;
      scales_of[side][half] = row * Format::scales_a_row(bank);
    }
  const int chunks_a_scale = Format::chunks_a_scale_log2(bank);
  float sums[SIDES][COLUMNS][4] = {};
  for (int begin = 0; begin * LANES_A_ROW < chunks; begin += WARPS * Format::AHEAD) {
    // What lies behind the end is read at the beginning, and x is zero there.
    Words4 read[Format::AHEAD][SIDES][2][Format::BYTES / 16];
    Factors factors[Format::AHEAD][SIDES][2];
    int at[Format::AHEAD];
    unsigned mask[Format::AHEAD];  // not a branch, in which lanes would part before a product of all
#pragma unroll
    for (int ahead = 0; ahead < Format::AHEAD; ++ahead) {
      const int chunk = (begin + warp * Format::AHEAD + ahead) * LANES_A_ROW + chunk_of_lane;
      mask[ahead] = chunk < chunks ? ~0u : 0u;
      at[ahead] = chunk < chunks ? chunk : 0;
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int i = 0; i < Format::BYTES / 16; ++i)
            read[ahead][side][half][i] = load_packed(values_of[side][half] + (i64)at[ahead] * Format::BYTES + 16 * i);
    }
#pragma unroll
    for (int ahead = 0; ahead < Format::AHEAD; ++ahead)
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          factors[ahead][side][half] = Format::factors(bank, scales_of[side][half] + (at[ahead] >> chunks_a_scale));
#pragma unroll
    for (int ahead = 0; ahead < Format::AHEAD; ++ahead) {
      float of_span[SIDES][COLUMNS][4] = {};
      float(&into)[SIDES][COLUMNS][4] = Format::SCALED_SUMS ? of_span : sums;
#pragma unroll
      for (int quarter = 0; quarter < CHUNK / QUARTER; ++quarter) {
        unsigned b[2][COLUMNS][2];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const Words4 words = load_row(x_of[c] + at[ahead] * CHUNK + quarter * QUARTER);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            b[step][c][0] = bytes_of(words.of[step], words.of[step + 2], 0x5410u) & mask[ahead];
            b[step][c][1] = bytes_of(words.of[step], words.of[step + 2], 0x7632u) & mask[ahead];
          }
        }
#pragma unroll
        for (int side = 0; side < SIDES; ++side)
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            unsigned a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              a[i] = Format::pair(read[ahead][side][i % 2], quarter, 2 * step + i / 2, factors[ahead][side][i % 2]);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) multiply_add(into[side][c], a, b[step][c]);
          }
      }
      if (!Format::SCALED_SUMS) continue;
      const int span = begin + warp * Format::AHEAD + ahead, last_span = (chunks - 1) / LANES_A_ROW;
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int output = first_output + side * SIDE + half * 8 + row_of_lane;
          const float scale = scale_of(bank, expert, output < bank.outputs ? output : 0, span < last_span ? span : last_span);
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i)
              sums[side][c][i] = fmaf(of_span[side][c][i], scale, sums[side][c][i]);
        }
    }
  }
#pragma unroll
  for (int side = 0; side < SIDES; ++side)
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        parts[warp][c * COLUMN + chunk_of_lane * 2 + i % 2][side * SIDE + i / 2 * 8 + row_of_lane] = sums[side][c][i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * OUTPUTS; i += blockDim.x) {
    const int row = i / OUTPUTS, output = first_output + i % OUTPUTS;
    if (row >= rows || output >= bank.outputs) continue;
    float sum = 0;
    for (int part = 0; part < WARPS; ++part) sum += parts[part][row][i % OUTPUTS];
    sum *= Format::last();
    if (bias) sum += wide(bias[(i64)expert * bank.outputs + output]);
    narrow(sum, y[(i64)order[first + row] * bank.outputs + output]);
  }
}

#define MULTIPLY(NAME, FORMAT, COLUMNS)                                                                              \
  extern "C" __global__ __launch_bounds__(128, COLUMNS > 2 ? 2 : 3) void NAME(                                        \
      const BFloat16* x, i64 x_stride, int chosen, const int* order, const int* tiles, const u8* values,              \
      const void* scales, const u8* zeros, int scale_rows, int scale_columns, const BFloat16* bias, int inputs,       \
      int outputs, BFloat16* y) {                                                                                     \
    const Bank bank = {values, scales, zeros, scale_rows, scale_columns, inputs, outputs};                            \
    multiply<FORMAT, COLUMNS>(x, x_stride, chosen, order, tiles, bank, bias, y);                                      \
  }

MULTIPLY(multiply_mxfp4_8, Mxfp4, 1)
MULTIPLY(multiply_mxfp4_16, Mxfp4, 2)
MULTIPLY(multiply_mxfp4_32, Mxfp4, 4)
MULTIPLY(multiply_fp8_8, Fp8, 1)
MULTIPLY(multiply_fp8_16, Fp8, 2)
MULTIPLY(multiply_fp8_32, Fp8, 4)
MULTIPLY(multiply_int4_8, Int4, 1)
MULTIPLY(multiply_int4_16, Int4, 2)
MULTIPLY(multiply_int4_32, Int4, 4)

// ---- rows by expert -------------------------------------------------------------------------------------------------

// Sums of all before and of each, of numbers in `lists[0]`; returns the list that has them.
__device__ static inline int add_up(int (*lists)[ITEMS], int count) {
  int own = 0;
  for (int step = 1; step < count; step <<= 1) {
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x)
      lists[1 - own][i] = lists[own][i] + (i >= step ? lists[own][i - step] : 0);
    own = 1 - own;
  }
  __syncthreads();
  return own;
}

// chosen [rows]: the expert of each row. Writes order [rows], the rows of expert 0, then those of expert 1 …, and
// tiles [count, TILE_WORDS] of at most `width` rows, those that are not needed without rows. One block, of any number of
// threads; experts are at most ITEMS. Each expert's rows are looked for by as many threads as there are.
extern "C" __global__ void plan_experts(const i64* chosen, int rows, int experts, int width, int count, int* order,
                                        int* tiles) {
  __shared__ int counts[2][ITEMS], needed[2][ITEMS];
  const int shares = ITEMS / experts, items = experts * shares;
  let_next_begin();
  wait_for_previous();
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    int found = 0;
    for (int row = item % shares; row < rows; row += shares) found += chosen[row] == item / shares;
    counts[0][item] = found;
  }
  const int* ends = counts[add_up(counts, items)];
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    int at = item ? ends[item - 1] : 0;
    for (int row = item % shares; row < rows; row += shares)
      if (chosen[row] == item / shares) order[at++] = row;
  }
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    const int first = expert ? ends[expert * shares - 1] : 0, own = ends[(expert + 1) * shares - 1] - first;
    needed[0][expert] = (own + width - 1) / width;
  }
  const int* tile_ends = needed[add_up(needed, experts)];
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    const int first = expert ? ends[expert * shares - 1] : 0, end = ends[(expert + 1) * shares - 1];
    int* tile = tiles + (i64)(expert ? tile_ends[expert - 1] : 0) * TILE_WORDS;
    for (int row = first; row < end; row += width, tile += TILE_WORDS) {
      tile[0] = expert;
      tile[1] = row;
      tile[2] = end - row < width ? end - row : width;
    }
  }
  for (int i = tile_ends[experts - 1] + threadIdx.x; i < count; i += blockDim.x)
    for (int word = 0; word < TILE_WORDS; ++word) tiles[i * TILE_WORDS + word] = 0;
}

// ---- numbers of bfloat16, where rows are many -----------------------------------------------------------------------

// Rows of each expert from `first` on, so many, become wide [experts, rows, inputs]. A thread unpacks a chunk.
template <class Format>
__device__ static inline void unpack(Bank bank, int first, int rows, i64 all, BFloat16* wide_numbers) {
  let_next_begin();
  wait_for_previous();
  const i64 at = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= all) return;
  const int chunks = bank.inputs / CHUNK, chunk = at % chunks, row = at / chunks % rows, expert = at / chunks / rows;
  const i64 own = (i64)expert * bank.outputs + first + row, place = own * chunks + chunk;
  Words4 read[Format::BYTES / 16];
#pragma unroll
  for (int i = 0; i < Format::BYTES / 16; ++i) read[i] = load_packed(bank.values + place * Format::BYTES + 16 * i);
  const Factors factors =
      Format::factors(bank, own * Format::scales_a_row(bank) + (chunk >> Format::chunks_a_scale_log2(bank)));
  const float scale =
      Format::SCALED_SUMS ? scale_of(bank, expert, first + row, chunk / LANES_A_ROW) : Format::last();
#pragma unroll
  for (int quarter = 0; quarter < CHUNK / QUARTER; ++quarter) {
    Neighbours<BFloat16, QUARTER> found;
#pragma unroll
    for (int i = 0; i < QUARTER / 2; ++i) {
      const unsigned pair = Format::pair(read, quarter, i, factors);
      const BFloat16 low = {(u16)pair}, high = {(u16)(pair >> 16)};
      narrow(wide(low) * scale, found.of[i]);
      narrow(wide(high) * scale, found.of[i + QUARTER / 2]);
    }
    *reinterpret_cast<Neighbours<BFloat16, QUARTER>*>(wide_numbers + at * CHUNK + quarter * QUARTER) = found;
  }
}

#define UNPACK(NAME, FORMAT)                                                                                         \
  extern "C" __global__ void NAME(const u8* values, const void* scales, const u8* zeros, int scale_rows,              \
                                  int scale_columns, int inputs, int outputs, int first, int rows, i64 all,           \
                                  BFloat16* wide_numbers) {                                                           \
    const Bank bank = {values, scales, zeros, scale_rows, scale_columns, inputs, outputs};                            \
    unpack<FORMAT>(bank, first, rows, all, wide_numbers);                                                             \
  }

UNPACK(unpack_mxfp4, Mxfp4)
UNPACK(unpack_fp8, Fp8)
UNPACK(unpack_int4, Int4)
