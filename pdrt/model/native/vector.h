// Vectors of float as wide as the instruction set has them, as GCC's vector extensions: operators
// work on all lanes, and wider vectors than the processor's are split by the compiler, so that
// every width can be tested on every processor. A condition `a < b` gives Ints, -1 for true, and
// `condition ? x : y` chooses by lane.
//
// Arithmetic is float's alone; bfloat16 is a format in memory, converted when loaded and stored.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(PDRT_VECTOR_BYTES)  // a test's
constexpr int VECTOR_BYTES = PDRT_VECTOR_BYTES;
#elif defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif

constexpr int LANES = VECTOR_BYTES / static_cast<int>(sizeof(float));

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfWords __attribute__((vector_size(VECTOR_BYTES / 2)));

struct Bf16 {
    uint16_t bits;
};

inline Floats as_floats(Words bits) { return reinterpret_cast<Floats>(bits); }
inline Floats as_floats(Ints bits) { return reinterpret_cast<Floats>(bits); }
inline Words as_words(Floats values) { return reinterpret_cast<Words>(values); }
inline Ints as_ints(Floats values) { return reinterpret_cast<Ints>(values); }

inline Floats splat(float value) { return value - Floats{}; }

// body(0), …, body(COUNT - 1), each of them with a constant, so that arrays of vectors are kept in
// registers: GCC unrolls loops only after it has decided which arrays need memory.
template <class Body, int... INDEX>
inline __attribute__((always_inline)) void unroll(std::integer_sequence<int, INDEX...>, Body body) {
    (body(std::integral_constant<int, INDEX>()), ...);
}
template <int COUNT, class Body>
inline __attribute__((always_inline)) void unroll(Body body) {
    unroll(std::make_integer_sequence<int, COUNT>(), body);
}

// Single values and vectors of both formats; addresses need no alignment.

inline float to_float(float value) { return value; }

