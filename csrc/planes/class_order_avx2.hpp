// Moves units to the order by class and back with AVX2: in one direction by byte shuffles from a
// table, in the other by the rank of each unit in its class.
#pragma once

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/class_order_portable.hpp"
#include "planes/place_shuffles.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Counts the keys at or above each cut in `n_blocks` blocks of 32.
template <uint32_t kCuts>
PACKHORSE_AVX2 inline void count_cuts_avx2(const uint8_t* keys, std::size_t n_blocks,
                                           const uint8_t* cuts, std::size_t* above) {
    while (n_blocks > 0) {
        const std::size_t run = std::min(n_blocks, kCountRounds);
        __m256i few[kCuts] = {};
        for (std::size_t b = 0; b < run; ++b, keys += 32) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
#pragma GCC unroll 8
            for (uint32_t t = 0; t < kCuts; ++t) {
                const __m256i cut = _mm256_set1_epi8(static_cast<char>(cuts[t]));
                few[t] = _mm256_sub_epi8(few[t], _mm256_cmpeq_epi8(_mm256_max_epu8(key, cut), key));
            }
        }
        for (uint32_t t = 0; t < kCuts; ++t) {
            alignas(32) uint64_t sums[4];
            _mm256_store_si256(reinterpret_cast<__m256i*>(sums),
                               _mm256_sad_epu8(few[t], _mm256_setzero_si256()));
            above[t] += sums[0] + sums[1] + sums[2] + sums[3];
        }
        n_blocks -= run;
    }
}

PACKHORSE_AVX2 PACKHORSE_INLINE uint64_t above_avx2(const uint8_t* keys, uint8_t cut) {
    uint32_t halves[2];
    for (int h = 0; h < 2; ++h) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys) + h);
        const __m256i larger = _mm256_max_epu8(key, _mm256_set1_epi8(static_cast<char>(cut)));
        halves[h] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(larger, key)));
    }
    return halves[0] | uint64_t{halves[1]} << 32;
}

PACKHORSE_AVX2 PACKHORSE_INLINE ClassSets class_sets_avx2(const uint8_t* keys,
                                                          const ClassCuts& cuts) {
    uint64_t above[kMaxClasses - 1];
    for (uint32_t t = 0; t + 1 < kMaxClasses; ++t)
        above[t] = above_avx2(keys, cuts.at[t]) & cuts.used[t];
    return class_sets(above);
}

// The cuts in registers.
struct CutsAvx2 {
    __m256i at[kMaxClasses - 1];
    __m256i used[kMaxClasses - 1];

    PACKHORSE_AVX2 explicit CutsAvx2(const ClassCuts& cuts) {
        for (uint32_t t = 0; t + 1 < kMaxClasses; ++t) {
            at[t] = _mm256_set1_epi8(static_cast<char>(cuts.at[t]));
            used[t] = _mm256_set1_epi64x(static_cast<long long>(cuts.used[t]));
        }
    }

    // The keys at or above a cut.
    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i above(__m256i keys, uint32_t t) const {
        return _mm256_and_si256(used[t], _mm256_cmpeq_epi8(_mm256_max_epu8(keys, at[t]), keys));
    }
};

// For each byte, the sum of the bytes before it in its half.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i sums_before_avx2(__m256i bytes) {
    __m256i sums = _mm256_slli_si256(bytes, 1);
    sums = _mm256_add_epi8(sums, _mm256_slli_si256(sums, 1));
    sums = _mm256_add_epi8(sums, _mm256_slli_si256(sums, 2));
    sums = _mm256_add_epi8(sums, _mm256_slli_si256(sums, 4));
    return _mm256_add_epi8(sums, _mm256_slli_si256(sums, 8));
}

// How many units of a block of 32 are at or above each cut, in the first half and in all.
struct CountsAbove {
    std::size_t half[kMaxClasses - 1];
    std::size_t all[kMaxClasses - 1];

    PACKHORSE_AVX2 PACKHORSE_INLINE explicit CountsAbove(const __m256i* above) {
        for (uint32_t t = 0; t + 1 < kMaxClasses; ++t) {
            const auto set = static_cast<uint32_t>(_mm256_movemask_epi8(above[t]));
            half[t] = static_cast<std::size_t>(__builtin_popcount(set & 0xFFFF));
            all[t] = static_cast<std::size_t>(__builtin_popcount(set));
        }
    }

