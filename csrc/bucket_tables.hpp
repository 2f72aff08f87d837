// Tables of the alias layout as kernels for GPUs read them, for many models at once
// (src/packhorse/kernels/models.py).
//
// A table is three rows: the slot at which the second part of a bucket begins, the entry of its
// first part, and that of its second. All tables have as many buckets: those of a narrower layout
// are cut, which leaves thresholds and entries as they are.
#pragma once

#include "rans_model.hpp"

namespace packhorse {

// A model of codes that yield `values`; false if it is none of the alias layout.
inline bool read_codes(const int64_t* freqs, const int64_t* values, int64_t n_codes,
                       uint32_t n_buckets, RansModel& model) {
    if (n_codes < 2 || n_codes > n_buckets) return false;
    model.raw_bits = 0;  // values have them already
    model.n_symbols = model.n_codes = static_cast<uint32_t>(n_codes);
    int64_t sum = 0;
    for (int64_t c = 0; c < n_codes; ++c) {
        if (freqs[c] < 1 || freqs[c] >= kProbSum || values[c] < 0 || values[c] > 255) return false;
        sum += freqs[c];
        model.freqs[c] = static_cast<uint16_t>(freqs[c]);
        model.symbols[c] = static_cast<uint8_t>(values[c]);
    }
    return sum == kProbSum;
}

// Writes 3 * n_buckets numbers; n_buckets is 32 or 64, and no less than the model's.
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
