// Moves units to the order by class and back with AVX-512 and VBMI2, which compresses and expands
// 64 units at a time.
#pragma once

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/class_order_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Counts the keys at or above each cut in `n_blocks` blocks of 64.
template <uint32_t kCuts>
PACKHORSE_AVX512 inline void count_cuts_avx512(const uint8_t* keys, std::size_t n_blocks,
                                               const uint8_t* cuts, std::size_t* above) {
    while (n_blocks > 0) {
        const std::size_t run = std::min(n_blocks, kCountRounds);
        __m512i few[kCuts] = {};
        for (std::size_t b = 0; b < run; ++b, keys += 64) {
            const __m512i key = _mm512_loadu_si512(keys);
#pragma GCC unroll 8
            for (uint32_t t = 0; t < kCuts; ++t) {
                const __m512i cut = _mm512_set1_epi8(static_cast<char>(cuts[t]));
                const __mmask64 mine = _mm512_cmpge_epu8_mask(key, cut);
                few[t] = _mm512_mask_sub_epi8(few[t], mine, few[t], _mm512_set1_epi8(-1));
            }
        }
        for (uint32_t t = 0; t < kCuts; ++t)
            above[t] += static_cast<std::size_t>(
                _mm512_reduce_add_epi64(_mm512_sad_epu8(few[t], _mm512_setzero_si512())));
        n_blocks -= run;
    }
}

// Which of 64 units are at or above each cut.
PACKHORSE_AVX512 PACKHORSE_INLINE ClassSets class_sets_avx512(const uint8_t* keys,
                                                              const ClassCuts& cuts) {
    const __m512i key = _mm512_loadu_si512(keys);
    uint64_t above[kMaxClasses - 1];
    for (uint32_t t = 0; t + 1 < kMaxClasses; ++t)
        above[t] = _mm512_mask_cmpge_epu8_mask(cuts.used[t], key,
                                               _mm512_set1_epi8(static_cast<char>(cuts.at[t])));
    return class_sets(above);
}

PACKHORSE_AVX512_VBMI2 inline std::size_t unsort_blocks_vbmi2(const uint8_t** from,
                                                              const uint8_t* keys, std::size_t n,
                                                              const ClassCuts& cuts, uint8_t* dst) {
    const uint8_t* next[kMaxClasses] = {from[0], from[1], from[2], from[3]};
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const ClassSets sets = class_sets_avx512(keys + i, cuts);
        __m512i units = _mm512_setzero_si512();
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            units = _mm512_mask_expand_epi8(units, sets.of[c], _mm512_loadu_si512(next[c]));
            next[c] += __builtin_popcountll(sets.of[c]);
        }
        _mm512_storeu_si512(dst + i, units);
    }
    for (uint32_t c = 0; c < kMaxClasses; ++c) from[c] = next[c];
    return i;
}

PACKHORSE_AVX512_VBMI2 inline std::size_t sort_blocks_vbmi2(const uint8_t* plane,
                                                            const uint8_t* keys, std::size_t n,
                                                            const ClassCuts& cuts, uint8_t** to) {
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const ClassSets sets = class_sets_avx512(keys + i, cuts);
        const __m512i units = _mm512_loadu_si512(plane + i);
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            _mm512_storeu_si512(to[c], _mm512_maskz_compress_epi8(sets.of[c], units));
            to[c] += __builtin_popcountll(sets.of[c]);
        }
    }
    return i;
}

#endif

}  // namespace packhorse
