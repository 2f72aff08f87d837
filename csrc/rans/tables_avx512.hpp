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
