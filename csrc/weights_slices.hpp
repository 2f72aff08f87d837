// One slice of a row of packed weights to BF16 elements, holes as the packed elements 0 that they
// are. Slices begin at multiples of 16 columns and are padded to such, so whole vectors of 16 may
// be read wherever one element may.
#pragma once

#include "weights.hpp"

namespace packhorse {

// Where the parts of a slice lie.
struct WeightSlice {
    const uint8_t* low_bytes;  // of the slice
    const uint8_t* high_bits;  // of the row
    std::size_t n_steps;
    std::size_t n;  // columns, padding left out
    uint8_t first;
    uint8_t* dst;
};

// The bits above the low byte of slice kSlice's column `j`.
template <class Form, uint32_t kSlice>
PACKHORSE_INLINE uint8_t take_high_bits(const uint8_t* bits, std::size_t n_steps, std::size_t j) {
    if constexpr (Form::kBits == 12) {
        (void)n_steps;
        return static_cast<uint8_t>(bits[j] >> (4 * kSlice) & 15);
    } else {
        const uint8_t below = bits[(1 + kSlice % 2) * n_steps + j];
        return static_cast<uint8_t>((bits[j] >> kSlice & 1) << 2 | (below >> (kSlice / 2 * 2) & 3));
    }
}

template <class Form, uint32_t kSlice>
inline void unpack_slice_portable(const WeightSlice& slice) {
    constexpr uint32_t kMagnitude = (1u << (Form::kBits - 1)) - 1;
    const uint8_t* __restrict const low = slice.low_bytes;
    const uint8_t* __restrict const bits = slice.high_bits;
    uint8_t* __restrict const to = slice.dst;
    const std::size_t n_steps = slice.n_steps, n = slice.n;
    const auto base = static_cast<uint16_t>(slice.first << 7);
    for (std::size_t j = 0; j < n; ++j) {
        const uint16_t high = take_high_bits<Form, kSlice>(bits, n_steps, j);
        const auto packed = static_cast<uint16_t>(high << 8 | low[j]);
        const auto magnitude = static_cast<uint16_t>(packed & kMagnitude);
        const bool coded = Form::kFirstCode == 0 || magnitude >= 0x80;
        const auto moved = static_cast<uint16_t>(magnitude + (coded ? base : uint16_t{0}));
        const auto sign = static_cast<uint16_t>((packed & ~kMagnitude) << (16 - Form::kBits));
        store(to + 2 * j, static_cast<uint16_t>(sign | moved));
    }
}

#if PACKHORSE_X86

constexpr std::size_t kWeightsAheadNbytes = 4096;

// Fetches what will be read and written, of 64 columns. Of the high bits, each byte is fetched by
// one of the slices that read it.
template <class Form, uint32_t kSlice>
PACKHORSE_INLINE void fetch_weights_ahead(const WeightSlice& slice, std::size_t j) {
    __builtin_prefetch(slice.low_bytes + j + kWeightsAheadNbytes, 0, 2);
    __builtin_prefetch(slice.dst + 2 * j + kWeightsAheadNbytes, 1, 2);
    __builtin_prefetch(slice.dst + 2 * j + kWeightsAheadNbytes + 64, 1, 2);
    if constexpr (kSlice < (Form::kBits - 8) * Form::kSlices / 8)
        __builtin_prefetch(slice.high_bits + kSlice * slice.n_steps + j + kWeightsAheadNbytes / 2,
                           0, 2);
}

PACKHORSE_AVX2 inline __m256i load_words_avx2(const uint8_t* src) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
}

// The elements of 16 columns from column `j` of the slice on.
template <class Form, uint32_t kSlice>
PACKHORSE_AVX2 inline __m256i unpack_words_avx2(const WeightSlice& slice, std::size_t j,
                                                __m256i base) {
    const __m256i low = load_words_avx2(slice.low_bytes + j);
    const __m256i bits = load_words_avx2(slice.high_bits + j);
    const __m256i sign_bit = _mm256_set1_epi16(-0x8000);
    if constexpr (Form::kBits == 12) {
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

template <class Form, uint32_t kSlice>
PACKHORSE_AVX2 inline void unpack_slice_avx2(const WeightSlice& slice) {
    const __m256i base = _mm256_set1_epi16(static_cast<int16_t>(slice.first << 7));
    std::size_t j = 0;
    for (; j + 16 <= slice.n; j += 16) {
        if (j % 64 == 0) fetch_weights_ahead<Form, kSlice>(slice, j);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(slice.dst + 2 * j),
                            unpack_words_avx2<Form, kSlice>(slice, j, base));
    }
    if (j == slice.n) return;
    const __m256i last = unpack_words_avx2<Form, kSlice>(slice, j, base);
    std::memcpy(slice.dst + 2 * j, &last, 2 * (slice.n - j));
}

PACKHORSE_AVX512 inline __m512i load_words_avx512(__mmask32 mask, const uint8_t* src) {
    return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(mask, src));
}

template <class Form, uint32_t kSlice>
PACKHORSE_AVX512 PACKHORSE_INLINE void unpack_words_avx512(const WeightSlice& slice, std::size_t j,
                                                           __mmask32 mask, __m512i base) {
    // Of bits a, b, c: a where c is set, else b.
    constexpr int kSelect = 0xE4;
    const __m512i low = load_words_avx512(mask, slice.low_bytes + j);
    const __m512i bits = load_words_avx512(mask, slice.high_bits + j);
    const __m512i sign_bit = _mm512_set1_epi16(-0x8000);
    __m512i sign, moved;
    if constexpr (Form::kBits == 12) {
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

template <class Form, uint32_t kSlice>
PACKHORSE_AVX512 inline void unpack_slice_avx512(const WeightSlice& slice) {
    const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(slice.first << 7));
    std::size_t j = 0;
    for (; j + 32 <= slice.n; j += 32) {
        if (j % 64 == 0) fetch_weights_ahead<Form, kSlice>(slice, j);
        unpack_words_avx512<Form, kSlice>(slice, j, ~__mmask32{0}, base);
    }
    if (j < slice.n)
        unpack_words_avx512<Form, kSlice>(slice, j, (__mmask32{1} << (slice.n - j)) - 1, base);
}

#endif

template <class Form, uint32_t kSlice>
inline void unpack_slice(const WeightSlice& slice, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return unpack_slice_avx512<Form, kSlice>(slice);
    if (isa >= Isa::kAvx2) return unpack_slice_avx2<Form, kSlice>(slice);
#endif
    (void)isa;
    unpack_slice_portable<Form, kSlice>(slice);
}

}  // namespace packhorse
