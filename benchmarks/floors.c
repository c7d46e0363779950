// What this processor can do at most: read memory, multiply and add. Compiled by floors.py for the
// machine it runs on; the caller's threads each call it, and it takes no time itself.
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { VECTOR_BYTES = 64 };
#elif defined(__AVX__)
enum { VECTOR_BYTES = 32 };
#else
enum { VECTOR_BYTES = 16 };
#endif
enum { FLOATS = VECTOR_BYTES / 4 };

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t words __attribute__((vector_size(VECTOR_BYTES)));

// More than latency times units (4 cycles, 2 units), and with both factors still in 16 registers.
enum { ACCUMULATORS = 10, READERS = 4 };

// Reads `size` bytes once; 64-byte aligned, a multiple of 4 vectors. What it returns keeps the
// compiler from leaving it out.
uint64_t floors_read(const void *memory, size_t size) {
    const words *at = memory;
    words sums[READERS];
    memset(sums, 0, sizeof sums);
    for (size_t i = 0; i < size / VECTOR_BYTES; i += READERS)
        for (int j = 0; j < READERS; j++) sums[j] += at[i + j];
    words sum = sums[0] + sums[1] + sums[2] + sums[3];
    uint64_t total = 0;
    for (int i = 0; i < VECTOR_BYTES / 8; i++) total += sum[i];
    return total;
}

// `rounds` float multiply-adds (one instruction under -ffp-contract=fast) on each accumulator.
// Operations: floors_float_flops(rounds).
float floors_float(int64_t rounds) {
    vector sums[ACCUMULATORS], factor, addend;
    for (int i = 0; i < FLOATS; i++) factor[i] = 0.999f, addend[i] = 0.001f;
    for (int j = 0; j < ACCUMULATORS; j++) sums[j] = addend * (float)j;
    for (int64_t round = 0; round < rounds; round++) {
        for (int j = 0; j < ACCUMULATORS; j++) sums[j] = sums[j] * factor + addend;
    }
    float total = 0;
    for (int j = 0; j < ACCUMULATORS; j++)
        for (int i = 0; i < FLOATS; i++) total += sums[j][i];
    return total;
}

double floors_float_flops(int64_t rounds) { return 2.0 * rounds * ACCUMULATORS * FLOATS; }

#ifdef __AVX512BF16__
// The same with dot products of pairs of bfloat16, summed in float.
float floors_bfloat16(int64_t rounds) {
    __m512 sums[ACCUMULATORS];
    const __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3c00);  // small enough to stay finite
    for (int j = 0; j < ACCUMULATORS; j++) sums[j] = _mm512_set1_ps((float)j);
    for (int64_t round = 0; round < rounds; round++) {
        for (int j = 0; j < ACCUMULATORS; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], factor, factor);
    }
    float total = 0;
    for (int j = 0; j < ACCUMULATORS; j++) total += _mm512_reduce_add_ps(sums[j]);
    return total;
}

double floors_bfloat16_flops(int64_t rounds) { return 2 * floors_float_flops(rounds); }
#endif
