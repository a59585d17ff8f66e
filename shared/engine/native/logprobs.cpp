// How likely a token is among all: log-softmax at one place, its rank, and the likeliest tokens. One row at a time, in a
// fixed order, so the bits depend on nothing but the row.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "lanes.h"

namespace segue {
namespace {

constexpr int BLOCK = 4 * LANES;  // values that are looked at together

// The highest of `count` values, at most a block.
float highest(const float* values, int count) {
    if (count == BLOCK) {
        Lanes most = Lanes::load(values);
        for (int at = LANES; at < BLOCK; at += LANES) most = larger(most, Lanes::load(values + at));
        return most.max();
    }
    return *std::max_element(values, values + count);
}

// The sum of e to the (value - shift) over a block; double, because a vocabulary is long.
double exponentials(const float* values, int count, float shift) {
    double sum = 0;
    for (int at = 0; at < count; at += LANES) {
        const int present = std::min(LANES, count - at);
        const Lanes powers = exp(Lanes::load(values + at, present) - Lanes::broadcast(shift));
        if (present == LANES) {
            sum += powers.sum();
            continue;
        }
        float padded[LANES];
        powers.store(padded);
        for (int lane = 0; lane < present; lane++) sum += padded[lane];
    }
    return sum;
}

// The likeliest so far, in falling order; of equal ones the lower id comes first, because ids come in rising order.
struct Best {
    int32_t* ids;
    float* values;
    int most, count = 0;

    float least() const { return count < most ? -std::numeric_limits<float>::infinity() : values[count - 1]; }

    void offer(int32_t id, float value) {
        if (count == most && !(value > values[count - 1])) return;
        int at = count < most ? count++ : count - 1;
        for (; at && value > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value, ids[at] = id;
    }
};

}  // namespace
}  // namespace segue

// logits [vocab]; `token` is the one that was chosen. Writes its logprob, its rank, and the ids and logprobs of the
// `top` likeliest; returns how many these are.
extern "C" int32_t segue_logprobs(
    const float* logits, int32_t vocab, int32_t token, int32_t top, double* logprob, int32_t* rank, int32_t* ids,
    double* logprobs) {
    using namespace segue;
    float values[64];
    Best best{ids, values, std::min(top, 64)};
    float most = -std::numeric_limits<float>::infinity();
    for (int begin = 0; begin < vocab; begin += BLOCK) {
        const int count = std::min(BLOCK, vocab - begin);
        const float block = highest(logits + begin, count);
        most = std::max(most, block);
        if (best.most && (best.count < best.most || block > best.least()))
            for (int at = begin; at < begin + count; at++) best.offer(at, logits[at]);
    }
    double sum = 0;
    int32_t above = 0;
    for (int begin = 0; begin < vocab; begin += BLOCK) {
        const int count = std::min(BLOCK, vocab - begin);
        sum += exponentials(logits + begin, count, most);
        for (int at = begin; at < begin + count; at++) above += logits[at] > logits[token];
    }
    const double total = most + std::log(sum);
    *logprob = logits[token] - total;
    *rank = above + 1;
    for (int at = 0; at < best.count; at++) logprobs[at] = values[at] - total;
    return best.count;
}
