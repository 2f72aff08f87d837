// Moves the bytes of differences to the order by class and back with AVX2, for up to eight classes,
// in the same steps as planes/class_order_avx2.hpp.
#pragma once

#include "common/dispatch.hpp"
#include "delta/rows.hpp"
#include "planes/class_order_avx2.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX2 PACKHORSE_INLINE __m256i load_halves_avx2(const uint8_t* first, std::size_t gap) {
    return _mm256_setr_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(first)),
                             _mm_loadu_si128(reinterpret_cast<const __m128i*>(first + gap)));
}

// Fetches the bytes of 32 units, each from the next bytes of its class, by its rank. The rank is
// the number of units of the class before it in its half of the block (see unsort_block_avx2()).
// Two classes share a byte of ranks.
template <uint32_t kClasses>
PACKHORSE_AVX2 inline std::size_t unsort_rows_avx2(ClassRows<const uint8_t>& rows,
                                                   const uint8_t* keys, std::size_t n,
                                                   const DeltaRule& rule,
                                                   const DeltaRowCounts& row_counts,
                                                   BlockRows& dst) {
    const ClassRows<const uint8_t> from = rows;
    const DeltaRowCounts counts = row_counts;
    const __m256i one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(0x0F);
    std::size_t next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = from.next[c];
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
        // The units of class c and above; none for numbers above the last class.
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
        __m256i tokens = _mm256_setzero_si256(), ranks[kClasses];
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            if (c % 2 == 0) {
                // 1 for this class, 16 for the next.
                const __m256i mine = _mm256_andnot_si256(from_class[c + 2], from_class[c]);
                const __m256i upper = _mm256_set1_epi8(16);
                const __m256i kind = _mm256_blendv_epi8(one, upper, from_class[c + 1]);
                ranks[c] = sums_before_avx2(_mm256_and_si256(mine, kind));
            } else {
                ranks[c] = _mm256_srli_epi16(ranks[c - 1], 4);
            }
            const uint8_t* const first = from.at[0] + next[c];
            const __m256i fresh = load_halves_avx2(first, half[c] - half[c + 1]);
            const __m256i rank = _mm256_and_si256(ranks[c], low);
            tokens = _mm256_blendv_epi8(tokens, _mm256_shuffle_epi8(fresh, rank), from_class[c]);
        }
        _mm256_store_si256(reinterpret_cast<__m256i*>(dst.at[0] + i), tokens);
        for (uint32_t p = 1; p < counts.most; ++p) {
            __m256i bytes = _mm256_setzero_si256();
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c) {
                if (p >= counts.of[c]) {
                    bytes = _mm256_andnot_si256(from_class[c], bytes);
                    continue;
                }
                const uint8_t* const first = from.at[p] + next[c];
                const __m256i fresh = load_halves_avx2(first, half[c] - half[c + 1]);
                const __m256i rank = _mm256_and_si256(ranks[c], low);
                bytes = _mm256_blendv_epi8(bytes, _mm256_shuffle_epi8(fresh, rank), from_class[c]);
            }
            _mm256_store_si256(reinterpret_cast<__m256i*>(dst.at[p] + i), bytes);
        }
        for (uint32_t c = 0; c < kClasses; ++c) next[c] += all[c] - all[c + 1];
    }
    for (uint32_t c = 0; c < kClasses; ++c) rows.next[c] = next[c];
    return i;
}

// Moves eight bytes at a time, by a table indexed by the set of places of a class's units.
template <uint32_t kClasses>
PACKHORSE_AVX2 inline std::size_t sort_rows_avx2(const BlockRows& src, const uint8_t* keys,
                                                 std::size_t n, const DeltaRule& rule,
                                                 const DeltaRowCounts& row_counts,
                                                 ClassRows<uint8_t>& rows) {
    const ClassRows<uint8_t> to = rows;
    const DeltaRowCounts counts = row_counts;
    std::size_t next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = to.next[c];
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
            __m128i bytes[kMaxDeltaRows];
            for (uint32_t p = 0; p < counts.most; ++p)
                bytes[p] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src.at[p] + i + k));
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c) {
                const auto set = static_cast<uint32_t>(sets[c] >> k & 0xFF);
                const __m128i places =
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaceShuffles.compress[set]));
                for (uint32_t p = 0; p < counts.of[c]; ++p)
                    _mm_storel_epi64(reinterpret_cast<__m128i*>(to.at[p] + next[c]),
                                     _mm_shuffle_epi8(bytes[p], places));
                next[c] += static_cast<std::size_t>(__builtin_popcount(set));
            }
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) rows.next[c] = next[c];
    return i;
}

#endif

}  // namespace packhorse
