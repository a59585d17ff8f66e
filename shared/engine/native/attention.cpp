// Each row's result is made from blocks of 128 positions, in order from position 0, by an online softmax: the maximum so
// far, the sum so far, the weighted values so far. Rows and query heads that share a KV head are computed together in
// tiles, as in a matrix product; a cell a row must not see gets weight 0, which changes no bit of its sums: cells are finite.
#include "attention.h"

#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "panels.h"

namespace segue {
namespace {

constexpr int BLOCK = 128;  // positions
constexpr int AHEAD = 4;    // groups of positions between what is read and what is fetched into the core's cache
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

int groups_of(int values) { return (values + LANES - 1) / LANES; }

// Some consecutive rows of a request and some query heads of one KV head: at most TILE_ROWS pairs.
struct Tile {
    int request, kv_head;
    int first_row, rows;    // of the batch
    int first_head, heads;  // of all query heads

    int pairs() const { return rows * heads; }
};

struct Attend {
    const Cache& cache;
    const Batch& batch;
    int layer;
    Scores scores;
    const float* q;
    long q_stride;
    float* out;
    long out_stride;
};

// What a thread needs for one tile; kept between tiles.
struct Scratch {
    std::vector<float> queries;                       // [TILE_ROWS, head_dim], scaled
    std::vector<float> weighted;                      // [TILE_ROWS, padded head_dim]
    alignas(64) float scores[TILE_ROWS][BLOCK];       // then the weights
    Lanes totals[TILE_ROWS];
    float highest[TILE_ROWS];
};

template <class Value>
class TileAttention {
public:
    TileAttention(const Attend& task, const Tile& tile, Scratch& scratch) : task_(task), tile_(tile), scratch_(scratch) {}

    template <int PAIRS>
    void compute() {
        if constexpr (PAIRS > 1)
            if (tile_.pairs() < PAIRS) return compute<PAIRS - 1>();
        const int head_dim = task_.cache.head_dim, padded = groups_of(head_dim) * LANES;
        gather_queries(head_dim, padded);
        const int first = position(0), last = position(tile_.pairs() - 1);
        const int start = task_.scores.window ? std::max(0, first - task_.scores.window + 1) / BLOCK * BLOCK : 0;
        for (int block = start; block <= last; block += BLOCK) {
            const int cells = std::min(BLOCK, last + 1 - block);
            score<PAIRS>(block, cells);
            if (task_.scores.cap) cap(cells);
            hide(block, cells);
            weigh(cells, padded);
            add_values<PAIRS>(block, cells, padded);
        }
        scatter(head_dim, padded);
    }

private:
    int position(int pair) const { return task_.batch.positions[tile_.first_row + pair / tile_.heads]; }

    int page(int position) const {
        return task_.batch.page(tile_.request, position, task_.cache.page_size);
    }

    const Value* keys(int position) const {
        return (const Value*)task_.cache.pages + task_.cache.keys(page(position), task_.layer, tile_.kv_head) +
               position % task_.cache.page_size;
    }

    const Value* values(int position) const {
        return (const Value*)task_.cache.pages + task_.cache.values(page(position), task_.layer, tile_.kv_head) +
               position % task_.cache.page_size * task_.cache.head_dim;
    }

    // What is read AHEAD groups after the `number`th of a block: its keys, its values, the keys of the next block.
    // Pages lie far apart, and each is too short for the hardware to see where the next begins.
    const Value* upcoming(int block, int cells, int number) const {
        number += AHEAD;
        const int groups = groups_of(cells);
        if (number < groups) return keys(block + number * LANES);
        number -= groups;
        if (number < groups) return values(block + number * LANES);
        const int next = block + BLOCK + (number - groups) * LANES;
        return keys(std::min(next, position(tile_.pairs() - 1)));
    }

    void gather_queries(int head_dim, int padded) {
        scratch_.queries.resize((size_t)TILE_ROWS * head_dim);
        scratch_.weighted.assign((size_t)TILE_ROWS * padded, 0.0f);
        for (int pair = 0; pair < tile_.pairs(); pair++) {
            const float* from = task_.q + (tile_.first_row + pair / tile_.heads) * task_.q_stride +
                                (tile_.first_head + pair % tile_.heads) * head_dim;
            for (int at = 0; at < head_dim; at++) scratch_.queries[(size_t)pair * head_dim + at] = from[at] * task_.scores.scale;
            scratch_.totals[pair] = Lanes::broadcast(0.0f);
            scratch_.highest[pair] = HIDDEN;
        }
    }

