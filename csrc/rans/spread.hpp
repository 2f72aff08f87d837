// The encoder's map from position to slot, small enough for registers (at most 32 codes).
// A position is the start of a code plus a rank. The map has up to 63 linear runs. To look it up
// without a table of 4096 entries, positions are spread over 64 buckets of 128 so that no bucket
// has more than two runs. Codes may start anywhere, and gaps do not matter. If there is no place
// for a code, there is no map.
#pragma once

#include <bit>

#include "rans/model.hpp"

namespace packhorse {

constexpr uint32_t kSpreadBuckets = 2 * kNarrowBuckets;
constexpr uint32_t kSpreadLog = 7;
constexpr uint32_t kSpreadSize = 1u << kSpreadLog;

struct SpreadMap {
    bool found;
    // For each bucket: where in it the second run begins, and slot - position mod 4096 of both
    // runs.
    alignas(64) uint16_t edge[kSpreadBuckets];
    alignas(64) uint16_t first_delta[kSpreadBuckets];
    alignas(64) uint16_t second_delta[kSpreadBuckets];
    // By code: freq (bits 0-11) and start (12-24), and the bits of the largest float <= 1 / freq.
    alignas(64) uint32_t freq_start[kNarrowBuckets];
    alignas(64) uint32_t reciprocal[kNarrowBuckets];
};

// The largest float that is not above 1 / freq. The rounding of the product decides, and float *
// int fits a double exactly.
inline uint32_t reciprocal_below(uint32_t freq) {
    const float nearest = 1.0f / static_cast<float>(freq);
    const auto bits = std::bit_cast<uint32_t>(nearest);
    return static_cast<double>(nearest) * freq <= 1.0 ? bits : bits - 1;
}

// The runs of one code, in rank order.
struct CodeRuns {
    uint32_t n;
    uint32_t first_slot[kNarrowBuckets];
    uint32_t n_slots[kNarrowBuckets];
};

// The runs of each code. Adjacent runs are joined.
inline void collect_runs(const RansModel& model, const AliasTables& alias, CodeRuns* runs) {
    for (uint32_t c = 0; c < model.n_codes; ++c) runs[c].n = 0;
    for_each_run(model, alias, [&](uint32_t code, uint32_t first, uint32_t n, uint32_t) {
        if (n == 0) return;
        CodeRuns& own = runs[code];
        if (own.n > 0 && own.first_slot[own.n - 1] + own.n_slots[own.n - 1] == first) {
            own.n_slots[own.n - 1] += n;
            return;
        }
        own.first_slot[own.n] = first;
        own.n_slots[own.n++] = n;
    });
}

// Whether a code can start here without giving any bucket a third run. `n_before` is the number of
// runs that are in the first bucket already.
inline bool runs_fit(const CodeRuns& runs, uint32_t start, uint32_t n_before) {
    uint32_t bucket = start >> kSpreadLog;
    uint32_t n_in_bucket = n_before;
    uint32_t at = start;
    for (uint32_t i = 0; i < runs.n; ++i) {
        if (at >> kSpreadLog != bucket) {
            bucket = at >> kSpreadLog;
            // The previous run reaches into this bucket, unless it ended at the edge.
            n_in_bucket = i > 0 && (at & (kSpreadSize - 1)) != 0 ? 1 : 0;
        }
        if (++n_in_bucket > 2) return false;
        at += runs.n_slots[i];
    }
    return true;
}

// Finds the first place at or after `cursor` where a code fits, or the end of all places.
// `n_before` runs are in the bucket of `cursor`.
inline uint32_t place_runs(const CodeRuns& runs, uint32_t cursor, uint32_t n_before) {
    const uint32_t shared = cursor >> kSpreadLog;
    for (uint32_t start = cursor; start < cursor + 2 * kSpreadSize; ++start)
        if (runs_fit(runs, start, start >> kSpreadLog == shared ? n_before : 0)) return start;
    return kSpreadBuckets * kSpreadSize;
}

// Fills the entries of the buckets that a run covers. `n_runs` counts the runs of each bucket.
inline void spread_run(uint32_t start, uint32_t first_slot, uint32_t n_slots, SpreadMap& map,
                       uint8_t* n_runs) {
    const auto delta = static_cast<uint16_t>((first_slot - start) & (kProbSum - 1));
    const uint32_t last = (start + n_slots - 1) >> kSpreadLog;
    for (uint32_t bucket = start >> kSpreadLog; bucket <= last; ++bucket) {
        if (n_runs[bucket]++ == 0) {
            map.edge[bucket] = kSpreadSize;  // above all offsets
            map.first_delta[bucket] = delta;
            map.second_delta[bucket] = 0;
        } else {
            map.edge[bucket] = static_cast<uint16_t>(start & (kSpreadSize - 1));
            map.second_delta[bucket] = delta;
        }
    }
}

// For a model of at most 32 codes.
inline void spread_slots(const RansModel& model, const AliasTables& alias, SpreadMap& map) {
    CodeRuns runs[kNarrowBuckets];
    collect_runs(model, alias, runs);
    uint8_t n_runs[kSpreadBuckets + 2] = {};
    uint32_t cursor = 0;
    map.found = false;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        uint32_t at = place_runs(runs[c], cursor, n_runs[cursor >> kSpreadLog]);
        if (at + model.freqs[c] > kSpreadBuckets * kSpreadSize) return;
        map.freq_start[c] = model.freqs[c] | at << kProbBits;
        map.reciprocal[c] = reciprocal_below(model.freqs[c]);
        for (uint32_t i = 0; i < runs[c].n; at += runs[c].n_slots[i++])
            spread_run(at, runs[c].first_slot[i], runs[c].n_slots[i], map, n_runs);
        cursor = at;
    }
    map.found = true;
}

}  // namespace packhorse
