// The encoder's map from position to slot, small enough for registers (at most 64 codes).
// A position is the start of a code plus a rank. In the order of positions the map is a sequence of
// linear runs, and the number of a run leads to slot - position. To find that number without a
// table of 4096 entries, positions are spread over buckets so that no bucket has more than one
// edge, which is a place inside of the bucket where a run begins. Codes may start anywhere, and
// gaps do not matter. Short runs can be so close that a code fits nowhere; then one edge of all,
// the lone edge, is left out of the buckets. If that does not help, there is no map.
#pragma once

#include <bit>

#include "rans/model.hpp"

namespace packhorse {

constexpr uint32_t kSpreadSize = 2 * kProbSum;  // positions
constexpr uint32_t kMaxSpreadBuckets = 128;
constexpr uint32_t kMaxSpreadRuns = 128;
// A map of at most 64 buckets and 64 runs, which fit half of the registers, is narrow.
constexpr uint32_t kNarrowBucketLog = 7;
constexpr uint32_t kWideBucketLog = 6;

struct SpreadMap {
    bool found;
    bool wide;
    uint32_t lone_edge;  // a position; kSpreadSize if there is none

    bool is_simple() const { return found && !wide && lone_edge == kSpreadSize; }
    // By code: the frequency, the start, and the halves of the largest float <= 1 / frequency.
    alignas(64) uint16_t freq[kWideBuckets];
    alignas(64) uint16_t start[kWideBuckets];
    alignas(64) uint16_t reciprocal_lower[kWideBuckets];
    alignas(64) uint16_t reciprocal_upper[kWideBuckets];
    // By bucket: 256 times the number of its first run, plus 256 less the edge in it (its size if
    // there is none), less the first position. So position + entry, divided by 256, is the number
    // of the run, less 1 if the position is at or above the lone edge.
    alignas(64) uint16_t entry[kMaxSpreadBuckets];
    alignas(64) uint16_t delta[kMaxSpreadRuns];  // slot - position, by run
};

// The largest float that is not above 1 / freq. The rounding of the product decides, and float *
// int fits a double exactly.
inline uint32_t reciprocal_below(uint32_t freq) {
    const float nearest = 1.0f / static_cast<float>(freq);
    const auto bits = std::bit_cast<uint32_t>(nearest);
    return static_cast<double>(nearest) * freq <= 1.0 ? bits : bits - 1;
}

// The runs of one code, in the order of ranks.
struct CodeRuns {
    uint32_t n;
    uint16_t first_slot[kWideBuckets];
    uint16_t n_slots[kWideBuckets];
};

// The runs of each code. Adjacent runs are joined. Returns the number of all runs.
inline uint32_t collect_runs(const RansModel& model, const AliasTables& alias, CodeRuns* runs) {
    for (uint32_t c = 0; c < model.n_codes; ++c) runs[c].n = 0;
    uint32_t n_runs = 0;
    for_each_run(model, alias, [&](uint32_t code, uint32_t first, uint32_t n, uint32_t) {
        if (n == 0) return;
        CodeRuns& own = runs[code];
        if (own.n > 0 && own.first_slot[own.n - 1] + own.n_slots[own.n - 1] == first) {
            own.n_slots[own.n - 1] = static_cast<uint16_t>(own.n_slots[own.n - 1] + n);
            return;
        }
        own.first_slot[own.n] = static_cast<uint16_t>(first);
        own.n_slots[own.n++] = static_cast<uint16_t>(n);
        ++n_runs;
    });
    return n_runs;
}

// Places the runs of codes, code after code.
class Spreader {
  public:
    Spreader(SpreadMap& map, uint32_t bucket_log) : map_(map), log_(bucket_log) {
        for (uint32_t b = 0; b < n_buckets(); ++b)
            map_.entry[b] = static_cast<uint16_t>(256 - bucket_size() - (b << log_));
        map_.wide = bucket_log == kWideBucketLog;
        map_.lone_edge = kSpreadSize;
    }

    // Sets `start` to the place of a code. Returns false if there is none.
    bool place(const CodeRuns& runs, uint32_t freq, uint16_t& start) {
        uint32_t lone = kWideBuckets;  // no run
        uint32_t at = find(runs, lone);
        if (at + freq > kSpreadSize && map_.lone_edge == kSpreadSize && runs.n > 3) {
            lone = crowded(runs);
            at = find(runs, lone);
        }
        if (at + freq > kSpreadSize) return false;
        start = static_cast<uint16_t>(at);
        for (uint32_t i = 0; i < runs.n; at += runs.n_slots[i++])
            add(at, runs.first_slot[i], runs.n_slots[i], i == lone);
        cursor_ = at;
        return true;
    }

