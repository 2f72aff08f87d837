// Turns units of 8, 16 and 32 bits into planes and back with AVX-512, 64 units at a time.
#pragma once

#include "common/copy_avx512.hpp"
#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/planes_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// 64 bytes, each rotated left by 1.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i rotate_bytes_avx512(__m512i bytes) {
    const __m512i one = _mm512_set1_epi8(0x01);
    return _mm512_ternarylogic_epi64(one, _mm512_srli_epi16(bytes, 7),
                                     _mm512_add_epi8(bytes, bytes), 0xCA);
}

PACKHORSE_AVX512 PACKHORSE_INLINE __m512i unrotate_bytes_avx512(__m512i bytes) {
    const __m512i low = _mm512_set1_epi8(0x7F);
    return _mm512_ternarylogic_epi64(low, _mm512_srli_epi16(bytes, 1), _mm512_slli_epi16(bytes, 7),
                                     0xCA);
}

// 64 units of 16 bits, rotated by 1: two packs and two permutes for each pair of registers.
PACKHORSE_AVX512 PACKHORSE_INLINE void split16_lines_avx512(const __m512i* lines, uint8_t* plane0,
                                                            uint8_t* plane1) {
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const __m512i byte = _mm512_set1_epi16(0xFF);
    __m512i upper[2], lower[2];
    for (int h = 0; h < 2; ++h) {
        const __m512i rotated =
            _mm512_or_si512(_mm512_add_epi16(lines[h], lines[h]), _mm512_srli_epi16(lines[h], 15));
        upper[h] = _mm512_srli_epi16(rotated, 8);
        lower[h] = _mm512_and_si512(rotated, byte);
    }
    _mm512_storeu_si512(plane0,
                        _mm512_permutexvar_epi64(order, _mm512_packus_epi16(upper[0], upper[1])));
    _mm512_storeu_si512(plane1,
                        _mm512_permutexvar_epi64(order, _mm512_packus_epi16(lower[0], lower[1])));
}

PACKHORSE_AVX512 inline void split16_block_avx512(const uint8_t* src, uint8_t* plane0,
                                                  uint8_t* plane1) {
    const __m512i lines[2] = {_mm512_loadu_si512(src), _mm512_loadu_si512(src + 64)};
    split16_lines_avx512(lines, plane0, plane1);
}

template <bool kPastCache>
PACKHORSE_AVX512 inline void merge16_block_avx512(const uint8_t* plane0, const uint8_t* plane1,
                                                  uint8_t* dst) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i upper = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(plane0));
    const __m512i lower = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(plane1));
    const __m512i rotated[2] = {_mm512_unpacklo_epi8(lower, upper),
                                _mm512_unpackhi_epi8(lower, upper)};
    for (int h = 0; h < 2; ++h)
        put_line_avx512<kPastCache>(
            dst + 64 * h,
            _mm512_or_si512(_mm512_srli_epi16(rotated[h], 1), _mm512_slli_epi16(rotated[h], 15)));
}

// The bytes of 16 units of 32 bits as four runs of 16 bytes, most significant first.
PACKHORSE_AVX512 inline __m512i gather_bytes32_avx512(__m512i units) {
    const __m512i in_lane =
        _mm512_broadcast_i32x4(_mm_setr_epi8(3, 7, 11, 15, 2, 6, 10, 14, 1, 5, 9, 13, 0, 4, 8, 12));
    const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(across, _mm512_shuffle_epi8(units, in_lane));
}

PACKHORSE_AVX512 inline __m512i scatter_bytes32_avx512(__m512i runs) {
    const __m512i across = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i in_lane =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 8, 4, 0, 13, 9, 5, 1, 14, 10, 6, 2, 15, 11, 7, 3));
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(across, runs), in_lane);
}

