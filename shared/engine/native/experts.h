// A mixture of experts: each row takes a few of many MLPs.
#pragma once

#include <vector>

#include "gating.h"
#include "gemm.h"

namespace segue {

// How a row's experts are chosen, and weighted: `Routing` of experts_config.py.
struct Routing {
    int32_t experts, chosen;  // 0 experts: the layer has none
    int32_t groups, groups_chosen;
    int32_t sigmoid, normalized;
    float scale;
    const float* correction;  // [experts], or null
};

struct Experts {
    Routing routing;
    int32_t inner;
    float slope, limit;       // of a clamped gate; limit 0: the activation of the decoder
    Matrix router;
    const Matrix* gate_up;    // [experts], gate first
    const Matrix* down;       // [experts]
};

// A row's experts and their weights; logits [experts]. Of equal scores the lower expert is taken.
void choose(const Routing& routing, const float* logits, int* chosen, float* weights);

// Computes the experts of some rows; what it needs for that is kept between steps.
class ExpertRows {
public:
    // y [rows, hidden], the weighted sum of what each row's experts make of x [rows, hidden].
    void compute(Team& team, const Experts& experts, bool gelu, const float* x, long hidden, int rows, float* y);

private:
    void compute_some(Team& team, const Experts& experts, bool gelu, const float* x, long hidden, int rows, float* y);
    void sort_by_expert(const Routing& routing, int rows);

    std::vector<float> logits_, weights_;  // [rows, experts], [rows, chosen]
    std::vector<int> chosen_;              // [rows, chosen]
    std::vector<int> starts_;              // [experts + 1], places of an expert's rows
    std::vector<int> sources_, places_;    // [places] the row that each place computes; [rows, chosen] where it does
    std::vector<float> inputs_, inner_, outputs_;  // [places, hidden], [places, 2 · inner], [places, hidden]
    std::vector<Product> products_;
};

}  // namespace segue
