// What a step does around its layers: `StepKernels` of step_kernels.py, equal bit for bit to its ReferenceKernels
// but for the last bits of a logprob, and of the sums by which top_p ends.
//
// Compiled by NVRTC at start, for the GPU that is there (CudaKernels of step_kernels.py); no header is needed. Each kernel runs with any
// number of threads a block that is 1 or a multiple of 32. So tests compile this same text with g++: with one thread a
// block it is plain C++, and with a real thread for each thread the reductions across a block run as well.

typedef long long i64;
typedef unsigned long long u64;

// Words of a slot's state, as in step_kernels.py.
enum { KV_LEN, LAST_TOKEN, PROMPT_LEN, TEMPERATURE, SEED, STATE_WORDS = 8 };

// Words of the report of a token, as in step_kernels.py.
enum { LOGPROB = 0, RANK = 2, TOP_IDS = 4, TOP_LOGPROBS = 24, REPORT_WORDS = 64 };

#define NO_TOKEN 0x7fffffff
#define GOLDEN 0x9E3779B97F4A7C15ull
// The noise lies between -2.82 and 16.64. So below this no token beats the highest one, whatever is drawn for either.
#define HOPELESS -19.5f

// ---- the noise of sampler.py, the same bits but for the last of logf ------------------------------------------------

__device__ static inline u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__device__ static inline float gumbel(u64 key, u64 token) {
  u64 bits = mix(key + token * GOLDEN);
  float uniform = (float)((bits >> 41) & 0x7FFFFFull) * 0x1p-23f + 0x1p-24f;
  return -logf(-logf(uniform));
}

// ---- the best of a block: the higher value, the lower token among equals -------------------------------------------

struct Best {
  float value;
  int token;
};

__device__ static inline float minus_infinity() { return __int_as_float((int)0xff800000u); }

__device__ static inline Best worst() {
  Best none = {minus_infinity(), NO_TOKEN};
  return none;
}

__device__ static inline Best better(Best a, Best b) {
  if (b.value > a.value || (b.value == a.value && b.token < a.token)) return b;
  return a;
}

// The same for all threads of the block.
__device__ static inline Best best_of_block(Best own) {
  __shared__ Best of_warp[32];
  __syncthreads();  // what an earlier call left has been read
  for (int lanes = 16; lanes; lanes >>= 1) {
    Best other = {__shfl_xor_sync(~0u, own.value, lanes), __shfl_xor_sync(~0u, own.token, lanes)};
    own = better(own, other);
  }
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  own = of_warp[0];
  for (int warp = 1; warp < (int)blockDim.x / 32; ++warp) own = better(own, of_warp[warp]);
  return own;
}

// ---- the total of a block: whole numbers, so the order of its threads does not matter -------------------------------

// The same for all threads of the block.
__device__ static inline u64 total_of_block(u64 own) {
  __shared__ u64 of_warp[32];
  if (blockDim.x == 1) return own;
  __syncthreads();  // what an earlier call left has been read
  for (int lanes = 16; lanes; lanes >>= 1) own += __shfl_xor_sync(~0u, own, lanes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
  __syncthreads();
  u64 total = 0;
  for (int warp = 0; warp < (int)blockDim.x / 32; ++warp) total += of_warp[warp];
  return total;
}

// ---- the sum of a block, in the order of its threads ---------------------------------------------------------------

// The same for all threads of the block.
__device__ static inline double sum_of_block(double own) {
  __shared__ double of_thread[1024];
  __syncthreads();  // what an earlier call left has been read
  of_thread[threadIdx.x] = own;
  __syncthreads();
  double sum = 0.0;
  for (int thread = 0; thread < (int)blockDim.x; ++thread) sum += of_thread[thread];
  return sum;
}

// ---- kernels ------------------------------------------------------------------------------------------------------

// Choosing a token is three kernels: the highest logit of each part of a row, the best of each part with its noise, and
// the best of all parts. `parts` blocks share a row, each a part of the vocabulary, so a few rows keep the GPU busy, too.
// logits float32 [rows, vocab], each row `stride` values behind the one before; slots and tokens int32 [rows]; state int32
// [slots, STATE_WORDS]; highest and drawn [rows, parts], what one kernel leaves to the next. NaN counts as -inf, for an
// answer must be a token: any other number would be read as a row of the embedding.

#define ROW_KERNEL __launch_bounds__(1024, 2)  // registers for two blocks a processor, where it holds 2,048 threads
#define AT_ONCE 4  // logits that a thread asks for before it looks at the first: memory answers late

struct Part {
  const float* row;
  int begin, end;  // tokens
};

__device__ static inline Part part_of_block(const float* logits, i64 stride, int vocab, int parts) {
  const int size = (vocab + parts - 1) / parts, begin = (int)(blockIdx.x % parts) * size;
  Part part = {logits + (i64)(blockIdx.x / parts) * stride, begin, begin + size < vocab ? begin + size : vocab};
  return part;
}

// The AT_ONCE logits that this thread looks at from `first` on; -inf behind the part.
__device__ static inline void logits_from(Part part, int first, float* values) {
#pragma unroll
  for (int i = 0; i < AT_ONCE; ++i) {
    const int token = first + i * (int)blockDim.x;
    values[i] = token < part.end ? fmaxf(part.row[token], minus_infinity()) : minus_infinity();
  }
}

// Gives `take` the logits that this thread looks at and their tokens, in order.
template <typename Take>
__device__ static inline void for_each_logit(Part part, Take take) {
  for (int first = part.begin + threadIdx.x; first < part.end; first += AT_ONCE * blockDim.x) {
    float values[AT_ONCE];
    logits_from(part, first, values);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int token = first + i * (int)blockDim.x;
      if (token < part.end) take(values[i], token);
    }
  }
}

