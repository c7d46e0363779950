// Products of bfloat16 in AMX's registers: blocks of 32 × 32 sums, of four tiles each.
//
// The registers need leave from Linux, once a process (pdrt_enable), and their shape on each thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vector.h"

constexpr int TILES_ROWS = 32, TILES_COLUMNS = 32;
// Pairs of numbers that are multiplied at once: so many, and multiples of it, can be summed over.
constexpr int TILES_DEPTH = 16;
// Of rows and panels. A tile's row that is spread over two cache lines takes several times as long.
constexpr int TILES_ALIGNMENT = 64;

// What is fetched meanwhile, a part with each step of TILES_DEPTH.
struct TilesAhead {
    const char *from = nullptr;
    int step_bytes = 0;
};

#if defined(__AMX_BF16__)

// While it lives, this thread's registers are tiles of 16 rows of 64 bytes. Afterwards they have
// the shape of before: oneDNN uses them on the same threads.
class TilesShape {
  public:
    TilesShape() {
        _tile_storeconfig(&before);
        Config tiles = {};
        tiles.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            tiles.row_bytes[tile] = 64;
            tiles.rows[tile] = 16;
        }
        load(tiles);
    }
    ~TilesShape() {
        if (before.palette)
            load(before);
        else
            _tile_release();
    }
    TilesShape(const TilesShape &) = delete;

  private:
    struct alignas(64) Config {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static void load(const Config &config) {
        asm volatile("" : : "m"(config));  // the intrinsic does not say that it reads memory
        _tile_loadconfig(&config);
    }

    Config before;
};

// sums[row][column] = or += the sum over `depth`, a multiple of TILES_DEPTH, of the products of
// a[row][k] and panel[k][column], each a pair. ROWS is 32, or 16: then the others are left alone.
// Strides count elements. Inside a TilesShape.
template <bool ADDED, int ROWS = TILES_ROWS>
void multiply_tiles(const uint32_t *a, ptrdiff_t a_stride, const uint32_t *panel,
                    ptrdiff_t panel_stride, int depth, float *sums, ptrdiff_t sums_stride,
                    TilesAhead ahead = {}) {
    constexpr int HALF = 16;
    constexpr bool BOTH = ROWS == TILES_ROWS;
    static_assert(BOTH || ROWS == HALF);
    const ptrdiff_t a_bytes = a_stride * 4, panel_bytes = panel_stride * 4;
    const ptrdiff_t sums_bytes = sums_stride * 4;
    float *const lower = sums + HALF * sums_stride;
    asm volatile("" : : : "memory");  // as above
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if constexpr (ADDED) {
        _tile_loadd(0, sums, sums_bytes);
        _tile_loadd(1, sums + HALF, sums_bytes);
        if constexpr (BOTH) _tile_loadd(2, lower, sums_bytes);
        if constexpr (BOTH) _tile_loadd(3, lower + HALF, sums_bytes);
    }
    for (int k = 0; k < depth; k += TILES_DEPTH) {
        const uint32_t *columns = panel + k * panel_stride;
        prefetch(ahead.from, ahead.step_bytes);
        ahead.from += ahead.step_bytes;
        // Rows come and go, and do not push the panel out of L1.
        _tile_stream_loadd(4, a + k, a_bytes);
        _tile_loadd(6, columns, panel_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, columns + HALF, panel_bytes);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            _tile_stream_loadd(5, a + HALF * a_stride + k, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sums_bytes);
    _tile_stored(1, sums + HALF, sums_bytes);
    if constexpr (BOTH) _tile_stored(2, lower, sums_bytes);
    if constexpr (BOTH) _tile_stored(3, lower + HALF, sums_bytes);
    asm volatile("" : : : "memory");
}

#else  // for tests, and as its meaning

struct TilesShape {};

template <bool ADDED, int ROWS = TILES_ROWS>
void multiply_tiles(const uint32_t *a, ptrdiff_t a_stride, const uint32_t *panel,
                    ptrdiff_t panel_stride, int depth, float *sums, ptrdiff_t sums_stride,
                    TilesAhead = {}) {
    for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < TILES_COLUMNS; ++column) {
            float sum = ADDED ? sums[row * sums_stride + column] : 0;
            for (int k = 0; k < depth; ++k) {
                const uint32_t x = a[row * a_stride + k], y = panel[k * panel_stride + column];
                sum += first_of(x) * first_of(y);
                sum += second_of(x) * second_of(y);
            }
            sums[row * sums_stride + column] = sum;
        }
}

#endif

#if defined(__AMX_BF16__) || defined(PDRT_EMULATE_TILES)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
