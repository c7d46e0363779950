// Attention of a block of queries over their sequence (prefill): bound by arithmetic.
//
// The block's rows are its tokens' heads. A block of keys is laid out for products once, and every
// few rows take it all the way: scores, softmax, sum of values, with the scores in L1.
#pragma once

#include <type_traits>

#include "attention.h"
#include "tiles.h"

// Rows that share a block of keys as laid out, at most: makes the laying out cheap beside the
// products, and lets queries and sums of a head_dim of 64 or 128 stay in L2.
constexpr int BLOCK_ROWS = 192;
// Rows and vectors of a tile of products: its sums fill the registers but for a few.
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = VECTOR_BYTES == 64 ? 4 : 2;
// Columns that are laid out together, one row after another: a tile reads memory in order then, and
// its columns are not all in the same few sets of L1.
constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;

// `Tiles`: pairs, laid out the same, but multiplied in blocks of rows and columns (tiles.h).
struct Tiles : Pairs {
    // Heads whose pairs, and so columns, fill whole blocks.
    static bool fits(int head_dim) { return head_dim % TILES_COLUMNS == 0; }
};

enum class Sums { FRESH, ADDED };

// sums[row][column] = or += the sum over `depth`, at least 1, of a[row][k] * panel[k][column].
template <class Product, int VECTORS, Sums SUMS>
void multiply_tile(const typename Product::Element *a, ptrdiff_t a_stride,
                   const typename Product::Element *panel, int depth, float *sums,
                   ptrdiff_t sums_stride) {
    Floats tile[TILE_ROWS][VECTORS];
    unroll<TILE_ROWS>([&](auto row) {
        unroll<VECTORS>([&](auto i) {
            tile[row][i] = SUMS == Sums::ADDED ? load(sums + row * sums_stride + i * LANES)
                                               : Floats{};
        });
    });
    ptrdiff_t k = 0;
    do {
        typename Product::Vector columns[VECTORS];
        unroll<VECTORS>([&](auto i) {
            columns[i] = Product::load_elements(panel + k * TILE_COLUMNS + i * LANES);
        });
        unroll<TILE_ROWS>([&](auto row) {
            const auto factor = Product::splat_element(a[row * a_stride + k]);
            unroll<VECTORS>([&](auto i) {
                tile[row][i] = Product::multiply_add(tile[row][i], factor, columns[i]);
            });
        });
    } while (++k < depth);
    unroll<TILE_ROWS>([&](auto row) {
        unroll<VECTORS>([&](auto i) { store(sums + row * sums_stride + i * LANES, tile[row][i]); });
    });
}

// The same for a multiple of LANES columns, up to TILE_COLUMNS.
template <class Product, Sums SUMS>
void multiply(const typename Product::Element *a, ptrdiff_t a_stride,
              const typename Product::Element *panel, int depth, int columns, float *sums,
              ptrdiff_t sums_stride) {
    if constexpr (std::is_same_v<Product, Tiles>) {
        for (int column = 0; column < columns; column += TILES_COLUMNS)
            multiply_tiles<SUMS == Sums::ADDED>(a, a_stride, panel + column, TILE_COLUMNS, depth,
                                                sums + column, sums_stride);
        return;
    }
    if (columns == TILE_COLUMNS)
        return multiply_tile<Product, TILE_VECTORS, SUMS>(a, a_stride, panel, depth, sums,
                                                          sums_stride);
    for (int column = 0; column < columns; column += LANES)
        multiply_tile<Product, 1, SUMS>(a, a_stride, panel + column, depth, sums + column,
                                        sums_stride);
}

// Element `index` of what is stored at `from`.
inline float stored_element(Singles, const float *from, int index) { return from[index]; }
inline float stored_element(Singles, const Bf16 *from, int index) { return to_float(from[index]); }
inline uint32_t stored_element(Pairs, const Bf16 *from, int index) {
    uint32_t pair;
    std::memcpy(&pair, from + 2 * index, sizeof pair);
    return pair;
}

// Values of two keys, or of one, as the elements that products with probabilities take.
inline void pack_value(Singles, const float *value, const float *, int columns, float *to) {
    std::copy_n(value, columns, to);
}
inline void pack_value(Singles, const Bf16 *value, const Bf16 *, int columns, float *to) {
    for (int column = 0; column < columns; ++column) to[column] = to_float(value[column]);
}
inline void pack_value(Pairs, const Bf16 *value, const Bf16 *next, int columns, uint32_t *to) {
    for (int column = 0; column < columns; ++column)
        to[column] = value[column].bits | static_cast<uint32_t>(next[column].bits) << 16;
}

// Probabilities as the elements that products take.
inline const float *pack_probabilities(Singles, const float *scores, int, float *) {
    return scores;
}
inline const uint32_t *pack_probabilities(Pairs, const float *scores, int count, uint32_t *to) {
    for (int index = 0; index < count; index += LANES)
        store(reinterpret_cast<Bf16 *>(to) + index, load(scores + index));
    return to;
}