__device__ static inline Best best_of_parts(const Best* found, int parts) {
  Best best = worst();
  for (int part = 0; part < parts; ++part) best = better(best, found[part]);
  return best;
}

extern "C" __global__ ROW_KERNEL void highest_of_parts(const float* logits, i64 stride, int vocab, int parts, Best* highest) {
  const Part part = part_of_block(logits, stride, vocab, parts);
  Best best = worst();
  for_each_logit(part, [&](float value, int token) {
    Best next = {value, token};
    best = better(best, next);
  });
  best = best_of_block(best);
  if (threadIdx.x == 0) highest[blockIdx.x] = best;
}

// Nothing for a row whose temperature is 0.
extern "C" __global__ ROW_KERNEL void draw_of_parts(const float* logits, i64 stride, int vocab, int parts, const int* slots,
                                         const int* state, const Best* highest, Best* drawn) {
  const Part part = part_of_block(logits, stride, vocab, parts);
  const int row = blockIdx.x / parts;
  const int* own = state + (i64)slots[row] * STATE_WORDS;
  const float temperature = __int_as_float(own[TEMPERATURE]);
  if (!(temperature > 0.0f)) return;
  const u64 seed = (u64)(unsigned)own[SEED] | (u64)(unsigned)own[SEED + 1] << 32;
  const u64 position = (u64)(i64)(own[KV_LEN] - own[PROMPT_LEN]);
  const u64 key = mix(mix(seed) + position * GOLDEN);
  const float top = best_of_parts(highest + row * parts, parts).value;
  Best best = worst();
  for (int first = part.begin + threadIdx.x; first < part.end; first += AT_ONCE * blockDim.x) {
    float values[AT_ONCE];
    logits_from(part, first, values);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int token = first + i * (int)blockDim.x;
      const float shifted = (values[i] - top) / temperature;
      if (token >= part.end || shifted < HOPELESS) continue;
      Best next = {fmaxf(shifted + gumbel(key, token), minus_infinity()), token};
      best = better(best, next);
    }
  }
  best = best_of_block(best);
  if (threadIdx.x == 0) drawn[blockIdx.x] = best;
}

// A thread a row. The slot `padding` is not written.
extern "C" __global__ void choose_tokens(int rows, int parts, const Best* highest, const Best* drawn, const int* slots,
                                         int padding, int* state, int* tokens) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  const int slot = slots[row];
  int* own = state + (i64)slot * STATE_WORDS;
  const Best* found = __int_as_float(own[TEMPERATURE]) > 0.0f ? drawn : highest;
  const int token = best_of_parts(found + row * parts, parts).token;
  tokens[row] = token;
  if (slot != padding) own[LAST_TOKEN] = token;
}

// ---- filters: what top_k, top_p and min_p exclude -------------------------------------------------------------------
// A row's floor is found digit by digit: floats as numbers of 32 bits in the same order, and for each of their four
// bytes, the highest first, how much has which. Few tokens matter, as a rule: the k-th highest of what each thread has as its own highest is a bound
// that at least k tokens reach. Those that do are kept beside, and looked at instead of the row. With top_p alone the
// bound is that of half of the threads, and what is kept serves if it holds the share.

enum { KEPT_MAX = 4096 };
#define WHOLE 0x1p40f  // a probability of 1, as a whole number

