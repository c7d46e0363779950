// The innermost part of a linear layer: some rows times one panel of weights or a few.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "panel.h"

// Rows of a tile: two accumulators for each of them leave a few registers over.
constexpr int TILE_ROWS = VECTOR_BYTES == 64 ? 12 : 6;
// Panels that are streamed at once: with more, the memory delivers no more.
constexpr int STREAMS = 4;

// Some rows of x against one panel or a few, or against a chunk of their inputs.
template <class Weight>
struct Tile {
    const Weight *panel;
    int64_t panel_stride;  // elements from one panel to the next
    int32_t depth;         // inputs
    const float *x;
    int64_t x_stride;    // from row to row; of no meaning for rows that are packed
    const float *start;  // what the sums begin with, per output; null: with what `out` holds
    float *out;
    int64_t out_stride;
    const char *ahead;   // what to prefetch meanwhile, where there is one panel
    int64_t ahead_step;  // so many bytes of it per input
};

// How the weights of a tile are used, which decides what is fetched ahead, and how.
enum class Use {
    STREAMED,  // once: several panels at a time, or one while the next is fetched at several places
    SHARED,    // by a few tiles, each of which fetches its share of what is next
    BLOCKED,   // likewise by many, whose rows are packed: [input][row]
};

// A single stream is fetched at so many places at once.
constexpr int PLACES = 4;

// What step k of a tile fetches ahead.
template <Use USE, class Weight>
inline const char *ahead_of(const Tile<Weight> &tile, int k, int64_t place) {
    if constexpr (USE == Use::STREAMED)
        return tile.ahead + k % PLACES * place + k / PLACES * tile.ahead_step;
    else
        return tile.ahead + k * tile.ahead_step;
}

template <Use USE, class Weight, int ROWS, int PANELS>
inline __attribute__((always_inline)) void multiply(const Tile<Weight> &tile, int k,
                                                    Pair (&sums)[ROWS][PANELS]) {
    const Weight *weights = tile.panel + static_cast<int64_t>(k) * PANEL;
#pragma GCC unroll 16
    for (int panel = 0; panel < PANELS; ++panel) {
        const Pair pair = load_pair(weights + panel * tile.panel_stride);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
            const float x = tile.x[USE == Use::BLOCKED ? k * ROWS + row
                                                      : row * tile.x_stride + k];
            sums[row][panel].low += pair.low * x;
            sums[row][panel].high += pair.high * x;
        }
    }
}

template <Use USE, class Weight, int ROWS, int PANELS>
void compute(const Tile<Weight> &given) {
    const Tile<Weight> tile = given;  // a copy: stores to `out` cannot change it
    Pair sums[ROWS][PANELS];
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
        for (int panel = 0; panel < PANELS; ++panel) {
            const float *start = tile.start ? tile.start : tile.out + row * tile.out_stride;
            sums[row][panel] = load_pair(start + panel * PANEL);
        }

    const int64_t place = tile.ahead_step * tile.depth / PLACES;
    // Steps are unrolled by the compiler, late: written out here, they get more values into the
    // air than there are registers.
#pragma GCC unroll 4
    for (int k = 0; k < tile.depth; ++k) {
        if constexpr (PANELS == 1) __builtin_prefetch(ahead_of<USE>(tile, k, place), 0, 2);
        multiply<USE>(tile, k, sums);
    }

#pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 16
        for (int panel = 0; panel < PANELS; ++panel)
            store_pair(tile.out + row * tile.out_stride + panel * PANEL, sums[row][panel]);
}

template <class Weight>
using Compute = void (*)(const Tile<Weight> &);

// bfloat16's mask takes a register that another row's accumulators would need.
template <class Weight>
constexpr int streams(int rows) {
    constexpr int ROWS = TILE_ROWS - (sizeof(Weight) < sizeof(float) ? 1 : 0);
    return std::clamp(ROWS / rows, 1, STREAMS);
}

// The kernels by number of rows, from one: for one panel, and for as many as are streamed at once.
template <Use USE, class Weight, int... INDEX>
constexpr std::array<Compute<Weight>, TILE_ROWS> one_panel(std::integer_sequence<int, INDEX...>) {
    return {compute<USE, Weight, INDEX + 1, 1>...};
}
template <class Weight, int... INDEX>
constexpr std::array<Compute<Weight>, TILE_ROWS> streamed(std::integer_sequence<int, INDEX...>) {
    return {compute<Use::STREAMED, Weight, INDEX + 1, streams<Weight>(INDEX + 1)>...};
}
using Indices = std::make_integer_sequence<int, TILE_ROWS>;
template <Use USE, class Weight>
constexpr std::array<Compute<Weight>, TILE_ROWS> ONE_PANEL = one_panel<USE, Weight>(Indices());
template <class Weight>
constexpr std::array<Compute<Weight>, TILE_ROWS> STREAMED = streamed<Weight>(Indices());

// One panel whose last outputs do not exist: through a buffer.
template <Use USE, class Weight>
void compute_edge(Tile<Weight> tile, int rows, int width) {
    alignas(64) float buffer[TILE_ROWS * PANEL] = {};
    float *out = std::exchange(tile.out, buffer);
    const int64_t out_stride = std::exchange(tile.out_stride, PANEL);
    if (!tile.start)
        for (int row = 0; row < rows; ++row)
            std::copy_n(out + row * out_stride, width, buffer + row * PANEL);
    ONE_PANEL<USE, Weight>[rows - 1](tile);
    for (int row = 0; row < rows; ++row)
        std::copy_n(buffer + row * PANEL, width, out + row * out_stride);
}