template <class Product, class Query, class Stored>
class BlockAttention {
  public:
    BlockAttention(const Attention &call, const Task &task)
        : call(call), task(task), sequence(call, task), head_dim(call.pool.head_dim),
          elements(head_dim / Product::WIDTH), columns(round_up(head_dim, LANES)),
          rows(task.tokens * task.heads) {}

    void attend() {
        [[maybe_unused]] const std::conditional_t<IN_TILES, TilesShape, std::nullptr_t> shape = {};
        pack_queries();
        std::fill_n(out, round_up(rows, ROWS) * columns, 0.0f);
        if (columns != head_dim) std::fill(std::begin(values), std::end(values), Element());
        const int end = task.position + task.tokens;
        int first = call.first_key(task.position) / KEY_BLOCK * KEY_BLOCK;
        for (; first < end; first += KEY_BLOCK)
            attend_keys(first, std::min(KEY_BLOCK, end - first));
        for (int row = 0; row < rows; ++row)
            write_out<Query>(call, task, row / task.heads, row % task.heads, out + row * columns,
                             1 / softmax[row].sum);
    }

  private:
    using Element = typename Product::Element;
    static constexpr bool IN_TILES = std::is_same_v<Product, Tiles>;
    // Of one product: rows, and keys that are summed over at once.
    static constexpr int ROWS = IN_TILES ? TILES_ROWS : TILE_ROWS;
    static constexpr int KEYS = IN_TILES ? TILES_DEPTH * Product::WIDTH : Product::WIDTH;
    // Rows that meet the keys before they meet the values, so that either stays in L1 meanwhile.
    static constexpr int SCORED_ROWS = IN_TILES ? ROWS : 4 * ROWS;
    static_assert(BLOCK_ROWS % ROWS == 0 && KEY_BLOCK % KEYS == 0);
    static constexpr int PROBABILITIES = KEY_BLOCK / Product::WIDTH;  // elements of a row's

    void pack_queries() {
        for (int row = 0; row < rows; ++row) {
            const Query *from = query_of<Query>(call, task, row / task.heads, row % task.heads);
            for (int index = 0; index < elements; ++index)
                queries[row * elements + index] = stored_element(Product(), from, index);
        }
        const int padded = round_up(rows, ROWS);
        std::fill(queries + rows * elements, queries + padded * elements, Element());
    }

    void attend_keys(int first, int count) {
        pack_keys(first, count);
        const int turns = (rows + SCORED_ROWS - 1) / SCORED_ROWS;
        const int share = (KEY_BLOCK + turns - 1) / turns;  // of the next block's keys
        for (int turn = 0; turn < turns; ++turn) {
            prefetch_keys(first + KEY_BLOCK + turn * share, share);
            attend_rows(turn * SCORED_ROWS, first);
        }
    }

    void prefetch_keys(int first, int count) const {
        const int bytes = head_dim * static_cast<int>(sizeof(Stored));
        const int end = std::min(first + count, task.position + task.tokens);
        for (int position = first; position < end; ++position) {
            const Stored *key = sequence.key(position);
            prefetch(reinterpret_cast<const char *>(key), bytes);
            prefetch(reinterpret_cast<const char *>(key + sequence.pages.to_value()), bytes);
        }
    }

    // Positions that a row sees, relative to the block of keys that begins at `first`.
    int visible_end(int row, int first) const {
        return std::min(task.position + row / task.heads + 1 - first, KEY_BLOCK);
    }
    int visible_begin(int row, int first) const {
        return std::max(call.first_key(task.position + row / task.heads) - first, 0);
    }

    // How many of the block's keys some of a tile's rows see.
    int tile_end(int tile, int first) const {
        const int last_row = std::min(tile + ROWS, rows) - 1;
        const int end = visible_end(last_row, first);
        return end > visible_begin(tile, first) ? end : 0;
    }

    void attend_rows(int first_row, int first) {
        alignas(VECTOR_BYTES) float scores[SCORED_ROWS * KEY_BLOCK];
        const int end_row = std::min(first_row + SCORED_ROWS, rows);
        score_rows(first_row, end_row, first, scores);
        for (int row = first_row; row < end_row; ++row)
            raise_row(row, first, scores + (row - first_row) * KEY_BLOCK);
        for (int row = first_row; row < end_row; ++row)
            exponentiate_row(row, first, scores + (row - first_row) * KEY_BLOCK);
        add_rows(first_row, end_row, first, scores);
    }

