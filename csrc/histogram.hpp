// How often each byte value occurs in a plane, counted in full or from a sample, and what coding it
// would cost.
//
// A full count takes as long as coding, so by default one run of 64 bytes in eight is looked at.
// Everything here is integer arithmetic: the encoder's choices, and so its output, are the same on
// every machine.
#pragma once

#include <array>
#include <bit>

#include "layout.hpp"

namespace packhorse {

struct Histogram {
    uint32_t counts[256];
    uint32_t total;
    bool sampled;  // values may exist that were not seen
};

constexpr std::size_t kSampleRun = 64;

// Four tables in turn, so that equal neighbours do not wait for each other's store.
inline void count_bytes(const uint8_t* plane, std::size_t n, uint32_t sample_log, Histogram& out) {
    uint32_t tables[4][256] = {};
    const std::size_t step = kSampleRun << sample_log;
    std::size_t seen = 0;
    for (std::size_t at = 0; at < n; at += step) {
        const std::size_t run = n - at < kSampleRun ? n - at : kSampleRun;
        const uint8_t* src = plane + at;
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

// log2(x) * 2^16, rounded down, for x in 1..4096: integer part by position, then one bit a
// squaring.
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

// kSymbolCost[f]: the cost of a symbol of frequency f of 4096.
inline constexpr std::array<uint32_t, kProbSum + 1> kSymbolCost = make_cost_table();

}  // namespace packhorse
