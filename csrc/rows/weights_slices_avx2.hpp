// Unpacks one slice of a row to BF16 elements with AVX2, 16 columns to a register.
#pragma once

#include "common/dispatch.hpp"
#include "rows/weights_slices_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX2 inline __m256i load_words_avx2(const uint8_t* src) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
}

// The elements of 16 columns from column `j` of the slice on.
template <class Format, uint32_t kSlice>
PACKHORSE_AVX2 inline __m256i unpack_words_avx2(const WeightSlice& slice, std::size_t j,
                                                __m256i base) {
    const __m256i low = load_words_avx2(slice.low_bytes + j);
    const __m256i bits = load_words_avx2(slice.high_bits + j);
    const __m256i sign_bit = _mm256_set1_epi16(-0x8000);
    if constexpr (Format::kBits == 12) {
        const __m256i high = _mm256_slli_epi16(bits, 8 - 4 * kSlice);  // sign in bit 11
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(high, 4), sign_bit);
        const __m256i magnitude =
            _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi16(0x700)), low);
        const __m256i coded = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(0x7F));
        return _mm256_or_si256(_mm256_add_epi16(magnitude, _mm256_and_si256(coded, base)), sign);
    } else {
        const uint8_t* const at = slice.high_bits + (1 + kSlice % 2) * slice.n_steps + j;
        const __m256i below = _mm256_slli_epi16(load_words_avx2(at), 8 - kSlice / 2 * 2);
        const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(bits, 15 - kSlice), sign_bit);
        const __m256i magnitude =
            _mm256_or_si256(_mm256_and_si256(below, _mm256_set1_epi16(0x300)), low);
        return _mm256_or_si256(_mm256_add_epi16(magnitude, base), sign);
    }
}

template <class Format, uint32_t kSlice>
PACKHORSE_AVX2 inline void unpack_slice_avx2(const WeightSlice& slice) {
    const __m256i base = _mm256_set1_epi16(static_cast<int16_t>(slice.first << 7));
    std::size_t j = 0;
    for (; j + 16 <= slice.n; j += 16) {
        if (j % 64 == 0) fetch_weights_ahead<Format, kSlice>(slice, j);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(slice.dst + 2 * j),
                            unpack_words_avx2<Format, kSlice>(slice, j, base));
    }
    if (j == slice.n) return;
    const __m256i last = unpack_words_avx2<Format, kSlice>(slice, j, base);
    std::memcpy(slice.dst + 2 * j, &last, 2 * (slice.n - j));
}

#endif

}  // namespace packhorse
