// How weights of linear layers are packed: panels of PANEL outputs, [panel][input][PANEL], so that
// one step along the inputs reads two vectors of weights.
#pragma once

#include <algorithm>

#include "vector.h"

constexpr int PANEL = 2 * LANES;

// Multiplications, or elements to move, that are worth another thread: tens of microseconds.
constexpr int64_t THREAD_WORK = 1 << 18;

struct Pair {
    Floats low, high;
};

inline Pair load_pair(const float *from) { return {load(from), load(from + LANES)}; }

// A word holds an output of the first vector in its lower half and one of the second in its upper.
inline Pair load_pair(const Bf16 *from) {
    const Words words = load_words(from);
    return {as_floats(words << 16), as_floats(words & 0xffff0000u)};
}

inline void store_pair(float *to, const Pair &pair) {
    store(to, pair.low);
    store(to + LANES, pair.high);
}

// Where output `column` of a panel lies within a step.
constexpr int position(const float *, int column) { return column; }
constexpr int position(const uint32_t *, int column) { return column; }
constexpr int position(const Bf16 *, int column) { return column % LANES * 2 + column / LANES; }

constexpr int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// One call of pdrt_linear, whose x and out are of `Number`.
template <class Number>
struct LayerCall {
    const void *packed;
    const float *bias;  // may be null
    const Number *x;
    int64_t x_stride;
    Number *out;
    int64_t out_stride;
    int32_t rows, inputs, outputs;

    int panels() const { return ceil_div(outputs, PANEL); }
    int width(int panel) const { return std::min(PANEL, outputs - panel * PANEL); }

    // What the sums of `count` panels begin with: their bias, padded with zeros.
    void fill_start(int panel, int count, float *start) const {
        std::fill_n(start, count * PANEL, 0.0f);
        if (bias == nullptr) return;
        const int width = std::min(count * PANEL, outputs - panel * PANEL);
        std::copy_n(bias + panel * PANEL, width, start);
    }
};