    template <int PAIRS>
    void score(int block, int cells) {
        constexpr int TOGETHER = panels_beside<CellPanel<Value>>(PAIRS);
        int group = 0;
        for (; group + TOGETHER <= groups_of(cells); group += TOGETHER) score_groups<PAIRS, TOGETHER>(block, cells, group);
        for (; group < groups_of(cells); group++) score_groups<PAIRS, 1>(block, cells, group);
    }

    template <int PAIRS, int GROUPS>
    void score_groups(int block, int cells, int first) {
        const Cache& cache = task_.cache;
        CellPanel<Value> panels[GROUPS];
        for (int group = 0; group < GROUPS; group++) {
            const Value* here = keys(block + (first + group) * LANES);
            panels[group] = {here, cache.page_size, upcoming(block, cells, first + group) - here};
        }
        Lanes sums[PAIRS][GROUPS];
        SEGUE_UNROLL for (auto& pair : sums) SEGUE_UNROLL for (auto& sum : pair) sum = Lanes::broadcast(0.0f);
        multiply<CellPanel<Value>, PAIRS, GROUPS>(
            scratch_.queries.data(), cache.head_dim, panels, cache.head_dim, sums);
        SEGUE_UNROLL for (int pair = 0; pair < PAIRS; pair++) SEGUE_UNROLL for (int group = 0; group < GROUPS; group++)
            sums[pair][group].store(&scratch_.scores[pair][(first + group) * LANES]);
    }

    void cap(int cells) {
        for (int pair = 0; pair < tile_.pairs(); pair++)
            for (int group = 0; group < groups_of(cells); group++) {
                float* scores = &scratch_.scores[pair][group * LANES];
                soft_cap(Lanes::load(scores), task_.scores.cap).store(scores);
            }
    }

    void hide(int block, int cells) {
        const int end = groups_of(cells) * LANES;
        for (int pair = 0; pair < tile_.pairs(); pair++) {
            const int own = position(pair);
            for (int cell = std::max(0, own + 1 - block); cell < end; cell++) scratch_.scores[pair][cell] = HIDDEN;
            if (task_.scores.window)
                for (int cell = 0; cell < std::min(end, own - task_.scores.window + 1 - block); cell++)
                    scratch_.scores[pair][cell] = HIDDEN;
        }
    }

    // Scores become weights, relative to the highest score so far; what was summed before is brought to the same scale.
    void weigh(int cells, int padded) {
        for (int pair = 0; pair < tile_.pairs(); pair++) {
            float* scores = scratch_.scores[pair];
            Lanes most = Lanes::load(scores);
            for (int group = 1; group < groups_of(cells); group++)
                most = larger(most, Lanes::load(scores + group * LANES));
            const float before = scratch_.highest[pair], now = std::max(before, most.max());
            scratch_.highest[pair] = now;
            const Lanes reference = Lanes::broadcast(now == HIDDEN ? 0.0f : now);
            if (now != before && before != HIDDEN) {
                const Lanes shrink = exp(Lanes::broadcast(before) - reference);
                scratch_.totals[pair] = scratch_.totals[pair] * shrink;
                float* weighted = &scratch_.weighted[(size_t)pair * padded];
                for (int at = 0; at < padded; at += LANES)
                    (Lanes::load(weighted + at) * shrink).store(weighted + at);
            }
            Lanes total = scratch_.totals[pair];
            for (int group = 0; group < groups_of(cells); group++) {
                const Lanes weight = exp(Lanes::load(scores + group * LANES) - reference);
                weight.store(scores + group * LANES);
                total = total + weight;
            }
            scratch_.totals[pair] = total;
        }
    }

    template <int PAIRS>
    void add_values(int block, int cells, int padded) {
        constexpr int TOGETHER = panels_beside<CellPanel<Value>>(PAIRS);
        const int columns = padded / LANES;
        int column = 0;
        for (; column + TOGETHER <= columns; column += TOGETHER)
            add_columns<PAIRS, TOGETHER>(block, cells, padded, column);
        for (; column < columns; column++) add_columns<PAIRS, 1>(block, cells, padded, column);
    }

    template <int PAIRS, int COLUMNS>
    void add_columns(int block, int cells, int padded, int first) {
        const Cache& cache = task_.cache;
        float* weighted = scratch_.weighted.data() + first * LANES;
        Lanes sums[PAIRS][COLUMNS];
        SEGUE_UNROLL for (int pair = 0; pair < PAIRS; pair++)
            SEGUE_UNROLL for (int column = 0; column < COLUMNS; column++) sums[pair][column] =
                Lanes::load(weighted + pair * padded + column * LANES);
        for (int cell = 0; cell < cells; cell += cache.page_size) {
            const Value* here = values(block + cell);
            const long ahead = upcoming(block, cells, groups_of(cells) + cell / LANES) - here;
            CellPanel<Value> panels[COLUMNS];
            for (int column = 0; column < COLUMNS; column++)
                panels[column] = {here + (first + column) * LANES, cache.head_dim, ahead};
            multiply<CellPanel<Value>, PAIRS, COLUMNS>(
                &scratch_.scores[0][cell], BLOCK, panels, std::min(cache.page_size, cells - cell), sums);
        }
        SEGUE_UNROLL for (int pair = 0; pair < PAIRS; pair++) SEGUE_UNROLL for (int column = 0; column < COLUMNS; column++)
            sums[pair][column].store(weighted + pair * padded + column * LANES);
    }

