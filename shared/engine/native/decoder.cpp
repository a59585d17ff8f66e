// The decoder of all families from token ids to logits in one call, and the C interface to it.
//
// The same mathematics as the model on torch, with the small steps fused into the rows they belong to. Nothing is
// checked here: shapes, page tables and positions come from Python, which has checked them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "experts.h"
#include "gating.h"
#include "gemm.h"
#include "lanes.h"

using namespace segue;

extern "C" {

struct SegueShape {
    int32_t hidden, heads, head_dim, vocab;
    int32_t rotary_dim;       // of head_dim, the first ones; even
    int32_t gelu;             // 1: of the gate, approximated by tanh; 0: SiLU
    int32_t whole_qk_norm;    // 1: norms of queries and keys are over all heads; 0: over each
    float epsilon;            // of RMS norms
    float embedding_scale, residual_scale, logits_divisor;
    float logits_cap;         // 0: none
    float attention_scale, attention_cap;
    Cache cache;
    Matrix embedding, head;
    const float* norm;  // [hidden]
};

struct SegueLayer {
    const float *attention_norm, *mlp_norm;            // [hidden], or null: of what attention and the MLP read
    const float *attention_post_norm, *mlp_post_norm;  // [hidden], or null: of what they give
    const float *q_norm, *k_norm;                      // [head_dim] or [heads * head_dim], or null
    const float *cosines, *sines;                      // [context_len, rotary_dim / 2], or null: nothing is rotated
    const float* sinks;                                // [heads], or null
    Matrix qkv[3], output;
    Matrix gate_up[2], down;  // of the MLP that every row takes; no outputs: there is none
    Experts experts;          // of which each row takes some besides
    int32_t window;           // tokens; 0: sees everything
};
}

namespace {

constexpr int ROWS = 8;  // rows of an item where rows are independent

// to = x normalized to a root mean square of 1, times weight; `to` may be `x`.
void normalize(const float* x, const float* weight, int size, float epsilon, float* to) {
    Lanes squares = Lanes::broadcast(0.0f);
    for (int at = 0; at < size; at += LANES) {
        const Lanes values = Lanes::load(x + at, std::min(LANES, size - at));
        squares = fma(values, values, squares);
    }
    const Lanes scale = Lanes::broadcast(1.0f / std::sqrt(squares.sum() / (float)size + epsilon));
    for (int at = 0; at < size; at += LANES) {
        const int count = std::min(LANES, size - at);
        (Lanes::load(weight + at, count) * (Lanes::load(x + at, count) * scale)).store(to + at, count);
    }
}

// Rotate halves of the first `rotary_dim` values by the angles of a position, in place.
void rotate(float* x, int rotary_dim, const float* cosines, const float* sines) {
    const int half = rotary_dim / 2;
    for (int at = 0; at < half; at++) {
        const float first = x[at], second = x[at + half];
        x[at] = first * cosines[at] - second * sines[at];
        x[at + half] = second * cosines[at] + first * sines[at];
    }
}

// What is added to the residual stream: normalized and scaled in the families that do so.
void add_to(float* stream, float* given, const float* weight, const SegueShape& shape) {
    if (weight) normalize(given, weight, shape.hidden, shape.epsilon, given);
    for (int at = 0; at < shape.hidden; at++) stream[at] += given[at] * shape.residual_scale;
}

void finish_logits(float* logits, const SegueShape& shape) {
    const Lanes divisor = Lanes::broadcast(shape.logits_divisor);
    for (int at = 0; at < shape.vocab; at += LANES) {
        const int count = std::min(LANES, shape.vocab - at);
        const Lanes divided = Lanes::load(logits + at, count) / divisor;
        (shape.logits_cap ? soft_cap(divided, shape.logits_cap) : divided).store(logits + at, count);
    }
}

}  // namespace

struct SegueDecoder {
    SegueDecoder(const SegueShape& shape, const SegueLayer* layers, int count, int threads)
        : shape(shape), layers(layers, layers + count), team(threads) {
        for (const SegueLayer& layer : this->layers) inner_most = std::max(inner_most, layer.gate_up[0].outputs);
    }

