// Turns units of 32 bits into planes and back with AVX2, in the same steps as
// planes/planes_sse2.hpp, rotates units of 8 bits, and merges units of 16 bits. For the rest,
// compilers make good loops. An output that will not stay in the cache is merged past it, with the
// raw bits of plane 0 in the same pass.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/planes_portable.hpp"
#include "planes/symbols_avx2.hpp"

namespace packhorse {

// Plane 0 may have this many raw bit planes if they are added while planes are merged.
constexpr uint32_t kMaxRawPlanes = 3;

#if PACKHORSE_X86

// Rotates each half of an element of 32 bits to the right.
template <uint32_t kRotation>
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i rotate_right16_avx2(__m256i units) {
    if constexpr (kRotation == 0) return units;
    return _mm256_or_si256(_mm256_srli_epi16(units, kRotation),
                           _mm256_slli_epi16(units, 16 - kRotation));
}

// Rotates bytes to the left. Returns how many, a multiple of 32. There are shifts of 16 bits but
// none of bytes, so each byte gets bits of its neighbour, which a mask takes away. `src` may be
// `dst`.
template <uint32_t kLeft>
PACKHORSE_AVX2 inline std::size_t rotate_blocks_avx2(const uint8_t* src, std::size_t n,
                                                     uint8_t* dst) {
    const __m256i upper = _mm256_set1_epi8(static_cast<char>(0xFF << kLeft));
    std::size_t at = 0;
    for (; at + 32 <= n; at += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at));
        const __m256i rotated =
            _mm256_or_si256(_mm256_and_si256(_mm256_slli_epi16(bytes, kLeft), upper),
                            _mm256_andnot_si256(upper, _mm256_srli_epi16(bytes, 8 - kLeft)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + at), rotated);
    }
    return at;
}

// Stores 16 bytes of `a` and 16 of `b`: their lower or upper halves. Past the cache, `dst` is a
// multiple of 16.
template <int kHalf, bool kPastCache>
PACKHORSE_AVX2 PACKHORSE_INLINE void store_halves_avx2(__m256i a, __m256i b, uint8_t* dst) {
    if constexpr (kPastCache) {
        auto* const to = reinterpret_cast<__m128i*>(dst);
        _mm_stream_si128(to, _mm256_extracti128_si256(a, kHalf));
        _mm_stream_si128(to + 1, _mm256_extracti128_si256(b, kHalf));
    } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                            _mm256_permute2x128_si256(a, b, kHalf == 0 ? 0x20 : 0x31));
    }
}

// AVX2 does in each half of a register what SSE2 does: the lower halves hold units 0 to 15, the
// upper ones 16 to 31.
template <uint32_t kRotation, bool kPastCache>
PACKHORSE_AVX2 PACKHORSE_INLINE void merge32_block_avx2(const uint8_t* const* planes,
                                                        std::size_t at, uint8_t* dst) {
    __m256i plane[4];
    for (int p = 0; p < 4; ++p)
        plane[p] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes[p] + at));
    __m256i upper[2] = {_mm256_unpacklo_epi8(plane[1], plane[0]),
                        _mm256_unpackhi_epi8(plane[1], plane[0])};
    const __m256i lower[2] = {_mm256_unpacklo_epi8(plane[3], plane[2]),
                              _mm256_unpackhi_epi8(plane[3], plane[2])};
    __m256i first[2], second[2];
    for (int h = 0; h < 2; ++h) {
        upper[h] = rotate_right16_avx2<kRotation>(upper[h]);
        first[h] = _mm256_unpacklo_epi16(lower[h], upper[h]);
        second[h] = _mm256_unpackhi_epi16(lower[h], upper[h]);
    }
    for (int h = 0; h < 2; ++h) store_halves_avx2<0, kPastCache>(first[h], second[h], dst + 32 * h);
    for (int h = 0; h < 2; ++h)
        store_halves_avx2<1, kPastCache>(first[h], second[h], dst + 64 + 32 * h);
}

template <uint32_t kRotation>
PACKHORSE_AVX2 PACKHORSE_INLINE void split32_block_avx2(const uint8_t* src, std::size_t at,
                                                        uint8_t* const* planes) {
    const auto* from = reinterpret_cast<const __m256i*>(src);
    const __m256i zero = _mm256_setzero_si256();
    __m256i halves[2][2];  // upper and lower halves of the units
    for (int h = 0; h < 2; ++h) {
        const __m256i a = _mm256_loadu_si256(from + 2 * h);
        const __m256i b = _mm256_loadu_si256(from + 2 * h + 1);
        halves[0][h] = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
        halves[1][h] = _mm256_packus_epi32(_mm256_blend_epi16(a, zero, 0xAA),
                                           _mm256_blend_epi16(b, zero, 0xAA));
        if constexpr (kRotation > 0)
            halves[0][h] = _mm256_or_si256(_mm256_slli_epi16(halves[0][h], kRotation),
                                           _mm256_srli_epi16(halves[0][h], 16 - kRotation));
    }
    // The packs mix the halves of their operands; this puts runs of four bytes back in order.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i byte = _mm256_set1_epi16(0xFF);
    for (int i = 0; i < 2; ++i) {
        const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(halves[i][0], 8),
                                                 _mm256_srli_epi16(halves[i][1], 8));
        const __m256i low = _mm256_packus_epi16(_mm256_and_si256(halves[i][0], byte),
                                                _mm256_and_si256(halves[i][1], byte));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes[2 * i] + at),
                            _mm256_permutevar8x32_epi32(high, order));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(planes[2 * i + 1] + at),
                            _mm256_permutevar8x32_epi32(low, order));
    }
}

