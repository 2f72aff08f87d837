// Copies a block with AVX2, through the cache or past it.
#pragma once

#include "common/copy_portable.hpp"
#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Past the cache, `dst` is a multiple of 64.
template <bool kPastCache>
PACKHORSE_AVX2 inline void copy_block_avx2(const uint8_t* src, uint8_t* dst) {
    for (std::size_t at = 0; at < kXxh3BlockNbytes; at += 64) {
        for (std::size_t h = at; h < at + 64; h += 32) {
            const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + h));
            __m256i* const to = reinterpret_cast<__m256i*>(dst + h);
            kPastCache ? _mm256_stream_si256(to, half) : _mm256_storeu_si256(to, half);
        }
        fetch_line_ahead<kPastCache>(src + at, dst + at);
    }
}

#endif

}  // namespace packhorse
