// Products of one to four rows: y = x Wᵀ + b. They cost what it takes to read the weights once, which libraries do not
// reach where a matrix is small.
//
// A few warps of a block share two outputs, so that many loads are on their way however small the matrix is. Sums are
// of float32, and added up in an order that depends on nothing but the shape.

#include "numbers16.cuh"
#include "overlap.cuh"

#define LOADED 8    // numbers that a lane reads at once
#define AHEAD 4     // such reads of each output that are on their way together
#define OUTPUTS 2   // of a warp: what it reads of x serves both
#define WARPS_MAX 8

// LOADED numbers, two a word.
struct Words {
  unsigned of[LOADED / 2];
};

// Loads stay in the order of the text, so that they are on their way together. No kernel writes weights: they come by
// the read-only path.
template <class T>
__device__ static inline Words load_weights(const T* from) {
  Words words;
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.of[0]), "=r"(words.of[1]), "=r"(words.of[2]), "=r"(words.of[3])
               : "l"(from));
#else
  __builtin_memcpy(&words, from, sizeof words);
#endif
  return words;
}

template <class T>
__device__ static inline Words load(const T* from) {
  Words words;
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.of[0]), "=r"(words.of[1]), "=r"(words.of[2]), "=r"(words.of[3])
               : "l"(from));
#else
  __builtin_memcpy(&words, from, sizeof words);
#endif
  return words;
}

// Ask for what is read soon: it comes as far as the L2 cache.
template <class T>
__device__ static inline void prefetch(const T* from) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
#endif
}

template <class T>
__device__ static inline float number(Words words, int i, unsigned mask = ~0u) {
  const T x = {(u16)((words.of[i / 2] & mask) >> (i % 2 * 16))};
  return wide(x);
}

__device__ static inline void store(float x, float& to) { to = x; }
__device__ static inline void store(float x, BFloat16& to) { narrow(x, to); }
__device__ static inline void store(float x, Float16& to) { narrow(x, to); }

// x [rows, inputs], each row `x_stride` values behind the one before; weight [outputs, inputs]; bias [outputs] or null;
// y [rows, outputs], each row `y_stride` values behind the one before. `split`: warps that share two outputs, a power of
// two and at most the block's. inputs is a multiple of LOADED, and all rows are aligned for it; rows are at most ROWS.
template <class T, class Y, int ROWS>
__device__ static inline void gemv(const T* x, i64 x_stride, int rows, const T* weight, const T* bias, int inputs,
                                   int outputs, int split, Y* y, i64 y_stride) {
  __shared__ float parts[WARPS_MAX][OUTPUTS * ROWS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int first = (blockIdx.x * (warps / split) + warp / split) * OUTPUTS;  // of the warp's outputs
  const T* row_of[OUTPUTS];
  for (int i = 0; i < OUTPUTS; ++i) row_of[i] = weight + (i64)(first + i < outputs ? first + i : 0) * inputs;
  float sums[OUTPUTS][ROWS] = {};
  let_next_begin();
  const int step = split * 32 * LOADED, begin_of_lane = (warp % split * 32 + lane) * LOADED;
  for (int at = begin_of_lane, ahead = 0; ahead < AHEAD && at < inputs; ++ahead, at += step)
    for (int i = 0; i < OUTPUTS; ++i) prefetch(row_of[i] + at);
  wait_for_previous();
  for (int begin = begin_of_lane; begin < inputs; begin += AHEAD * step) {
    // What lies behind the end is read at the beginning, and x is zero there: loads under a condition come one by one.
    // So they do with fewer registers than two blocks a processor leave.
    int at[AHEAD];
    Words own[AHEAD][OUTPUTS];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      at[ahead] = begin + ahead * step < inputs ? begin + ahead * step : 0;
#pragma unroll
      for (int i = 0; i < OUTPUTS; ++i) own[ahead][i] = load_weights(row_of[i] + at[ahead]);
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      const unsigned mask = begin + ahead * step < inputs ? ~0u : 0u;
      Words of_x[ROWS];
#pragma unroll
      for (int row = 0; row < ROWS; ++row) of_x[row] = load(x + (row < rows ? row : 0) * x_stride + at[ahead]);
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int j = 0; j < LOADED; ++j)
#pragma unroll
          for (int i = 0; i < OUTPUTS; ++i)
            sums[i][row] = fmaf(number<T>(own[ahead][i], j), number<T>(of_x[row], j, mask), sums[i][row]);
    }
  }
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i)
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float sum = sums[i][row];
      for (int lanes = 16; lanes; lanes >>= 1) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
      if (lane == 0) parts[warp][i * ROWS + row] = sum;
    }
  __syncthreads();
  // A warp of each group adds up what its group has found.
  const int i = lane / ROWS, row = lane % ROWS;
  if (warp % split || i >= OUTPUTS || row >= rows || first + i >= outputs) return;
  float sum = bias ? wide(bias[first + i]) : 0.0f;
  for (int part = 0; part < split; ++part) sum += parts[warp + part][lane];
  store(sum, y[row * y_stride + first + i]);
}

#define GEMV(NAME, T, Y, ROWS)                                                                                       \
  extern "C" __global__ __launch_bounds__(256, 2) void NAME(const T* x, i64 x_stride, int rows, const T* weight,         \
                                                         const T* bias, int inputs, int outputs, int split, Y* y,     \
                                                         i64 y_stride) {                                              \
    gemv<T, Y, ROWS>(x, x_stride, rows, weight, bias, inputs, outputs, split, y, y_stride);                           \
  }

#define GEMVS(NAME, T, Y) \
  GEMV(NAME##_1, T, Y, 1) \
  GEMV(NAME##_2, T, Y, 2) \
  GEMV(NAME##_4, T, Y, 4)

GEMVS(gemv_bfloat16_bfloat16, BFloat16, BFloat16)
GEMVS(gemv_bfloat16_float32, BFloat16, float)
GEMVS(gemv_float16_float16, Float16, Float16)
GEMVS(gemv_float16_float32, Float16, float)
