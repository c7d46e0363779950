// Packing of linear weights, once when a model is loaded, and rows of what is packed.
#include <algorithm>

#include "kernels.h"
#include "linear_pairs.h"

namespace {

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

void unpack_pair_rows(const uint32_t *packed, const int64_t *ids, float *out, int rows, int inputs,
                      float scale) {
    const int pairs = inputs / Pairs::WIDTH;
    for (int row = 0; row < rows; ++row) {
        const uint32_t *from = packed + ids[row] / PANEL * pairs * PANEL + ids[row] % PANEL;
        float *to = out + static_cast<int64_t>(row) * inputs;
        for (int k = 0; k < pairs; ++k) {
            const uint32_t pair = from[static_cast<int64_t>(k) * PANEL];
            to[2 * k] = scale * first_of(pair);
            to[2 * k + 1] = scale * second_of(pair);
        }
    }
}

}  // namespace

extern "C" {

int64_t pdrt_packed_bytes(int32_t type, int32_t inputs, int32_t outputs) {
    const int64_t bytes = type == PDRT_F32 ? sizeof(float) : sizeof(Bf16);
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
    else if (type == PDRT_PAIRS && HAS_PAIR_LAYERS && inputs % PAIR_INPUTS == 0)
        // As if both inputs of a pair were one.
        pack(static_cast<const uint32_t *>(weight), inputs / Pairs::WIDTH, outputs,
             static_cast<uint32_t *>(packed), at, total);
    else
        return -1;
    return 0;
}

void pdrt_packed_rows(int32_t type, const void *packed, const int64_t *ids, float *out,
                      int32_t rows, int32_t inputs, int32_t, float scale) {
    if (type == PDRT_F32)
        unpack_rows(static_cast<const float *>(packed), ids, out, rows, inputs, scale);
    else if (type == PDRT_PAIRS)
        unpack_pair_rows(static_cast<const uint32_t *>(packed), ids, out, rows, inputs, scale);
    else
        unpack_rows(static_cast<const Bf16 *>(packed), ids, out, rows, inputs, scale);
}

}  // extern "C"
