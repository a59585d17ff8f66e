// The experts of each token and their weights, in one launch: what model/routing.py does in eight to sixteen.
//
// A warp takes a token, and each of its lanes every 32nd expert. All is float32, and depends on nothing but the token's own
// logits. Scores are compared as integers in the order of the numbers, with the expert behind: of equal scores the lower
// expert is taken, and what is not a number has a place in that order, too. Threads of a block are a multiple of 32.

#include "numbers16.cuh"
#include "overlap.cuh"

#define SUM_MIN 1e-20f  // as the reference has it, where sigmoids may all be 0
#define LOWEST __int_as_float((int)0xff800000u)  // minus infinity
#define NONE (-0x7fffffffffffffffLL - 1)  // below the rank of any expert

// ---- a warp ---------------------------------------------------------------------------------------------------------

__device__ static inline float sum_of_lanes(float x) {
  for (int lanes = 16; lanes; lanes >>= 1) x += __shfl_xor_sync(ALL_LANES, x, lanes);
  return x;
}

__device__ static inline float highest_of_lanes(float x) {
  for (int lanes = 16; lanes; lanes >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lanes));
  return x;
}

__device__ static inline i64 first_of_lanes(i64 rank) {
  for (int lanes = 16; lanes; lanes >>= 1) {
    const i64 other = __shfl_xor_sync(ALL_LANES, rank, lanes);
    rank = other > rank ? other : rank;
  }
  return rank;
}

// ---- the order of what is chosen from -------------------------------------------------------------------------------

// Higher for a higher number, and of equal ones for the lower place.
__device__ static inline i64 rank_of(float x, int place) {
  const int bits = __float_as_int(x), ordered = bits ^ (bits >> 31 & 0x7fffffff);
  return ((i64)ordered * 2 + 1) * 0x80000000LL - place;  // above NONE whatever the number
}

__device__ static inline int place_of(i64 rank) { return (int)(-rank & 0x7fffffff); }

// The number of the place with this rank.
__device__ static inline float number_of(i64 rank) {
  const int ordered = (int)((rank + place_of(rank)) >> 32);
  return __int_as_float(ordered ^ (ordered >> 31 & 0x7fffffff));
}

// Lanes' ranks of what none has taken yet: the best of a warp, which is then taken. `score` becomes that of each lane's own
// best: looked up by the number of the taken one, scores would lie in local memory.
template <int EACH>
__device__ static inline i64 take_first(i64 (&ranks)[EACH], const float (&scores)[EACH], float& score) {
  i64 own = NONE;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    score = ranks[i] > own ? scores[i] : score;
    own = ranks[i] > own ? ranks[i] : own;
  }
  const i64 first = first_of_lanes(own);
#pragma unroll
  for (int i = 0; i < EACH; ++i) ranks[i] = ranks[i] == first ? NONE : ranks[i];
  return first;
}

template <int EACH>
__device__ static inline i64 take_first(i64 (&ranks)[EACH]) {
  const float scores[EACH] = {};
  float score = 0.0f;
  return take_first(ranks, scores, score);
}

// The sum of the two highest of a group's numbers; each group has two.
template <int EACH>
__device__ static inline float worth_of(const i64 (&ranks)[EACH], int group, int size, int lane) {
  i64 in_group[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) in_group[i] = (i * 32 + lane) / size == group ? ranks[i] : NONE;
  const i64 first = take_first(in_group), second = take_first(in_group);
  return number_of(first) + number_of(second);
}

// Experts outside the best groups leave the choice.
template <int EACH>
__device__ static inline void keep_best_groups(i64 (&ranks)[EACH], int size, int groups, int groups_chosen, int lane) {
  i64 of_groups[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) of_groups[i] = NONE;
  for (int group = 0; group < groups; ++group) {
    const i64 rank = rank_of(worth_of(ranks, group, size, lane), group);
#pragma unroll
    for (int i = 0; i < EACH; ++i) of_groups[i] = i * 32 + lane == group ? rank : of_groups[i];
  }
  bool kept[EACH] = {};
  for (int n = 0; n < groups_chosen; ++n) {
    const int group = place_of(take_first(of_groups));
#pragma unroll
    for (int i = 0; i < EACH; ++i) kept[i] = kept[i] || (i * 32 + lane) / size == group;
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) ranks[i] = kept[i] ? ranks[i] : NONE;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// logits [tokens, experts], experts at most 32 EACH; correction [experts] or null; chosen and weights [tokens, count],
// count at most 32. Of softmax over all experts, or of sigmoids.
template <int EACH>
__device__ static inline void route(const float* logits, const float* correction, int tokens, int experts, int count,
                                    int softmax, int normalized, float factor, int groups, int groups_chosen,
                                    i64* chosen, float* weights) {
  const int lane = threadIdx.x % 32, token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  let_next_begin();
  float corrections[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    corrections[i] = correction && expert < experts ? correction[expert] : 0.0f;
  }
  wait_for_previous();
  if (token >= tokens) return;
  float scores[EACH], highest = LOWEST;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    scores[i] = expert < experts ? logits[(i64)token * experts + expert] : LOWEST;
    highest = fmaxf(highest, scores[i]);
  }
  if (softmax) {
    highest = highest_of_lanes(highest);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      scores[i] = i * 32 + lane < experts ? expf(scores[i] - highest) : 0.0f;
      sum += scores[i];
    }
    sum = sum_of_lanes(sum);
#pragma unroll
    for (int i = 0; i < EACH; ++i) scores[i] /= sum;
  } else {
#pragma unroll
    for (int i = 0; i < EACH; ++i) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
  }
  i64 ranks[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    ranks[i] = expert < experts ? rank_of(scores[i] + corrections[i], expert) : NONE;
  }
  if (groups > 1) keep_best_groups(ranks, experts / groups, groups, groups_chosen, lane);
  float total = 0.0f, own_weight = 0.0f;
  int own_expert = 0;
  for (int n = 0; n < count; ++n) {
    float score = 0.0f;
    const int expert = place_of(take_first(ranks, scores, score));
    score = __shfl_sync(ALL_LANES, score, expert % 32);
    total += score;
    own_expert = lane == n ? expert : own_expert;
    own_weight = lane == n ? score : own_weight;
  }
  if (lane >= count) return;
  if (normalized) own_weight /= softmax ? total : total + SUM_MIN;
  chosen[(i64)token * count + lane] = own_expert;
  weights[(i64)token * count + lane] = own_weight * factor;
}

#define ROUTE(EACH)                                                                                                   \
  extern "C" __global__ __launch_bounds__(128, 4) void route_experts_##EACH(                                          \
      const float* logits, const float* correction, int tokens, int experts, int count, int softmax, int normalized,  \
      float factor, int groups, int groups_chosen, i64* chosen, float* weights) {                                     \
    route<EACH>(logits, correction, tokens, experts, count, softmax, normalized, factor, groups, groups_chosen,       \
                chosen, weights);                                                                                     \
  }

ROUTE(1)
ROUTE(2)
ROUTE(4)
ROUTE(8)
ROUTE(16)
