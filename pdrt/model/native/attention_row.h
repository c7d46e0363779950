// Attention of one token over its sequence: bound by how fast keys and values come from memory.
//
// All query heads of a KV head go through its pages together, so that these are read once. Needs
// head_dim to be a multiple of NUMBERS; the block kernel does the rest.
#pragma once

#include "attention.h"

// Keys of a long sequence are attended in parts of this many, each with a softmax of its own, that
// are merged in order. Always, so that a result does not depend on how many threads there were.
constexpr int PART_KEYS = 1024;
// Heads whose sums fit into 16 registers, several keys or columns at once.
constexpr int TILE_HEADS = 4;
// Keys between two updates of the softmax. Meanwhile as many that come next are fetched into L2.
constexpr int ROW_BLOCK = 64;
// Pages lie anywhere, and the processor has to look up first where that is, in memory too: a line
// of each is asked for so many keys ahead. Fetching all of it that early would stall on the lookup.
constexpr int LOOKUP_KEYS = 512;
constexpr int SCORE_STRIDE = ROW_BLOCK + LANES;

struct RowState {
    Softmax softmax[HEADS_MAX];
    alignas(VECTOR_BYTES) float out[HEADS_MAX * HEAD_DIM_MAX];  // (heads, head_dim), not divided
};

// With more, sums and what they are summed up from do not fit into 16 registers.
constexpr int keys_at_once(int heads) { return heads == 1 ? 8 : heads == 2 ? 4 : 2; }

// scores[head][key] = query[head] . keys[key]; writes whole vectors, so up to LANES - 1 more.
// Meanwhile prefetches as much as it reads of what lies at `ahead`: bit by bit, as the processor
// can wait for some 20 cache lines at once, and stalls when it is asked for more.
template <class Product, int HEADS, class Stored>
void score_keys(const typename Product::Element *query, const Stored *keys, int count,
                int head_dim, float *scores, const char *ahead) {
    constexpr int KEYS = std::min(keys_at_once(HEADS), LANES);
    constexpr int STEP_BYTES = Product::NUMBERS * KEYS * static_cast<int>(sizeof(Stored));
    const int elements = head_dim / Product::WIDTH;
    for (int first = 0; first < count; first += LANES) {
        Floats products[HEADS][LANES / KEYS];
        for (int part = 0; part < LANES / KEYS; ++part) {
            const Stored *key[KEYS];
            // Past the last key it is computed again, as what lies behind may be anything.
            for (int i = 0; i < KEYS; ++i)
                key[i] = keys + std::min(first + part * KEYS + i, count - 1) * head_dim;
            Floats sums[HEADS][KEYS] = {};
            int number = 0;
            do {
                prefetch(ahead, STEP_BYTES);
                ahead += STEP_BYTES;
                unroll<KEYS>([&](auto i) {
                    const auto numbers = Product::load_stored(key[i] + number);
                    unroll<HEADS>([&](auto head) {
                        const auto queries = Product::load_elements(query + head * elements +
                                                                    number / Product::WIDTH);
                        sums[head][i] = Product::multiply_add(sums[head][i], queries, numbers);
                    });
                });
                number += Product::NUMBERS;
            } while (number < head_dim);
            unroll<HEADS>([&](auto head) {
                products[head][part] = sum_rows<1, KEYS>(sums[head]);
            });
        }
        unroll<HEADS>([&](auto head) {
            store(scores + head * SCORE_STRIDE + first,
                  sum_rows<KEYS, LANES / KEYS>(products[head]));
        });
    }
}

// Columns of values are summed up in the order in which they are loaded: as `Halves` has them where
// they are stored as bfloat16.
template <class Stored>
constexpr int VALUE_VECTORS = sizeof(Stored) < sizeof(float) ? 2 : 1;

inline void load_values(const float *from, Floats *to) { to[0] = load(from); }
inline void load_values(const Bf16 *from, Floats *to) {
    const Halves::Vector halves = Halves::load_stored(from);
    to[0] = halves.even;
    to[1] = halves.odd;
}

// A sum waits four cycles for the one before: where there are fewer, every other key has its own.
constexpr int SUMS_MIN = 8;

