// How weights of linear layers are packed: panels of PANEL outputs, [panel][input][PANEL], so that
// one step along the inputs reads two vectors of weights.
#pragma once

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
    Words words;
    std::memcpy(&words, from, sizeof words);
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
