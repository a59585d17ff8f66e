// The products of a layer's experts from weights as a file packs them: y = x Wᵀ + b, each row by its own expert.
//
// Rows are sorted by expert and cut into tiles of one expert each. A block multiplies a tile with 32 outputs: its warps
// share the inputs, and each weight is read once, unpacked to bfloat16 in registers and multiplied by tensor cores, the
// outputs of a weight as their rows and the rows of x as their columns. Sums are of float32, in an order that depends on
// nothing but the shape of the weight: a row's bits are the same in any batch. Which expert a row chose is read on the
// device alone, and blocks are as many as the worst choice needs; those left over end at once.
// The formats are in packed_formats.cuh.

#include "packed_formats.cuh"

#define SIDES 2     // products of a warp, one above the other
#define OUTPUTS (SIDE * SIDES)
#define WARPS 4     // of a block
#define ITEMS 1024  // experts at most
#define EACH 8      // neighbours that `weigh_rows` sums in a thread

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
            pairs_of<Format>(words, step, b[step][c]);
            for (int i = 0; i < 2; ++i) b[step][c][i] &= mask[ahead];
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
  extern "C" __global__ __launch_bounds__(128, COLUMNS > 2 ? 2 : 3) void NAME(PACKED_ARGUMENTS) {                    \
    const Bank bank = PACKED_BANK;                                                                                   \
    multiply<FORMAT, COLUMNS>(x, x_stride, chosen, order, tiles, bank, bias, y);                                     \
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

// chosen [rows]: the expert of each row, or `experts` where it is on another rank. Writes order [rows], the rows of expert 0, then those of expert 1 …, each
// expert's in any order, and tiles [count, TILE_WORDS] of at most `width` rows, those that are not needed without rows.
// One block, of any number of threads.
extern "C" __global__ void plan_experts(const i64* chosen, int rows, int experts, int width, int count, int* order,
                                        int* tiles) {
  __shared__ int counts[2][ITEMS], needed[2][ITEMS], next[ITEMS];
  let_next_begin();
  wait_for_previous();
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) counts[0][expert] = 0;
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += blockDim.x)
    if (chosen[row] < experts) atomicAdd(&counts[0][chosen[row]], 1);
  const int* ends = counts[add_up(counts, experts)];
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    next[expert] = expert ? ends[expert - 1] : 0;
    needed[0][expert] = (ends[expert] - next[expert] + width - 1) / width;
  }
  __syncthreads();
  for (int row = threadIdx.x; row < rows; row += blockDim.x)
    if (chosen[row] < experts) order[atomicAdd(&next[chosen[row]], 1)] = row;
  const int* tile_ends = needed[add_up(needed, experts)];
  for (int expert = threadIdx.x; expert < experts; expert += blockDim.x) {
    const int first = expert ? ends[expert - 1] : 0, end = ends[expert];
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

// rows [tokens * chosen, size], weights [tokens, chosen] → y [tokens, size]: sums of a token's rows times its weights, of
// float32, rounded once; a row of weight 0 counts for nothing, whatever its bits. A thread sums EACH numbers.
extern "C" __global__ void weigh_rows(const BFloat16* rows, const float* weights, int tokens, int chosen, int size,
                                      BFloat16* y) {
  const i64 at = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * EACH, token = at / size, first = at % size;
  let_next_begin();
  wait_for_previous();
  if (token >= tokens) return;
  float sums[EACH] = {};
  for (int i = 0; i < chosen; ++i) {
    const float weight = weights[token * chosen + i];
    const Neighbours<BFloat16, EACH> row = neighbours<BFloat16, EACH>(rows + (token * chosen + i) * size + first);
    for (int j = 0; j < EACH; ++j) sums[j] += weight != 0.0f ? wide(row.of[j]) * weight : 0.0f;
  }
  Neighbours<BFloat16, EACH> found;
  for (int j = 0; j < EACH; ++j) narrow(sums[j], found.of[j]);
  *reinterpret_cast<Neighbours<BFloat16, EACH>*>(y + at) = found;
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
      narrow(wide(low) * scale, found.of[Format::NEIGHBOURS ? 2 * i : i]);
      narrow(wide(high) * scale, found.of[Format::NEIGHBOURS ? 2 * i + 1 : i + QUARTER / 2]);
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
