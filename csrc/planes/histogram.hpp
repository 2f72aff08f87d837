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
#include <cstring>

#include "common/layout.hpp"

namespace packhorse {

struct Histogram {
    uint32_t counts[256];
    uint32_t total;
    bool sampled;  // the plane may have values that were not counted
};

constexpr std::size_t kSampleRun = 64;

// Counts the values of the runs of a sample in tables that take turns, so that equal neighbours do
// not wait for each other's store. Returns how many were counted.
template <class Count, std::size_t kTables>
inline std::size_t count_runs(const uint8_t* plane, std::size_t n, uint32_t sample_log,
                              Count (&tables)[kTables][256]) {
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
    return seen;
}

template <class Count, std::size_t kTables>
inline void count_in_tables(const uint8_t* plane, std::size_t n, uint32_t sample_log,
                            Histogram& out) {
    Count tables[kTables][256];
    std::memset(tables, 0, sizeof tables);
    out.total = static_cast<uint32_t>(count_runs(plane, n, sample_log, tables));
    out.sampled = out.total < n;
    for (std::size_t v = 0; v < 256; ++v) {
        Count sum = 0;
        for (std::size_t t = 0; t < kTables; ++t) sum = static_cast<Count>(sum + tables[t][v]);
        out.counts[v] = sum;
    }
}

// Clearing and adding up eight tables takes longer than counting a few hundred bytes.
inline void count_bytes(const uint8_t* plane, std::size_t n, uint32_t sample_log, Histogram& out) {
    constexpr std::size_t kFew = 4096;
    if ((n >> sample_log) + kSampleRun <= kFew)
        count_in_tables<uint16_t, 4>(plane, n, sample_log, out);
    else
        count_in_tables<uint32_t, 8>(plane, n, sample_log, out);
}

// The symbols of a plane that occur, ascending. Symbols are bytes, or their upper bits.
struct SymbolCounts {
    uint32_t n;      // symbols that occur
    uint32_t total;  // units
    bool sampled;
    uint8_t symbols[256];
    uint32_t counts[256 + 1];  // room for an escape
};

// Copies only what is there: that is little in most cases.
inline void copy_symbols(const SymbolCounts& from, SymbolCounts& to) {
    to.n = from.n;
    to.total = from.total;
    to.sampled = from.sampled;
    std::copy_n(from.symbols, from.n, to.symbols);
    std::copy_n(from.counts, from.n, to.counts);
}

inline void list_symbols(const Histogram& histogram, SymbolCounts& out) {
    out.total = histogram.total;
    out.sampled = histogram.sampled;
    uint8_t seen[256];
    for (uint32_t v = 0; v < 256; ++v) seen[v] = histogram.counts[v] > 0 ? 1 : 0;
    out.n = 0;
    for (uint32_t v = 0; v < 256; v += 64) {
        uint64_t mask = 0;                    // of 64 values
        for (uint32_t i = 0; i < 64; i += 8)  // the product gathers a bit of each byte
            mask |= load<uint64_t>(seen + v + i) * 0x0102040810204080 >> 56 << i;
        for (; mask != 0; mask &= mask - 1, ++out.n) {
            const uint32_t value = v + static_cast<uint32_t>(std::countr_zero(mask));
            out.symbols[out.n] = static_cast<uint8_t>(value);
            out.counts[out.n] = histogram.counts[value];
        }
    }
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
    table[0] = table[1];
    return table;
}

// kSymbolCost[f]: the cost of a symbol that has the frequency f of 4096. Symbols that are rarer
// than 1 in 4096 cost as much as those.
inline constexpr std::array<uint32_t, kProbSum + 1> kSymbolCost = make_cost_table();

// The bits that are set in any symbol.
inline uint32_t bits_in_use(const SymbolCounts& symbols) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < symbols.n; ++i) used |= symbols.symbols[i];
    return used;
}

// Drops the `raw_bits` low bits of bytes.
inline void fold(const SymbolCounts& bytes, uint32_t raw_bits, SymbolCounts& folded) {
    folded.total = bytes.total;
    folded.sampled = bytes.sampled;
    folded.n = 0;
    uint32_t last = ~0u, sum = 0;
    for (uint32_t i = 0; i < bytes.n; ++i) {
        const uint32_t symbol = uint32_t{bytes.symbols[i]} >> raw_bits;
        const bool is_new = symbol != last;
        sum = (is_new ? 0 : sum) + bytes.counts[i];
        folded.n += is_new ? 1 : 0;
        folded.symbols[folded.n - 1] = static_cast<uint8_t>(symbol);
        folded.counts[folded.n - 1] = sum;
        last = symbol;
    }
}

// A symbol and its count as one number: a larger one is more common, or as common and smaller.
inline uint32_t rank_key(const SymbolCounts& symbols, uint32_t i) {
    return symbols.counts[i] << 8 | (255u - symbols.symbols[i]);
}

