// What stands between a decoder's linear layers and attention: norms, rotation, the MLP's gate.
//
// Rows are independent, and each is computed in the same order however many threads there are.
// Arithmetic is float's; results are rounded once, when stored. NaN goes through everything but
// the pool, whose pages must never hold what would spoil another sequence's.
#include <algorithm>
#include <cmath>

#include "kernels.h"
#include "pool.h"
#include "vector.h"

namespace {

// Elements that are worth a second thread: waking it costs some microseconds.
constexpr int64_t THREAD_ELEMENTS = 1 << 15;

constexpr float SQRT_2_OVER_PI = 0.7978845608f;
constexpr float GELU_CUBIC = 0.044715f;

// Call `function` with a value of the type that is meant.
template <class Function>
void with_type(int32_t type, Function function) {
    if (type == PDRT_BF16)
        function(Bf16{});
    else
        function(float{});
}

bool is_type(int32_t type) { return type == PDRT_F32 || type == PDRT_BF16; }

// Vectors at the end of a row: `count` elements are there, or more than a vector has.
template <class T>
inline Floats load_some(const T *from, int count) {
    if (count >= LANES) return load(from);
    T buffer[LANES] = {};
    std::copy_n(from, count, buffer);
    return load(buffer);
}

template <class T>
inline void store_some(T *to, Floats values, int count) {
    if (count >= LANES) return store(to, values);
    T buffer[LANES];
    store(buffer, values);
    std::copy_n(buffer, count, to);
}

// The factor that brings the root of the mean square to 1.
inline float inverse_rms(Floats squares, int width, float epsilon) {
    return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + epsilon);
}

template <class In, class Out>
void scale_row(const In *x, float factor, const float *weight, Out *out, int width) {
    for (int i = 0; i < width; i += LANES) {
        const Floats scaled = load_some(x + i, width - i) * factor;
        store_some(out + i, scaled * load_some(weight + i, width - i), width - i);
    }
}

template <class In, class Out>
void norm_row(const In *x, const float *weight, Out *out, int width, float epsilon) {
    Floats squares = {};
    for (int i = 0; i < width; i += LANES) {
        const Floats values = load_some(x + i, width - i);
        squares += values * values;
    }
    scale_row(x, inverse_rms(squares, width, epsilon), weight, out, width);
}

template <class T>
void add_norm_row(float *residual, const T *add, const float *weight, T *out, int width,
                  float epsilon) {
    Floats squares = {};
    for (int i = 0; i < width; i += LANES) {
        const Floats sum = load_some(residual + i, width - i) + load_some(add + i, width - i);
        store_some(residual + i, sum, width - i);
        squares += sum * sum;
    }
    scale_row(residual, inverse_rms(squares, width, epsilon), weight, out, width);
}

// 2 * sqrt(2 / pi) * (x + 0.044715 x^3): gelu's tanh form is x * sigmoid of this, which is exact
// where 1 + tanh cancels.
inline Floats gelu_exponent(Floats x) {
    return 2.0f * SQRT_2_OVER_PI * (x + GELU_CUBIC * x * x * x);
}

template <int KIND, class T>
void gate_row(const T *gate, const T *up, T *out, int width) {
    for (int i = 0; i < width; i += LANES) {
        const Floats x = load_some(gate + i, width - i);
        const Floats exponent = KIND == PDRT_GELU_TANH ? gelu_exponent(x) : x;
        const Floats activated = x / (1.0f + exponential(-exponent));
        store_some(out + i, activated * load_some(up + i, width - i), width - i);
    }
}

// The two halves of the rotated part of a head, by a token's angles; the rest goes along.
struct Rotation {
    const float *cos, *sin;
    int32_t half, head_dim;
};

template <class From, class To, class Finish>
void rotate_head(const Rotation &by, const From *from, To *to, Finish finish) {
    for (int i = 0; i < by.half; i += LANES) {
        const int count = by.half - i;
        const Floats cos = load_some(by.cos + i, count), sin = load_some(by.sin + i, count);
        const Floats first = load_some(from + i, count);
        const Floats second = load_some(from + by.half + i, count);
        store_some(to + i, finish(first * cos - second * sin), count);
        store_some(to + by.half + i, finish(second * cos + first * sin), count);
    }
    for (int i = 2 * by.half; i < by.head_dim; i += LANES)
        store_some(to + i, finish(load_some(from + i, by.head_dim - i)), by.head_dim - i);
}

// One token's queries, keys and values.
template <class T>
struct Token {
    T *query;
    const T *key, *value;
};

// Where a layer keeps a token.
struct Slot {
    const PdrtPool &pool;
    int32_t layer;
    int64_t page;
    int offset;
};

