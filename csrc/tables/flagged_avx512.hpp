// Stores the packed elements that bitmap rows hold, 64 columns at a time, with AVX-512 and VBMI2.
#pragma once

#include "tables/table.hpp"

namespace packhorse {

#if PACKHORSE_X86

// kNbytes low bytes of each element whose flag is 1, one after the other: 1 or all. Returns the
// end; up to 63 bytes behind it are written, too.
template <class U, std::size_t kNbytes>
PACKHORSE_AVX512_VBMI2 inline uint8_t* store_flagged_avx512(const U* packed, const uint8_t* flags,
                                                            std::size_t n, uint8_t* at) {
    constexpr std::size_t kLanes = 64 / sizeof(U);
    for (std::size_t c = 0; c < n; c += kLanes) {
        const uint64_t mask = first_columns(n - c) & first_columns(kLanes);
        const uint64_t held =
            _mm512_test_epi8_mask(_mm512_maskz_loadu_epi8(mask, flags + c), _mm512_set1_epi8(1));
        const __m512i elements = _mm512_loadu_si512(packed + c);
        __m512i stored;
        if constexpr (sizeof(U) == 1) {
            stored = _mm512_maskz_compress_epi8(held, elements);
        } else if constexpr (kNbytes == 1) {
            __m128i bytes;
            if constexpr (sizeof(U) == 2) {
                stored = _mm512_maskz_compress_epi8(
                    held, _mm512_zextsi256_si512(_mm512_cvtepi16_epi8(elements)));
            } else {
                if constexpr (sizeof(U) == 4) bytes = _mm512_cvtepi32_epi8(elements);
                if constexpr (sizeof(U) == 8) bytes = _mm512_cvtepi64_epi8(elements);
                stored = _mm512_zextsi128_si512(
                    _mm_maskz_compress_epi8(static_cast<__mmask16>(held), bytes));
            }
        } else if constexpr (sizeof(U) == 2) {
            stored = _mm512_maskz_compress_epi16(static_cast<__mmask32>(held), elements);
        } else if constexpr (sizeof(U) == 4) {
            stored = _mm512_maskz_compress_epi32(static_cast<__mmask16>(held), elements);
        } else {
            stored = _mm512_maskz_compress_epi64(static_cast<__mmask8>(held), elements);
        }
        _mm512_storeu_si512(at, stored);
        at += kNbytes * static_cast<std::size_t>(std::popcount(held));
    }
    return at;
}

#endif

}  // namespace packhorse
