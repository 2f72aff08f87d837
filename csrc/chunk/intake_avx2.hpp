// Copies and hashes blocks of a source with AVX2; each register is read once.
#pragma once

#include "common/copy.hpp"
#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX2 inline void take_blocks_avx2(const uint8_t* src, std::size_t n_blocks, uint8_t* dst,
                                            Xxh3Accumulator& acc) {
    for (std::size_t block = 0; block < n_blocks; ++block) {
        __m256i lanes[2];
        for (int h = 0; h < 2; ++h)
            lanes[h] = _mm256_load_si256(reinterpret_cast<const __m256i*>(acc.lanes) + h);
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i, src += 64, dst += 64) {
            __builtin_prefetch(src + kCopyAheadNbytes, 0, 3);
            for (int h = 0; h < 2; ++h) {
                __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src) + h);
                asm("" : "+x"(half));  // the compiler may not read it again
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst) + h, half);
                lanes[h] = xxh3_half_stripe_avx2(lanes[h], half, kXxh3Secret + 8 * i + 32 * h);
            }
        }
        for (int h = 0; h < 2; ++h)
            _mm256_store_si256(reinterpret_cast<__m256i*>(acc.lanes) + h, lanes[h]);
        xxh3_scramble(acc);
    }
}

#endif

}  // namespace packhorse
