// Linear layers for every number of rows, over weights that are packed once.
//
// Packed weights are panels of PANEL outputs, [panel][input][PANEL], so that one step along the
// inputs reads one cache line of weights and multiplies it with a broadcast element of each row.
//
// Few rows (decode) are bound by memory: panels are streamed once, several at a time where the
// registers allow, since the processor fetches ahead in each of several streams but not far enough
// in one. Many rows (prefill) are bound by arithmetic: blocked so that the rows stay in L2 and a
// chunk of a panel in L1, the rows copied so that a tile's are side by side (Goto and van de Geijn,
// Anatomy of High-Performance Matrix Multiplication, 2008).
//
// Every element of the output is one sum along the inputs, in order, in one float. A row's result
// is therefore the same to the bit in whatever batch it is computed, and with however many threads.
#include <omp.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kernels.h"
#include "vector.h"

namespace {

constexpr int PANEL = 2 * LANES;
// Rows of a tile: two accumulators for each of them leave a few registers over.
constexpr int TILE_ROWS = VECTOR_BYTES == 64 ? 12 : 6;
// Panels that are streamed at once: with more, the memory delivers no more.
constexpr int STREAMS = 4;
// Up to so many tiles of rows, a panel is used so few times that it is streamed, not blocked.
constexpr int STREAMED_TILES = 2;
// Inputs of a chunk: with the rows of a tile it fits into the 32 KB of a small L1 cache.
constexpr int CHUNK = 20480 / (PANEL * static_cast<int>(sizeof(float)));
// Inputs of a block, and elements of x in one (256 KB): half of a small L2 cache.
constexpr int BLOCK = 1024;
constexpr int BLOCK_ELEMENTS = 1 << 16;
// Multiplications that are worth another thread: some tens of microseconds.
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
constexpr int position(const Bf16 *, int column) { return column % LANES * 2 + column / LANES; }

constexpr int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Where part `index` of `parts` begins, of `total` split evenly.
constexpr int split(int64_t total, int64_t index, int64_t parts) {
    return static_cast<int>(total * index / parts);
}

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

// One call of pdrt_linear.
struct Layer {
    const void *packed;
    const float *bias;  // may be null
    const float *x;
    int64_t x_stride;
    float *out;
    int64_t out_stride;
    int32_t rows, inputs, outputs;

    int panels() const { return ceil_div(outputs, PANEL); }
    int width(int panel) const { return std::min(PANEL, outputs - panel * PANEL); }
    int64_t panel_stride() const { return static_cast<int64_t>(inputs) * PANEL; }

    // The weights of a panel from input `first` on. There may be no such panel: for prefetching.
    template <class Weight>
    const Weight *weights(int panel, int first) const {
        return static_cast<const Weight *>(packed) + panel * panel_stride() + first * PANEL;
    }

    // What the sums of `count` panels begin with: their bias, padded with zeros.
    void fill_start(int panel, int count, float *start) const {
        std::fill_n(start, count * PANEL, 0.0f);
        if (bias == nullptr) return;
        const int width = std::min(count * PANEL, outputs - panel * PANEL);
        std::copy_n(bias + panel * PANEL, width, start);
    }
};

// A range of rows, or of panels or inputs.
struct Range {
    int first, end;

    int size() const { return end - first; }
    Range part(int index, int parts) const {
        return {first + split(size(), index, parts), first + split(size(), index + 1, parts)};
    }
};

int tiles_of(Range rows) { return ceil_div(rows.size(), TILE_ROWS); }

template <class Weight>
const char *address(const Weight *weights) {
    return reinterpret_cast<const char *>(weights);
}

// All tiles of `rows`, as even as can be, against the weights of one panel that `tile` names; its x
// is that of the first row. Each tile prefetches its share of what is ahead.
template <Use USE, class Weight>
void compute_rows(const Layer &layer, Range rows, int panel, Tile<Weight> tile) {
    const int tiles = tiles_of(rows), width = layer.width(panel);
    const int64_t x_stride = USE == Use::BLOCKED ? tile.depth : tile.x_stride;
    for (int index = 0; index < tiles; ++index) {
        const Range part = rows.part(index, tiles);
        tile.out = layer.out + part.first * layer.out_stride + panel * PANEL;
        if (width < PANEL)
            compute_edge<USE>(tile, part.size(), width);
        else
            ONE_PANEL<USE, Weight>[part.size() - 1](tile);
        tile.x += part.size() * x_stride;
        tile.ahead += tile.ahead_step * tile.depth;
    }
}

// Bytes per input that each of several tiles prefetches of a panel.
template <class Weight>
int64_t share(int tiles) {
    return ceil_div(PANEL * sizeof(Weight), tiles);
}

// Few rows: whole panels, one after another or, for a single tile, several at a time.
template <class Weight>
void stream(const Layer &layer, Range rows, Range panels) {
    alignas(64) float start[STREAMS * PANEL];
    const int tiles = tiles_of(rows);
    const int several = tiles == 1 ? streams<Weight>(rows.size()) : 1;
    const int whole = std::min(panels.end, layer.outputs / PANEL);  // end of those without an edge
    Tile<Weight> tile = {nullptr, layer.panel_stride(), layer.inputs,
                         layer.x + rows.first * layer.x_stride, layer.x_stride, start, nullptr,
                         layer.out_stride, nullptr, share<Weight>(tiles)};
    for (int panel = panels.first; panel < panels.end;) {
        const bool alone = tiles == 1 && panel + several <= whole;
        const int count = alone ? several : 1;
        layer.fill_start(panel, count, start);
        tile.panel = layer.weights<Weight>(panel, 0);
        tile.ahead = address(layer.weights<Weight>(panel + 1, 0));
        tile.out = layer.out + rows.first * layer.out_stride + panel * PANEL;
        if (alone)
            STREAMED<Weight>[rows.size() - 1](tile);
        else
            compute_rows<Use::SHARED>(layer, rows, panel, tile);
        panel += count;
    }
}

// The chunk as float: as it lies, or widened into the buffer, once for all rows.
inline const float *widen(const float *chunk, int, float *) { return chunk; }
inline const float *widen(const Bf16 *chunk, int depth, float *buffer) {
    for (int step = 0; step < depth; ++step)
        store_pair(buffer + step * PANEL, load_pair(chunk + step * PANEL));
    return buffer;
}

// A block: some rows and inputs, whose elements of x are packed.
struct Block {
    Range rows, inputs;
    const float *x;  // chunk by chunk, and tile by tile in each

