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

// Adds kWords raw bits to each byte. What is the same for all blocks stays in registers.
template <uint32_t kWords>
PACKHORSE_AVX512 inline void add_raw_words_avx512(const RawPlanes& raw, std::size_t first,
                                                  std::size_t n_blocks, uint8_t* dst) {
    __m512i bits[kWords];
    for (uint32_t w = 0; w < kWords; ++w)
        bits[w] = _mm512_set1_epi8(static_cast<char>(1u << raw.bits[w]));
    const uint8_t* const planes = raw.planes + first / 8;
    const std::size_t stride = raw.stride;
    for (std::size_t b = 0; b < n_blocks; ++b) {
        __m512i bytes = _mm512_loadu_si512(dst + 64 * b);
#pragma GCC unroll 8
        for (uint32_t w = 0; w < kWords; ++w)
            bytes = _mm512_mask_add_epi8(bytes, load<uint64_t>(planes + w * stride + 8 * b), bytes,
                                         bits[w]);
        _mm512_storeu_si512(dst + 64 * b, bytes);
    }
}

// `raw` has at least one plane.
inline void add_raw_blocks_avx512(const RawPlanes& raw, std::size_t first, std::size_t n_blocks,
                                  uint8_t* dst) {
    switch (raw.n) {
        case 1:
            return add_raw_words_avx512<1>(raw, first, n_blocks, dst);
        case 2:
            return add_raw_words_avx512<2>(raw, first, n_blocks, dst);
        case 3:
            return add_raw_words_avx512<3>(raw, first, n_blocks, dst);
        case 4:
            return add_raw_words_avx512<4>(raw, first, n_blocks, dst);
        case 5:
            return add_raw_words_avx512<5>(raw, first, n_blocks, dst);
        case 6:
            return add_raw_words_avx512<6>(raw, first, n_blocks, dst);
        case 7:
            return add_raw_words_avx512<7>(raw, first, n_blocks, dst);
        default:
            return add_raw_words_avx512<8>(raw, first, n_blocks, dst);
    }
}

#endif

}  // namespace packhorse
