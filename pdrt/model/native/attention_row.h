// Attention of one token over its sequence: bound by how fast keys and values come from memory.
//
// All query heads of a KV head go through its pages together, so that these are read once. Needs
// head_dim to be a multiple of the vector's numbers; the block kernel does the rest.
#pragma once

#include "attention.h"

// Keys of a long sequence are attended in parts of this many, each with a softmax of its own, that
// are merged in order. Always, so that a result does not depend on how many threads shared the work.
constexpr int PART_KEYS = 1024;
// Heads whose sums fit into 16 registers, several keys or columns at once.
constexpr int TILE_HEADS = 4;
constexpr int SCORE_STRIDE = KEY_BLOCK + LANES;

struct RowState {
    Softmax softmax[HEADS_MAX];
    alignas(VECTOR_BYTES) float out[HEADS_MAX * HEAD_DIM_MAX];  // (heads, head_dim), not divided
};

constexpr int keys_at_once(int heads) { return heads == 1 ? 8 : heads < 4 ? 4 : 2; }

// scores[head][key] = query[head] . keys[key]; writes whole vectors, so up to LANES - 1 more.
template <class Product, int HEADS, class Stored>
void score_keys(const typename Product::Element *query, const Stored *keys, int count,
                int head_dim, float *scores) {
    constexpr int KEYS = std::min(keys_at_once(HEADS), LANES);
    const int elements = head_dim / Product::WIDTH;
    for (int first = 0; first < count; first += LANES) {
        Floats products[HEADS][LANES];
        for (int part = 0; part < LANES; part += KEYS) {
            const Stored *key[KEYS];
            // Past the last key it is computed again, as what lies behind may be anything.
            for (int i = 0; i < KEYS; ++i)
                key[i] = keys + std::min(first + part + i, count - 1) * head_dim;
            Floats sums[HEADS][KEYS] = {};
            for (int element = 0; element < elements; element += LANES) {
                typename Product::Vector numbers[KEYS];
                for (int i = 0; i < KEYS; ++i)
                    numbers[i] = Product::load_stored(key[i] + element * Product::WIDTH);
                for (int head = 0; head < HEADS; ++head) {
                    const auto queries = Product::load_elements(query + head * elements + element);
                    for (int i = 0; i < KEYS; ++i)
                        sums[head][i] =
                            Product::multiply_add(sums[head][i], queries, numbers[i]);
                }
            }
            for (int head = 0; head < HEADS; ++head)
                for (int i = 0; i < KEYS; ++i) products[head][part + i] = sums[head][i];
        }
        for (int head = 0; head < HEADS; ++head)
            store(scores + head * SCORE_STRIDE + first, sum_rows(products[head]));
    }
}

// out[head][column, …) += the sum of the values, each times its probability.
template <int HEADS, int VECTORS, class Stored>
void add_columns(const float *probabilities, const Stored *values, int count, int head_dim,
                 float *out) {
    Floats sums[HEADS][VECTORS];
    for (int head = 0; head < HEADS; ++head)
        for (int i = 0; i < VECTORS; ++i) sums[head][i] = load(out + head * head_dim + i * LANES);
    for (int key = 0; key < count; ++key) {
        Floats numbers[VECTORS];
        for (int i = 0; i < VECTORS; ++i)
            numbers[i] = load(values + static_cast<int64_t>(key) * head_dim + i * LANES);
        for (int head = 0; head < HEADS; ++head) {
            const Floats probability = splat(probabilities[head * SCORE_STRIDE + key]);
            for (int i = 0; i < VECTORS; ++i) sums[head][i] += probability * numbers[i];
        }
    }
    for (int head = 0; head < HEADS; ++head)
        for (int i = 0; i < VECTORS; ++i) store(out + head * head_dim + i * LANES, sums[head][i]);
}

template <int HEADS, class Stored>
void add_values(const float *probabilities, const Stored *values, int count, int head_dim,
                float *out) {
    constexpr int VECTORS = HEADS < 4 ? 4 : 2;
    int column = 0;
    for (; column + VECTORS * LANES <= head_dim; column += VECTORS * LANES)
        add_columns<HEADS, VECTORS>(probabilities, values + column, count, head_dim, out + column);
    for (; column < head_dim; column += LANES)
        add_columns<HEADS, 1>(probabilities, values + column, count, head_dim, out + column);
}

// Calls `tile(head, number)` with `number`, a constant, of up to TILE_HEADS heads at a time.
template <class Tile>
void for_head_tiles(int heads, Tile tile) {
    int head = 0;
    for (; head + TILE_HEADS <= heads; head += TILE_HEADS)
        tile(head, std::integral_constant<int, TILE_HEADS>());
    switch (heads - head) {
        case 3: return tile(head, std::integral_constant<int, 3>());
        case 2: return tile(head, std::integral_constant<int, 2>());
        case 1: return tile(head, std::integral_constant<int, 1>());
    }
}

// The part of a page that holds keys [position, …) of a block that ends at `end`.
template <class Stored>
struct Run {
    const Stored *keys;
    int count;

    Run(const Sequence<Stored> &sequence, int position, int end)
        : keys(sequence.key(position)),
          count(std::min(end - position,
                         sequence.pages.page_size - position % sequence.pages.page_size)) {}
};