// out[head][column, …) += the sum of the values, each times its probability. Prefetches likewise.
template <int HEADS, int VECTORS, class Stored>
void add_columns(const float *probabilities, const Stored *values, int count, int head_dim,
                 float *out, const char *ahead) {
    constexpr int STEP_BYTES = LANES * VECTORS * static_cast<int>(sizeof(Stored));
    constexpr int CHAINS = HEADS * VECTORS < SUMS_MIN ? 2 : 1;
    Floats sums[CHAINS][HEADS][VECTORS] = {};
    unroll<HEADS>([&](auto head) {
        unroll<VECTORS>(
            [&](auto i) { sums[0][head][i] = load(out + head * head_dim + i * LANES); });
    });
    const auto add_key = [&](ptrdiff_t key, auto chain) {
        const Stored *value = values + key * head_dim;
        prefetch(ahead + key * STEP_BYTES, STEP_BYTES);
        Floats numbers[VECTORS];
        constexpr int AT_ONCE = VALUE_VECTORS<Stored>;
        unroll<VECTORS / AT_ONCE>([&](auto i) {
            load_values(value + i * (AT_ONCE * LANES), numbers + i * AT_ONCE);
        });
        unroll<HEADS>([&](auto head) {
            const Floats probability = splat(probabilities[head * SCORE_STRIDE + key]);
            unroll<VECTORS>([&](auto i) { sums[chain][head][i] += probability * numbers[i]; });
        });
    };
    ptrdiff_t key = 0;
    for (; key + CHAINS <= count; key += CHAINS)
        unroll<CHAINS>([&](auto chain) { add_key(key + chain, chain); });
    if (key < count) add_key(key, std::integral_constant<int, 0>());
    unroll<HEADS>([&](auto head) {
        unroll<VECTORS>([&](auto i) {
            Floats sum = sums[0][head][i];
            if constexpr (CHAINS > 1) sum += sums[1][head][i];
            store(out + head * head_dim + i * LANES, sum);
        });
    });
}

