// What our kernels take from CUDA, for g++. A block's threads run one after the other, or, where they wait for
// each other, as threads of the system.

#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct Dimension {
  int x;
};
static thread_local Dimension threadIdx;
static Dimension blockIdx, blockDim;
static std::barrier<>* together;  // null where a block is one thread

static inline void __syncthreads() {
  if (together) together->arrive_and_wait();
}

static inline int __syncthreads_count(int own) {
  static std::atomic<int> count;
  if (!together) return own != 0;
  count = 0;
  __syncthreads();
  count += own != 0;
  __syncthreads();
  const int total = count;
  __syncthreads();
  return total;
}

template <class T>
static T __shfl_sync(unsigned, T own, int lane) {
  static T given[1024];
  if (!together) return own;
  given[threadIdx.x] = own;
  __syncthreads();
  T other = given[threadIdx.x / 32 * 32 + lane];
  __syncthreads();
  return other;
}

template <class T>
static T __shfl_xor_sync(unsigned, T own, int lanes) {
  return __shfl_sync(0, own, threadIdx.x % 32 ^ lanes);
}

static inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class T>
static inline T atomicAdd(T* place, T value) {
  return __atomic_fetch_add(place, value, __ATOMIC_RELAXED);
}

template <class... Arguments, std::size_t... Index>
static void call(void (*kernel)(Arguments...), void** arguments, std::index_sequence<Index...>) {
  kernel(*static_cast<Arguments*>(arguments[Index])...);
}

// cuLaunchKernel: each argument is copied from where its pointer points, with the size that the kernel declares.
template <class... Arguments>
static void launch(void (*kernel)(Arguments...), int blocks, int threads, bool waiting, void** arguments) {
  auto indices = std::index_sequence_for<Arguments...>();
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (!waiting || threads == 1) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) call(kernel, arguments, indices);
      continue;
    }
    std::barrier<> all(threads);
    together = &all;
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread)
      running.emplace_back([=] {
        threadIdx.x = thread;
        call(kernel, arguments, indices);
        together->arrive_and_drop();  // a warp may end before the others
      });
    for (auto& each : running) each.join();
    together = nullptr;
  }
}
