// Moves tokens to the order by class and back with AVX2, for up to eight classes, in the same steps
// as planes/class_order_avx2.hpp.
#pragma once

#include "common/dispatch.hpp"
#include "delta/delta.hpp"
#include "planes/class_order_avx2.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Fetches 32 tokens, each from the next tokens of its class, by its rank. The rank is the number of
// tokens of the class before it in its half of the block (see unsort_block_avx2()). Two classes
// share a byte of ranks.
template <uint32_t kClasses>
PACKHORSE_AVX2 inline std::size_t unsort_tokens_avx2(const uint8_t** from, const uint8_t* keys,
                                                     std::size_t n, const DeltaRule& rule,
                                                     uint8_t* dst) {
    const __m256i one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(0x0F);
    const uint8_t* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = from[c];
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
        // The tokens of class c and above; none for numbers above the last class.
        __m256i from_class[kClasses + 2];
        uint32_t half[kClasses + 1], all[kClasses + 1];
#pragma GCC unroll 10
        for (uint32_t c = 0; c < kClasses + 2; ++c) {
            from_class[c] = c < kClasses ? _mm256_set1_epi8(-1) : _mm256_setzero_si256();
            if (c > 0 && c < kClasses) {
                const __m256i cut = _mm256_set1_epi8(static_cast<char>(rule.thresholds[c - 1]));
                from_class[c] = _mm256_cmpeq_epi8(_mm256_max_epu8(key, cut), key);
            }
            if (c > kClasses) continue;
            const auto set = static_cast<uint32_t>(_mm256_movemask_epi8(from_class[c]));
            half[c] = static_cast<uint32_t>(__builtin_popcount(set & 0xFFFF));
            all[c] = static_cast<uint32_t>(__builtin_popcount(set));
        }
        __m256i units = _mm256_setzero_si256(), ranks = units;
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            if (c % 2 == 0) {
                // 1 for this class, 16 for the next.
                const __m256i mine = _mm256_andnot_si256(from_class[c + 2], from_class[c]);
                const __m256i upper = _mm256_set1_epi8(16);
                const __m256i kind = _mm256_blendv_epi8(one, upper, from_class[c + 1]);
                ranks = sums_before_avx2(_mm256_and_si256(mine, kind));
            }
            const __m256i rank =
                _mm256_and_si256(c % 2 == 0 ? ranks : _mm256_srli_epi16(ranks, 4), low);
            const uint8_t* const second = next[c] + (half[c] - half[c + 1]);
            const __m256i fresh =
                _mm256_setr_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next[c])),
                                  _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)));
            units = _mm256_blendv_epi8(units, _mm256_shuffle_epi8(fresh, rank), from_class[c]);
            next[c] += all[c] - all[c + 1];
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), units);
    }
    for (uint32_t c = 0; c < kClasses; ++c) from[c] = next[c];
    return i;
}

// Moves eight tokens at a time, by a table indexed by the set of places of a class's tokens.
template <uint32_t kClasses>
PACKHORSE_AVX2 inline std::size_t sort_tokens_avx2(const uint8_t* src, const uint8_t* keys,
                                                   std::size_t n, const DeltaRule& rule,
                                                   uint8_t** to) {
    uint8_t* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = to[c];
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t sets[kClasses];
        uint64_t from_here = ~uint64_t{0};
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const uint64_t above = c + 1 < kClasses ? above_avx2(keys + i, rule.thresholds[c]) : 0;
            sets[c] = from_here & ~above;
            from_here = above;
        }
        for (std::size_t k = 0; k < 64; k += 8) {
            const __m128i tokens = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + i + k));
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c) {
                const auto set = static_cast<uint32_t>(sets[c] >> k & 0xFF);
                const __m128i places =
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaceShuffles.compress[set]));
                _mm_storel_epi64(reinterpret_cast<__m128i*>(next[c]),
                                 _mm_shuffle_epi8(tokens, places));
                next[c] += __builtin_popcount(set);
            }
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) to[c] = next[c];
    return i;
}

#endif

}  // namespace packhorse
