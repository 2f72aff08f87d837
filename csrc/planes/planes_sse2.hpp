// Turns units of 32 bits into four planes and back with SSE2, the baseline of x86-64, for which
// compilers make scalar loops. Units are first split into two halves of 16 bits, and the upper
// halves are rotated (docs/format.md, section 4). Merging takes the same steps in reverse.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

#if PACKHORSE_X86

template <uint32_t kRotation>
PACKHORSE_INLINE void merge32_block_sse2(const uint8_t* const* planes, std::size_t at,
                                         uint8_t* dst) {
    __m128i plane[4];
    for (int p = 0; p < 4; ++p)
        plane[p] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(planes[p] + at));
    __m128i upper[2] = {_mm_unpacklo_epi8(plane[1], plane[0]),
                        _mm_unpackhi_epi8(plane[1], plane[0])};
    const __m128i lower[2] = {_mm_unpacklo_epi8(plane[3], plane[2]),
                              _mm_unpackhi_epi8(plane[3], plane[2])};
    auto* to = reinterpret_cast<__m128i*>(dst);
    for (int h = 0; h < 2; ++h) {
        if constexpr (kRotation > 0)
            upper[h] = _mm_or_si128(_mm_srli_epi16(upper[h], kRotation),
                                    _mm_slli_epi16(upper[h], 16 - kRotation));
        _mm_storeu_si128(to + 2 * h, _mm_unpacklo_epi16(lower[h], upper[h]));
        _mm_storeu_si128(to + 2 * h + 1, _mm_unpackhi_epi16(lower[h], upper[h]));
    }
}

template <uint32_t kRotation>
PACKHORSE_INLINE void split32_block_sse2(const uint8_t* src, std::size_t at,
                                         uint8_t* const* planes) {
    const auto* from = reinterpret_cast<const __m128i*>(src);
    __m128i upper[2], lower[2];
    for (int h = 0; h < 2; ++h) {
        const __m128i a = _mm_loadu_si128(from + 2 * h), b = _mm_loadu_si128(from + 2 * h + 1);
        // Sign-extended halves are packed unchanged.
        upper[h] = _mm_packs_epi32(_mm_srai_epi32(a, 16), _mm_srai_epi32(b, 16));
        lower[h] = _mm_packs_epi32(_mm_srai_epi32(_mm_slli_epi32(a, 16), 16),
                                   _mm_srai_epi32(_mm_slli_epi32(b, 16), 16));
        if constexpr (kRotation > 0)
            upper[h] = _mm_or_si128(_mm_slli_epi16(upper[h], kRotation),
                                    _mm_srli_epi16(upper[h], 16 - kRotation));
    }
    const __m128i byte = _mm_set1_epi16(0xFF);
    const auto store_bytes = [&](int p, const __m128i* halves) {
        auto* to = reinterpret_cast<__m128i*>(planes[p] + at);
        auto* next = reinterpret_cast<__m128i*>(planes[p + 1] + at);
        _mm_storeu_si128(
            to, _mm_packus_epi16(_mm_srli_epi16(halves[0], 8), _mm_srli_epi16(halves[1], 8)));
        _mm_storeu_si128(
            next, _mm_packus_epi16(_mm_and_si128(halves[0], byte), _mm_and_si128(halves[1], byte)));
    };
    store_bytes(0, upper);
    store_bytes(2, lower);
}

// Processes all full blocks. Returns how many units they have.
template <uint32_t kRotation>
inline std::size_t split32_blocks_sse2(const uint8_t* src, std::size_t n, uint8_t* const* planes) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) split32_block_sse2<kRotation>(src + 4 * at, at, planes);
    return at;
}

template <uint32_t kRotation>
inline std::size_t merge32_blocks_sse2(const uint8_t* const* planes, std::size_t n, uint8_t* dst) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) merge32_block_sse2<kRotation>(planes, at, dst + 4 * at);
    return at;
}

#endif

}  // namespace packhorse
