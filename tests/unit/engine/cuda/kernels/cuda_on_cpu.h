// What our kernels take from CUDA, for g++. A block's threads run one after the other; where they wait for each other
// each has a stack of its own, and runs until it waits. Stacks are kept from launch to launch, and left by longjmp, which
// asks the kernel of the machine for nothing: swapcontext does, for the mask of signals, each time.

#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include <setjmp.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static

struct Dimension {
  int x;
};
static Dimension threadIdx, blockIdx, blockDim;
struct Thread {
  char* stack;
  jmp_buf place;  // where it goes on
};
static std::vector<Thread> begun;  // those of a block, which waits for the next one when it has ended
static bool together;              // whether threads wait for each other
static jmp_buf turns;
static bool has_ended;  // the thread that ran last

static void give_turn() {
  if (!_setjmp(begun[threadIdx.x].place)) _longjmp(turns, 1);
}

static inline void __syncthreads() {
  if (!together) return;
  has_ended = false;
  give_turn();
}

static inline int __syncthreads_count(int own) {
  static int count;
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

// sums [16, 8] += a [16, 16] · b [16, 8] of bfloat16, as mma.m16n8k16 spreads them over a warp.
static inline void multiply_add_on_cpu(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  static unsigned of_a[1024][4], of_b[1024][2];
  std::memcpy(of_a[threadIdx.x], a, sizeof a);
  std::memcpy(of_b[threadIdx.x], b, sizeof b);
  __syncthreads();
  const int warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  const auto number = [](unsigned pair, int half) {
    const unsigned bits = pair >> 16 * half << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      sums[i] += number(of_a[warp + row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                 number(of_b[warp + column * 4 + k % 8 / 2][k / 8], k % 2);
  }
  __syncthreads();
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

static void (*own_call)(void*);
static void* own_launch;

static void run_blocks() {
  for (;;) {
    own_call(own_launch);
    has_ended = true;
    give_turn();
  }
}

static void begin_thread() {
  constexpr int STACK = 1 << 17;
  Thread& thread = begun.emplace_back();
  thread.stack = new char[STACK];
  ucontext_t begins;
  getcontext(&begins);
  begins.uc_stack.ss_sp = thread.stack;
  begins.uc_stack.ss_size = STACK;
  begins.uc_link = nullptr;
  makecontext(&begins, run_blocks, 0);
  setcontext(&begins);
}

static void take_turn() {
  if (_setjmp(turns)) return;
  if (threadIdx.x < (int)begun.size()) _longjmp(begun[threadIdx.x].place, 1);
  begin_thread();
}

// cuLaunchKernel: each argument is copied from where its pointer points, with the size that the kernel declares.
template <class... Arguments>
static void launch(void (*kernel)(Arguments...), int blocks, int threads, bool waiting, void** arguments) {
  const auto run = [=] { call(kernel, arguments, std::index_sequence_for<Arguments...>()); };
  using Run = decltype(run);
  own_call = [](void* each) { (*static_cast<const Run*>(each))(); };
  own_launch = const_cast<void*>(static_cast<const void*>(&run));
  blockDim.x = threads;
  together = waiting && threads > 1;
  std::vector<char> alive(threads);
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
    if (!together) {
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) run();
      continue;
    }
    alive.assign(threads, 1);
    for (int left = threads; left;)  // all that are alive come to the same place, or end: a warp may before the others
      for (int thread = 0; thread < threads; ++thread) {
        if (!alive[thread]) continue;
        threadIdx.x = thread;
        take_turn();
        alive[thread] = !has_ended;
        left -= has_ended;
      }
  }
  together = false;
}
