// Tables of the alias layout, in the form that kernels for GPUs read.
//
// A table has three rows: the slot at which the second part of a bucket begins, the entry of its
// first part, and the entry of its second part. All tables have equally many buckets: the buckets
// of a narrower layout are cut in pieces, which keep their thresholds and entries.
#pragma once

#include "rans/model.hpp"

namespace packhorse {

// Writes 3 * n_buckets numbers. n_buckets is 32 or 64, and not less than the model's.
inline void write_bucket_table(const RansModel& model, uint32_t n_buckets, uint32_t* table) {
    AliasTables tables;
    BucketEntries entries;
    build_alias(model, tables);
    fill_bucket_entries(model, tables, entries);
    const uint32_t n_parts = n_buckets / model.n_buckets();
    for (uint32_t b = 0; b < n_buckets; ++b) {
        table[b] = tables.threshold[b / n_parts];
        table[n_buckets + b] = entries.first[b / n_parts];
        table[2 * n_buckets + b] = entries.second[b / n_parts];
    }
}

}  // namespace packhorse