template <class Stored, class T>
void rope_store_token(const Slot &slot, const Rotation &by, int heads, const Token<T> &token) {
    const auto as_is = [](Floats values) { return values; };
    const Rotation none = {nullptr, nullptr, 0, by.head_dim};
    const Rotation only = {by.cos, by.sin, by.half, 2 * by.half};  // in place: the rest stays
    for (int64_t head = 0; head < heads; ++head) {
        T *query = token.query + head * by.head_dim;
        rotate_head(only, query, query, as_is);
    }
    for (int head = 0; head < slot.pool.kv_heads; ++head) {
        const HeadPages<Stored> pages(slot.pool, slot.layer, head);
        const int64_t from = static_cast<int64_t>(head) * by.head_dim;
        Stored *key = pages.key(slot.page, slot.offset);
        rotate_head(by, token.key + from, key, finite<Stored>);
        rotate_head(none, token.value + from, key + pages.to_value(), finite<Stored>);
    }
}

}  // namespace

extern "C" {

int pdrt_rope_store(const PdrtPool *pool, const PdrtStep *step, int32_t layer, int32_t heads,
                    int32_t type, void *query, int64_t query_stride, const void *key,
                    int64_t key_stride, const void *value, int64_t value_stride, const float *cos,
                    const float *sin, int32_t rotary) {
    if (!is_type(type) || !is_type(pool->type)) return -1;
    if (rotary < 0 || rotary % 2 != 0 || rotary > pool->head_dim) return -1;
    const int32_t half = rotary / 2;
    const int64_t elements =
        static_cast<int64_t>(step->tokens) * (heads + 2 * pool->kv_heads) * pool->head_dim;
    with_type(type, [&](auto zero) {
        using T = decltype(zero);
        with_type(pool->type, [&](auto stored) {
#pragma omp parallel for schedule(static) if (elements > THREAD_ELEMENTS)
            for (int64_t i = 0; i < step->tokens; ++i)
                rope_store_token<decltype(stored)>(
                    {*pool, layer, step->slots[i] / pool->page_size,
                     static_cast<int>(step->slots[i] % pool->page_size)},
                    {cos + i * half, sin + i * half, half, pool->head_dim}, heads,
                    Token<T>{static_cast<T *>(query) + i * query_stride,
                             static_cast<const T *>(key) + i * key_stride,
                             static_cast<const T *>(value) + i * value_stride});
        });
    });
    return 0;
}

void pdrt_head_norm(int32_t type, void *x, int64_t stride, int32_t tokens, int32_t heads,
                    int32_t head_dim, const float *weight, float epsilon) {
    with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const int64_t elements = static_cast<int64_t>(tokens) * heads * head_dim;
#pragma omp parallel for schedule(static) if (elements > THREAD_ELEMENTS)
        for (int64_t token = 0; token < tokens; ++token)
            for (int64_t head = 0; head < heads; ++head) {
                T *row = static_cast<T *>(x) + token * stride + head * head_dim;
                norm_row(row, weight, row, head_dim, epsilon);
            }
    });
}

void pdrt_rms_norm(int32_t x_type, const void *x, const float *weight, int32_t out_type, void *out,
                   int32_t rows, int32_t width, float epsilon) {
    with_type(x_type, [&](auto in) {
        with_type(out_type, [&](auto zero) {
            const auto *from = static_cast<const decltype(in) *>(x);
            auto *to = static_cast<decltype(zero) *>(out);
#pragma omp parallel for schedule(static) if (int64_t{rows} * width > THREAD_ELEMENTS)
            for (int64_t row = 0; row < rows; ++row)
                norm_row(from + row * width, weight, to + row * width, width, epsilon);
        });
    });
}

void pdrt_add_rms_norm(float *residual, int32_t type, const void *add, const float *weight,
                       void *out, int32_t rows, int32_t width, float epsilon) {
    if (add == nullptr)
        return pdrt_rms_norm(PDRT_F32, residual, weight, type, out, rows, width, epsilon);
    with_type(type, [&](auto zero) {
        using T = decltype(zero);
#pragma omp parallel for schedule(static) if (int64_t{rows} * width > THREAD_ELEMENTS)
        for (int64_t row = 0; row < rows; ++row)
            add_norm_row(residual + row * width, static_cast<const T *>(add) + row * width, weight,
                         static_cast<T *>(out) + row * width, width, epsilon);
    });
}

void pdrt_gate(int32_t type, int32_t kind, const void *gate_up, void *out, int32_t rows,
               int32_t width) {
    with_type(type, [&](auto zero) {
        using T = decltype(zero);
        const auto row_of = kind == PDRT_GELU_TANH ? gate_row<PDRT_GELU_TANH, T>
                                                   : gate_row<PDRT_SILU, T>;
#pragma omp parallel for schedule(static) if (int64_t{rows} * width > THREAD_ELEMENTS)
        for (int64_t row = 0; row < rows; ++row) {
            const T *gate = static_cast<const T *>(gate_up) + 2 * row * width;
            row_of(gate, gate + width, static_cast<T *>(out) + row * width, width);
        }
    });
}

}  // extern "C"
