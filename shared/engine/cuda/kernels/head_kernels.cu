// What lies between a layer's projections and its attention, in one launch: `HeadWriter` of attention/protocol.py, with the
// same roundings as plain torch (tests/doubles/torch_head_writer.py). Only the sum of a norm's squares is in another order.
//
// A warp takes one head of one token: of a query, a key or a value. Compiled as step_kernels.cu is; threads of a block are
// a multiple of 32.

#include "numbers16.cuh"
#include "overlap.cuh"

// ---- a head, divided among the lanes of a warp ---------------------------------------------------------------------

// RMSNorm over the head.
template <class T, int COUNT>
__device__ static inline void normalize(float* x, Neighbours<T, COUNT> weights, float epsilon) {
  float squares = 0.0f;
  for (int i = 0; i < COUNT; ++i) squares += x[i] * x[i];
  for (int lanes = 16; lanes; lanes >>= 1) squares += __shfl_xor_sync(ALL_LANES, squares, lanes);
  const float scale = 1.0f / sqrtf(squares / (32 * COUNT) + epsilon);
  for (int i = 0; i < COUNT; ++i) x[i] = rounded<T>(wide(weights.of[i]) * rounded<T>(x[i] * scale));
}

// Rotary embedding of the first numbers of a head, halves rotated: what a lane needs for its own.
template <int COUNT>
struct Rotation {
  Neighbours<float, COUNT> cosines, sines;
  int other;  // the lane that holds the other half; itself where nothing is rotated
};

// cos_sin float32 [rotary_dim], cosines first.
template <int COUNT>
__device__ static inline Rotation<COUNT> rotation_of(const float* cos_sin, int rotary_dim, int lane) {
  const int half = rotary_dim / 2, lanes = half / COUNT;  // that hold a half
  const int angle = lane < lanes ? lane : lane < 2 * lanes ? lane - lanes : 0;
  Rotation<COUNT> rotation = {neighbours<float, COUNT>(cos_sin + angle * COUNT),
                              neighbours<float, COUNT>(cos_sin + half + angle * COUNT),
                              lane < lanes ? lane + lanes : lane < 2 * lanes ? lane - lanes : lane};
  return rotation;
}

template <class T, int COUNT>
__device__ static inline void rotate(float* x, Rotation<COUNT> by, int lane) {
  for (int i = 0; i < COUNT; ++i) {
    const float other = __shfl_sync(ALL_LANES, x[i], by.other);
    const float across = other * by.sines.of[i], along = x[i] * by.cosines.of[i];
    if (by.other != lane) x[i] = rounded<T>(lane < by.other ? along - across : along + across);
  }
}

// What a page keeps of a number.
template <class T>
__device__ static inline void keep(T x, T& cell) { cell = x; }
template <class T>
__device__ static inline void keep(T x, Float8& cell) { narrow(wide(x), cell); }

// ---- the kernel ----------------------------------------------------------------------------------------------------