__device__ static inline unsigned key_of(float value) {
  const unsigned bits = (unsigned)__float_as_int(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ static inline float float_of(unsigned key) {
  return __int_as_float((int)(key & 0x80000000u ? key & 0x7fffffffu : ~key));
}

// Logits below the highest, over the temperature: those of a row, or those that are kept.
struct Scaled {
  const float* row;
  int count;
  float top, temperature;
  const float* kept;  // null: the row
};

__device__ static inline float scaled_at(Scaled from, int place) {
  if (from.kept) return from.kept[place];
  return (fmaxf(from.row[place], minus_infinity()) - from.top) / from.temperature;
}

// How many lie at or above `key`, or how probable they are together. Of the block.
__device__ static inline u64 weight_from(Scaled from, unsigned key, bool probable) {
  u64 own = 0;
  for (int place = threadIdx.x; place < from.count; place += blockDim.x) {
    const float value = scaled_at(from, place);
    if (key_of(value) >= key) own += probable ? (u64)(expf(value) * WHOLE) : 1;
  }
  return total_of_block(own);
}

enum { DIGITS = 256, GROUP = 16 };  // values of a byte, and how many of them are added up beforehand

// The highest key from which on there is so much; 0 if there never is. Of the block.
__device__ static inline unsigned floor_of(Scaled from, bool probable, double wanted) {
  __shared__ u64 of_digit[DIGITS], of_group[DIGITS / GROUP], chosen_above;
  __shared__ unsigned low[DIGITS], high[DIGITS];  // halves: shared memory adds 32 bits at once, 64 only by trial
  __shared__ int chosen;
  unsigned key = 0;
  u64 above = 0;  // how much has a higher key, whatever the digits that are not chosen yet
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();  // what was chosen last has been read
    for (int digit = threadIdx.x; digit < DIGITS; digit += blockDim.x) {
      low[digit] = high[digit] = 0;
    }
    if (threadIdx.x == 0) chosen = -1;
    __syncthreads();
    for (int place = threadIdx.x; place < from.count; place += blockDim.x) {
      const float value = scaled_at(from, place);
      const unsigned own = key_of(value);
      if (((u64)own ^ key) >> (shift + 8)) continue;  // other digits before this one
      const u64 weight = probable ? (u64)(expf(value) * WHOLE) : 1;
      const int digit = own >> shift & (DIGITS - 1);
      const unsigned lower = (unsigned)weight, before = atomicAdd(&low[digit], lower);
      const unsigned upper = (unsigned)(weight >> 32) + (before + lower < before);  // with what is carried
      if (upper) atomicAdd(&high[digit], upper);
    }
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += blockDim.x) of_digit[digit] = (u64)high[digit] << 32 | low[digit];
    __syncthreads();
    for (int group = threadIdx.x; group < DIGITS / GROUP; group += blockDim.x) {
      of_group[group] = 0;
      for (int i = 0; i < GROUP; ++i) of_group[group] += of_digit[group * GROUP + i];
    }
    __syncthreads();
    for (int digit = threadIdx.x; digit < DIGITS; digit += blockDim.x) {
      u64 more = above;
      for (int group = digit / GROUP + 1; group < DIGITS / GROUP; ++group) more += of_group[group];
      for (int other = digit + 1; other % GROUP; ++other) more += of_digit[other];
      if ((double)more >= wanted || (double)(more + of_digit[digit]) < wanted) continue;
      chosen = digit;
      chosen_above = more;
    }
    __syncthreads();
    if (chosen < 0) return 0;
    key |= (unsigned)chosen << shift;
    above = chosen_above;
  }
  return key;
}

