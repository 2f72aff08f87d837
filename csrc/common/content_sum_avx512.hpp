// Content sums with AVX-512.
#pragma once

#include "common/content_sum_portable.hpp"

#if PACKHORSE_X86

namespace packhorse {

PACKHORSE_AVX512 PACKHORSE_INLINE __m512i eight_u64(uint64_t x) {
    return _mm512_set1_epi64(static_cast<int64_t>(x));
}

PACKHORSE_AVX512 PACKHORSE_INLINE __m512i eight_words(const uint8_t* src) {
    return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
}

PACKHORSE_AVX512 PACKHORSE_INLINE uint64_t sum_of_eight(__m512i x) {
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(x));
}

// As sum_words(): eight words at a time, which 32-bit multiplications suffice for.
template <bool kReplaces>
PACKHORSE_AVX512 inline SumChange sum_words_avx512(const uint8_t* bytes, const uint8_t* before,
                                                   std::size_t nbytes, uint64_t first) {
    constexpr std::size_t kStep = 8 * sizeof(uint32_t);
    __m512i places = _mm512_mullo_epi64(
        _mm512_add_epi64(eight_u64(first), _mm512_set_epi64(8, 7, 6, 5, 4, 3, 2, 1)),
        eight_u64(kKeyStep));
    __m512i low = _mm512_setzero_si512(), high = low, low_before = low, high_before = low;
    std::size_t at = 0;
    for (; nbytes - at >= kStep; at += kStep) {
        __m512i key = _mm512_xor_si512(places, _mm512_srli_epi64(places, 30));
        key = _mm512_mullo_epi64(key, eight_u64(kKeyFactors[0]));
        key = _mm512_xor_si512(key, _mm512_srli_epi64(key, 27));
        key = _mm512_mullo_epi64(key, eight_u64(kKeyFactors[1]));
        key = _mm512_xor_si512(key, _mm512_srli_epi64(key, 31));
        const __m512i top = _mm512_srli_epi64(key, 32);
        const __m512i words = eight_words(bytes + at);
        low = _mm512_add_epi64(low, _mm512_mul_epu32(key, words));
        high = _mm512_add_epi64(high, _mm512_mul_epu32(top, words));
        if constexpr (kReplaces) {
            const __m512i others = eight_words(before + at);
            low_before = _mm512_add_epi64(low_before, _mm512_mul_epu32(key, others));
            high_before = _mm512_add_epi64(high_before, _mm512_mul_epu32(top, others));
        }
        places = _mm512_add_epi64(places, eight_u64(8 * kKeyStep));
    }
    SumChange change = sum_words<kReplaces>(bytes + at, kReplaces ? before + at : nullptr,
                                            nbytes - at, first + at / sizeof(uint32_t));
    change.sum.low += sum_of_eight(low) - sum_of_eight(low_before);
    change.sum.high += sum_of_eight(high) - sum_of_eight(high_before);
    change.before += sum_of_eight(low_before);
    return change;
}

template <class Unit>
PACKHORSE_AVX512 inline SumChange sum_units_avx512(const uint32_t* places, const Unit* units,
                                                   const Unit* before, std::size_t n,
                                                   uint64_t first_byte) {
    return sum_units(places, units, before, n, first_byte);
}

}  // namespace packhorse

#endif