    int chunks() const { return ceil_div(inputs.size(), CHUNK); }
    Range chunk(int index) const { return inputs.part(index, chunks()); }
    int64_t offset(Range chunk) const {
        return static_cast<int64_t>(chunk.first - inputs.first) * rows.size();
    }
};

void pack_tile(const float *x, int64_t x_stride, Range rows, Range inputs, float *to) {
    for (int row = rows.first; row < rows.end; ++row)
        for (int k = 0; k < inputs.size(); ++k)
            to[k * rows.size() + row - rows.first] = x[row * x_stride + inputs.first + k];
}

void pack_block(const Layer &layer, const Block &block, float *buffer) {
    const int tiles = tiles_of(block.rows);
    for (int index = 0; index < block.chunks(); ++index) {
        const Range chunk = block.chunk(index);
        float *to = buffer + block.offset(chunk);
        for (int tile = 0; tile < tiles; ++tile) {
            const Range rows = block.rows.part(tile, tiles);
            pack_tile(layer.x, layer.x_stride, rows, chunk, to);
            to += rows.size() * chunk.size();
        }
    }
}

// A block against one panel, in chunks; `after` is what is needed after those.
template <class Weight>
void compute_block(const Layer &layer, const Block &block, int panel, const char *after) {
    alignas(64) float start[PANEL], buffer[CHUNK * PANEL];
    layer.fill_start(panel, 1, start);
    for (int index = 0; index < block.chunks(); ++index) {
        const Range chunk = block.chunk(index);
        const Weight *weights = layer.weights<Weight>(panel, chunk.first);
        const bool last = chunk.end == block.inputs.end;
        const char *ahead = last ? after : address(layer.weights<Weight>(panel, chunk.end));
        compute_rows<Use::BLOCKED>(
            layer, block.rows, panel,
            Tile<float>{widen(weights, chunk.size(), buffer), 0, chunk.size(),
                        block.x + block.offset(chunk), 0, chunk.first == 0 ? start : nullptr,
                        nullptr, layer.out_stride, ahead, share<Weight>(tiles_of(block.rows))});
    }
}

// Many rows: blocks that stay in L2, each against all panels.
template <class Weight>
void blocked(const Layer &layer, Range rows, Range panels) {
    alignas(64) float buffer[BLOCK_ELEMENTS];
    const int input_blocks = ceil_div(layer.inputs, BLOCK);
    const int block_rows = BLOCK_ELEMENTS / ceil_div(layer.inputs, input_blocks);
    const int row_blocks = ceil_div(rows.size(), block_rows);
    for (int r = 0; r < row_blocks; ++r)
        for (int i = 0; i < input_blocks; ++i) {
            const Block block = {rows.part(r, row_blocks),
                                 Range{0, layer.inputs}.part(i, input_blocks), buffer};
            pack_block(layer, block, buffer);
            for (int panel = panels.first; panel < panels.end; ++panel)
                compute_block<Weight>(
                    layer, block, panel,
                    address(layer.weights<Weight>(panel + 1, block.inputs.first)));
        }
}

// Threads along the rows, of `threads` in all, such that the largest part is smallest; the fewest
// that do, since each of them reads all of its panels.
int row_parts(int tiles, int panels, int threads) {
    int best = 1;
    int64_t least = INT64_MAX;
    for (int parts = 1; parts <= threads; parts++) {
        if (threads % parts != 0) continue;
        const int64_t largest = static_cast<int64_t>(ceil_div(tiles, parts)) *
                                ceil_div(panels, threads / parts);
        if (largest < least) {
            least = largest;
            best = parts;
        }
    }
    return best;
}

template <class Weight>
void run(const Layer &layer) {
    const int64_t work = static_cast<int64_t>(layer.rows) * layer.inputs * layer.outputs;
    const int threads =
        static_cast<int>(std::min<int64_t>(omp_get_max_threads(), 1 + work / THREAD_WORK));
    const Range rows = {0, layer.rows}, panels = {0, layer.panels()};
    const int along_rows = row_parts(tiles_of(rows), panels.size(), threads);
    const int along_panels = threads / along_rows;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int index = 0; index < threads; ++index) {
        const Range some = rows.part(index / along_panels, along_rows);
        const Range of_panels = panels.part(index % along_panels, along_panels);
        if (tiles_of(some) <= STREAMED_TILES)
            stream<Weight>(layer, some, of_panels);
        else
            blocked<Weight>(layer, some, of_panels);
    }
}