    // Panel by panel, so that it stays in L1 for all rows.
    void score_rows(int first_row, int end_row, int first, float *scores) const {
        for (int column = 0; column < KEY_BLOCK; column += TILE_COLUMNS)
            for (int tile = first_row; tile < end_row; tile += ROWS) {
                const int seen = round_up(tile_end(tile, first), LANES) - column;
                if (seen <= 0) continue;
                multiply<Product, Sums::FRESH>(
                    queries + tile * elements, elements, keys + column * elements, elements,
                    std::min(seen, TILE_COLUMNS), scores + (tile - first_row) * KEY_BLOCK + column,
                    KEY_BLOCK);
            }
    }

    void add_rows(int first_row, int end_row, int first, const float *scores) {
        alignas(VECTOR_BYTES) Element packed[SCORED_ROWS * PROBABILITIES];
        const int count = round_up(end_row - first_row, ROWS) * KEY_BLOCK;
        const Element *probabilities = pack_probabilities(Product(), scores, count, packed);
        for (int column = 0; column < columns; column += TILE_COLUMNS)
            for (int tile = first_row; tile < end_row; tile += ROWS) {
                const int seen = tile_end(tile, first);
                if (seen == 0) continue;
                multiply<Product, Sums::ADDED>(
                    probabilities + (tile - first_row) * PROBABILITIES, PROBABILITIES,
                    values + column * PROBABILITIES, round_up(seen, KEYS) / Product::WIDTH,
                    std::min(columns - column, TILE_COLUMNS), out + tile * columns + column,
                    columns);
            }
    }

    void raise_row(int row, int first, float *scores) {
        const int begin = visible_begin(row, first), end = visible_end(row, first);
        if (begin >= end) return;
        const float factor = raise_maximum(call, scores, begin, end, softmax[row]);
        if (factor != 1) multiply_by(out + row * columns, columns, factor);
    }

    // Probabilities are 0 as far as other rows of the tile see keys, and as products take them.
    void exponentiate_row(int row, int first, float *scores) {
        const int tile_keys = round_up(tile_end(row - row % ROWS, first), std::max(LANES, KEYS));
        const int begin = visible_begin(row, first), end = visible_end(row, first);
        const int filled = begin < end ? round_up(end, LANES) : 0;
        if (filled) take_exponentials(call, scores, end, softmax[row]);
        if (filled < tile_keys) std::fill(scores + filled, scores + tile_keys, 0.0f);
    }

    void pack_keys(int first, int count) {
        static const Stored NOTHING[HEAD_DIM_MAX] = {};
        const Stored *key[KEY_BLOCK], *value[KEY_BLOCK];
        for (int index = 0; index < KEY_BLOCK; ++index) {
            key[index] = index < count ? sequence.key(first + index) : NOTHING;
            value[index] = index < count ? key[index] + sequence.pages.to_value() : NOTHING;
        }
        for (int index = 0; index < KEY_BLOCK; index += LANES) transpose_keys(key + index, index);
        const int packed = round_up(count, KEYS);
        for (int column = 0; column < head_dim; column += TILE_COLUMNS) {
            Element *to = values + column * PROBABILITIES;
            const int width = std::min(head_dim - column, TILE_COLUMNS);
            for (int index = 0; index < packed; index += Product::WIDTH, to += TILE_COLUMNS)
                pack_value(Product(), value[index] + column,
                           value[index + Product::WIDTH - 1] + column, width, to);
        }
    }

    // LANES keys become columns [column, …) of `keys`.
    void transpose_keys(const Stored *const *key, int column) {
        const int within = column % TILE_COLUMNS;
        Element *to = keys + (column - within) * elements + within;
        int element = 0;
        for (; element + LANES <= elements; element += LANES) {
            Floats tile[LANES];
            for (int i = 0; i < LANES; ++i)
                tile[i] = reinterpret_cast<Floats>(
                    Product::load_stored(key[i] + element * Product::WIDTH));
            transpose(tile);
            for (int i = 0; i < LANES; ++i)
                std::memcpy(to + (element + i) * TILE_COLUMNS, &tile[i], sizeof tile[i]);
        }
        for (; element < elements; ++element)
            for (int i = 0; i < LANES; ++i)
                to[element * TILE_COLUMNS + i] = stored_element(Product(), key[i], element);
    }

    const Attention &call;
    const Task &task;
    const Sequence<Stored> sequence;
    const int head_dim, elements, columns, rows;
    Softmax softmax[BLOCK_ROWS];
    alignas(VECTOR_BYTES) Element queries[BLOCK_ROWS * HEAD_DIM_MAX / Product::WIDTH];
    alignas(VECTOR_BYTES) float out[BLOCK_ROWS * HEAD_DIM_MAX];
    // Panels of [element][key], and of [key or pair of keys][column], 0 past head_dim.
    alignas(VECTOR_BYTES) Element keys[HEAD_DIM_MAX / Product::WIDTH * KEY_BLOCK];
    alignas(VECTOR_BYTES) Element values[PROBABILITIES * HEAD_DIM_MAX];
};
