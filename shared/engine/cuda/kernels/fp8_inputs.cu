// Rounds the inputs of linears to e4m3, with one scale a row or one for each 128 numbers: what `rounded` and
// `rounded_by_blocks` of shared/engine/quantized/fp8.py give, bit for bit, and each in one launch. Numbers are read once
// or, of a row, twice, the second time from a cache.

#include "numbers16.cuh"
#include "overlap.cuh"

#define EACH 8     // numbers that a thread reads at once
#define BLOCK 128  // numbers with one scale
#define LANES (BLOCK / EACH)
#define LARGEST 448.0f
#define SMALLEST 1e-12f

typedef Neighbours<BFloat16, EACH> Numbers;

// The bits of the largest number but for its sign; those of NaN are larger than all others.
__device__ static inline unsigned largest_of(const Numbers& numbers, unsigned so_far) {
  for (int i = 0; i < EACH; ++i) {
    const unsigned size = numbers.of[i].bits & 0x7fff;
    so_far = size > so_far ? size : so_far;
  }
  return so_far;
}

__device__ static inline unsigned largest_among(unsigned own, int lanes) {
  for (int apart = lanes / 2; apart; apart /= 2) {
    const unsigned other = __shfl_xor_sync(ALL_LANES, own, apart);
    own = other > own ? other : own;
  }
  return own;
}

__device__ static inline float scale_for(unsigned largest) {
  const float size = wide(BFloat16{(u16)largest});
  return (size < SMALLEST ? SMALLEST : size) / LARGEST;
}

// Four quotients, NaN where they are, else 448 at most, to the nearest: the first in the lowest byte.
__device__ static inline unsigned narrow_four(const BFloat16* numbers, float scale) {
  float quotients[4];
  for (int i = 0; i < 4; ++i) quotients[i] = wide(numbers[i]) / scale;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(quotients[1]), "f"(quotients[0]));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(quotients[3]), "f"(quotients[2]));
  return (unsigned)high << 16 | low;
#else
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) {
    Float8 narrowed;
    narrow(quotients[i], narrowed);
    found |= (unsigned)narrowed.bits << 8 * i;
  }
  return found;
#endif
}

struct alignas(8) Bytes8 {
  unsigned of[2];
};

__device__ static inline void write(const Numbers& numbers, float scale, unsigned char* to) {
  *reinterpret_cast<Bytes8*>(to) = {{narrow_four(numbers.of, scale), narrow_four(numbers.of + 4, scale)}};
}

// x [rows, size] by x_stride → values [rows, size], scales [rows]: that which is given for all, or each row's own. A
// block rounds a row; size is a multiple of EACH.
extern "C" __global__ void round_rows(const BFloat16* x, i64 x_stride, int size, const float* given,
                                      unsigned char* values, float* scales) {
  __shared__ unsigned of_warps[32];
  const int row = blockIdx.x, warps = blockDim.x / 32;
  const BFloat16* own = x + row * x_stride;
  let_next_begin();
  wait_for_previous();
  float scale;
  if (given) {
    scale = *given;
  } else {
    unsigned largest = 0;
    for (int i = threadIdx.x * EACH; i < size; i += blockDim.x * EACH)
      largest = largest_of(neighbours<BFloat16, EACH>(own + i), largest);
    largest = largest_among(largest, 32);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (int warp = 0; warp < warps; ++warp) largest = of_warps[warp] > largest ? of_warps[warp] : largest;
    scale = scale_for(largest);
  }
  if (threadIdx.x == 0) scales[row] = scale;
  for (int i = threadIdx.x * EACH; i < size; i += blockDim.x * EACH)
    write(neighbours<BFloat16, EACH>(own + i), scale, values + (i64)row * size + i);
}

// x [rows, 128 blocks] by x_stride → values [padded, 128 blocks], scales [blocks, padded]; rows behind those of x are
// zeros. So many lanes share a scale.
extern "C" __global__ void round_blocks(const BFloat16* x, i64 x_stride, int rows, int padded, int blocks,
                                        unsigned char* values, float* scales) {
  const i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  const int lane = (int)(thread % LANES), block = (int)(thread / LANES % blocks);
  const i64 row = thread / LANES / blocks;
  let_next_begin();
  wait_for_previous();
  Numbers numbers = {};
  if (row < rows) numbers = neighbours<BFloat16, EACH>(x + row * x_stride + block * BLOCK + lane * EACH);
  const float scale = scale_for(largest_among(largest_of(numbers, 0), LANES));
  if (row >= padded) return;  // after lanes have met
  if (lane == 0) scales[(i64)block * padded + row] = scale;
  write(numbers, scale, values + (row * blocks + block) * BLOCK + lane * EACH);
}
