// Rows are sorted by their expert, so that all rows of an expert are one product, and all products share the team. What a
// row's experts give is added in the order in which it chose them: a row has the same bits whatever the rows beside it.
#include "experts.h"

#include <algorithm>
#include <limits>

namespace segue {
namespace {

constexpr int ROWS_MAX = 1024;     // of a round: what a row needs is some hundred KiB (EXPERT_ROWS_MAX of cpu_engine.py)
constexpr float SUM_MIN = 1e-20f;  // as the reference has it, where sigmoids may all be 0
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The `count` places of the highest scores, the highest first; of equal ones the lower place.
void highest(const float* scores, int size, int count, int* places) {
    static thread_local std::vector<char> taken;
    taken.assign(size, 0);
    for (int number = 0; number < count; number++) {
        int best = -1;
        for (int place = 0; place < size; place++)
            if (!taken[place] && (best < 0 || scores[place] > scores[best])) best = place;
        taken[best] = 1;
        places[number] = best;
    }
}

void score(const Routing& routing, const float* logits, float* scores) {
    const int size = routing.experts;
    if (routing.sigmoid) {
        const Lanes one = Lanes::broadcast(1.0f), zero = Lanes::broadcast(0.0f);
        for (int at = 0; at < size; at += LANES) {
            const int count = std::min(LANES, size - at);
            const Lanes slope = larger(Lanes::load(logits + at, count), Lanes::broadcast(-88.0f));  // as in gating.h
            (one / (one + exp(zero - slope))).store(scores + at, count);
        }
        return;
    }
    const Lanes most = Lanes::broadcast(*std::max_element(logits, logits + size));
    float total = 0.0f;
    for (int at = 0; at < size; at += LANES) {
        const int count = std::min(LANES, size - at);
        exp(Lanes::load(logits + at, count) - most).store(scores + at, count);
        for (int place = at; place < at + count; place++) total += scores[place];
    }
    for (int place = 0; place < size; place++) scores[place] /= total;
}

// Scores of experts outside the best groups become -inf; a group is worth the sum of its two best.
void keep_best_groups(const Routing& routing, float* ranked) {
    static thread_local std::vector<float> worth;
    static thread_local std::vector<int> best;
    const int size = routing.experts / routing.groups;
    worth.resize(routing.groups);
    best.resize(routing.groups_chosen);
    for (int group = 0; group < routing.groups; group++) {
        int two[2];
        highest(ranked + group * size, size, 2, two);
        worth[group] = ranked[group * size + two[0]] + ranked[group * size + two[1]];
    }
    highest(worth.data(), routing.groups, routing.groups_chosen, best.data());
    for (int group = 0; group < routing.groups; group++)
        if (std::find(best.begin(), best.end(), group) == best.end())
            std::fill_n(ranked + group * size, size, NEVER);
}

}  // namespace

void choose(const Routing& routing, const float* logits, int* chosen, float* weights) {
    static thread_local std::vector<float> scores, ranked;
    scores.resize(routing.experts);
    score(routing, logits, scores.data());
    ranked = scores;
    if (routing.correction)
        for (int expert = 0; expert < routing.experts; expert++) ranked[expert] += routing.correction[expert];
    if (routing.groups > 1) keep_best_groups(routing, ranked.data());
    highest(ranked.data(), routing.experts, routing.chosen, chosen);
    float total = routing.sigmoid ? SUM_MIN : 0.0f;
    for (int number = 0; number < routing.chosen; number++) total += weights[number] = scores[chosen[number]];
    for (int number = 0; number < routing.chosen; number++)
        weights[number] = (routing.normalized ? weights[number] / total : weights[number]) * routing.scale;
}

void ExpertRows::compute(Team& team, const Experts& experts, bool gelu, const float* x, long hidden, int rows, float* y) {
    for (int first = 0; first < rows; first += ROWS_MAX) {
        const int some = std::min(ROWS_MAX, rows - first);
        compute_some(team, experts, gelu, x + first * hidden, hidden, some, y + first * hidden);
    }
}

void ExpertRows::compute_some(
    Team& team, const Experts& experts, bool gelu, const float* x, long hidden, int rows, float* y) {
    const Routing& routing = experts.routing;
    const int chosen = routing.chosen, places = rows * chosen, inner = experts.inner;
    logits_.resize((size_t)rows * routing.experts);
    weights_.resize(places);
    chosen_.resize(places);
    inputs_.resize((size_t)places * hidden);
    inner_.resize((size_t)places * 2 * inner);
    outputs_.resize((size_t)places * hidden);
    gemm(team, &experts.router, 1, x, hidden, rows, logits_.data(), routing.experts, false);
    team.share(rows, [&](int row) {
        choose(routing, &logits_[(size_t)row * routing.experts], &chosen_[row * chosen], &weights_[row * chosen]);
    });
    sort_by_expert(routing, rows);
    team.share(places, [&](int place) {
        std::copy_n(x + sources_[place] * hidden, hidden, &inputs_[place * hidden]);
    });
    auto multiply_all = [&](const Matrix* matrices, const float* from, long from_stride, float* to, long to_stride) {
        products_.clear();
        for (int expert = 0; expert < routing.experts; expert++)
            if (const int start = starts_[expert], count = starts_[expert + 1] - start; count)
                products_.push_back({matrices + expert, from + start * from_stride, count, to + start * to_stride});
        gemm(team, products_, from_stride, to_stride, false);
    };
    multiply_all(experts.gate_up, inputs_.data(), hidden, inner_.data(), 2L * inner);
    team.share(places, [&](int place) {
        float* gate = &inner_[(size_t)place * 2 * inner];
        activate_multiply(gate, gate + inner, inner, {gelu, experts.slope, experts.limit});
    });
    multiply_all(experts.down, inner_.data(), 2L * inner, outputs_.data(), hidden);
    team.share(rows, [&](int row) {
        float* sum = y + row * hidden;
        std::fill_n(sum, hidden, 0.0f);
        for (int number = row * chosen; number < (row + 1) * chosen; number++) {
            const float *given = &outputs_[places_[number] * hidden], weight = weights_[number];
            for (long at = 0; at < hidden; at++) sum[at] += given[at] * weight;
        }
    });
}

void ExpertRows::sort_by_expert(const Routing& routing, int rows) {
    const int places = rows * routing.chosen;
    starts_.assign(routing.experts + 1, 0);
    for (int number = 0; number < places; number++) starts_[chosen_[number] + 1]++;
    for (int expert = 0; expert < routing.experts; expert++) starts_[expert + 1] += starts_[expert];
    sources_.resize(places);
    places_.resize(places);
    std::vector<int> next(starts_.begin(), starts_.end() - 1);
    for (int number = 0; number < places; number++) {
        places_[number] = next[chosen_[number]]++;
        sources_[places_[number]] = number / routing.chosen;
    }
}

}  // namespace segue