// Keeps the `limit` most common symbols. Returns how often the others occur. There are more than
// `limit`; counts are below 2^23. Comparing all of them some twenty times, without branches, is
// faster than selecting.
inline uint32_t drop_rare(const SymbolCounts& all, uint32_t limit, SymbolCounts& kept) {
    int32_t keys[256];
    int32_t least = 0, above = 0;  // at least `limit` keys reach the first, fewer the second
    for (uint32_t i = 0; i < all.n; ++i) {
        keys[i] = static_cast<int32_t>(rank_key(all, i));
        above = std::max(above, keys[i] + 1);
    }
    for (uint32_t n_kept = all.n; n_kept != limit;) {
        const int32_t middle = least + (above - least) / 2;
        n_kept = 0;
        for (uint32_t i = 0; i < all.n; ++i) n_kept += keys[i] >= middle ? 1 : 0;
        (n_kept < limit ? above : least) = middle;
    }
    uint32_t dropped = 0, n_kept = 0;
    for (uint32_t i = 0; i < all.n; ++i) {
        const bool keeps = keys[i] >= least;
        dropped += keeps ? 0 : all.counts[i];
        if (n_kept < limit) {
            kept.symbols[n_kept] = all.symbols[i];
            kept.counts[n_kept] = all.counts[i];
        }
        n_kept += keeps ? 1 : 0;
    }
    kept.n = limit;
    kept.total = all.total;
    kept.sampled = all.sampled;
    return dropped;
}

// A sample underestimates the entropy. The Miller-Madow term, (values - 1) / (2 ln 2) bits, makes
// up for it.
constexpr int32_t kBiasCost = 47274;

constexpr uint32_t kMostTabled = 2 * 1024 + 2 * kSampleRun;

// By count c: c * log2(c), less the bias of a value that occurs, in 2^-16 bits.
constexpr std::array<int32_t, kMostTabled + 1> make_count_table() {
    std::array<int32_t, kMostTabled + 1> table{};
    for (uint32_t count = 1; count <= kMostTabled; ++count)
        table[count] = static_cast<int32_t>(count * log2_fixed(count)) - kBiasCost;
    return table;
}

inline constexpr std::array<int32_t, kMostTabled + 1> kCountTable = make_count_table();

// Cost of `n` counts that add up to `total`, at their entropy, in 2^-16 bits. For a first look,
// with its small total, that is a difference of table entries.
inline uint64_t entropy_cost(const uint32_t* counts, uint32_t n, uint32_t total) {
    int64_t cost = 0;
    if (total <= kMostTabled) {
        for (uint32_t i = 0; i < n; ++i) cost -= kCountTable[counts[i]];
        cost += kCountTable[total];
        return static_cast<uint64_t>(std::max<int64_t>(cost, 0));
    }
    const SlotScale slots(total);
    uint32_t n_seen = 0;
    for (uint32_t i = 0; i < n; ++i) {
        cost += int64_t{counts[i]} * kSymbolCost[slots.below(counts[i])];
        n_seen += counts[i] > 0 ? 1 : 0;
    }
    return static_cast<uint64_t>(cost + (int64_t{n_seen} - 1) * kBiasCost);
}

inline uint64_t entropy_cost(const Histogram& histogram) {
    return entropy_cost(histogram.counts, 256, histogram.total);
}

inline uint64_t entropy_cost(const SymbolCounts& symbols) {
    return entropy_cost(symbols.counts, symbols.n, symbols.total);
}

// Such a cost without that term: no code takes less for the units that were counted.
inline uint64_t without_bias(uint64_t cost, uint32_t n_values) {
    const uint64_t bias = static_cast<uint64_t>(kBiasCost) * (std::max(n_values, 1u) - 1);
    return cost - std::min(cost, bias);
}

inline uint64_t least_cost(const SymbolCounts& symbols) {
    return without_bias(entropy_cost(symbols), symbols.n);
}

inline uint64_t least_cost(const Histogram& histogram) {
    uint32_t n_seen = 0;
    for (const uint32_t count : histogram.counts) n_seen += count > 0 ? 1 : 0;
    return without_bias(entropy_cost(histogram), n_seen);
}

// Cost of a histogram if each symbol gets the slots nearest to its share, in 2^-16 bits.
inline uint64_t nearest_cost(const SymbolCounts& symbols) {
    const SlotScale slots(symbols.total);
    uint64_t cost = 0;
    for (uint32_t i = 0; i < symbols.n; ++i)
        cost += uint64_t{symbols.counts[i]} * kSymbolCost[slots.nearest(symbols.counts[i])];
    return cost;
}

// Scales a cost of the sample (2^-16 bits) to bytes of the plane.
inline std::size_t scale_cost(uint64_t cost, uint32_t total, std::size_t n) {
    return static_cast<std::size_t>((cost >> kCostBits) * n / total / 8);
}

}  // namespace packhorse
