// Copies and hashes, or splits and hashes, blocks of a source with AVX-512; each line is read once.
#pragma once

#include "common/copy.hpp"
#include "common/dispatch.hpp"
#include "planes/planes.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX512 inline void take_blocks_avx512(const uint8_t* src, std::size_t n_blocks,
                                                uint8_t* dst, Xxh3Accumulator& acc) {
    for (std::size_t block = 0; block < n_blocks; ++block) {
        __m512i lanes = _mm512_load_si512(acc.lanes);
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i, src += 64, dst += 64) {
            __builtin_prefetch(src + kCopyAheadNbytes, 0, 3);
            const __m512i line = load_once_avx512(src);
            _mm512_storeu_si512(dst, line);
            lanes = xxh3_stripe_avx512(lanes, line, kXxh3Secret + 8 * i);
        }
        _mm512_store_si512(acc.lanes, lanes);
        xxh3_scramble(acc);
    }
}

// Splits and hashes blocks in one pass, and reads each line once. The last line is also copied to
// `last`.
template <uint32_t kUnitNbytes, bool kFloat>
PACKHORSE_AVX512 inline void split_blocks_hashed(const uint8_t* src, std::size_t n_blocks,
                                                 uint8_t* const* planes, Xxh3Accumulator& acc,
                                                 uint8_t* last) {
    constexpr std::size_t kLines = kUnitNbytes;  // 64 units
    __m512i lines[kLines] = {};
    std::size_t unit = 0;
    for (std::size_t block = 0; block < n_blocks; ++block) {
        __m512i lanes = _mm512_load_si512(acc.lanes);
#pragma GCC unroll 8
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; i += kLines, unit += 64) {
            for (std::size_t k = 0; k < kLines; ++k, src += 64) {
                __builtin_prefetch(src + kCopyAheadNbytes, 0, 3);
                const __m512i line = load_once_avx512(src);
                lanes = xxh3_stripe_avx512(lanes, line, kXxh3Secret + 8 * (i + k));
                lines[k] = line;
            }
            for (std::size_t p = 0; p < kUnitNbytes; ++p)
                __builtin_prefetch(planes[p] + unit + kCopyAheadNbytes / kUnitNbytes, 1, 3);
            if constexpr (kUnitNbytes == 1)
                _mm512_storeu_si512(planes[0] + unit, rotate_bytes_avx512(lines[0]));
            else if constexpr (kUnitNbytes == 2)
                split16_lines_avx512(lines, planes[0] + unit, planes[1] + unit);
            else
                split32_lines_avx512<kFloat>(lines, unit, planes);
        }
        _mm512_store_si512(acc.lanes, lanes);
        xxh3_scramble(acc);
    }
    _mm512_storeu_si512(last, lines[kLines - 1]);
}

// Whether there are loops for such planes.
inline bool has_hashed_split(const PlaneSpec& spec, Isa isa) {
    return isa >= Isa::kAvx512 &&
           (spec.unit_nbytes == 4 || (spec.unit_nbytes <= 2 && spec.rotation == 1));
}

inline void split_blocks_hashed_any(const uint8_t* src, std::size_t n_blocks, const PlaneSpec& spec,
                                    uint8_t* const* planes, Xxh3Accumulator& acc, uint8_t* last) {
    if (spec.unit_nbytes == 1)
        return split_blocks_hashed<1, true>(src, n_blocks, planes, acc, last);
    if (spec.unit_nbytes == 2)
        return split_blocks_hashed<2, true>(src, n_blocks, planes, acc, last);
    if (spec.rotation == 1) return split_blocks_hashed<4, true>(src, n_blocks, planes, acc, last);
    split_blocks_hashed<4, false>(src, n_blocks, planes, acc, last);
}

#endif

}  // namespace packhorse
