// What an MLP does with its gate.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace segue {

struct Gating {
    bool gelu;           // of the gate, approximated by tanh; else SiLU
    float slope, limit;  // (up + 1) · gate · sigmoid(slope · gate), both clamped at the limit; limit 0: none of that
};

// gate = gate / (1 + e^-slope) * up: the slope is the gate itself for SiLU, 2u for GELU, as (1 + tanh u) / 2 is that.
inline void activate_multiply(float* gate, const float* up, int size, const Gating& gating) {
    const Lanes one = Lanes::broadcast(1.0f), zero = Lanes::broadcast(0.0f), cubic = Lanes::broadcast(0.044715f);
    const Lanes doubled = Lanes::broadcast(1.5957691216f);  // 2 * sqrt(2 / pi)
    const Lanes limit = Lanes::broadcast(gating.limit), slope_of_gate = Lanes::broadcast(gating.slope);
    for (int at = 0; at < size; at += LANES) {
        const int count = std::min(LANES, size - at);
        Lanes x = Lanes::load(gate + at, count), factor = Lanes::load(up + at, count), slope = x;
        if (gating.limit) {
            x = smaller(x, limit);
            factor = one + larger(smaller(factor, limit), zero - limit);
            slope = slope_of_gate * x;
        } else if (gating.gelu) {
            slope = doubled * fma(cubic * x * x, x, x);
        }
        // e^-slope would overflow below -88
        const Lanes inverse = one + exp(zero - larger(slope, Lanes::broadcast(-88.0f)));
        (x / inverse * factor).store(gate + at, count);
    }
}

}  // namespace segue