    void forward(const Batch& batch, float* logits) {
        const int hidden = shape.hidden, heads = shape.heads, kv_heads = shape.cache.kv_heads;
        const int head_dim = shape.head_dim;
        const long qkv_size = (long)(heads + 2 * kv_heads) * head_dim, q_size = (long)heads * head_dim;
        int rows = batch.rows;
        x.resize((size_t)rows * hidden);
        normal.resize((size_t)rows * std::max((long)hidden, q_size));
        wide.resize((size_t)rows * std::max({qkv_size, 2L * inner_most, (long)hidden}));
        each_row(rows, [&](int row) { embed(batch, row); });
        for (int number = 0; number < (int)layers.size(); number++) {
            const SegueLayer& layer = layers[number];
            const float* read = normalize_rows(rows, layer.attention_norm);
            gemm(team, layer.qkv, 3, read, hidden, rows, wide.data(), qkv_size, false);
            each_row(rows, [&](int row) { place(batch, layer, number, row, &wide[row * qkv_size]); });
            const Scores scores{layer.window, shape.attention_scale, shape.attention_cap, layer.sinks};
            attend(team, shape.cache, batch, number, heads, scores, wide.data(), qkv_size, normal.data(), q_size);
            if (number + 1 == (int)layers.size()) rows = keep_sampled(batch, q_size);
            give(layer.output, normal.data(), q_size, rows, layer.attention_post_norm, wide);
            feed_forward(layer, rows);
            layers_done.fetch_add(1, std::memory_order_relaxed);
        }
        gemm(team, &shape.head, 1, normalize_rows(rows, shape.norm), hidden, rows, logits, shape.vocab, false);
        if (shape.logits_divisor != 1.0f || shape.logits_cap)
            each_row(rows, [&](int row) { finish_logits(logits + (long)row * shape.vocab, shape); });
    }

    SegueShape shape;
    std::vector<SegueLayer> layers;
    std::atomic<int64_t> layers_done{0};  // over all steps; others watch whether it grows
    std::vector<float> x;       // [rows, hidden], the residual stream
    std::vector<float> normal;  // [rows, hidden], what a linear reads; attention's result
    std::vector<float> wide;    // [rows, q k v], [rows, gate up]
    std::vector<float> given;   // [rows, hidden], what a layer with experts adds to the stream
    ExpertRows expert_rows;
    int inner_most = 0;         // inner numbers of the largest MLP that every row takes
    Team team;                  // last: its threads end before what they work on

private:
    template <class Work>
    void each_row(int rows, const Work& work) {
        team.share((rows + ROWS - 1) / ROWS, [&](int item) {
            for (int row = item * ROWS; row < std::min(rows, (item + 1) * ROWS); row++) work(row);
        });
    }

    void embed(const Batch& batch, int row) {
        float* to = &x[(size_t)row * shape.hidden];
        unpack_row(shape.embedding, (int)batch.token_ids[row], to);
        if (shape.embedding_scale != 1.0f)
            for (int at = 0; at < shape.hidden; at++) to[at] *= shape.embedding_scale;
    }

    void feed_forward(const SegueLayer& layer, int rows) {
        const int hidden = shape.hidden;
        const float* read = normalize_rows(rows, layer.mlp_norm);
        const long inner = layer.gate_up[0].outputs;  // 0: no MLP that every row takes
        if (inner) {
            gemm(team, layer.gate_up, 2, read, hidden, rows, wide.data(), 2 * inner, false);
            each_row(rows, [&](int row) {
                float* gate = &wide[row * 2 * inner];
                activate_multiply(gate, gate + inner, (int)inner, {shape.gelu != 0, 0.0f, 0.0f});
            });
        }
        if (!layer.experts.routing.experts) return give(layer.down, wide.data(), 2 * inner, rows, layer.mlp_post_norm, normal);
        given.resize((size_t)rows * hidden);
        expert_rows.compute(team, layer.experts, shape.gelu != 0, read, hidden, rows, given.data());
        if (inner) gemm(team, &layer.down, 1, wide.data(), 2 * inner, rows, given.data(), hidden, true);
        add_rows(given.data(), rows, layer.mlp_post_norm);
    }

    // Add what a matrix gives to the stream, by way of `between` where something is done to it before.
    void give(const Matrix& matrix, const float* from, long stride, int rows, const float* weight, std::vector<float>& between) {
        const int hidden = shape.hidden;
        if (!weight && shape.residual_scale == 1.0f)
            return gemm(team, &matrix, 1, from, stride, rows, x.data(), hidden, true);
        gemm(team, &matrix, 1, from, stride, rows, between.data(), hidden, false);
        add_rows(between.data(), rows, weight);
    }

