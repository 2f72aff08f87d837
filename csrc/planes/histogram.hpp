// Histograms: how often each byte value occurs in a plane, in all of it or in a sample, and what
// coding the plane would cost.
//
// A full count takes as long as coding, so by default one run of 64 bytes in eight is counted. All
// arithmetic is in integers, so the encoder's choices, and with them its output, are the same on
// every machine.
#pragma once

#include <algorithm>
#include <array>
#include <bit>

#include "common/layout.hpp"

namespace packhorse {

struct Histogram {
    uint32_t counts[256];
    uint32_t total;
    bool sampled;  // the plane may have values that were not counted
};

constexpr std::size_t kSampleRun = 64;

// Eight tables take turns, so that equal neighbours do not wait for each other's store.
inline void count_bytes(const uint8_t* plane, std::size_t n, uint32_t sample_log, Histogram& out) {
    constexpr std::size_t kTables = 8;
    uint32_t tables[kTables][256] = {};
    const std::size_t step = kSampleRun << sample_log;
    std::size_t seen = 0;
    for (std::size_t at = 0; at < n; at += step) {
        const std::size_t run = n - at < kSampleRun ? n - at : kSampleRun;
        const uint8_t* src = plane + at;
        // The runs of a sample are far apart, so the hardware does not prefetch them.
        if (n - at > 16 * step) __builtin_prefetch(src + 16 * step);
        if (run == kSampleRun) {
#pragma GCC unroll 64
            for (std::size_t i = 0; i < kSampleRun; ++i) ++tables[i % kTables][src[i]];
        } else {
            for (std::size_t i = 0; i < run; ++i) ++tables[i % kTables][src[i]];
        }
        seen += run;
    }
    for (std::size_t v = 0; v < 256; ++v) {
        out.counts[v] = 0;
        for (std::size_t t = 0; t < kTables; ++t) out.counts[v] += tables[t][v];
    }
    out.total = static_cast<uint32_t>(seen);
    out.sampled = seen < n;
}

// Scales counts to slots: count * n_slots / total, off by at most 2^-20. One division serves all
// counts of a total below 2^32.
class SlotScale {
  public:
    explicit SlotScale(uint64_t total, uint32_t n_slots = kProbSum)
        : factor_(total == 0 ? 0 : (uint64_t{n_slots} << 32) / total) {}
    uint32_t below(uint32_t count) const { return static_cast<uint32_t>(count * factor_ >> 32); }
    uint32_t nearest(uint32_t count) const {
        return static_cast<uint32_t>((count * factor_ + (uint64_t{1} << 31)) >> 32);
    }

  private:
    uint64_t factor_;
};

constexpr uint32_t kCostBits = 16;  // costs are in 2^-16 bits

// log2(x) * 2^16, rounded down, for x in 1..4096. The position of the top bit gives the integer
// part, and each squaring gives one bit more.
constexpr uint32_t log2_fixed(uint32_t x) {
    const auto whole = static_cast<uint32_t>(std::bit_width(x) - 1);
    uint64_t mantissa = uint64_t{x} << (31 - whole);
    uint32_t fraction = 0;
    for (uint32_t bit = 0; bit < kCostBits; ++bit) {
        mantissa = mantissa * mantissa >> 31;
        const uint64_t carry = mantissa >> 32;
        fraction = fraction << 1 | static_cast<uint32_t>(carry);
        mantissa >>= carry;
    }
    return whole << kCostBits | fraction;
}

constexpr std::array<uint32_t, kProbSum + 1> make_cost_table() {
    std::array<uint32_t, kProbSum + 1> table{};
    for (uint32_t freq = 1; freq <= kProbSum; ++freq)
        table[freq] = (kProbBits << kCostBits) - log2_fixed(freq);
    return table;
}

// kSymbolCost[f]: the cost of a symbol that has the frequency f of 4096.
inline constexpr std::array<uint32_t, kProbSum + 1> kSymbolCost = make_cost_table();

// Counts symbols, which are bytes without their `raw_bits` low bits. Returns how many of those bits
// are set in any byte.
inline uint32_t fold(const Histogram& bytes, uint32_t raw_bits, Histogram& symbols) {
    symbols = {};
    uint32_t used = 0;
    for (uint32_t v = 0; v < 256; ++v) {
        symbols.counts[v >> raw_bits] += bytes.counts[v];
        used |= bytes.counts[v] > 0 ? v : 0;
    }
    symbols.total = bytes.total;
    symbols.sampled = bytes.sampled;
    return static_cast<uint32_t>(std::popcount(used & ((1u << raw_bits) - 1)));
}

// Lists the symbols below `n_possible` that occur, ascending. `order` has room for one more than
// there are. Returns their number.
inline uint32_t list_seen(const Histogram& histogram, uint32_t n_possible, uint8_t* order) {
    uint32_t n_seen = 0;
    for (uint32_t v = 0; v < n_possible; ++v) {
        order[n_seen] = static_cast<uint8_t>(v);
        n_seen += histogram.counts[v] > 0 ? 1 : 0;
    }
    return n_seen;
}

// Leaves the `limit` most common symbols in `order` (ascending), the smaller ones among equally
// common ones. Returns how often the others occur. There are more than `limit`; counts are below
// 2^23. Comparing all of them some twenty times, without branches, is faster than selecting.
inline uint32_t drop_rare(const Histogram& histogram, uint32_t limit, uint8_t* order,
                          uint32_t n_seen) {
    int32_t keys[256];
    for (uint32_t i = 0; i < n_seen; ++i)
        keys[i] = static_cast<int32_t>(histogram.counts[order[i]] << 8 | (255u - order[i]));
    int32_t least = 0,
            above = 0x7FFFFFFF;  // at least `limit` keys reach the first, fewer the second
    for (uint32_t n_kept = n_seen; n_kept != limit;) {
        const int32_t middle = least + (above - least) / 2;
        n_kept = 0;
        for (uint32_t i = 0; i < n_seen; ++i) n_kept += keys[i] >= middle ? 1 : 0;
        (n_kept < limit ? above : least) = middle;
    }
    uint32_t dropped = 0, n_kept = 0;
    for (uint32_t i = 0; i < n_seen; ++i) {
        const bool kept = keys[i] >= least;
        dropped += kept ? 0 : histogram.counts[order[i]];
        order[n_kept] = order[i];
        n_kept += kept ? 1 : 0;
    }
    return dropped;
}

// Cost of the histogram's values at the plane's entropy, in 2^-16 bits. A sample underestimates the
// entropy; the Miller-Madow term, (values - 1) / (2 ln 2) bits, makes up for it.
inline uint64_t entropy_cost(const Histogram& histogram) {
    constexpr uint64_t kBiasCost = 47274;
    const SlotScale slots(histogram.total);
    uint64_t cost = 0;
    for (uint32_t count : histogram.counts)
        if (count > 0) {
            const uint32_t freq = slots.below(count);
            cost += uint64_t{count} * kSymbolCost[freq == 0 ? 1 : freq] + kBiasCost;
        }
    return cost - std::min(cost, kBiasCost);
}

// Scales a cost of the sample (2^-16 bits) to bytes of the plane.
inline std::size_t scale_cost(uint64_t cost, uint32_t total, std::size_t n) {
    return static_cast<std::size_t>((cost >> kCostBits) * n / total / 8);
}

}  // namespace packhorse
