// Linear layers for every number of rows, over weights that are packed once.
//
// Few rows (decode) are bound by memory: panels are streamed once, several at a time where the
// registers allow, since the processor fetches ahead in each of several streams but not far enough
// in one. Many rows (prefill) are bound by arithmetic: blocked so that the rows stay in L2 and a
// chunk of a panel in L1, the rows copied so that a tile's are side by side (Goto and van de Geijn,
// Anatomy of High-Performance Matrix Multiplication, 2008).
//
// Every element of the output is one sum along the inputs, in order, in one float. A row's result
// is therefore the same to the bit in whatever batch it is computed, and with however many threads.
// Layers that are bfloat16 throughout: linear_pairs.h.
#include <omp.h>

#include <algorithm>

#include "kernels.h"
#include "linear_pairs.h"
#include "linear_tile.h"

namespace {

// Up to so many tiles of rows, a panel is used so few times that it is streamed, not blocked.
constexpr int STREAMED_TILES = 2;
// Inputs of a chunk: with the rows of a tile it fits into the 32 KB of a small L1 cache.
constexpr int CHUNK = 20480 / (PANEL * static_cast<int>(sizeof(float)));
// Inputs of a block, and elements of x in one (256 KB): half of a small L2 cache.
constexpr int BLOCK = 1024;
constexpr int BLOCK_ELEMENTS = 1 << 16;

// Where part `index` of `parts` begins, of `total` split evenly.
constexpr int split(int64_t total, int64_t index, int64_t parts) {
    return static_cast<int>(total * index / parts);
}

struct Layer : LayerCall<float> {
    int64_t panel_stride() const { return static_cast<int64_t>(inputs) * PANEL; }

    // The weights of a panel from input `first` on. There may be no such panel: for prefetching.
    template <class Weight>
    const Weight *weights(int panel, int first) const {
        return static_cast<const Weight *>(packed) + panel * panel_stride() + first * PANEL;
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

template <class Any>
int threads_for(const Any &layer) {
    const int64_t work = static_cast<int64_t>(layer.rows) * layer.inputs * layer.outputs;
    return static_cast<int>(std::min<int64_t>(omp_get_max_threads(), 1 + work / THREAD_WORK));
}

template <class Weight>
void run(const Layer &layer) {
    const int threads = threads_for(layer);
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

void run_pairs(const PairLayer &layer) {
    const int threads = threads_for(layer), panels = layer.panels();
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int index = 0; index < threads; ++index)
        compute_panels(layer, split(panels, index, threads), split(panels, index + 1, threads));
}

}  // namespace

extern "C" {

void pdrt_linear(int32_t type, const void *packed, const float *bias, const void *x,
                 int64_t x_stride, void *out, int64_t out_stride, int32_t rows, int32_t inputs,
                 int32_t outputs) {
    if (rows < 1) return;
    if (type == PDRT_PAIRS) {
        if constexpr (HAS_PAIR_LAYERS)
            run_pairs({{packed, bias, static_cast<const Bf16 *>(x), x_stride,
                        static_cast<Bf16 *>(out), out_stride, rows, inputs, outputs}});
        return;
    }
    const Layer layer = {{packed, bias, static_cast<const float *>(x), x_stride,
                          static_cast<float *>(out), out_stride, rows, inputs, outputs}};
    if (type == PDRT_F32)
        run<float>(layer);
    else
        run<Bf16>(layer);
}

}  // extern "C"
