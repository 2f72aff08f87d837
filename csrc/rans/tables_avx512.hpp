// Tables that fit two registers of AVX-512, where one permute looks up a whole vector. The permutes
// use only as many bits of an index as the table needs, so the bits above need not be cleared.
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

#endif

}  // namespace packhorse