  private:
    uint32_t n_buckets() const { return kSpreadSize >> log_; }
    uint32_t bucket_size() const { return 1u << log_; }
    bool is_first(uint32_t position) const { return (position & (bucket_size() - 1)) == 0; }

    // Whether a code can start here without giving any bucket a second edge. Run `lone` gives none.
    bool fits(const CodeRuns& runs, uint32_t start, uint32_t lone) const {
        uint32_t with_edge = last_edge_;
        uint32_t at = start;
        for (uint32_t i = 0; i < runs.n; at += runs.n_slots[i++]) {
            const uint32_t bucket = at >> log_;
            const bool opens = i == 0 && (bucket != cursor_ >> log_ || is_first(cursor_));
            if (opens || i == lone || is_first(at)) continue;
            if (bucket == with_edge) return false;
            with_edge = bucket;
        }
        return true;
    }

    // The first place where a code fits, or the end of all places. Beyond the next bucket, places
    // are as good as those in it.
    uint32_t find(const CodeRuns& runs, uint32_t lone) const {
        const uint32_t end = ((cursor_ >> log_) + 2) << log_;
        for (uint32_t start = cursor_; start < end; ++start)
            if (fits(runs, start, lone)) return start;
        return kSpreadSize;
    }

    // Of four runs or more, the one whose neighbours begin closest to it.
    static uint32_t crowded(const CodeRuns& runs) {
        uint32_t best = 2;
        for (uint32_t i = 3; i + 1 < runs.n; ++i)
            if (runs.n_slots[i - 1] + runs.n_slots[i] < runs.n_slots[best - 1] + runs.n_slots[best])
                best = i;
        return best;
    }

    void add(uint32_t at, uint32_t first_slot, uint32_t n_slots, bool lone) {
        const uint32_t bucket = at >> log_, end = (at + n_slots - 1) >> log_;
        // Numbers of runs behind the lone edge are one less in buckets.
        uint32_t number = n_runs_ - (map_.lone_edge < kSpreadSize ? 1 : 0);
        if (is_first(at) || bucket != filled_) {
            set_first(bucket, number);
        } else if (lone) {
            map_.lone_edge = at;
            --number;
        } else {
            map_.entry[bucket] = static_cast<uint16_t>(map_.entry[bucket] + bucket_size() -
                                                       (at & (bucket_size() - 1)));
            last_edge_ = bucket;
        }
        for (uint32_t b = bucket + 1; b <= end; ++b) set_first(b, number);
        map_.delta[n_runs_++] = static_cast<uint16_t>(first_slot - at);
        filled_ = end;
    }

    void set_first(uint32_t bucket, uint32_t number) {
        map_.entry[bucket] = static_cast<uint16_t>(map_.entry[bucket] + (number << 8));
    }

    SpreadMap& map_;
    uint32_t log_;
    uint32_t cursor_ = 0;
    uint32_t n_runs_ = 0;
    uint32_t last_edge_ = kMaxSpreadBuckets;  // the last bucket that has an edge
    uint32_t filled_ = kMaxSpreadBuckets;     // the last bucket that has a run
};

inline bool spread_codes(const RansModel& model, const CodeRuns* runs, uint32_t bucket_log,
                         SpreadMap& map) {
    Spreader spreader(map, bucket_log);
    for (uint32_t c = 0; c < model.n_codes; ++c)
        if (!spreader.place(runs[c], model.freqs[c], map.start[c])) return false;
    return true;
}

// For a model of at most 64 codes.
inline void spread_slots(const RansModel& model, const AliasTables& alias, SpreadMap& map) {
    CodeRuns runs[kWideBuckets];
    const uint32_t n_runs = collect_runs(model, alias, runs);
    map.found = n_runs <= kMaxSpreadRuns / 2 && model.n_codes <= kNarrowBuckets &&
                spread_codes(model, runs, kNarrowBucketLog, map);
    if (!map.found) map.found = spread_codes(model, runs, kWideBucketLog, map);
    if (!map.found) return;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t reciprocal = reciprocal_below(model.freqs[c]);
        map.freq[c] = model.freqs[c];
        map.reciprocal_lower[c] = static_cast<uint16_t>(reciprocal);
        map.reciprocal_upper[c] = static_cast<uint16_t>(reciprocal >> 16);
    }
}

}  // namespace packhorse