// Inputs that are transposed at a time: a stretch of each row against a panel's part in L1.
constexpr int PACK_INPUTS = 64;

template <class Weight>
void pack_panel(const Weight *weight, int inputs, int outputs, Weight *panel, int first) {
    for (int k0 = 0; k0 < inputs; k0 += PACK_INPUTS)
        for (int column = 0; column < PANEL; ++column) {
            const int output = first + column;
            if (output < 0 || output >= outputs) continue;
            const Weight *from = weight + static_cast<int64_t>(output) * inputs;
            Weight *to = panel + position(panel, column);
            for (int k = k0; k < std::min(inputs, k0 + PACK_INPUTS); ++k)
                to[static_cast<int64_t>(k) * PANEL] = from[k];
        }
}

// The outputs of the last panel that do not exist: they are computed, and must not trap or stall.
template <class Weight>
void clear_tail(Weight *packed, int inputs, int total) {
    Weight *panel = packed + static_cast<int64_t>(total / PANEL) * inputs * PANEL;
    for (int column = total % PANEL; column < PANEL; ++column)
        for (int k = 0; k < inputs; ++k)
            panel[static_cast<int64_t>(k) * PANEL + position(panel, column)] = Weight{};
}

template <class Weight>
void pack(const Weight *weight, int inputs, int outputs, Weight *packed, int at, int total) {
#pragma omp parallel for schedule(static)
    for (int panel = at / PANEL; panel < ceil_div(at + outputs, PANEL); ++panel)
        pack_panel(weight, inputs, outputs, packed + static_cast<int64_t>(panel) * inputs * PANEL,
                   panel * PANEL - at);
    if (at + outputs == total && total % PANEL != 0) clear_tail(packed, inputs, total);
}

template <class Weight>
void unpack_rows(const Weight *packed, const int64_t *ids, float *out, int rows, int inputs,
                 float scale) {
#pragma omp parallel for schedule(static) if (static_cast<int64_t>(rows) * inputs > THREAD_WORK)
    for (int row = 0; row < rows; ++row) {
        const Weight *panel = packed + ids[row] / PANEL * inputs * PANEL;
        const Weight *from = panel + position(panel, static_cast<int>(ids[row] % PANEL));
        float *to = out + static_cast<int64_t>(row) * inputs;
        for (int k = 0; k < inputs; ++k)
            to[k] = scale * to_float(from[static_cast<int64_t>(k) * PANEL]);
    }
}

}  // namespace

extern "C" {

int64_t pdrt_packed_bytes(int32_t type, int32_t inputs, int32_t outputs) {
    const int64_t bytes = type == PDRT_BF16 ? sizeof(Bf16) : sizeof(float);
    return ceil_div(outputs, PANEL) * bytes * PANEL * inputs;
}

int pdrt_pack(int32_t type, const void *weight, int32_t inputs, int32_t outputs, void *packed,
              int32_t at, int32_t total) {
    if (inputs < 1 || outputs < 1 || at < 0 || at > total - outputs) return -1;
    if (type == PDRT_F32)
        pack(static_cast<const float *>(weight), inputs, outputs, static_cast<float *>(packed), at,
             total);
    else if (type == PDRT_BF16)
        pack(static_cast<const Bf16 *>(weight), inputs, outputs, static_cast<Bf16 *>(packed), at,
             total);
    else
        return -1;
    return 0;
}

void pdrt_linear(int32_t type, const void *packed, const float *bias, const float *x,
                 int64_t x_stride, float *out, int64_t out_stride, int32_t rows, int32_t inputs,
                 int32_t outputs) {
    if (rows < 1) return;
    const Layer layer = {packed, bias, x, x_stride, out, out_stride, rows, inputs, outputs};
    if (type == PDRT_F32)
        run<float>(layer);
    else
        run<Bf16>(layer);
}

void pdrt_packed_rows(int32_t type, const void *packed, const int64_t *ids, float *out,
                      int32_t rows, int32_t inputs, int32_t, float scale) {
    if (type == PDRT_F32)
        unpack_rows(static_cast<const float *>(packed), ids, out, rows, inputs, scale);
    else
        unpack_rows(static_cast<const Bf16 *>(packed), ids, out, rows, inputs, scale);
}

}  // extern "C"
