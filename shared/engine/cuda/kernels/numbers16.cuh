// Numbers of 16 bits, bfloat16 and float16, as our kernels read, compute and round them, and those of 8 bits as they are
// written; and neighbours in memory, which are read and written at once. NVRTC has neither without CUDA's own headers, which an image lacks.

#pragma once

typedef long long i64;
typedef unsigned short u16;

#define ALL_LANES ~0u

struct BFloat16 {
  u16 bits;
};

struct Float16 {
  u16 bits;
};

__device__ static inline float wide(BFloat16 x) { return __int_as_float((int)((unsigned)x.bits << 16)); }

__device__ static inline void narrow(float x, BFloat16& to) {  // to the nearest, to the even one of two
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  const unsigned bits = (unsigned)__float_as_int(x);
  to.bits = x != x ? (u16)0x7fff : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}

#ifdef __CUDA_ARCH__
__device__ static inline float wide(Float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

__device__ static inline void narrow(float x, Float16& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
#else
static inline float wide(Float16 x) {
  _Float16 result;
  __builtin_memcpy(&result, &x, sizeof result);
  return (float)result;
}

static inline void narrow(float x, Float16& to) {
  const _Float16 result = (_Float16)x;
  __builtin_memcpy(&to, &result, sizeof to);
}
#endif

struct Float8 {  // e4m3: three bits of fraction, no infinity
  unsigned char bits;
};

__device__ static inline void narrow(float x, Float8& to) {  // to the nearest, to the even one of two, 448 at most
  const unsigned bits = (unsigned)__float_as_int(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  const unsigned smallest_normal = 0x3c800000, largest = 0x43e00000, infinite = 0x7f800000;  // 2^-6, 448
  unsigned found;
  if (size > infinite) {
    found = 0x7f;
  } else if (size >= largest) {
    found = 0x7e;
  } else if (size < smallest_normal) {  // 2^14 has the smallest number, 2^-9, as its last bit
    found = (unsigned)(__float_as_int(__int_as_float((int)size) + 16384.0f) - __float_as_int(16384.0f));
  } else {
    found = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  }
  to.bits = (unsigned char)(sign | found);
}

template <class T>
__device__ static inline float rounded(float x) {
  T narrowed;
  narrow(x, narrowed);
  return wide(narrowed);
}

// The neighbours that a lane holds: read and written at once.
template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT < 16 ? sizeof(T) * COUNT : 16) Neighbours {
  T of[COUNT];
};

template <class T, int COUNT>
__device__ static inline Neighbours<T, COUNT> neighbours(const T* begin) {
  return *reinterpret_cast<const Neighbours<T, COUNT>*>(begin);
}