    // Units of a class among the `n` that were counted.
    static PACKHORSE_INLINE std::size_t of(const std::size_t* counts, std::size_t n, uint32_t c) {
        return (c == 0 ? n : counts[c - 1]) - (c + 1 == kMaxClasses ? 0 : counts[c]);
    }
};

// Fetches 32 units, each from the next units of its class, by its rank: the number of units of the
// class before it in its half of the block. Ranks are below 16, so one byte counts for two classes.
PACKHORSE_AVX2 PACKHORSE_INLINE void unsort_block_avx2(const uint8_t** next, const uint8_t* keys,
                                                       const CutsAvx2& cuts, uint8_t* dst) {
    const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
    const __m256i above[3] = {cuts.above(key, 0), cuts.above(key, 1), cuts.above(key, 2)};
    const __m256i one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(0x0F);
    // 1 for the lower class of a pair, 16 for the upper.
    const __m256i lower = _mm256_add_epi8(one, _mm256_and_si256(above[0], low));
    const __m256i upper = _mm256_add_epi8(one, _mm256_and_si256(above[2], low));
    const __m256i ranks[2] = {sums_before_avx2(_mm256_andnot_si256(above[1], lower)),
                              sums_before_avx2(_mm256_and_si256(above[1], upper))};
    const CountsAbove counts(above);
    __m256i units[kMaxClasses];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < kMaxClasses; ++c) {
        const __m256i both = ranks[c / 2];
        const __m256i rank = _mm256_and_si256(c % 2 == 0 ? both : _mm256_srli_epi16(both, 4), low);
        const uint8_t* half = next[c] + CountsAbove::of(counts.half, 16, c);
        const __m128i fresh[2] = {_mm_loadu_si128(reinterpret_cast<const __m128i*>(next[c])),
                                  _mm_loadu_si128(reinterpret_cast<const __m128i*>(half))};
        units[c] = _mm256_shuffle_epi8(_mm256_setr_m128i(fresh[0], fresh[1]), rank);
        next[c] += CountsAbove::of(counts.all, 32, c);
    }
    const __m256i pairs[2] = {_mm256_blendv_epi8(units[0], units[1], above[0]),
                              _mm256_blendv_epi8(units[2], units[3], above[2])};
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                        _mm256_blendv_epi8(pairs[0], pairs[1], above[1]));
}

PACKHORSE_AVX2 inline std::size_t unsort_blocks_avx2(const uint8_t** from, const uint8_t* keys,
                                                     std::size_t n, const ClassCuts& cuts,
                                                     uint8_t* dst) {
    const uint8_t* next[kMaxClasses] = {from[0], from[1], from[2], from[3]};
    const CutsAvx2 registers(cuts);
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) unsort_block_avx2(next, keys + i, registers, dst + i);
    for (uint32_t c = 0; c < kMaxClasses; ++c) from[c] = next[c];
    return i;
}

PACKHORSE_AVX2 inline std::size_t sort_blocks_avx2(const uint8_t* plane, const uint8_t* keys,
                                                   std::size_t n, const ClassCuts& cuts,
                                                   uint8_t** to) {
    uint8_t* next[kMaxClasses] = {to[0], to[1], to[2], to[3]};
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const ClassSets sets = class_sets_avx2(keys + i, cuts);
        for (std::size_t k = 0; k < 64; k += 8) {
            const __m128i units = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(plane + i + k));
#pragma GCC unroll 4
            for (uint32_t c = 0; c < kMaxClasses; ++c) {
                const auto set = static_cast<uint32_t>(sets.of[c] >> k & 0xFF);
                const __m128i places =
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaceShuffles.compress[set]));
                _mm_storel_epi64(reinterpret_cast<__m128i*>(next[c]),
                                 _mm_shuffle_epi8(units, places));
                next[c] += __builtin_popcount(set);
            }
        }
    }
    for (uint32_t c = 0; c < kMaxClasses; ++c) to[c] = next[c];
    return i;
}

#endif

}  // namespace packhorse