// q [rows, heads, 32 COUNT], k and v [rows, kv_heads, 32 COUNT], each row `stride` values behind the one before; q is
// overwritten. q_norm and k_norm [32 COUNT] or null; cos_sin float32 [positions, rotary_dim] or null. positions and
// requests int32 [rows]; kv_indptr and kv_indices as in PagedBatch. cells: a layer's keys of the first page, in a type of
// their own; its values, the next head and the next page lie `kind_stride`, `head_stride` and `page_stride` further.
template <class T, class Cell, int COUNT>
__device__ static inline void write_heads(T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride, int rows,
                                          int heads, int kv_heads, const T* q_norm, const T* k_norm, float epsilon,
                                          const float* cos_sin, int rotary_dim, const int* positions,
                                          const int* requests, const int* kv_indptr, const int* kv_indices,
                                          int page_size, Cell* cells, i64 page_stride, i64 kind_stride,
                                          i64 head_stride) {
  const int lane = threadIdx.x % 32, warp = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  let_next_begin();
  const int of_row = heads + 2 * kv_heads, row = warp / of_row, head = warp % of_row;
  if (row >= rows) return;
  const bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
  const int kv_head = is_query ? 0 : is_key ? head - heads : head - heads - kv_heads;
  const T* source = is_query ? q + row * q_stride + head * (32 * COUNT)
                    : is_key ? k + row * k_stride + kv_head * (32 * COUNT)
                             : v + row * v_stride + kv_head * (32 * COUNT);
  // Memory answers late: what depends on nothing is asked for first.
  const T* weight = is_query ? q_norm : is_key ? k_norm : 0;
  Neighbours<T, COUNT> weights = {};
  if (weight) weights = neighbours<T, COUNT>(weight + lane * COUNT);
  wait_for_previous();
  auto own = neighbours<T, COUNT>(source + lane * COUNT);
  const int position = positions[row];
  Cell* target = cells;
  if (!is_query) {
    const i64 page = kv_indices[kv_indptr[requests[row]] + position / page_size];
    const i64 of_head = kv_head * head_stride + (is_key ? 0 : kind_stride);
    target = cells + page * page_stride + of_head + (position % page_size) * (32 * COUNT);
  }
  if (is_query || is_key) {
    Rotation<COUNT> rotation = {};
    if (cos_sin) rotation = rotation_of<COUNT>(cos_sin + (i64)position * rotary_dim, rotary_dim, lane);
    float x[COUNT];
    for (int i = 0; i < COUNT; ++i) x[i] = wide(own.of[i]);
    if (weight) normalize<T, COUNT>(x, weights, epsilon);
    if (cos_sin) rotate<T, COUNT>(x, rotation, lane);
    for (int i = 0; i < COUNT; ++i) narrow(x[i], own.of[i]);
  }
  if (is_query) {
    *reinterpret_cast<Neighbours<T, COUNT>*>(q + row * q_stride + head * (32 * COUNT) + lane * COUNT) = own;
    return;
  }
  Neighbours<Cell, COUNT> kept;
  for (int i = 0; i < COUNT; ++i) keep(own.of[i], kept.of[i]);
  *reinterpret_cast<Neighbours<Cell, COUNT>*>(target + lane * COUNT) = kept;
}

#define WRITE_HEADS(NAME, T, CELL, HEAD_DIM)                                                                          \
  extern "C" __global__ void NAME(T* q, i64 q_stride, const T* k, i64 k_stride, const T* v, i64 v_stride, int rows,   \
                                  int heads, int kv_heads, const T* q_norm, const T* k_norm, float epsilon,           \
                                  const float* cos_sin, int rotary_dim, const int* positions, const int* requests,    \
                                  const int* kv_indptr, const int* kv_indices, int page_size, CELL* cells,            \
                                  i64 page_stride, i64 kind_stride, i64 head_stride) {                                \
    write_heads<T, CELL, HEAD_DIM / 32>(q, q_stride, k, k_stride, v, v_stride, rows, heads, kv_heads, q_norm, k_norm, \
                                        epsilon, cos_sin, rotary_dim, positions, requests, kv_indptr, kv_indices,     \
                                        page_size, cells, page_stride, kind_stride, head_stride);                     \
  }

WRITE_HEADS(write_heads_bfloat16_64, BFloat16, BFloat16, 64)
WRITE_HEADS(write_heads_bfloat16_128, BFloat16, BFloat16, 128)
WRITE_HEADS(write_heads_bfloat16_256, BFloat16, BFloat16, 256)
WRITE_HEADS(write_heads_float16_64, Float16, Float16, 64)
WRITE_HEADS(write_heads_float16_128, Float16, Float16, 128)
WRITE_HEADS(write_heads_float16_256, Float16, Float16, 256)
WRITE_HEADS(write_heads_bfloat16_float8_e4m3fn_64, BFloat16, Float8, 64)
WRITE_HEADS(write_heads_bfloat16_float8_e4m3fn_128, BFloat16, Float8, 128)
WRITE_HEADS(write_heads_bfloat16_float8_e4m3fn_256, BFloat16, Float8, 256)
WRITE_HEADS(write_heads_float16_float8_e4m3fn_64, Float16, Float8, 64)
WRITE_HEADS(write_heads_float16_float8_e4m3fn_128, Float16, Float8, 128)
WRITE_HEADS(write_heads_float16_float8_e4m3fn_256, Float16, Float8, 256)