    // e to the distance of a sink above the highest score; beyond 88 it would overflow, and values count for nothing there.
    static float sink_weight(float above) { return exp(Lanes::broadcast(std::min(above, 88.0f))).part[0][0]; }

    void scatter(int head_dim, int padded) {
        for (int pair = 0; pair < tile_.pairs(); pair++) {
            const int head = tile_.first_head + pair % tile_.heads;
            float total = scratch_.totals[pair].sum();
            if (task_.scores.sinks) total += sink_weight(task_.scores.sinks[head] - scratch_.highest[pair]);
            const float share = 1.0f / total;
            float* to = task_.out + (tile_.first_row + pair / tile_.heads) * task_.out_stride + head * head_dim;
            for (int at = 0; at < head_dim; at++) to[at] = scratch_.weighted[(size_t)pair * padded + at] * share;
        }
    }

    const Attend& task_;
    const Tile& tile_;
    Scratch& scratch_;
};

std::vector<Tile> tiles_of(const Batch& batch, int heads, int kv_heads) {
    const int shared = heads / kv_heads;
    const int heads_together = std::min(shared, TILE_ROWS), rows_together = TILE_ROWS / heads_together;
    std::vector<Tile> tiles;
    int row = 0;
    for (int request = 0; request < batch.requests; request++)
        for (const int end = batch.qo_indptr[request + 1]; row < end;) {
            const int rows = std::min(rows_together, end - row);
            for (int kv_head = 0; kv_head < kv_heads; kv_head++)
                for (int head = 0; head < shared; head += heads_together)
                    tiles.push_back(
                        {request, kv_head, row, rows, kv_head * shared + head, std::min(heads_together, shared - head)});
            row += rows;
        }
    return tiles;
}

// A float as it is kept: finite, for an infinite value times weight 0 would spoil rows that must not see it.
template <class Value>
Value kept(float value) {
    constexpr float most = std::is_same_v<Value, Half> ? 65504.0f : std::numeric_limits<float>::max();
    return (Value)std::clamp(value, -most, most);
}

template <class Value>
void write(const Cache& cache, long keys, long values, int slot, const float* key, const float* value) {
    Value* key_cells = (Value*)cache.pages + keys + slot;
    Value* value_cells = (Value*)cache.pages + values + (long)slot * cache.head_dim;
    for (int at = 0; at < cache.head_dim; at++) key_cells[(long)at * cache.page_size] = kept<Value>(key[at]);
    for (int at = 0; at < cache.head_dim; at++) value_cells[at] = kept<Value>(value[at]);
}

}  // namespace

void write_cell(const Cache& cache, const Batch& batch, int layer, int row, const float* keys, const float* values) {
    const int position = batch.positions[row], slot = position % cache.page_size;
    const int page = batch.page(batch.batch_indices[row], position, cache.page_size);
    for (int kv_head = 0; kv_head < cache.kv_heads; kv_head++) {
        const float *key = keys + kv_head * cache.head_dim, *value = values + kv_head * cache.head_dim;
        if (cache.type == KVType::F32)
            write<float>(cache, cache.keys(page, layer, kv_head), cache.values(page, layer, kv_head), slot, key, value);
        else
            write<Half>(cache, cache.keys(page, layer, kv_head), cache.values(page, layer, kv_head), slot, key, value);
    }
}

void attend(
    Team& team, const Cache& cache, const Batch& batch, int layer, int heads, const Scores& scores, const float* q,
    long q_stride, float* out, long out_stride) {
    const Attend task{cache, batch, layer, scores, q, q_stride, out, out_stride};
    const std::vector<Tile> tiles = tiles_of(batch, heads, cache.kv_heads);
    team.share((int)tiles.size(), [&](int number) {
        static thread_local Scratch scratch;
        if (cache.type == KVType::F32)
            TileAttention<float>(task, tiles[number], scratch).compute<TILE_ROWS>();
        else
            TileAttention<Half>(task, tiles[number], scratch).compute<TILE_ROWS>();
    });
}

}  // namespace segue
