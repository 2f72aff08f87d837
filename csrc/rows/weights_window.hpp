// Chooses the window of a row: the lowest of those that leave the fewest exceptions.
// Counting all exponents takes most of the time of packing. But the rows of a matrix are alike: the
// window is usually the same as that of the row before, or only a step or two away. With AVX2, six
// windows around it
// are counted by comparisons with twelve limits. The best of them is used if the counts prove that
// no other window is better; otherwise all exponents are counted.
#pragma once

#include "rows/weights.hpp"
#include "rows/weights_window_avx2.hpp"

namespace packhorse {

struct Window {
    uint32_t first;
    uint32_t covered;  // elements with an exponent inside
};

// Uses four tables in turn, so that equal neighbours do not wait for each other's store. Their
// counters of 16 bits can hold a quarter of the longest row.
inline void count_exponents(const uint8_t* exponents, std::size_t n, uint32_t* counts) {
    static_assert(kMaxWeightColumns / 4 + 8 < 1 << 16);
    uint16_t tables[4][256] = {};
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const auto word = load<uint64_t>(exponents + i);
        for (int k = 0; k < 8; ++k) ++tables[k & 3][word >> (8 * k) & 0xFF];
    }
    for (; i < n; ++i) ++tables[0][exponents[i]];
    for (int v = 0; v < 256; ++v)
        counts[v] = uint32_t{tables[0][v]} + tables[1][v] + tables[2][v] + tables[3][v];
}

template <class Format>
inline Window choose_window(const uint8_t* exponents, std::size_t n) {
    uint32_t counts[256];
    count_exponents(exponents, n, counts);
    uint32_t covered = 0;
    for (uint32_t code = Format::kFirstCode; code < 1u << Format::kCodeBits; ++code)
        covered += counts[Format::kMinFirst + code];
    Window best{Format::kMinFirst, covered};
    for (uint32_t first = Format::kMinFirst + 1; first <= Format::kMaxFirst; ++first) {
        const uint32_t lowest = first + Format::kFirstCode;
        covered += counts[lowest + kWindowWidth<Format> - 1] - counts[lowest - 1];
        if (covered > best.covered) best = {first, covered};
    }
    return best;
}

#if PACKHORSE_X86

constexpr uint32_t kNearWindows = 6;
constexpr uint32_t kNearBelow = 3;  // the number of these windows below that of the row before

// Finds the best window, if it is near `before` and the counts prove that it is the best. Returns
// whether they do.
template <class Format>
PACKHORSE_AVX2 inline bool choose_near_window(const uint8_t* exponents, std::size_t n,
                                              uint32_t before, const uint8_t* ahead, Window& best) {
    constexpr uint32_t kLast = kNearWindows - 1;
    const uint32_t below =
        before < Format::kMinFirst + kNearBelow ? before - Format::kMinFirst : kNearBelow;
    const uint32_t lowest =
        before - below > Format::kMaxFirst - kLast ? Format::kMaxFirst - kLast : before - below;
    uint32_t limits[2 * kNearWindows], counts[2 * kNearWindows];
    for (uint32_t k = 0; k < kNearWindows; ++k) {
        limits[k] = lowest + k + Format::kFirstCode;
        limits[kNearWindows + k] = lowest + k + (1u << Format::kCodeBits);
    }
    count_from<2 * kNearWindows>(exponents, n, limits, ahead, counts);
    best = {lowest, counts[0] - counts[kNearWindows]};
    for (uint32_t k = 1; k < kNearWindows; ++k) {
        const uint32_t covered = counts[k] - counts[kNearWindows + k];
        if (covered > best.covered) best = {lowest + k, covered};
    }
    // A lower window leaves at least the exponents above the lowest of these windows; a higher one
    // leaves at least those below the highest. If windows are equally good, the lower one is
    // chosen.
    const auto left = static_cast<uint32_t>(n) - best.covered;
    const auto below_highest = static_cast<uint32_t>(n) - counts[kLast];
    return (lowest == Format::kMinFirst || left < counts[kNearWindows]) &&
           (lowest == Format::kMaxFirst - kLast || left <= below_highest);
}

#endif

}  // namespace packhorse
