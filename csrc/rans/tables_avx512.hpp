// Tables that fit registers of AVX-512, where a permute of two looks up a whole vector. Permutes
// use only as many bits of an index as they need, so the bits above need not be cleared.
#pragma once

#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_X86

// 32 entries of 32 bits.
struct Table32Avx512 {
    __m512i low, high;

    PACKHORSE_AVX512 explicit Table32Avx512(const uint32_t* entries)
        : low(_mm512_loadu_si512(entries)), high(_mm512_loadu_si512(entries + 16)) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE __m512i look_up(__m512i index) const {
        return _mm512_permutex2var_epi32(low, index, high);
    }
};

// 64 entries of 16 bits.
struct Table64Avx512 {
    __m512i low, high;

    PACKHORSE_AVX512 explicit Table64Avx512(const uint16_t* entries)
        : low(_mm512_load_si512(entries)), high(_mm512_load_si512(entries + 32)) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE __m512i look_up(__m512i index) const {
        return _mm512_permutex2var_epi16(low, index, high);
    }
};

// Maps consecutive symbols, 64 at a time: drops their raw bits and subtracts `base`. What is not
// below `escape_code` then becomes that code. Sets `escaped` if there is any. Returns how many.
PACKHORSE_AVX512 inline std::size_t subtract_base_avx512(const uint8_t* bytes, std::size_t n,
                                                         uint32_t raw_bits, uint8_t base,
                                                         uint8_t escape_code, uint8_t* codes,
                                                         bool& escaped) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(raw_bits));
    const __m512i kept = _mm512_set1_epi8(static_cast<char>(0xFF >> raw_bits));
    const __m512i first = _mm512_set1_epi8(static_cast<char>(base));
    const __m512i escape = _mm512_set1_epi8(static_cast<char>(escape_code));
    __m512i greatest = _mm512_setzero_si512();
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i symbols =
            _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(bytes + i), shift), kept);
        const __m512i found = _mm512_min_epu8(_mm512_sub_epi8(symbols, first), escape);
        greatest = _mm512_max_epu8(greatest, found);
        _mm512_storeu_si512(codes + i, found);
    }
    escaped |= _mm512_cmpeq_epu8_mask(greatest, escape) != 0;
    return i;
}

// Looks up bytes in a table of 256, 64 at a time. Returns how many.
PACKHORSE_AVX512_VBMI2 inline std::size_t look_up_vbmi2(const uint8_t* bytes, std::size_t n,
                                                        const uint8_t* table, uint8_t* dst) {
    __m512i parts[4];
    for (int q = 0; q < 4; ++q) parts[q] = _mm512_loadu_si512(table + 64 * q);
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i index = _mm512_loadu_si512(bytes + i);
        const __m512i low = _mm512_permutex2var_epi8(parts[0], index, parts[1]);
        const __m512i high = _mm512_permutex2var_epi8(parts[2], index, parts[3]);
        _mm512_storeu_si512(dst + i, _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(index), high));
    }
    return i;
}

#endif

}  // namespace packhorse
