// The dense decoder (Llama, Mistral, Qwen2, Qwen3) from token ids to logits in one call, and the C interface to it.
//
// The same mathematics as the model on torch, with the small steps fused into the rows they belong to. Nothing is
// checked here: shapes, page tables and positions come from Python, which has checked them.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "lanes.h"

using namespace segue;

extern "C" {

struct SegueShape {
    int32_t hidden, inner, heads, head_dim, vocab;
    float epsilon;               // of RMS norms
    const float *cosines, *sines;  // [context_len, head_dim / 2]
    Cache cache;
    Matrix embedding, head;
    const float* norm;  // [hidden]
};

struct SegueLayer {
    const float *attention_norm, *mlp_norm;  // [hidden]
    const float *q_norm, *k_norm;            // [head_dim], or null
    Matrix qkv[3], output, gate_up[2], down;
    int32_t window;  // tokens; 0: sees everything
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

// Rotate halves by the angles of a position, in place.
void rotate(float* x, int head_dim, const float* cosines, const float* sines) {
    const int half = head_dim / 2;
    for (int at = 0; at < half; at++) {
        const float first = x[at], second = x[at + half];
        x[at] = first * cosines[at] - second * sines[at];
        x[at + half] = second * cosines[at] + first * sines[at];
    }
}

// gate = silu(gate) * up
void silu_multiply(float* gate, const float* up, int size) {
    for (int at = 0; at < size; at += LANES) {
        const int count = std::min(LANES, size - at);
        const Lanes x = Lanes::load(gate + at, count), one = Lanes::broadcast(1.0f);
        // e^-x would overflow below -88
        const Lanes inverse = one + exp(Lanes::broadcast(0.0f) - larger(x, Lanes::broadcast(-88.0f)));
        (x / inverse * Lanes::load(up + at, count)).store(gate + at, count);
    }
}

}  // namespace

struct SegueDecoder {
    SegueDecoder(const SegueShape& shape, const SegueLayer* layers, int count, int threads)
        : shape(shape), layers(layers, layers + count), team(threads) {}

    void forward(const Batch& batch, float* logits) {
        const int hidden = shape.hidden, heads = shape.heads, kv_heads = shape.cache.kv_heads;
        const int head_dim = shape.head_dim;
        const long qkv_size = (long)(heads + 2 * kv_heads) * head_dim, q_size = (long)heads * head_dim;
        int rows = batch.rows;
        x.resize((size_t)rows * hidden);
        normal.resize((size_t)rows * std::max((long)hidden, q_size));
        wide.resize((size_t)rows * std::max(qkv_size, 2L * shape.inner));
        each_row(rows, [&](int row) { unpack_row(shape.embedding, (int)batch.token_ids[row], &x[(size_t)row * hidden]); });
        for (int number = 0; number < (int)layers.size(); number++) {
            const SegueLayer& layer = layers[number];
            normalize_rows(rows, layer.attention_norm);
            gemm(team, layer.qkv, 3, normal.data(), hidden, rows, wide.data(), qkv_size, false);
            each_row(rows, [&](int row) { place(batch, layer, number, row, &wide[row * qkv_size]); });
            attend(
                team, shape.cache, batch, number, heads, layer.window, wide.data(), qkv_size, normal.data(), q_size);
            if (number + 1 == (int)layers.size()) rows = keep_sampled(batch, q_size);
            gemm(team, &layer.output, 1, normal.data(), q_size, rows, x.data(), hidden, true);
            normalize_rows(rows, layer.mlp_norm);
            const long inner = shape.inner;
            gemm(team, layer.gate_up, 2, normal.data(), hidden, rows, wide.data(), 2 * inner, false);
            each_row(rows, [&](int row) {
                float* gate = &wide[row * 2 * inner];
                silu_multiply(gate, gate + inner, (int)inner);
            });
            gemm(team, &layer.down, 1, wide.data(), 2 * inner, rows, x.data(), hidden, true);
            layers_done.fetch_add(1, std::memory_order_relaxed);
        }
        normalize_rows(rows, shape.norm);
        gemm(team, &shape.head, 1, normal.data(), hidden, rows, logits, shape.vocab, false);
    }

    SegueShape shape;
    std::vector<SegueLayer> layers;
    std::atomic<int64_t> layers_done{0};  // over all steps; others watch whether it grows
    std::vector<float> x;       // [rows, hidden], the residual stream
    std::vector<float> normal;  // [rows, hidden], what a linear reads; attention's result
    std::vector<float> wide;    // [rows, q k v], [rows, gate up]
    Team team;                  // last: its threads end before what they work on

private:
    template <class Work>
    void each_row(int rows, const Work& work) {
        team.share((rows + ROWS - 1) / ROWS, [&](int item) {
            for (int row = item * ROWS; row < std::min(rows, (item + 1) * ROWS); row++) work(row);
        });
    }

    void normalize_rows(int rows, const float* weight) {
        each_row(rows, [&](int row) {
            const size_t start = (size_t)row * shape.hidden;
            normalize(&x[start], weight, shape.hidden, shape.epsilon, &normal[start]);
        });
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
        const long angle = (long)batch.positions[row] * (head_dim / 2);
        for (int head = 0; head < heads + kv_heads; head++) {
            float* vector = qkv + head * head_dim;
            if (const float* weight = head < heads ? layer.q_norm : layer.k_norm)
                normalize(vector, weight, head_dim, shape.epsilon, vector);
            rotate(vector, head_dim, shape.cosines + angle, shape.sines + angle);
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

// Of the structs that Python knows as well, in its order.
int32_t segue_size_of(int32_t number) {
    const size_t sizes[] = {sizeof(Matrix), sizeof(Cache), sizeof(Batch), sizeof(SegueShape), sizeof(SegueLayer)};
    return (int32_t)sizes[number];
}
}
