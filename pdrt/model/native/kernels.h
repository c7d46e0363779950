// The C ABI of the CPU kernels: plain C, no torch, called through ctypes (which lets the GIL go).
//
// One library per instruction set is built from these sources (setup.py) and the best one that the
// processor has is loaded (library.py). Threads are OpenMP's, of the runtime that torch brought.
//
// "type" is a PdrtType. Strides count elements. Rows are tokens, packed one after another.
// Functions that can refuse a shape return 0, or -1 without having written anything.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

enum PdrtType { PDRT_F32 = 0, PDRT_BF16 = 1, PDRT_PAIRS = 2 };
enum PdrtGate { PDRT_SILU = 0, PDRT_GELU_TANH = 1 };

typedef struct {
    void *data;  // [page][kv_head][layer][key, value][token][head_dim], contiguous
    int32_t type;
    int32_t page_size, kv_heads, layers, head_dim;
} PdrtPool;

typedef struct {
    int32_t rows, tokens;
    int32_t table_width;
    const int32_t *first;    // (rows + 1) each row's first token
    const int32_t *context;  // (rows) tokens of the sequence once this step's are stored
    const int32_t *tables;   // (rows, table_width) pages of each sequence; its tail is not read
    const int64_t *slots;    // (tokens) page * page_size + offset: where a token's KV goes
} PdrtStep;

// What the library was built for: "portable", "avx2", "avx512", "avx512bf16" or "amx".
const char *pdrt_isa(void);
// Asks the system for what those instructions need, once before any other call. 0, or an errno.
int pdrt_enable(void);
// Which version of this file it was built from: the start of the file's SHA-256.
const char *pdrt_interface(void);

// Causal attention of every token over its sequence's pages, which hold this step's KV already.
// query, out: (tokens, heads, head_dim) of `type`, each token `*_stride` apart. softcap 0: none.
// window 0: all; else so many tokens, the query's own included.
int pdrt_attend(const PdrtPool *pool, const PdrtStep *step, int32_t layer, int32_t heads,
                int32_t type, const void *query, int64_t query_stride, void *out,
                int64_t out_stride, float scale, float softcap, int32_t window);

// Store keys and values, (tokens, kv_heads, head_dim) of `type`, as they are. NaN becomes 0 and
// what is infinite the largest number, as torch.nan_to_num does.
int pdrt_store(const PdrtPool *pool, const PdrtStep *step, int32_t layer, int32_t type,
               const void *key, int64_t key_stride, const void *value, int64_t value_stride);

// Rotate queries in place and keys on their way into the pool (first half against second half of
// the first `rotary` elements of a head), and store the values; as pdrt_store otherwise.
// cos, sin: (tokens, rotary / 2). rotary 0: no rotation.
int pdrt_rope_store(const PdrtPool *pool, const PdrtStep *step, int32_t layer, int32_t heads,
                    int32_t type, void *query, int64_t query_stride, const void *key,
                    int64_t key_stride, const void *value, int64_t value_stride, const float *cos,
                    const float *sin, int32_t rotary);

// RMS norm in place of each head: x is (tokens, heads, head_dim), weight (head_dim).
void pdrt_head_norm(int32_t type, void *x, int64_t stride, int32_t tokens, int32_t heads,
                    int32_t head_dim, const float *weight, float epsilon);

// out = rms_norm(x) * weight. x: (rows, width) of x_type; out: (rows, width) of out_type. May be
// the same memory where the types are the same.
void pdrt_rms_norm(int32_t x_type, const void *x, const float *weight, int32_t out_type, void *out,
                   int32_t rows, int32_t width, float epsilon);

// residual += add (where add is not NULL), then out = rms_norm(residual) * weight.
// residual: (rows, width) float; add, out: (rows, width) of `type`.
void pdrt_add_rms_norm(float *residual, int32_t type, const void *add, const float *weight,
                       void *out, int32_t rows, int32_t width, float epsilon);

// out = act(gate) * up. gate_up: (rows, 2 * width) of `type`, gate first; out: (rows, width).
void pdrt_gate(int32_t type, int32_t kind, const void *gate_up, void *out, int32_t rows,
               int32_t width);

// Linear layers over weights of `type`, packed once, computed in float from x and to out of float.
// PDRT_PAIRS, of linear layers only: bfloat16, as x and out are then, multiplied as such; inputs are
// a multiple of 32, x_stride of 2. Only libraries with vectors of 64 bytes take it.
int64_t pdrt_packed_bytes(int32_t type, int32_t inputs, int32_t outputs);  // 64-byte aligned
// weight: (outputs, inputs) of `type`, row-major, goes to rows [at, at + outputs) of a packed
// matrix of `total` outputs: how fused layers are packed without being concatenated first.
int pdrt_pack(int32_t type, const void *weight, int32_t inputs, int32_t outputs, void *packed,
              int32_t at, int32_t total);
// out = x @ weight.T + bias (where bias is not NULL). x: (rows, inputs), out: (rows, outputs).
void pdrt_linear(int32_t type, const void *packed, const float *bias, const void *x,
                 int64_t x_stride, void *out, int64_t out_stride, int32_t rows, int32_t inputs,
                 int32_t outputs);
// out[i] = scale * row ids[i] of a packed matrix: the embedding of a tied head.
void pdrt_packed_rows(int32_t type, const void *packed, const int64_t *ids, float *out,
                      int32_t rows, int32_t inputs, int32_t outputs, float scale);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
