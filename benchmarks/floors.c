// What this processor can do at most: read memory, multiply and add. Compiled by floors.py for the
// machine it runs on; the caller's threads each call it, and it takes no time itself.
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
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
// The same with dot products of pairs of bfloat16, summed in float. All are ones, so that the sums
// count them; they start apart, or the compiler would take one for all.
static float dot_products(int64_t rounds) {
    __m512 sums[ACCUMULATORS];
    const __m512bh factor = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int j = 0; j < ACCUMULATORS; j++) sums[j] = _mm512_set1_ps((float)j);
    for (int64_t round = 0; round < rounds; round++) {
        for (int j = 0; j < ACCUMULATORS; j++)
            sums[j] = _mm512_dpbf16_ps(sums[j], factor, factor);
    }
    float total = 0;
    for (int j = 0; j < ACCUMULATORS; j++) total += _mm512_reduce_add_ps(sums[j]);
    return total;
}

#ifdef __AMX_BF16__
// Of 16 rows of 64 bytes: 16 x 16 sums, each of 32 products. Four wait for none: 52 cycles of
// latency, a product every 16.
enum { TILES = 4, TILE_ROWS = 16, TILE_BYTES = 64, TILE_SUMS = 256, TILE_DEPTH = 32 };

struct shape {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

static int has_tiles;

// Linux must be asked for the registers, once for the whole process. Here, as this is loaded: so
// what runs and what is counted cannot differ.
__attribute__((constructor)) static void ask_for_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    has_tiles = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static void load_shape(const struct shape *shape) {
    __asm__ volatile("" : : "m"(*shape));  // the intrinsic does not say that it reads all of it
    _tile_loadconfig(shape);
}

// Products of tiles of ones. This thread's shape of before is put back: oneDNN has its own there.
static float tile_products(int64_t rounds) {
    struct shape before, shape = {.palette = 1};
    for (int tile = 0; tile < TILES + 2; tile++)
        shape.rows[tile] = TILE_ROWS, shape.row_bytes[tile] = TILE_BYTES;
    uint16_t ones[TILE_ROWS * TILE_DEPTH];
    float sums[TILES][TILE_SUMS], total = 0;
    for (int i = 0; i < TILE_ROWS * TILE_DEPTH; i++) ones[i] = 0x3f80;
    _tile_storeconfig(&before);
    load_shape(&shape);  // and all sums are zero
    __asm__ volatile("" : : "m"(ones));  // as above
    _tile_loadd(4, ones, TILE_BYTES);
    _tile_loadd(5, ones, TILE_BYTES);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums[0], TILE_BYTES);
    _tile_stored(1, sums[1], TILE_BYTES);
    _tile_stored(2, sums[2], TILE_BYTES);
    _tile_stored(3, sums[3], TILE_BYTES);
    if (before.palette)
        load_shape(&before);
    else
        _tile_release();
    for (int tile = 0; tile < TILES; tile++)
        for (int i = 0; i < TILE_SUMS; i++) total += sums[tile][i];
    return total;
}
#else
enum { has_tiles = 0, TILES = 0, TILE_SUMS = 0, TILE_DEPTH = 0 };
static float tile_products(int64_t rounds) { return (float)rounds; }
#endif

// Whether the next two are of AMX products.
int floors_has_tiles(void) { return has_tiles; }

float floors_bfloat16(int64_t rounds) {
    return has_tiles ? tile_products(rounds) : dot_products(rounds);
}

double floors_bfloat16_flops(int64_t rounds) {
    if (has_tiles) return 2.0 * rounds * TILES * TILE_SUMS * TILE_DEPTH;
    return 2 * floors_float_flops(rounds);
}
#endif
