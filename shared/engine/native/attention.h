// Attention over the paged KV cache, for ragged batches of prompts' chunks and single tokens alike.
#pragma once

#include <cstdint>

#include "team.h"

namespace segue {

enum class KVType : int32_t { F32 = 0, F16 = 1 };

// [page, layer, K | V, kv_head, …]: a head's keys [head_dim, page_size], its values [page_size, head_dim].
// Keys lie transposed, so that they are panels for `multiply`, like the packed weights.
struct Cache {
    void* pages;
    KVType type;
    int32_t layers, kv_heads, head_dim, page_size;

    // Where the keys of a head begin, and its values: both counted in cells.
    long keys(int page, int layer, int kv_head) const {
        return (((long)page * layers + layer) * 2 * kv_heads + kv_head) * head_dim * page_size;
    }
    long values(int page, int layer, int kv_head) const { return keys(page, layer, kv_heads + kv_head); }
};

// A packed, ragged batch: `PagedBatch` of attention/protocol.py.
struct Batch {
    int32_t rows, requests, sampled;
    const int64_t* token_ids;      // [rows]
    const int32_t* qo_indptr;      // [requests + 1]
    const int32_t* kv_indptr;      // [requests + 1]
    const int32_t* kv_indices;     // [kv_indptr[requests]]
    const int32_t* batch_indices;  // [rows]
    const int32_t* positions;      // [rows]
    const int64_t* sampled_rows;   // [sampled], ascending

    // The page of a request's position.
    int page(int request, int position, int page_size) const { return kv_indices[kv_indptr[request] + position / page_size]; }
};

// Write the key and value of a row, [kv_heads, head_dim] each, to its cell.
void write_cell(const Cache& cache, const Batch& batch, int layer, int row, const float* keys, const float* values);

// What becomes of the products of queries and keys.
struct Scores {
    int window;   // tokens; 0: a row sees all before it
    float scale;  // of a product
    float cap;    // of a score: cap * tanh(score / cap); 0: none
    const float* sinks;  // [heads], a score that each row sees besides, of a value of 0; or null
};

// Attend with every row of q, [rows, q_stride] with heads · head_dim values each.
void attend(
    Team& team, const Cache& cache, const Batch& batch, int layer, int heads, const Scores& scores, const float* q,
    long q_stride, float* out, long out_stride);

}  // namespace segue