template <int HEADS, class Stored>
void add_values(const float *probabilities, const Stored *values, int count, int head_dim,
                float *out, const char *ahead) {
    constexpr int VECTORS = HEADS < 3 ? 4 : 2;
    const auto ahead_of = [&](int column) {
        return ahead + static_cast<int64_t>(column) * count * static_cast<int>(sizeof(Stored));
    };
    int column = 0;
    for (; column + VECTORS * LANES <= head_dim; column += VECTORS * LANES)
        add_columns<HEADS, VECTORS>(probabilities, values + column, count, head_dim, out + column,
                                    ahead_of(column));
    constexpr int LEAST = VALUE_VECTORS<Stored>;
    for (; column < head_dim; column += LEAST * LANES)
        add_columns<HEADS, LEAST>(probabilities, values + column, count, head_dim, out + column,
                                  ahead_of(column));
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

// Keys of a block that lie in one page, and those that lie a block ahead, to be prefetched.
template <class Stored>
struct Run {
    const Stored *keys, *ahead;
    int count;
};

// A vector's numbers of a query as the elements of a product.
template <class Query>
void take_query(Singles, const Query *from, float *to) {
    store(to, load(from));
}
template <class Query>
void take_query(Halves, const Query *from, float *to) {
    for (int lane = 0; lane < LANES; ++lane) {
        to[lane] = to_float(from[2 * lane]);
        to[LANES + lane] = to_float(from[2 * lane + 1]);
    }
}
inline void take_query(Pairs, const Bf16 *from, uint32_t *to) {
    std::memcpy(to, from, VECTOR_BYTES);
}

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
            for (int number = 0; number < head_dim; number += Product::NUMBERS)
                take_query(Product(), from + number, to + number / Product::WIDTH);
        }
    }

    // Attends to keys [first, end).
    void attend(int first, int end, RowState &state) const {
        std::fill_n(state.softmax, task.heads, Softmax());
        std::fill_n(state.out, task.heads * head_dim, 0.0f);
        look_up(first, std::min(first + LOOKUP_KEYS, end));
        while (first < end) {
            const int block_end = std::min(end, first / ROW_BLOCK * ROW_BLOCK + ROW_BLOCK);
            look_up(std::min(first + LOOKUP_KEYS, end), std::min(block_end + LOOKUP_KEYS, end));
            attend_block(first, block_end, end, state);
            first = block_end;
        }
    }

  private:
    // Asks for a line of each page of keys [first, end), and of their values.
    void look_up(int first, int end) const {
        for (; first < end; first += sequence.pages.page_size) {
            const Stored *keys = sequence.key(first);
            prefetch(address(keys), CACHE_LINE_BYTES);
            prefetch(address(keys + to_value()), CACHE_LINE_BYTES);
        }
    }

    void attend_block(int first, int block_end, int end, RowState &state) const {
        Run<Stored> runs[ROW_BLOCK];
        const int count = find_runs(first, block_end, end, runs);
        alignas(VECTOR_BYTES) float scores[HEADS_MAX * SCORE_STRIDE];
        for (int index = 0, key = 0; index < count; key += runs[index++].count) {
            const Run<Stored> &run = runs[index];
            const Stored *ahead = run.ahead;
            for_head_tiles(task.heads, [&](int head, auto number) {
                score_keys<Product, number>(query + head * (head_dim / Product::WIDTH), run.keys,
                                            run.count, head_dim,
                                            scores + head * SCORE_STRIDE + key, address(ahead));
                ahead = run.keys;  // what is there already
            });
        }
        for (int head = 0; head < task.heads; ++head) {
            const float factor = raise_maximum(call, scores + head * SCORE_STRIDE, 0,
                                               block_end - first, state.softmax[head]);
            if (factor != 1) multiply_by(state.out + head * head_dim, head_dim, factor);
        }
        for (int head = 0; head < task.heads; ++head)
            take_exponentials(call, scores + head * SCORE_STRIDE, block_end - first,
                              state.softmax[head]);
        for (int index = 0, key = 0; index < count; key += runs[index++].count) {
            const Run<Stored> &run = runs[index];
            const Stored *values = run.keys + to_value(), *ahead = run.ahead + to_value();
            for_head_tiles(task.heads, [&](int head, auto number) {
                add_values<number>(scores + head * SCORE_STRIDE + key, values, run.count, head_dim,
                                   state.out + head * head_dim, address(ahead));
                ahead = values;
            });
        }
    }

    // The runs of keys [first, block_end), of a sequence that ends at `end`.
    int find_runs(int first, int block_end, int end, Run<Stored> *runs) const {
        int count = 0;
        while (first < block_end) {
            const int left = sequence.pages.page_size - first % sequence.pages.page_size;
            const Stored *keys = sequence.key(first);
            const bool has_next = first + ROW_BLOCK < end;
            runs[count++] = {keys, has_next ? sequence.key(first + ROW_BLOCK) : keys,
                             std::min(block_end - first, left)};
            first += left;
        }
        return count;
    }

    int64_t to_value() const { return sequence.pages.to_value(); }

    static const char *address(const Stored *stored) {
        return reinterpret_cast<const char *>(stored);
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

// Puts sums into the order of the columns.
inline void order_columns(const float *, float *, int) {}
inline void order_columns(const Bf16 *, float *sums, int head_dim) {
    for (int column = 0; column < head_dim; column += 2 * LANES) {
        float halves[2 * LANES];
        std::copy_n(sums + column, 2 * LANES, halves);
        for (int lane = 0; lane < LANES; ++lane) {
            sums[column + 2 * lane] = halves[lane];
            sums[column + 2 * lane + 1] = halves[LANES + lane];
        }
    }
}

template <class Query, class Stored>
void write_row(const Attention &call, const Task &task, RowState &state) {
    for (int head = 0; head < task.heads; ++head) {
        float *sums = state.out + head * call.pool.head_dim;
        order_columns(static_cast<const Stored *>(nullptr), sums, call.pool.head_dim);
        write_out<Query>(call, task, 0, head, sums, 1 / state.softmax[head].sum);
    }
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
    write_row<Query, Stored>(call, task, state);
}