// Transposes the 4 x 4 runs of 128 bits in four registers. It is its own inverse.
PACKHORSE_AVX512 inline void transpose_runs_avx512(__m512i* rows) {
    const __m512i a = _mm512_shuffle_i32x4(rows[0], rows[1], 0x44);
    const __m512i b = _mm512_shuffle_i32x4(rows[0], rows[1], 0xEE);
    const __m512i c = _mm512_shuffle_i32x4(rows[2], rows[3], 0x44);
    const __m512i d = _mm512_shuffle_i32x4(rows[2], rows[3], 0xEE);
    rows[0] = _mm512_shuffle_i32x4(a, c, 0x88);
    rows[1] = _mm512_shuffle_i32x4(a, c, 0xDD);
    rows[2] = _mm512_shuffle_i32x4(b, d, 0x88);
    rows[3] = _mm512_shuffle_i32x4(b, d, 0xDD);
}

// Turns the top two bytes of units (sign and exponent, exponent and mantissa) into planes 0 and 1,
// or back: the top bit of each byte becomes the lowest bit of the other.
PACKHORSE_AVX512 inline void rotate_pair_avx512(__m512i& byte0, __m512i& byte1) {
    const __m512i one = _mm512_set1_epi8(0x01);
    const __m512i top0 = _mm512_srli_epi16(byte0, 7);
    const __m512i top1 = _mm512_srli_epi16(byte1, 7);
    byte0 = _mm512_ternarylogic_epi64(one, top1, _mm512_add_epi8(byte0, byte0), 0xCA);
    byte1 = _mm512_ternarylogic_epi64(one, top0, _mm512_add_epi8(byte1, byte1), 0xCA);
}

PACKHORSE_AVX512 inline void unrotate_pair_avx512(__m512i& byte0, __m512i& byte1) {
    const __m512i low = _mm512_set1_epi8(0x7F);
    const __m512i end0 = _mm512_slli_epi16(byte0, 7);
    const __m512i end1 = _mm512_slli_epi16(byte1, 7);
    byte0 = _mm512_ternarylogic_epi64(low, _mm512_srli_epi16(byte0, 1), end1, 0xCA);
    byte1 = _mm512_ternarylogic_epi64(low, _mm512_srli_epi16(byte1, 1), end0, 0xCA);
}

template <bool kFloat>
PACKHORSE_AVX512 PACKHORSE_INLINE void split32_lines_avx512(const __m512i* lines, std::size_t at,
                                                            uint8_t* const* planes) {
    __m512i rows[4];
    for (int r = 0; r < 4; ++r) rows[r] = gather_bytes32_avx512(lines[r]);
    transpose_runs_avx512(rows);
    if constexpr (kFloat) rotate_pair_avx512(rows[0], rows[1]);
    for (int p = 0; p < 4; ++p) _mm512_storeu_si512(planes[p] + at, rows[p]);
}

template <bool kFloat>
PACKHORSE_AVX512 inline void split32_block_avx512(const uint8_t* src, std::size_t at,
                                                  uint8_t* const* planes) {
    __m512i lines[4];
    for (int r = 0; r < 4; ++r) lines[r] = _mm512_loadu_si512(src + 64 * r);
    split32_lines_avx512<kFloat>(lines, at, planes);
}

template <bool kFloat, bool kPastCache>
PACKHORSE_AVX512 inline void merge32_block_avx512(const uint8_t* const* planes, std::size_t at,
                                                  uint8_t* dst) {
    __m512i rows[4];
    for (int p = 0; p < 4; ++p) rows[p] = _mm512_loadu_si512(planes[p] + at);
    if constexpr (kFloat) unrotate_pair_avx512(rows[0], rows[1]);
    transpose_runs_avx512(rows);
    for (int r = 0; r < 4; ++r)
        put_line_avx512<kPastCache>(dst + 64 * r, scatter_bytes32_avx512(rows[r]));
}

// Returns how many units, a multiple of 64, the intrinsics have processed.
PACKHORSE_AVX512 inline std::size_t split_blocks_avx512(const uint8_t* src, std::size_t n,
                                                        const PlaneSpec& spec,
                                                        uint8_t* const* planes) {
    const std::size_t n_blocks = n / 64;
    if (spec.unit_nbytes == 1 && spec.rotation == 1) {
        for (std::size_t at = 0; at < 64 * n_blocks; at += 64)
            _mm512_storeu_si512(planes[0] + at, rotate_bytes_avx512(_mm512_loadu_si512(src + at)));
        return 64 * n_blocks;
    }
    if (spec.unit_nbytes == 2 && spec.rotation == 1) {
        for (std::size_t b = 0; b < n_blocks; ++b)
            split16_block_avx512(src + 128 * b, planes[0] + 64 * b, planes[1] + 64 * b);
        return 64 * n_blocks;
    }
    if (spec.unit_nbytes == 4) {
        for (std::size_t b = 0; b < n_blocks; ++b)
            if (spec.rotation == 1)
                split32_block_avx512<true>(src + 256 * b, 64 * b, planes);
            else
                split32_block_avx512<false>(src + 256 * b, 64 * b, planes);
        return 64 * n_blocks;
    }
    return 0;
}

