// pdrt_attend and pdrt_store: which kernel takes which part of a step, and on which thread.
#include <omp.h>

#include <memory>
#include <vector>

#include "attention.h"
#include "attention_block.h"
#include "attention_row.h"

namespace {

// Where there are fewer tasks per thread than this, long sequences are shared out by their keys.
constexpr int TASKS_PER_THREAD = 4;

template <class Add>
void for_heads(const Attention &call, Add add) {
    for (int kv_head = 0; kv_head < call.pool.kv_heads; ++kv_head)
        for (int head = 0; head < call.group; head += HEADS_MAX)
            add(kv_head, head, std::min(HEADS_MAX, call.group - head));
}

// Blocks of queries of all rows with several tokens; the last first, as they see the most keys.
std::vector<Task> block_tasks(const Attention &call, bool with_single_tokens) {
    std::vector<Task> tasks;
    const int block = std::max(1, BLOCK_ROWS / std::min(call.group, HEADS_MAX));
    for (int row = 0; row < call.step.rows; ++row) {
        const int first = call.step.first[row], tokens = call.step.first[row + 1] - first;
        if (tokens == 1 && !with_single_tokens) continue;
        const int start = call.step.context[row] - tokens;
        for (int token = (tokens - 1) / block * block; token >= 0; token -= block)
            for_heads(call, [&](int kv_head, int head, int heads) {
                tasks.push_back({row, kv_head, head, heads, first + token,
                                 std::min(block, tokens - token), start + token});
            });
    }
    return tasks;
}

std::vector<Task> row_tasks(const Attention &call) {
    std::vector<Task> tasks;
    for (int row = 0; row < call.step.rows; ++row) {
        const int token = call.step.first[row];
        if (call.step.first[row + 1] - token != 1) continue;
        for_heads(call, [&](int kv_head, int head, int heads) {
            tasks.push_back({row, kv_head, head, heads, token, 1, call.step.context[row] - 1});
        });
    }
    return tasks;
}

template <class Run>
void run_all(int count, Run run) {
#pragma omp parallel for schedule(dynamic) if (count > 1)
    for (int index = 0; index < count; ++index) run(index);
}

// Rows with one token, their keys shared out over the threads and merged afterwards.
template <class Product, class Query, class Stored>
void attend_shared(const Attention &call, const std::vector<Task> &tasks) {
    std::vector<int> first_part = {0};
    for (const Task &task : tasks) first_part.push_back(first_part.back() + parts_of(call, task));
    const int count = static_cast<int>(tasks.size());
    const std::unique_ptr<RowState[]> states(new RowState[first_part.back()]);
    run_all(first_part.back(), [&](int part) {
        const auto after = std::upper_bound(first_part.begin(), first_part.end(), part);
        const int index = static_cast<int>(after - first_part.begin()) - 1;
        attend_part<Product, Query, Stored>(call, tasks[index], part - first_part[index],
                                            states[part]);
    });
    for (int index = 0; index < count; ++index) {
        RowState &state = states[first_part[index]];
        for (int part = first_part[index] + 1; part < first_part[index + 1]; ++part)
            merge(state, states[part], tasks[index].heads, call.pool.head_dim);
        write_row<Query, Stored>(call, tasks[index], state);
    }
}

template <class Product, class Query, class Stored>
void attend_rows(const Attention &call) {
    const std::vector<Task> tasks = row_tasks(call);
    const int threads = omp_get_max_threads(), count = static_cast<int>(tasks.size());
    const auto is_long = [&](const Task &task) { return parts_of(call, task) > 1; };
    if (threads > 1 && count < threads * TASKS_PER_THREAD &&
        std::any_of(tasks.begin(), tasks.end(), is_long))
        return attend_shared<Product, Query, Stored>(call, tasks);
    run_all(count, [&](int index) { attend_row<Product, Query, Stored>(call, tasks[index]); });
}

template <class RowProduct, class BlockProduct, class Query, class Stored>
void attend_all(const Attention &call) {
    const bool fits_rows = call.pool.head_dim % RowProduct::NUMBERS == 0;
    const std::vector<Task> blocks = block_tasks(call, !fits_rows);
    run_all(static_cast<int>(blocks.size()), [&](int index) {
        if constexpr (HAS_TILES && std::is_same_v<BlockProduct, Pairs>) {
            if (Tiles::fits(call.pool.head_dim))
                return BlockAttention<Tiles, Query, Stored>(call, blocks[index]).attend();
        }
        BlockAttention<BlockProduct, Query, Stored>(call, blocks[index]).attend();
    });
    if (fits_rows) attend_rows<RowProduct, Query, Stored>(call);
}

// A vector's worth of numbers, or the rest of a head.
template <class Source, class Stored>
void store_head(const Source *from, Stored *to, int head_dim) {
    int element = 0;
    for (; element + LANES <= head_dim; element += LANES)
        store(to + element, finite<Stored>(load(from + element)));
    for (; element < head_dim; ++element)
        store_one(to + element, finite<Stored>(splat(to_float(from[element])))[0]);
}

template <class Source, class Stored>
void store_all(const PdrtPool &pool, const PdrtStep &step, int layer, const Source *key,
               int64_t key_stride, const Source *value, int64_t value_stride) {
    for (int head = 0; head < pool.kv_heads; ++head) {
        const HeadPages<Stored> pages(pool, layer, head);
        const int64_t column = static_cast<int64_t>(head) * pool.head_dim;
        for (int token = 0; token < step.tokens; ++token) {
            const int64_t slot = step.slots[token];
            Stored *to = pages.key(slot / pool.page_size, static_cast<int>(slot % pool.page_size));
            store_head(key + token * key_stride + column, to, pool.head_dim);
            store_head(value + token * value_stride + column, to + pages.to_value(),
                       pool.head_dim);
        }
    }
}

}  // namespace

