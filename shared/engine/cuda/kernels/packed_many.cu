// The products of a layer's experts from packed weights, where an expert has many rows: y = x Wᵀ + b.
//
// A block multiplies a tile of one expert's rows with 128 outputs. Its rows lie in shared memory, 128 numbers of each at a
// time, and the next 128 are on their way meanwhile; each warp unpacks the weights of 32 outputs in registers and
// multiplies them with all rows of the tile, so that a weight is unpacked once for so many. Sums are of float32, in the
// order of inputs: a row's bits are the same in any tile. Formats and tiles: packed_formats.cuh, packed_experts.cu.

#include "packed_formats.cuh"

#define WARPS 4
#define SIDES 2  // products of a warp, one above the other
#define OUTPUTS (WARPS * SIDES * SIDE)
#define THREADS (WARPS * 32)
#define UNITS (SPAN / QUARTER)  // of 16 bytes, of a row in shared memory
#define APART 8                 // numbers between rows of results in shared memory

// Where a unit of a row lies: lanes of neighbouring chunks and rows read at once, and from different banks.
__device__ static inline int place_of(int row, int chunk, int quarter) {
  return (quarter * LANES_A_ROW + chunk) ^ (row % 2 * LANES_A_ROW);
}

// 16 bytes on their way to shared memory; none are read but zeros written unless `wanted`.
__device__ static inline void fetch(Words4* to, const BFloat16* from, bool wanted) {
#ifdef __CUDA_ARCH__
#if __CUDA_ARCH__ >= 800
  unsigned place;
  asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(place) : "l"(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(wanted ? 16 : 0) : "memory");
#endif
#else
  *to = wanted ? load_row(from) : Words4{};
#endif
}

__device__ static inline void end_of_fetches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all but the last group of fetches have come.
__device__ static inline void wait_for_fetches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

// What a lane reads of weights for a span.
template <class Format>
struct Span {
  Words4 words[SIDES][2][Format::BYTES / 16];
  Factors factors[SIDES][2];
};

