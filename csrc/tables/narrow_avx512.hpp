// Unpacks narrow planes with AVX-512. A slice of a plane is an eighth of a row or a few, often less
// than a vector, so masks take the place of loops over what is left.
#pragma once

#include "tables/table.hpp"

namespace packhorse {

#if PACKHORSE_X86

template <uint32_t kBits, uint32_t kLowest>
PACKHORSE_AVX512 inline void unpack_plane_avx512(const uint8_t* plane, std::size_t nbytes,
                                                 std::size_t n, uint8_t* high) {
    const __m512i field = _mm512_set1_epi8((1 << kBits) - 1);
    for (std::size_t j = 0; j < nbytes; j += 64) {
        const __m512i bytes = _mm512_maskz_loadu_epi8(first_columns(nbytes - j), plane + j);
        for (std::size_t slice = 0; slice < 8 / kBits; ++slice) {
            const std::size_t start = slice * nbytes + j;
            if (start >= n) break;
            const std::size_t count = std::min(nbytes - j, n - start);
            const __mmask64 mask = first_columns(count);
            const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(kBits * slice));
            __m512i bits = _mm512_and_si512(_mm512_srl_epi16(bytes, shift), field);
            if constexpr (kLowest != 0)
                bits = _mm512_or_si512(_mm512_slli_epi16(bits, kLowest),
                                       _mm512_maskz_loadu_epi8(mask, high + start));
            _mm512_mask_storeu_epi8(high + start, mask, bits);
        }
    }
}

// As unpack_narrow().
template <uint32_t kNarrow>
PACKHORSE_AVX512 inline void unpack_narrow_avx512(const uint8_t* planes, std::size_t n,
                                                  uint8_t* high) {
    constexpr uint32_t kFours = kNarrow & 4, kBelowOnes = kNarrow & 6;
    if constexpr (kFours != 0) {
        unpack_plane_avx512<4, 0>(planes, narrow_nbytes(4, n), n, high);
        planes += narrow_nbytes(4, n);
    }
    if constexpr ((kNarrow & 2) != 0) {
        unpack_plane_avx512<2, kFours>(planes, narrow_nbytes(2, n), n, high);
        planes += narrow_nbytes(2, n);
    }
    if constexpr ((kNarrow & 1) != 0)
        unpack_plane_avx512<1, kBelowOnes>(planes, narrow_nbytes(1, n), n, high);
}

#endif

}  // namespace packhorse
