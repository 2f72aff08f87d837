// Moves raw bits out of planes and back, block by block, with AVX-512: 64 bytes to a register.
#pragma once

#include "common/dispatch.hpp"
#include "planes/symbols_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX512 inline std::size_t write_raw_blocks_avx512(const uint8_t* plane,
                                                            std::size_t n_blocks, uint32_t j,
                                                            uint8_t* dst) {
    const __m512i bit = _mm512_set1_epi8(static_cast<char>(1u << j));
    for (std::size_t b = 0; b < n_blocks; ++b)
        store(dst + 8 * b, _mm512_test_epi8_mask(_mm512_loadu_si512(plane + 64 * b), bit));
    return n_blocks;
}

PACKHORSE_AVX512 inline void add_raw_block_avx512(const uint64_t* words, const uint8_t* bits,
                                                  uint32_t n_words, uint8_t* dst) {
    __m512i bytes = _mm512_loadu_si512(dst);
    for (uint32_t w = 0; w < n_words; ++w)
        bytes = _mm512_mask_add_epi8(bytes, words[w], bytes,
                                     _mm512_set1_epi8(static_cast<char>(1u << bits[w])));
    _mm512_storeu_si512(dst, bytes);
}

PACKHORSE_AVX512 inline void add_raw_blocks_avx512(const RawPlanes& raw, std::size_t first,
                                                   std::size_t n_blocks, uint8_t* dst) {
    uint64_t words[8];
    for (std::size_t b = 0; b < n_blocks; ++b) {
        load_raw_words(raw, first + 64 * b, words);
        add_raw_block_avx512(words, raw.bits, raw.n, dst + 64 * b);
    }
}

#endif

}  // namespace packhorse
