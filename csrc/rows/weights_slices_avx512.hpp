// Unpacks one slice of a row to BF16 elements with AVX-512, 32 columns to a register.
#pragma once

#include "common/dispatch.hpp"
#include "rows/weights_slices_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX512 inline __m512i load_words_avx512(__mmask32 mask, const uint8_t* src) {
    return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, src));
}

template <class Format, uint32_t kSlice>
PACKHORSE_AVX512 PACKHORSE_INLINE void unpack_words_avx512(const WeightSlice& slice, std::size_t j,
                                                           __mmask32 mask, __m512i base) {
    // For bits a, b, c: a where c is set, otherwise b.
    constexpr int kSelect = 0xE4;
    const __m512i low = load_words_avx512(mask, slice.low_bytes + j);
    const __m512i bits = load_words_avx512(mask, slice.high_bits + j);
    const __m512i sign_bit = _mm512_set1_epi16(-0x8000);
    __m512i sign, moved;
    if constexpr (Format::kBits == 12) {
        const __m512i high = _mm512_slli_epi16(bits, 8 - 4 * kSlice);
        sign = _mm512_slli_epi16(high, 4);
        const __m512i magnitude =
            _mm512_ternarylogic_epi32(high, low, _mm512_set1_epi16(0x700), kSelect);
        const __mmask32 coded = _mm512_cmpgt_epi16_mask(magnitude, _mm512_set1_epi16(0x7F));
        moved = _mm512_mask_add_epi16(magnitude, coded, magnitude, base);
    } else {
        const uint8_t* const at = slice.high_bits + (1 + kSlice % 2) * slice.n_steps + j;
        const __m512i below = _mm512_slli_epi16(load_words_avx512(mask, at), 8 - kSlice / 2 * 2);
        sign = _mm512_slli_epi16(bits, 15 - kSlice);
        const __m512i magnitude =
            _mm512_ternarylogic_epi32(below, low, _mm512_set1_epi16(0x300), kSelect);
        moved = _mm512_add_epi16(magnitude, base);
    }
    _mm512_mask_storeu_epi16(slice.dst + 2 * j, mask,
                             _mm512_ternarylogic_epi32(sign, moved, sign_bit, kSelect));
}

template <class Format, uint32_t kSlice>
PACKHORSE_AVX512 inline void unpack_slice_avx512(const WeightSlice& slice) {
    const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(slice.first << 7));
    std::size_t j = 0;
    for (; j + 32 <= slice.n; j += 32) {
        if (j % 64 == 0) fetch_weights_ahead<Format, kSlice>(slice, j);
        unpack_words_avx512<Format, kSlice>(slice, j, ~__mmask32{0}, base);
    }
    if (j < slice.n)
        unpack_words_avx512<Format, kSlice>(slice, j, (__mmask32{1} << (slice.n - j)) - 1, base);
}

#endif

}  // namespace packhorse
