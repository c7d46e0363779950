// Where keys and values lie in a pool: [page][kv_head][layer][key, value][token][head_dim].
#pragma once

#include "kernels.h"
#include "vector.h"

// One head and layer of a pool whose elements are `Stored`.
template <class Stored>
struct HeadPages {
    Stored *first;        // page 0's keys
    int64_t page_stride;  // elements from one page to the next
    int page_size, head_dim;

    HeadPages(const PdrtPool &pool, int layer, int kv_head)
        : page_size(pool.page_size), head_dim(pool.head_dim) {
        const int64_t block = 2 * static_cast<int64_t>(page_size) * head_dim;
        page_stride = block * pool.layers * pool.kv_heads;
        first = static_cast<Stored *>(pool.data) +
                block * (static_cast<int64_t>(kv_head) * pool.layers + layer);
    }

    // The key in slot page * page_size + offset, head_dim elements; its value is `to_value` on.
    Stored *key(int64_t page, int offset) const {
        return first + page * page_stride + static_cast<int64_t>(offset) * head_dim;
    }
    int64_t to_value() const { return static_cast<int64_t>(page_size) * head_dim; }
};