int pdrt_attend(const PdrtPool *pool, const PdrtStep *step, int32_t layer, int32_t heads,
                int32_t type, const void *query, int64_t query_stride, void *out,
                int64_t out_stride, float scale, float softcap, int32_t window) {
    if (pool->head_dim % 8 || pool->head_dim > HEAD_DIM_MAX || heads % pool->kv_heads) return -1;
    const Attention call = {*pool, *step, layer,      heads / pool->kv_heads, query,
                            out,   query_stride, out_stride, scale, softcap, window};
    if (type == PDRT_F32 && pool->type == PDRT_F32)
        attend_all<Singles, Singles, float, float>(call);
    else if (type == PDRT_F32 && pool->type == PDRT_BF16)
        attend_all<Halves, Singles, float, Bf16>(call);
    else if (type == PDRT_BF16 && pool->type == PDRT_BF16)
        attend_all<std::conditional_t<HAS_PAIRS, Pairs, Halves>,
                   std::conditional_t<HAS_PAIRS, Pairs, Singles>, Bf16, Bf16>(call);
    else
        return -1;
    return 0;
}

int pdrt_store(const PdrtPool *pool, const PdrtStep *step, int32_t layer, int32_t type,
               const void *key, int64_t key_stride, const void *value, int64_t value_stride) {
    const auto store_from = [&](const auto *source, auto *stored) {
        using Source = std::remove_const_t<std::remove_pointer_t<decltype(source)>>;
        using Stored = std::remove_pointer_t<decltype(stored)>;
        store_all<Source, Stored>(*pool, *step, layer, source, key_stride,
                                  static_cast<const Source *>(value), value_stride);
        return 0;
    };
    const auto *floats = static_cast<const float *>(key);
    const auto *halves = static_cast<const Bf16 *>(key);
    if (type == PDRT_F32 && pool->type == PDRT_F32)
        return store_from(floats, static_cast<float *>(pool->data));
    if (type == PDRT_F32 && pool->type == PDRT_BF16)
        return store_from(floats, static_cast<Bf16 *>(pool->data));
    if (type == PDRT_BF16 && pool->type == PDRT_BF16)
        return store_from(halves, static_cast<Bf16 *>(pool->data));
    return -1;
}