template <class Product, class Query, class Stored>
struct RowAttention {
    using Element = typename Product::Element;
    const Attention &call;
    const Task &task;
    const Sequence<Stored> sequence;
    const int head_dim;
    alignas(VECTOR_BYTES) Element query[HEADS_MAX * HEAD_DIM_MAX / Product::WIDTH];

    RowAttention(const Attention &call, const Task &task)
        : call(call), task(task), sequence(call, task), head_dim(call.pool.head_dim) {
        for (int head = 0; head < task.heads; ++head) {
            const Query *from = query_of<Query>(call, task, 0, head);
            Element *to = query + head * (head_dim / Product::WIDTH);
            for (int element = 0; element < head_dim / Product::WIDTH; element += LANES) {
                const auto numbers = Product::load_stored(from + element * Product::WIDTH);
                std::memcpy(to + element, &numbers, sizeof numbers);
            }
        }
    }

    // Attends to keys [first, end).
    void attend(int first, int end, RowState &state) const {
        std::fill_n(state.softmax, task.heads, Softmax());
        std::fill_n(state.out, task.heads * head_dim, 0.0f);
        while (first < end) {
            const int block_end = std::min(end, first / KEY_BLOCK * KEY_BLOCK + KEY_BLOCK);
            attend_block(first, block_end, end, state);
            first = block_end;
        }
    }

  private:
    void attend_block(int first, int block_end, int end, RowState &state) const {
        alignas(VECTOR_BYTES) float scores[HEADS_MAX * SCORE_STRIDE];
        for (int position = first; position < block_end;) {
            const Run<Stored> run(sequence, position, block_end);
            prefetch_page(position + sequence.pages.page_size, end);
            for_head_tiles(task.heads, [&](int head, auto number) {
                score_keys<Product, number>(query + head * (head_dim / Product::WIDTH), run.keys,
                                            run.count, head_dim,
                                            scores + head * SCORE_STRIDE + position - first);
            });
            position += run.count;
        }
        for (int head = 0; head < task.heads; ++head) {
            const float factor = update_softmax(call, scores + head * SCORE_STRIDE, 0,
                                                block_end - first, state.softmax[head]);
            if (factor != 1) multiply_by(state.out + head * head_dim, head_dim, factor);
        }
        for (int position = first; position < block_end;) {
            const Run<Stored> run(sequence, position, block_end);
            for_head_tiles(task.heads, [&](int head, auto number) {
                add_values<number>(scores + head * SCORE_STRIDE + position - first,
                                   run.keys + sequence.pages.to_value(), run.count, head_dim,
                                   state.out + head * head_dim);
            });
            position += run.count;
        }
    }

    // Pages lie anywhere, and the processor's own prefetching ends with each 4 KB.
    void prefetch_page(int position, int end) const {
        if (position >= end) return;
        const int64_t page = sequence.table[position / sequence.pages.page_size];
        prefetch(sequence.pages.key(page, 0),
                 2 * sequence.pages.to_value() * static_cast<int64_t>(sizeof(Stored)));
    }
};

// Adds a later part of the keys.
inline void merge(RowState &state, const RowState &part, int heads, int head_dim) {
    for (int head = 0; head < heads; ++head) {
        Softmax &softmax = state.softmax[head];
        const Softmax &other = part.softmax[head];
        const float highest = std::max(softmax.maximum, other.maximum);
        const float factor = std::exp(softmax.maximum - highest);
        const float other_factor = std::exp(other.maximum - highest);
        float *out = state.out + head * head_dim;
        const float *added = part.out + head * head_dim;
        for (int element = 0; element < head_dim; ++element)
            out[element] = out[element] * factor + added[element] * other_factor;
        softmax = {highest, softmax.sum * factor + other.sum * other_factor};
    }
}

template <class Query>
void write_row(const Attention &call, const Task &task, const RowState &state) {
    for (int head = 0; head < task.heads; ++head)
        write_out<Query>(call, task, 0, head, state.out + head * call.pool.head_dim,
                         1 / state.softmax[head].sum);
}

// Keys that a row's parts begin with: multiples of PART_KEYS but for the first.
inline int parts_of(const Attention &call, const Task &task) {
    return task.position / PART_KEYS - call.first_key(task.position) / PART_KEYS + 1;
}

template <class Product, class Query, class Stored>
void attend_part(const Attention &call, const Task &task, int part, RowState &state) {
    const int first = call.first_key(task.position);
    const int begin = (first / PART_KEYS + part) * PART_KEYS;
    const int end = std::min(begin + PART_KEYS, task.position + 1);
    RowAttention<Product, Query, Stored>(call, task).attend(std::max(first, begin), end, state);
}

template <class Product, class Query, class Stored>
void attend_row(const Attention &call, const Task &task) {
    RowState state, part;
    attend_part<Product, Query, Stored>(call, task, 0, state);
    for (int index = 1; index < parts_of(call, task); ++index) {
        attend_part<Product, Query, Stored>(call, task, index, part);
        merge(state, part, task.heads, call.pool.head_dim);
    }
    write_row<Query>(call, task, state);
}