// Adds the raw bits in `raw` to the units of plane 0, too.
template <uint32_t kRotation, bool kPastCache, uint32_t kRawPlanes>
PACKHORSE_AVX2 inline std::size_t merge16_blocks_avx2(const uint8_t* const* planes,
                                                      const RawBlockAvx2<kRawPlanes>& raw,
                                                      std::size_t n, uint8_t* dst) {
    std::size_t at = 0;
    for (; at + 32 <= n; at += 32) {
        const __m256i top =
            raw.add(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes[0] + at)), at);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(planes[1] + at));
        const __m256i a = rotate_right16_avx2<kRotation>(_mm256_unpacklo_epi8(low, top));
        const __m256i b = rotate_right16_avx2<kRotation>(_mm256_unpackhi_epi8(low, top));
        store_halves_avx2<0, kPastCache>(a, b, dst + 2 * at);
        store_halves_avx2<1, kPastCache>(a, b, dst + 2 * at + 32);
    }
    return at;
}

template <uint32_t kRotation>
PACKHORSE_AVX2 inline std::size_t split32_blocks_avx2(const uint8_t* src, std::size_t n,
                                                      uint8_t* const* planes) {
    std::size_t at = 0;
    for (; at + 32 <= n; at += 32) split32_block_avx2<kRotation>(src + 4 * at, at, planes);
    return at;
}

template <uint32_t kRotation, bool kPastCache>
PACKHORSE_AVX2 inline std::size_t merge32_blocks_avx2(const uint8_t* const* planes, std::size_t n,
                                                      uint8_t* dst) {
    std::size_t at = 0;
    for (; at + 32 <= n; at += 32)
        merge32_block_avx2<kRotation, kPastCache>(planes, at, dst + 4 * at);
    return at;
}

PACKHORSE_AVX2 inline void split_avx2(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                                      uint8_t* const* planes) {
    std::size_t done = 0;
    if (spec.unit_nbytes == 1 && spec.rotation == 1)
        done = rotate_blocks_avx2<1>(src, n, planes[0]);
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? split32_blocks_avx2<1>(src, n, planes)
                                  : split32_blocks_avx2<0>(src, n, planes);
    split_rest(src, n, spec, done, planes);
}

PACKHORSE_AVX2 inline void merge_avx2(const uint8_t* const* planes, std::size_t n,
                                      const PlaneSpec& spec, uint8_t* dst) {
    const RawBlockAvx2<0> no_raw({}, 0, 0);
    std::size_t done = 0;
    if (spec.unit_nbytes == 1 && spec.rotation == 1)
        done = rotate_blocks_avx2<7>(planes[0], n, dst);
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? merge32_blocks_avx2<1, false>(planes, n, dst)
                                  : merge32_blocks_avx2<0, false>(planes, n, dst);
    if (spec.unit_nbytes == 2)
        done = spec.rotation == 1 ? merge16_blocks_avx2<1, false>(planes, no_raw, n, dst)
                                  : merge16_blocks_avx2<0, false>(planes, no_raw, n, dst);
    merge_rest(planes, n, spec, done, dst);
}

// Copies bytes past the cache and adds the raw bits in `raw`.
template <uint32_t kRawPlanes>
PACKHORSE_AVX2 inline void add_raw_past_cache_avx2(const uint8_t* src,
                                                   const RawBlockAvx2<kRawPlanes>& raw,
                                                   std::size_t n, uint8_t* dst) {
    for (std::size_t at = 0; at < n; at += 32) {
        const __m256i bytes =
            raw.add(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + at)), at);
        auto* const to = reinterpret_cast<__m128i*>(dst + at);
        _mm_stream_si128(to, _mm256_castsi256_si128(bytes));
        _mm_stream_si128(to + 1, _mm256_extracti128_si256(bytes, 1));
    }
}

template <uint32_t kRawPlanes>
PACKHORSE_AVX2 inline void merge_past_cache_avx2(const uint8_t* const* planes, const RawPlanes& raw,
                                                 std::size_t first, std::size_t n,
                                                 const PlaneSpec& spec, uint8_t* dst) {
    const RawBlockAvx2<kRawPlanes> block(raw, 0, first);
    if (spec.unit_nbytes == 1) return add_raw_past_cache_avx2(planes[0], block, n, dst);
    spec.rotation == 1 ? merge16_blocks_avx2<1, true>(planes, block, n, dst)
                       : merge16_blocks_avx2<0, true>(planes, block, n, dst);
}

// Merges units past the cache: units of two bytes, of four bytes without raw bits, or of one byte
// that need no rotation. Adds at most kMaxRawPlanes raw bit planes, from unit `first` on, to
// plane 0. `n` is a multiple of 32, and `dst` of 16.
PACKHORSE_AVX2 inline void merge_past_cache_avx2(const uint8_t* const* planes, const RawPlanes& raw,
                                                 std::size_t first, std::size_t n,
                                                 const PlaneSpec& spec, uint8_t* dst) {
    if (spec.unit_nbytes == 4) {
        spec.rotation == 1 ? merge32_blocks_avx2<1, true>(planes, n, dst)
                           : merge32_blocks_avx2<0, true>(planes, n, dst);
        return;
    }
    switch (raw.n) {
        case 0:
            return merge_past_cache_avx2<0>(planes, raw, first, n, spec, dst);
        case 1:
            return merge_past_cache_avx2<1>(planes, raw, first, n, spec, dst);
        case 2:
            return merge_past_cache_avx2<2>(planes, raw, first, n, spec, dst);
        default:
            return merge_past_cache_avx2<kMaxRawPlanes>(planes, raw, first, n, spec, dst);
    }
}

#endif

}  // namespace packhorse
