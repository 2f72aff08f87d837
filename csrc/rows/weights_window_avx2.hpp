// Counts with AVX2 how many exponents of a row reach each of some limits.
#pragma once

#include "common/dispatch.hpp"
#include "rows/weights.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Counts the exponents that are at least as large as each of some limits, which are not 0.
// `exponents` is padded with zeros to a multiple of 32. Prefetches the same number of elements from
// `ahead` on.
template <uint32_t kLimits>
PACKHORSE_AVX2 inline void count_from(const uint8_t* exponents, std::size_t n,
                                      const uint32_t* limits, const uint8_t* ahead,
                                      uint32_t* counts) {
    constexpr std::size_t kMaxVectors = 255;  // more would overflow a byte
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

#endif

}  // namespace packhorse