// Returns how many units, a multiple of 64, the intrinsics have merged.
template <bool kPastCache>
PACKHORSE_AVX512 inline std::size_t merge_blocks_avx512(const uint8_t* const* planes, std::size_t n,
                                                        const PlaneSpec& spec, uint8_t* dst) {
    const std::size_t n_blocks = n / 64;
    if (spec.unit_nbytes == 1 && spec.rotation == 1) {
        for (std::size_t at = 0; at < 64 * n_blocks; at += 64)
            _mm512_storeu_si512(dst + at,
                                unrotate_bytes_avx512(_mm512_loadu_si512(planes[0] + at)));
        return 64 * n_blocks;
    }
    if (spec.unit_nbytes == 2 && spec.rotation == 1) {
        for (std::size_t b = 0; b < n_blocks; ++b)
            merge16_block_avx512<kPastCache>(planes[0] + 64 * b, planes[1] + 64 * b, dst + 128 * b);
        return 64 * n_blocks;
    }
    if (spec.unit_nbytes == 4) {
        for (std::size_t b = 0; b < n_blocks; ++b)
            if (spec.rotation == 1)
                merge32_block_avx512<true, kPastCache>(planes, 64 * b, dst + 256 * b);
            else
                merge32_block_avx512<false, kPastCache>(planes, 64 * b, dst + 256 * b);
        return 64 * n_blocks;
    }
    return 0;
}

PACKHORSE_AVX512 inline void split_avx512(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                                          uint8_t* const* planes) {
    split_rest(src, n, spec, split_blocks_avx512(src, n, spec, planes), planes);
}

PACKHORSE_AVX512 inline void merge_avx512(const uint8_t* const* planes, std::size_t n,
                                          const PlaneSpec& spec, uint8_t* dst) {
    merge_rest(planes, n, spec, merge_blocks_avx512<false>(planes, n, spec, dst), dst);
}

// Whether merge_blocks_avx512() has a loop for units, and some of them begin where lines do.
inline bool can_merge_past_cache_avx512(const PlaneSpec& spec, const uint8_t* dst) {
    const std::size_t unit = spec.unit_nbytes;
    return ((unit == 2 && spec.rotation == 1) || unit == 4) &&
           reinterpret_cast<uintptr_t>(dst) % unit == 0;
}

// Does the same past the cache, if that can be, with at least 128 units. What does not fill a line,
// at both ends, is merged aside.
PACKHORSE_AVX512 inline void merge_past_cache_avx512(const uint8_t* const* planes, std::size_t n,
                                                     const PlaneSpec& spec, uint8_t* dst) {
    constexpr std::size_t kBlock = 64;
    const std::size_t unit = spec.unit_nbytes, shift = -reinterpret_cast<uintptr_t>(dst) % 64;
    alignas(64) uint8_t aside[kBlock * sizeof(uint32_t)];
    const uint8_t* from[kMaxPlanes];
    const std::size_t head = shift / unit, tail = (n - head) % kBlock;
    const auto merge_from = [&](std::size_t at) {
        for (uint32_t p = 0; p < spec.n_planes; ++p) from[p] = planes[p] + at;
    };
    if (head > 0) {
        merge_avx512(planes, kBlock, spec, aside);
        std::memcpy(dst, aside, shift);
    }
    merge_from(head);
    merge_blocks_avx512<true>(from, n - head - tail, spec, dst + shift);
    if (tail > 0) {
        merge_from(n - kBlock);
        merge_avx512(from, kBlock, spec, aside);
        std::memcpy(dst + (n - tail) * unit, aside + (kBlock - tail) * unit, tail * unit);
    }
}

#endif

}  // namespace packhorse