inline float to_float(Bf16 stored) {
    const uint32_t bits = static_cast<uint32_t>(stored.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline Floats load(const float *from) {
    Floats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

inline Floats load(const Bf16 *from) {
    HalfWords halves;
    std::memcpy(&halves, from, sizeof halves);
    return as_floats(__builtin_convertvector(halves, Words) << 16);
}

inline Words load_words(const void *from) {
    Words words;
    std::memcpy(&words, from, sizeof words);
    return words;
}

// The numbers of a pair of bfloat16.
inline float first_of(uint32_t pair) { return to_float(Bf16{static_cast<uint16_t>(pair)}); }
inline float second_of(uint32_t pair) { return first_of(pair >> 16); }

inline void store(float *to, Floats values) { std::memcpy(to, &values, sizeof values); }

// Rounds to the nearest, to even if two are as near; NaN stays NaN.
inline void store(Bf16 *to, Floats values) {
    const Words bits = as_words(values);
    const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Words quiet_nan = (bits >> 16) | 0x40;
    const Ints is_nan = values != values;
    const HalfWords halves =
        __builtin_convertvector(is_nan ? quiet_nan : rounded, HalfWords);
    std::memcpy(to, &halves, sizeof halves);
}

inline void store_one(float *to, float value) { *to = value; }

inline void store_one(Bf16 *to, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    const bool is_nan = value != value;
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to->bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// The largest finite number of a format.
constexpr float largest(const float *) { return 3.40282347e38f; }
constexpr float largest(const Bf16 *) { return 3.38953139e38f; }

// As torch.nan_to_num: NaN becomes 0, and what `Stored` cannot hold its largest number.
template <class Stored>
inline Floats finite(Floats values) {
    constexpr float LARGEST = largest(static_cast<const Stored *>(nullptr));
    values = values == values ? values : Floats{};
    values = values > LARGEST ? splat(LARGEST) : values;
    return values < -LARGEST ? splat(-LARGEST) : values;
}

// Lane 0 combines all lanes, the upper half folded onto the lower one, and so on.
template <int HALF, class Combine, int... LANE>
inline Floats fold_halves(Floats values, Combine combine, std::integer_sequence<int, LANE...> all) {
    constexpr Ints SWAPPED = {(LANE ^ HALF)...};
    values = combine(values, __builtin_shuffle(values, SWAPPED));
    if constexpr (HALF > 1) return fold_halves<HALF / 2>(values, combine, all);
    return values;
}

inline float sum_lanes(Floats values) {
    const auto add = [](Floats a, Floats b) { return a + b; };
    return fold_halves<LANES / 2>(values, add, std::make_integer_sequence<int, LANES>())[0];
}

inline float max_lanes(Floats values) {
    return fold_halves<LANES / 2>(values, maximum, std::make_integer_sequence<int, LANES>())[0];
}

// 0, 1, 2, …
template <int... LANE>
constexpr Ints lane_numbers(std::integer_sequence<int, LANE...>) {
    return Ints{LANE...};
}

// 2^power * e^rest as the range reduction of e^x gives them, for x in [-86.9, 89], times
// 2^-EXTRA. Reduction and polynomial are those of Cephes' expf (Moshier, 1992).
template <int EXTRA>
inline Floats reduced_exponential(Floats x) {
    constexpr float LOG2_E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    constexpr float ROUNDER = 12582912.0f;  // 1.5 * 2^23: leaves an integer in the low bits
    const Floats shifted = x * LOG2_E + ROUNDER;
    const Floats power = shifted - ROUNDER;
    const Floats rest = (x - power * LN2_HIGH) - power * LN2_LOW;
    Floats sum = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * (rest * rest) + rest + 1.0f;
    constexpr int BIAS = 127 - EXTRA;
    return sum * as_floats((as_ints(shifted) - (as_ints(splat(ROUNDER)) - BIAS)) << 23);
}

constexpr float EXPONENT_MIN = -86.9f;  // below, e^x is no normal number, and here 0

// e^x within about 1.5 units in the last place; 0 below -86.9, infinity where a float ends.
inline Floats exponential(Floats x) {
    constexpr float LARGEST = 89.0f;
    const Floats bounded = x > LARGEST ? splat(LARGEST) : x;
    const Floats half = reduced_exponential<1>(bounded);  // 2^128 is none of a float
    return x < EXPONENT_MIN ? Floats{} : half + half;
}

// The same for x <= 0.
inline Floats exponential_below_one(Floats x) {
    const Floats result = reduced_exponential<0>(x);
    return x < EXPONENT_MIN ? Floats{} : result;
}

// tanh(x) within a few units in the last place, near 0 as well. After Cephes' tanhf.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats size = x < 0 ? -x : x;
    const Floats square = x * x;
    Floats small = -5.70498872745e-3f * square + 2.06390887954e-2f;
    small = small * square - 5.37397155531e-2f;
    small = small * square + 1.33314422036e-1f;
    small = small * square - 3.33332819422e-1f;
    small = small * square * x + x;
    const Floats large = 1.0f - 2.0f / (exponential(size + size) + 1.0f);
    return size < 0.625f ? small : (x < 0 ? -large : large);
}

// One round of a transposition: in every pair of rows STEP apart, exchange the blocks of STEP lanes
// that are off the diagonal.
template <int STEP, int... LANE>
inline void exchange_blocks(Floats (&rows)[LANES], std::integer_sequence<int, LANE...>) {
    constexpr Ints UPPER = {(LANE & STEP ? LANES + LANE - STEP : LANE)...};
    constexpr Ints LOWER = {(LANE & STEP ? LANES + LANE : LANE + STEP)...};
#pragma GCC unroll 16
    for (int row = 0; row < LANES; ++row) {
        if (row & STEP) continue;
        const Floats first = rows[row], second = rows[row + STEP];
        rows[row] = __builtin_shuffle(first, second, UPPER);
        rows[row + STEP] = __builtin_shuffle(first, second, LOWER);
    }
}

// Rows become columns.
template <int STEP = LANES / 2>
inline void transpose(Floats (&rows)[LANES]) {
    exchange_blocks<STEP>(rows, std::make_integer_sequence<int, LANES>());
    if constexpr (STEP > 1) transpose<STEP / 2>(rows);
}

// Lanes that are added up when the sums of rows are gathered. Rows of `step` sums each become one
// of twice as many: within blocks of four lanes, which are cheap to mix, then block by block.
constexpr int folded_lane(int step, int lane, bool is_second) {
    if (step < 4) {
        const int block = lane & ~3, of_row = (lane & 1) * 2 + (is_second ? 1 : 0);
        return (lane & 2 ? LANES : 0) + block + of_row;
    }
    return (lane & step ? LANES : 0) + (lane & ~step) + (is_second ? step : 0);
}

template <int STEP, int... LANE>
inline Floats fold(Floats first, Floats second, std::integer_sequence<int, LANE...>) {
    constexpr Ints KEPT = {folded_lane(STEP, LANE, false)...};
    constexpr Ints ADDED = {folded_lane(STEP, LANE, true)...};
    return __builtin_shuffle(first, second, KEPT) + __builtin_shuffle(first, second, ADDED);
}

// Lane i is the sum of rows[i]'s lanes, where COUNT is LANES and STEP 1. Fewer rows are summed up
// in part: the results of LANES / COUNT such calls, folded with STEP = COUNT, give the same.
template <int STEP, int COUNT>
inline Floats sum_rows(const Floats *rows) {
    if constexpr (COUNT == 1) {
        return rows[0];
    } else {
        constexpr int HALF = COUNT / 2;
        return fold<STEP * HALF>(sum_rows<STEP, HALF>(rows), sum_rows<STEP, HALF>(rows + HALF),
                                 std::make_integer_sequence<int, LANES>());
    }
}

constexpr int round_up(int count, int multiple) {
    return (count + multiple - 1) / multiple * multiple;
}

constexpr int CACHE_LINE_BYTES = 64;

// Asks for memory before it is needed, into L2: L1 is small. Addresses need not be valid.
inline void prefetch(const char *line, int bytes) {
    asm volatile("");  // GCC would drop a function that does nothing else
    for (int offset = 0; offset < bytes; offset += CACHE_LINE_BYTES)
        __builtin_prefetch(line + offset, 0, 2);
}