// Arguments as those of `multiply` in packed_experts.cu; a tile has at most COLUMN * COLUMNS rows.
template <class Format, int COLUMNS>
__device__ static inline void multiply_many(const BFloat16* x, i64 x_stride, int chosen, const int* order,
                                            const int* tiles, Bank bank, const BFloat16* bias, BFloat16* y) {
  const int ROWS = COLUMN * COLUMNS;
  __shared__ Words4 staged[2][ROWS][UNITS];
  __shared__ int x_rows[ROWS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_of_lane = lane / 4, chunk_of_lane = lane % 4;
  const int across = (bank.outputs + OUTPUTS - 1) / OUTPUTS;
  const int* tile = tiles + (i64)(blockIdx.x / across) * TILE_WORDS;
  const int first_output = blockIdx.x % across * OUTPUTS, chunks = bank.inputs / CHUNK;
  const int spans = (chunks + LANES_A_ROW - 1) / LANES_A_ROW, own_output = first_output + warp * SIDES * SIDE + row_of_lane;
  let_next_begin();
  wait_for_previous();
  const int expert = tile[0], first = tile[1], rows = tile[2];
  if (!rows) return;
  for (int row = threadIdx.x; row < ROWS; row += THREADS) x_rows[row] = order[first + (row < rows ? row : 0)] / chosen;
  __syncthreads();

  // Of each so many rows a thread fetches the same unit.
  const int unit = threadIdx.x % UNITS, chunk_of_unit = unit / LANES_A_ROW, quarter_of_unit = unit % LANES_A_ROW;
  const BFloat16* x_unit = x + unit * QUARTER;
  const auto fetch_rows = [&](int span) {
    const bool wanted = span * LANES_A_ROW + chunk_of_unit < chunks;
    const BFloat16* from = x_unit + (wanted ? span * SPAN : 0);
#pragma unroll
    for (int i = 0; i < ROWS * UNITS / THREADS; ++i) {
      const int row = threadIdx.x / UNITS + i * (THREADS / UNITS);
      Words4* to = &staged[span % 2][row][place_of(row, chunk_of_unit, quarter_of_unit)];
      fetch(to, from + x_rows[row] * x_stride, wanted);
    }
  };
  const int chunks_a_scale = Format::chunks_a_scale_log2(bank);
  const auto output_of = [&](int side, int half) {
    const int output = own_output + side * SIDE + half * 8;
    return output < bank.outputs ? output : 0;
  };
  const auto read = [&](int span) {
    Span<Format> found;
    // What lies behind the end is read at the beginning, and x is zero there.
    const int chunk = span * LANES_A_ROW + chunk_of_lane < chunks ? span * LANES_A_ROW + chunk_of_lane : 0;
#pragma unroll
    for (int side = 0; side < SIDES; ++side)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 row = (i64)expert * bank.outputs + output_of(side, half);
#pragma unroll
        for (int i = 0; i < Format::BYTES / 16; ++i)
          found.words[side][half][i] = load_packed(bank.values + (row * chunks + chunk) * Format::BYTES + 16 * i);
        found.factors[side][half] =
            Format::factors(bank, row * Format::scales_a_row(bank) + (chunk >> chunks_a_scale));
      }
    return found;
  };

  float sums[SIDES][COLUMNS][4] = {};
  fetch_rows(0);
  end_of_fetches();
  Span<Format> next = read(0);
  for (int span = 0; span < spans; ++span) {
    const Span<Format> weights = next;
    if (span + 1 < spans) {
      fetch_rows(span + 1);
      next = read(span + 1);
    }
    end_of_fetches();
    wait_for_fetches();
    __syncthreads();
    float scales[SIDES][2], of_span[SIDES][COLUMNS][4] = {};
    if (Format::SCALED_SUMS)
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int half = 0; half < 2; ++half) scales[side][half] = scale_of(bank, expert, output_of(side, half), span);
    float(&into)[SIDES][COLUMNS][4] = Format::SCALED_SUMS ? of_span : sums;
#pragma unroll
    for (int quarter = 0; quarter < CHUNK / QUARTER; ++quarter) {
      unsigned a[SIDES][2][4];
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            a[side][step][i] =
                Format::pair(weights.words[side][i % 2], quarter, 2 * step + i / 2, weights.factors[side][i % 2]);
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const Words4 words =
            staged[span % 2][c * COLUMN + row_of_lane][place_of(row_of_lane, chunk_of_lane, quarter)];
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          unsigned b[2];
          pairs_of<Format>(words, step, b);
#pragma unroll
          for (int side = 0; side < SIDES; ++side) multiply_add(into[side][c], a[side][step], b);
        }
      }
    }
    if (Format::SCALED_SUMS)
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            sums[side][c][i] = fmaf(of_span[side][c][i], scales[side][i / 2], sums[side][c][i]);
    __syncthreads();  // before the rows after the next ones come to where these lie
  }

  // Results go through shared memory, so that neighbouring threads write neighbours.
  BFloat16(*found)[OUTPUTS + APART] = reinterpret_cast<BFloat16(*)[OUTPUTS + APART]>(&staged[0][0][0]);
#pragma unroll
  for (int side = 0; side < SIDES; ++side)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int output = own_output + side * SIDE + half * 8;
      const float added = bias && output < bank.outputs ? wide(bias[(i64)expert * bank.outputs + output]) : 0.0f;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sum = sums[side][c][2 * half + i] * Format::last();
          if (bias) sum += added;
          narrow(sum, found[c * COLUMN + chunk_of_lane * 2 + i][output - first_output]);
        }
    }
  __syncthreads();
  for (int i = threadIdx.x; i < rows * OUTPUTS; i += THREADS) {
    const int row = i / OUTPUTS, output = first_output + i % OUTPUTS;
    if (output < bank.outputs) y[(i64)order[first + row] * bank.outputs + output] = found[row][i % OUTPUTS];
  }
}

#define MULTIPLY(NAME, FORMAT, COLUMNS)                                                                              \
  extern "C" __global__ __launch_bounds__(128, 2) void NAME(PACKED_ARGUMENTS) {                                      \
    const Bank bank = PACKED_BANK;                                                                                   \
    multiply_many<FORMAT, COLUMNS>(x, x_stride, chosen, order, tiles, bank, bias, y);                                \
  }

MULTIPLY(many_mxfp4_32, Mxfp4, 4)
MULTIPLY(many_mxfp4_64, Mxfp4, 8)
MULTIPLY(many_fp8_32, Fp8, 4)
MULTIPLY(many_fp8_64, Fp8, 8)
MULTIPLY(many_int4_32, Int4, 4)
MULTIPLY(many_int4_64, Int4, 8)
