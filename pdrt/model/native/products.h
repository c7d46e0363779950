// What is multiplied, and how: vectors of floats, or of pairs of bfloat16.
#pragma once

#include "vector.h"

// Products come in three kinds. `Singles`: floats, whatever the format in memory.
struct Singles {
    using Element = float;
    using Vector = Floats;
    static constexpr int WIDTH = 1;        // numbers in an element
    static constexpr int NUMBERS = LANES;  // in a vector

    static Vector splat_element(Element element) { return splat(element); }
    static Vector load_elements(const Element *from) { return load(from); }
    template <class Stored>
    static Vector load_stored(const Stored *from) { return load(from); }
    static Floats multiply_add(Floats sum, Vector a, Vector b) { return sum + a * b; }
};

// `Halves`: floats again, but of bfloat16 in memory those at even places in one vector and those at
// odd ones in another, which takes an operation each instead of two. In a sum over them all the
// order does not matter, if only both factors have the same one.
struct Halves {
    using Element = float;
    struct Vector {
        Floats even, odd;
    };
    static constexpr int WIDTH = 1;
    static constexpr int NUMBERS = 2 * LANES;

    static Vector load_elements(const Element *from) { return {load(from), load(from + LANES)}; }
    static Vector load_stored(const Bf16 *from) {
        const Words words = load_words(from);
        return {as_floats(words << 16), as_floats(words & 0xffff0000u)};
    }
    static Floats multiply_add(Floats sum, const Vector &a, const Vector &b) {
        return sum + a.even * b.even + a.odd * b.odd;
    }
};

// `Pairs`: two bfloat16 neighbours along the axis that is summed over, where the processor
// multiplies and adds both at once.
struct Pairs {
    using Element = uint32_t;
    using Vector = Words;
    static constexpr int WIDTH = 2;
    static constexpr int NUMBERS = 2 * LANES;

    static Vector splat_element(Element element) { return element - Words{}; }
    static Vector load_elements(const Element *from) { return load_words(from); }
    static Vector load_stored(const Bf16 *from) { return load_words(from); }
#if defined(__AVX512BF16__)
    static Floats multiply_add(Floats sum, Vector a, Vector b) {
        return reinterpret_cast<Floats>(
            _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(a),
                             reinterpret_cast<__m512bh>(b)));
    }
#else
    static Floats multiply_add(Floats sum, Vector a, Vector b) {  // for tests, and as its meaning
        sum += as_floats(a << 16) * as_floats(b << 16);
        return sum + as_floats(a & 0xffff0000u) * as_floats(b & 0xffff0000u);
    }
#endif
};

#if defined(__AVX512BF16__) || defined(PDRT_EMULATE_BF16_PAIRS)
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif
