// The float32 operations a core can do: independent sums in as many registers as the kernels use, nothing loaded.
#include "lanes.h"

using namespace segue;

constexpr int SUMS = WIDTH == 16 ? 24 : TILE_ROWS;

extern "C" int segue_operations_of_a_round() { return SUMS * LANES * 2; }

extern "C" float segue_rounds(long rounds) {
    Lanes sums[SUMS], factor = Lanes::broadcast(0.999f), term = Lanes::broadcast(0.001f), all = term;
    for (int number = 0; number < SUMS; number++) sums[number] = Lanes::broadcast((float)number);
    for (long round = 0; round < rounds; round++)
#pragma GCC unroll 24
        for (int number = 0; number < SUMS; number++) sums[number] = fma(sums[number], factor, term);
    for (const Lanes& sum : sums) all = all + sum;
    return all.sum();
}
