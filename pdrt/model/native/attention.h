// What the two attention kernels share: the call, products of queries and keys, the softmax.
//
// Softmax is taken block of keys by block of keys with a running maximum and sum, and what was
// summed up before is rescaled when the maximum grows (Milakov and Gimelshein, Online normalizer
// calculation for softmax, 2018; Dao et al., FlashAttention, 2022).
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "pool.h"
#include "products.h"

constexpr int HEAD_DIM_MAX = 256;
// Query heads of one KV head that are attended together; larger groups go in several parts.
constexpr int HEADS_MAX = 16;
// Keys between two updates of the softmax: their keys and values stay in L2 meanwhile.
constexpr int KEY_BLOCK = 128;

struct Attention {
    PdrtPool pool;
    PdrtStep step;
    int layer, group;  // group: query heads per KV head
    const void *query;
    void *out;
    int64_t query_stride, out_stride;
    float scale, softcap;
    int window;

    // What is left to multiply scores with once they are capped.
    float scale_capped() const { return softcap == 0 ? scale : 1; }

    // First key that the query at `position` sees.
    int first_key(int position) const { return window ? std::max(0, position + 1 - window) : 0; }
};

// The queries of some heads that share a KV head, of consecutive tokens of one row.
struct Task {
    int row, kv_head;
    int head, heads;    // within the group
    int token, tokens;  // within the step
    int position;       // of the first token, in its sequence
};

template <class Stored>
struct Sequence {
    HeadPages<Stored> pages;
    const int32_t *table;

    Sequence(const Attention &call, const Task &task)
        : pages(call.pool, call.layer, task.kv_head),
          table(call.step.tables + static_cast<int64_t>(task.row) * call.step.table_width) {}

    const Stored *key(int position) const {
        return pages.key(table[position / pages.page_size], position % pages.page_size);
    }
};

template <class Query>
const Query *query_of(const Attention &call, const Task &task, int token, int head) {
    const int first = task.kv_head * call.group + task.head;
    return static_cast<const Query *>(call.query) + (task.token + token) * call.query_stride +
           static_cast<int64_t>(first + head) * call.pool.head_dim;
}

// Writes `values` times `factor` where the result of one token's head belongs.
template <class Query>
void write_out(const Attention &call, const Task &task, int token, int head, const float *values,
               float factor) {
    const int first = task.kv_head * call.group + task.head, head_dim = call.pool.head_dim;
    Query *out = static_cast<Query *>(call.out) + (task.token + token) * call.out_stride +
                 static_cast<int64_t>(first + head) * head_dim;
    int element = 0;
    for (; element + LANES <= head_dim; element += LANES)
        store(out + element, load(values + element) * factor);
    for (; element < head_dim; ++element) store_one(out + element, values[element] * factor);
}

struct Softmax {
    float maximum = -INFINITY;
    float sum = 0;
};

// Makes all scores but [first, end) of the vectors before `end` count for nothing.
inline void mask_scores(float *scores, int first, int end) {
    const Ints lanes = lane_numbers(std::make_integer_sequence<int, LANES>());
    const Floats hidden = splat(-INFINITY);
    for (int key = 0; key < first; key += LANES)
        store(scores + key, lanes < first - key ? hidden : load(scores + key));
    const int last = end - end % LANES;
    if (last < end) store(scores + last, lanes < end - last ? load(scores + last) : hidden);
}

inline void cap_scores(const Attention &call, float *scores, int end) {
    for (int key = 0; key < end; key += LANES) {
        const Floats values = load(scores + key) * (call.scale / call.softcap);
        store(scores + key, hyperbolic_tangent(values) * call.softcap);
    }
}

// The scores of one row become probabilities in two passes. Rows take the first one after another,
// then the second: each is a chain of operations that wait for each other, but not for other rows'.

// First pass, over the scores [first, end): scales them and raises the running maximum. Returns by
// how much to multiply what was summed up so far.
inline float raise_maximum(const Attention &call, float *scores, int first, int end,
                           Softmax &softmax) {
    if (call.softcap != 0) cap_scores(call, scores, end);
    mask_scores(scores, first, end);
    const float scale = call.scale_capped();
    Floats maxima = splat(softmax.maximum);
    for (int key = 0; key < end; key += LANES)
        maxima = maximum(load(scores + key) * scale, maxima);
    const float highest = max_lanes(maxima);
    if (highest == softmax.maximum) return 1;
    const float factor = exponential(splat(softmax.maximum - highest))[0];
    softmax = {highest, softmax.sum * factor};
    return factor;
}

// Second pass: probabilities relative to the maximum, 0 for what was masked.
inline __attribute__((noinline)) void take_exponentials(const Attention &call, float *scores,
                                                        int end, Softmax &softmax) {
    const float scale = call.scale_capped(), highest = softmax.maximum;
    Floats sums = {};
    for (int key = 0; key < end; key += LANES) {
        const Floats probability = exponential_below_one(load(scores + key) * scale - highest);
        store(scores + key, probability);
        sums += probability;
    }
    softmax.sum += sum_lanes(sums);
}

inline void multiply_by(float *values, int count, float factor) {
    int index = 0;
    for (; index + LANES <= count; index += LANES)
        store(values + index, load(values + index) * factor);
    for (; index < count; ++index) values[index] *= factor;
}