// A block a row that filters. logits as above; rows and top_k int32 [n], top_k of all tokens excludes none; temperature,
// top_p, and the logarithm of min_p float32 [n]. What is excluded becomes -inf.
extern "C" __global__ ROW_KERNEL void filter_rows(float* logits, i64 stride, int vocab, const int* rows, const int* top_k,
                                       const float* temperature, const float* top_p, const float* log_min_p) {
  __shared__ float kept[KEPT_MAX];
  __shared__ int count;
  float* row = logits + (i64)rows[blockIdx.x] * stride;
  const Part whole = {row, 0, vocab};
  Best own = worst();
  for (int first = threadIdx.x; first < vocab; first += AT_ONCE * blockDim.x) {
    float values[AT_ONCE];
    logits_from(whole, first, values);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) own.value = fmaxf(own.value, values[i]);
  }
  const float highest = own.value, top = best_of_block(own).value;
  if (top == minus_infinity() || top == -minus_infinity()) return;  // no shares
  const Scaled all = {row, vocab, top, temperature[blockIdx.x], 0};
  Scaled few = all;
  float floor = log_min_p[blockIdx.x];
  const int k = top_k[blockIdx.x], threads = (int)blockDim.x;
  const bool ranks = k < vocab, shares = top_p[blockIdx.x] < 1.0f;
  if (ranks ? k <= threads : shares) {
    const u64 reach = ranks ? k : (threads + 1) / 2;
    const unsigned mine = key_of((highest - top) / all.temperature);
    unsigned bound = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const unsigned next = bound | 1u << bit;
      if ((u64)__syncthreads_count(mine >= next) >= reach) bound = next;
    }
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    for (int first = threadIdx.x; first < vocab; first += AT_ONCE * threads) {
      float values[AT_ONCE];
      logits_from(whole, first, values);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const float value = (values[i] - top) / all.temperature;
        // Where a mask allows fewer than k tokens the bound is -inf: what is masked is not among them.
        if (key_of(value) < bound || value == minus_infinity()) continue;
        const int place = atomicAdd(&count, 1);
        if (place < KEPT_MAX) kept[place] = value;
      }
    }
    __syncthreads();
    if (count <= KEPT_MAX) {
      few.kept = kept;
      few.count = count;
    }
  }
  unsigned ranked = 0;  // the floor of top_k; 0 where fewer are allowed
  if (ranks) {
    ranked = floor_of(few, false, (double)k);
    floor = fmaxf(floor, float_of(ranked));
  }
  if (shares) {
    const u64 whole_weight = weight_from(ranks ? few : all, ranked, true);
    const double wanted = fmax((double)top_p[blockIdx.x] * (double)whole_weight, 1.0);
    if (!ranks && (double)weight_from(few, 0, true) < wanted) few = all;
    floor = fmaxf(floor, float_of(floor_of(few, true, wanted)));
  }
  for (int first = threadIdx.x; first < vocab; first += AT_ONCE * threads) {
    float values[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) values[i] = first + i * threads < vocab ? row[first + i * threads] : top;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      // NaN is not at or above a floor, the highest is
      if (!((values[i] - top) / all.temperature >= floor)) row[first + i * threads] = minus_infinity();
    }
  }
}

// A block a row of a DECODE step. The slot `padding` is empty and stays so; its table names the page it writes.
extern "C" __global__ void prepare_decode(const int* slots, const int* kv_indptr, const int* page_tables,
                                          i64 table_stride, int* state, int padding, int page_size, int* token_ids,
                                          int* positions, int* kv_last_page_len, int* kv_indices) {
  const int row = blockIdx.x, slot = slots[row], first = kv_indptr[row], pages = kv_indptr[row + 1] - first;
  const int* table = page_tables + slot * table_stride;
  for (int i = threadIdx.x; i < pages; i += blockDim.x) kv_indices[first + i] = table[i];
  if (threadIdx.x != 0) return;
  int* own = state + (i64)slot * STATE_WORDS;
  const int position = slot == padding ? 0 : own[KV_LEN];
  token_ids[row] = own[LAST_TOKEN];
  positions[row] = position;
  kv_last_page_len[row] = position % page_size + 1;
  if (slot != padding) own[KV_LEN] = position + 1;
}

// A thread an entry: (place, word) of the flat array `words`.
extern "C" __global__ void write_words(const int* entries, int count, int* words) {
  const int entry = blockIdx.x * blockDim.x + threadIdx.x;
  if (entry < count) words[entries[2 * entry]] = entries[2 * entry + 1];
}

// A block for each reported token. logits as above; rows, tokens and tops int32 [n]; reports int32 [n, REPORT_WORDS]. The
// likeliest are found one by one, each the best of those behind the last: few are asked for.
extern "C" __global__ void logprobs(const float* logits, i64 stride, int vocab, const int* rows, const int* tokens,
                                    const int* tops, int* reports) {
  const float* row = logits + rows[blockIdx.x] * stride;
  const Part all = {row, 0, vocab};
  const float chosen = fmaxf(row[tokens[blockIdx.x]], minus_infinity());
  int* own = reports + (i64)blockIdx.x * REPORT_WORDS;
  Best best = worst();
  for_each_logit(all, [&](float value, int token) {
    Best next = {value, token};
    best = better(best, next);
  });
  best = best_of_block(best);
  double sum = 0.0, above = 0.0;
  for_each_logit(all, [&](float value, int) {
    sum += exp((double)value - (double)best.value);
    above += value > chosen;
  });
  sum = sum_of_block(sum);
  above = sum_of_block(above);
  const double total = (double)best.value + log(sum);
  if (threadIdx.x == 0) {
    *(double*)(own + LOGPROB) = (double)chosen - total;
    own[RANK] = (int)above + 1;
  }
  for (int place = 0; place < tops[blockIdx.x]; ++place) {
    if (threadIdx.x == 0) {
      own[TOP_IDS + place] = best.token;
      *(double*)(own + TOP_LOGPROBS + 2 * place) = (double)best.value - total;
    }
    const Best last = best;
    best = worst();
    for_each_logit(all, [&](float value, int token) {
      Best next = {value, token};
      const bool behind = value < last.value || (value == last.value && token > last.token);
      if (behind) best = better(best, next);
    });
    best = best_of_block(best);
  }
}
