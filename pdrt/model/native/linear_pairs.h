// Linear layers of bfloat16 throughout, in AMX's registers (tiles.h). Few rows (decode) are bound by
// memory here too; many go past one panel of weights after another, which stays in L1.
//
// Weights are packed in panels of [pair of inputs][PANEL]: a word holds an output's weights of both.
// Every element of the output is one sum along the inputs, in order: a row's result is the same to
// the bit in whatever batch it is computed, and with however many threads.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "panel.h"
#include "products.h"
#include "tiles.h"

// There are vectors as wide as a tile, and layers whose inputs fill whole ones.
constexpr bool HAS_PAIR_LAYERS = PANEL == TILES_COLUMNS;
constexpr int PAIR_INPUTS = TILES_DEPTH * Pairs::WIDTH;
// What a single block of rows asks for ahead of the panel that it reads.
constexpr int STREAM_AHEAD = 16384;

inline void round_pair(Bf16 *to, const Pair &sums) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(sums.high),
                                              reinterpret_cast<__m512>(sums.low));
    std::memcpy(to, &both, sizeof both);
#else
    store(to, sums.low);
    store(to + LANES, sums.high);
#endif
}

struct PairLayer : LayerCall<Bf16> {
    int pairs() const { return inputs / Pairs::WIDTH; }
    // There may be no such panel: for prefetching.
    const uint32_t *panel(int index) const {
        const int64_t words = static_cast<int64_t>(pairs()) * PANEL;
        return static_cast<const uint32_t *>(packed) + index * words;
    }
    const Bf16 *row(int index) const { return x + index * x_stride; }

    // Stores what a row and a panel give.
    void put(int row, int index, const Pair &sums) const {
        Bf16 *to = out + row * out_stride + index * PANEL;
        if (width(index) == PANEL) return round_pair(to, sums);
        Bf16 padded[PANEL];
        round_pair(padded, sums);
        std::copy_n(padded, width(index), to);
    }
};

// ROWS rows from `first` on, or fewer, which are in `padded` then with others that do not count.
template <int ROWS>
void multiply_rows(const PairLayer &layer, int first, int index, const Bf16 *padded,
                   TilesAhead ahead) {
    alignas(TILES_ALIGNMENT) float sums[ROWS * PANEL], start[PANEL];
    const int count = std::min(ROWS, layer.rows - first);
    const Bf16 *x = padded == nullptr ? layer.row(first) : padded;
    const int64_t stride = padded == nullptr ? layer.x_stride : layer.inputs;
    multiply_tiles<false, ROWS>(reinterpret_cast<const uint32_t *>(x), stride / Pairs::WIDTH,
                                layer.panel(index), PANEL, layer.pairs(), sums, PANEL, ahead);
    layer.fill_start(index, 1, start);
    const Pair bias = load_pair(start);
    for (int row = 0; row < count; ++row) {
        const Pair pair = load_pair(sums + row * PANEL);
        layer.put(first + row, index, {pair.low + bias.low, pair.high + bias.high});
    }
}

// The last `count` rows, which fill no block of tiles, and zeros; none where there are none.
class PaddedRows {
  public:
    PaddedRows(const PairLayer &layer, int count) {
        if (count == 0) return;
        const int block = count > TILES_ROWS / 2 ? TILES_ROWS : TILES_ROWS / 2;
        const size_t numbers = static_cast<size_t>(block) * layer.inputs;
        rows = static_cast<Bf16 *>(std::aligned_alloc(TILES_ALIGNMENT, numbers * sizeof(Bf16)));
        Bf16 *to = rows;
        for (int row = layer.rows - count; row < layer.rows; ++row)
            to = std::copy_n(layer.row(row), layer.inputs, to);
        std::fill(to, rows + numbers, Bf16());
    }
    ~PaddedRows() { std::free(rows); }
    PaddedRows(const PaddedRows &) = delete;

    Bf16 *rows = nullptr;
};

// All rows against the panels [first, end). The rows of one panel fetch the next one; few of them
// wait for memory, and fetch further ahead.
inline void compute_panels(const PairLayer &layer, int first, int end) {
    [[maybe_unused]] const TilesShape shape = {};
    const int left = layer.rows % TILES_ROWS, whole = layer.rows - left;
    const PaddedRows padded(layer, left);
    const int step_bytes = TILES_DEPTH * PANEL * 4, steps = layer.pairs() / TILES_DEPTH;
    const int blocks = ceil_div(layer.rows, TILES_ROWS);
    const int share = round_up(ceil_div(step_bytes, blocks), CACHE_LINE_BYTES);
    for (int panel = first; panel < end; ++panel) {
        const char *from = blocks == 1
                               ? reinterpret_cast<const char *>(layer.panel(panel)) + STREAM_AHEAD
                               : reinterpret_cast<const char *>(layer.panel(panel + 1));
        for (int row = 0; row < whole; row += TILES_ROWS) {
            multiply_rows<TILES_ROWS>(layer, row, panel, nullptr, {from, share});
            from += share * steps;
        }
        if (left > TILES_ROWS / 2)
            multiply_rows<TILES_ROWS>(layer, whole, panel, padded.rows, {from, share});
        else if (left)
            multiply_rows<TILES_ROWS / 2>(layer, whole, panel, padded.rows, {from, share});
    }
}