    void add_rows(float* given, int rows, const float* weight) {
        each_row(rows, [&](int row) {
            const size_t start = (size_t)row * shape.hidden;
            add_to(&x[start], given + start, weight, shape);
        });
    }

    // What attention or the MLP reads: the stream itself where the family does not normalize it.
    const float* normalize_rows(int rows, const float* weight) {
        if (!weight) return x.data();
        each_row(rows, [&](int row) {
            const size_t start = (size_t)row * shape.hidden;
            normalize(&x[start], weight, shape.hidden, shape.epsilon, &normal[start]);
        });
        return normal.data();
    }

    // Once the last keys and values are cached, only the rows that get logits go on: brought together at the front.
    int keep_sampled(const Batch& batch, long q_size) {
        for (int to = 0; to < batch.sampled; to++) {
            const long from = batch.sampled_rows[to];
            if (from == to) continue;
            std::copy_n(&x[from * shape.hidden], shape.hidden, &x[(long)to * shape.hidden]);
            std::copy_n(&normal[from * q_size], q_size, &normal[to * q_size]);
        }
        return batch.sampled;
    }

    // Norms of queries and keys, rotation, and the row's cell in the cache.
    void place(const Batch& batch, const SegueLayer& layer, int number, int row, float* qkv) {
        const int heads = shape.heads, kv_heads = shape.cache.kv_heads, head_dim = shape.head_dim;
        const long angle = (long)batch.positions[row] * (shape.rotary_dim / 2);
        if (layer.q_norm && shape.whole_qk_norm) {
            normalize(qkv, layer.q_norm, heads * head_dim, shape.epsilon, qkv);
            normalize(qkv + heads * head_dim, layer.k_norm, kv_heads * head_dim, shape.epsilon, qkv + heads * head_dim);
        }
        for (int head = 0; head < heads + kv_heads; head++) {
            float* vector = qkv + head * head_dim;
            const float* weight = head < heads ? layer.q_norm : layer.k_norm;
            if (weight && !shape.whole_qk_norm) normalize(vector, weight, head_dim, shape.epsilon, vector);
            if (layer.cosines) rotate(vector, shape.rotary_dim, layer.cosines + angle, layer.sines + angle);
        }
        const float* keys = qkv + heads * head_dim;
        write_cell(shape.cache, batch, number, row, keys, keys + kv_heads * head_dim);
    }
};

extern "C" {

// Null where there is no memory or no thread to be had.
SegueDecoder* segue_decoder_new(const SegueShape* shape, const SegueLayer* layers, int32_t count, int32_t threads) try {
    return new SegueDecoder(*shape, layers, count, threads);
} catch (const std::exception&) {
    return nullptr;
}

void segue_decoder_delete(SegueDecoder* decoder) { delete decoder; }

// logits [sampled, vocab]; 0, or 1 where there was no memory.
int32_t segue_decoder_forward(SegueDecoder* decoder, const Batch* batch, float* logits) try {
    decoder->forward(*batch, logits);
    return 0;
} catch (const std::exception&) {
    return 1;
}

// From any thread, while another one computes.
int64_t segue_decoder_layers_done(const SegueDecoder* decoder) { return decoder->layers_done.load(std::memory_order_relaxed); }

// One product by itself, for benchmarks: y [rows, outputs] = x [rows, inputs] · Wᵀ + b.
void segue_gemm(SegueDecoder* decoder, const Matrix* matrix, const float* x, int32_t rows, float* y) {
    gemm(decoder->team, matrix, 1, x, matrix->inputs, rows, y, matrix->outputs, false);
}

// How experts are chosen by itself, for tests: logits [rows, experts] → chosen and weights [rows, chosen].
void segue_choose_experts(const Routing* routing, const float* logits, int32_t rows, int32_t* chosen, float* weights) {
    for (int row = 0; row < rows; row++, logits += routing->experts, chosen += routing->chosen, weights += routing->chosen)
        choose(*routing, logits, chosen, weights);
}

// Of the structs that Python knows as well, in its order.
int32_t segue_size_of(int32_t number) {
    const size_t sizes[] = {
        sizeof(Matrix), sizeof(Cache), sizeof(Batch), sizeof(Experts), sizeof(SegueShape), sizeof(SegueLayer)};
    return (int32_t)sizes[number];
}
}
