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

// Four tables take turns, so that equal neighbours do not wait for each other's store.
inline void count_bytes(const uint8_t* plane, std::size_t n, uint32_t sample_log, Histogram& out) {
    uint32_t tables[4][256] = {};
    const std::size_t step = kSampleRun << sample_log;
    std::size_t seen = 0;
    for (std::size_t at = 0; at < n; at += step) {
        const std::size_t run = n - at < kSampleRun ? n - at : kSampleRun;
        const uint8_t* src = plane + at;
        // The runs of a sample are far apart, so the hardware does not prefetch them.
        __builtin_prefetch(src + 16 * step);
        std::size_t i = 0;
        for (; i + 8 <= run; i += 8) {
            const auto word = load<uint64_t>(src + i);
            for (int k = 0; k < 8; ++k) ++tables[k & 3][word >> (8 * k) & 0xFF];
        }
        for (; i < run; ++i) ++tables[0][src[i]];
        seen += run;
    }
    for (int v = 0; v < 256; ++v)
        out.counts[v] = tables[0][v] + tables[1][v] + tables[2][v] + tables[3][v];
    out.total = static_cast<uint32_t>(seen);
    out.sampled = seen < n;
}

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

// Cost of the histogram's values at the plane's entropy, in 2^-16 bits. A sample underestimates the
// entropy; the Miller-Madow term, (values - 1) / (2 ln 2) bits, makes up for it.
inline uint64_t entropy_cost(const Histogram& histogram) {
    constexpr uint64_t kBiasCost = 47274;
    uint64_t cost = 0;
    for (uint32_t count : histogram.counts)
        if (count > 0) {
            const uint64_t freq = uint64_t{count} * kProbSum / histogram.total;
            cost += uint64_t{count} * kSymbolCost[freq == 0 ? 1 : freq] + kBiasCost;
        }
    return cost - std::min(cost, kBiasCost);
}

// Scales a cost of the sample (2^-16 bits) to bytes of the plane.
inline std::size_t scale_cost(uint64_t cost, uint32_t total, std::size_t n) {
    return static_cast<std::size_t>((cost >> kCostBits) * n / total / 8);
}

}  // namespace packhorse
