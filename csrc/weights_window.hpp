// Which window a row of weights gets: of all that leave the fewest exceptions, the lowest.
//
// To count all exponents takes most of the time of packing. But the rows of a matrix are alike: the
// window is mostly that of the row before, or a step or two away. With AVX2 six windows around it
// are counted, by comparisons with twelve limits, and the best of them is taken if those counts
// prove that no other window is better; else all exponents are counted.
#pragma once

#include "weights.hpp"

namespace packhorse {

struct Window {
    uint32_t first;
    uint32_t covered;  // elements with an exponent inside
};

// Four tables in turn, so that equal neighbours do not wait for each other's store. Their 16 bits
// hold a quarter of the longest row.
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

template <class Form>
inline Window choose_window(const uint8_t* exponents, std::size_t n) {
    uint32_t counts[256];
    count_exponents(exponents, n, counts);
    uint32_t covered = 0;
    for (uint32_t code = Form::kFirstCode; code < 1u << Form::kCodeBits; ++code)
        covered += counts[Form::kMinFirst + code];
    Window best{Form::kMinFirst, covered};
    for (uint32_t first = Form::kMinFirst + 1; first <= Form::kMaxFirst; ++first) {
        const uint32_t lowest = first + Form::kFirstCode;
        covered += counts[lowest + kWindowWidth<Form> - 1] - counts[lowest - 1];
        if (covered > best.covered) best = {first, covered};
    }
    return best;
}

#if PACKHORSE_X86

constexpr uint32_t kNearWindows = 6;
constexpr uint32_t kNearBelow = 3;  // so many of them are below the window of the row before

// How many exponents are at least as large as each of some limits, which are not 0. `exponents` has
// zeros up to a multiple of 32. Fetches the same number of elements from `ahead` on.
template <uint32_t kLimits>
PACKHORSE_AVX2 inline void count_from(const uint8_t* exponents, std::size_t n,
                                      const uint32_t* limits, const uint8_t* ahead,
                                      uint32_t* counts) {
    constexpr std::size_t kMaxVectors = 255;  // until a byte is full
    const __m256i flip = _mm256_set1_epi8(-128), zero = _mm256_setzero_si256();
    __m256i below[kLimits];
    for (uint32_t k = 0; k < kLimits; ++k) {
        below[k] = _mm256_set1_epi8(static_cast<char>(limits[k] - 1 - 128));
        counts[k] = 0;
    }
    for (std::size_t at = 0; at < n; at += 32 * kMaxVectors) {
        const std::size_t stop = n - at < 32 * kMaxVectors ? n : at + 32 * kMaxVectors;
        __m256i sums[kLimits];
        for (uint32_t k = 0; k < kLimits; ++k) sums[k] = zero;
        for (std::size_t i = at; i < stop; i += 32) {
            __builtin_prefetch(ahead + 2 * i);
            const __m256i bytes =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponents + i));
            const __m256i flipped = _mm256_xor_si256(bytes, flip);
#pragma GCC unroll 12
            for (uint32_t k = 0; k < kLimits; ++k)
                sums[k] = _mm256_sub_epi8(sums[k], _mm256_cmpgt_epi8(flipped, below[k]));
        }
        for (uint32_t k = 0; k < kLimits; ++k) {
            const __m256i words = _mm256_sad_epu8(sums[k], zero);
            const __m128i halves =
                _mm_add_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            counts[k] +=
                static_cast<uint32_t>(_mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 2));
        }
    }
}

// The best window, if it is one near `before` and the counts prove it.
template <class Form>
PACKHORSE_AVX2 inline bool choose_near_window(const uint8_t* exponents, std::size_t n,
                                              uint32_t before, const uint8_t* ahead, Window& best) {
    constexpr uint32_t kLast = kNearWindows - 1;
    const uint32_t below =
        before < Form::kMinFirst + kNearBelow ? before - Form::kMinFirst : kNearBelow;
    const uint32_t lowest =
        before - below > Form::kMaxFirst - kLast ? Form::kMaxFirst - kLast : before - below;
    uint32_t limits[2 * kNearWindows], counts[2 * kNearWindows];
    for (uint32_t k = 0; k < kNearWindows; ++k) {
        limits[k] = lowest + k + Form::kFirstCode;
        limits[kNearWindows + k] = lowest + k + (1u << Form::kCodeBits);
    }
    count_from<2 * kNearWindows>(exponents, n, limits, ahead, counts);
    best = {lowest, counts[0] - counts[kNearWindows]};
    for (uint32_t k = 1; k < kNearWindows; ++k) {
        const uint32_t covered = counts[k] - counts[kNearWindows + k];
        if (covered > best.covered) best = {lowest + k, covered};
    }
    // A lower window leaves at least what is above the lowest of these; a higher one at least what
    // is below the highest. Where both leave as many, the lower one is taken.
    const auto left = static_cast<uint32_t>(n) - best.covered;
    const auto below_highest = static_cast<uint32_t>(n) - counts[kLast];
    return (lowest == Form::kMinFirst || left < counts[kNearWindows]) &&
           (lowest == Form::kMaxFirst - kLast || left <= below_highest);
}

#endif

}  // namespace packhorse
