// Copies blocks with AVX-512, a line of 64 bytes to a register. CRC and hash are made from the same
// registers.
#pragma once

#include "common/checksum_avx512.hpp"
#include "common/copy_portable.hpp"
#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Loads a line. The compiler may not load it again for a second use.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i load_once_avx512(const uint8_t* src) {
    __m512i line = _mm512_loadu_si512(src);
    asm("" : "+v"(line));
    return line;
}

// Past the cache, lines are written whole, so that they need not be read first.
template <bool kPastCache>
PACKHORSE_AVX512 PACKHORSE_INLINE void put_line_avx512(uint8_t* dst, __m512i line) {
    kPastCache ? _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), line)
               : _mm512_storeu_si512(dst, line);
}

template <bool kPastCache>
PACKHORSE_AVX512 PACKHORSE_INLINE void copy_line_avx512(const uint8_t* src, uint8_t* dst) {
    put_line_avx512<kPastCache>(dst, _mm512_loadu_si512(src));
    fetch_line_ahead<kPastCache>(src, dst);
}

template <bool kPastCache>
PACKHORSE_AVX512 inline void copy_block_avx512(const uint8_t* src, uint8_t* dst) {
    for (std::size_t at = 0; at < kXxh3BlockNbytes; at += 64)
        copy_line_avx512<kPastCache>(src + at, dst + at);
}

// Copies and adds to the CRC line by line: no step waits for another one, only for memory.
template <bool kPastCache>
PACKHORSE_VPCLMULQDQ inline void copy_blocks_folding(const BlockCopy& copy, uint32_t& crc) {
    CrcFold fold = crc_fold_start(crc);
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const uint8_t* const src = copy.src + block * kXxh3BlockNbytes;
        uint8_t* const dst = copy.dst + block * kXxh3BlockNbytes + copy.shift;
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i) {
            const __m512i line = _mm512_loadu_si512(src + 64 * i);
            copy_line_avx512<kPastCache>(src + copy.shift + 64 * i, dst + 64 * i);
            fold.vectors[i % 4] = crc_fold_line(fold.vectors[i % 4],
                                                i == 0 ? _mm512_xor_si512(line, fold.seed) : line);
        }
        fold.seed = _mm512_setzero_si512();
    }
    crc = crc_fold_finish(fold);
}

// Does what copy_blocks_folding() does, line by line.
template <bool kPastCache>
PACKHORSE_VPCLMULQDQ inline void hashed_copy_folding(const HashedCopy& copy, uint32_t& crc) {
    CrcFold fold = crc_fold_start(crc);
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto n_kept = static_cast<int>(16 - copy.back / 4);  // numbers of the previous line
    const __m512i order = _mm512_add_epi32(places, _mm512_set1_epi32(n_kept));
    __m512i before =
        kPastCache ? _mm512_loadu_si512(copy.dst - kXxh3StripeNbytes) : _mm512_setzero_si512();
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const uint8_t* const src = copy.src + block * kXxh3BlockNbytes;
        uint8_t* const dst = copy.dst + block * kXxh3BlockNbytes;
        __m512i lanes = _mm512_load_si512(copy.acc.lanes);
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i) {
            const __m512i line = load_once_avx512(src + 64 * i);
            if constexpr (kPastCache) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(dst - copy.back + 64 * i),
                                    _mm512_permutex2var_epi32(before, order, line));
                before = line;
            } else {
                _mm512_storeu_si512(dst + 64 * i, line);
            }
            fetch_line_ahead<kPastCache>(src + 64 * i, dst + 64 * i);
            fold.vectors[i % 4] = crc_fold_line(fold.vectors[i % 4],
                                                i == 0 ? _mm512_xor_si512(line, fold.seed) : line);
            lanes = xxh3_stripe_avx512(lanes, line, kXxh3Secret + 8 * i);
        }
        fold.seed = _mm512_setzero_si512();
        _mm512_store_si512(copy.acc.lanes, lanes);
        xxh3_scramble(copy.acc);
    }
    crc = crc_fold_finish(fold);
    if constexpr (kPastCache) {
        alignas(64) uint8_t last[kXxh3StripeNbytes];
        _mm512_store_si512(last, before);
        std::memcpy(copy.dst + copy.n_blocks * kXxh3BlockNbytes - copy.back,
                    last + sizeof last - copy.back, copy.back);
    }
}

#endif

}  // namespace packhorse
