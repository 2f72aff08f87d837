// Moves raw bits out of planes and back, block by block, with AVX-512: 64 bytes to a register.
#pragma once

#include "common/dispatch.hpp"
#include "planes/symbols_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Writes the bits `from` of each byte, as words of 64 bits; the words of each next bit are `stride`
// bytes behind those of the one before.
template <uint32_t kBits>
PACKHORSE_AVX512 inline void write_raw_words_avx512(const uint8_t* plane, std::size_t n_blocks,
                                                    const uint8_t* from, std::size_t stride,
                                                    uint8_t* dst) {
    __m512i bits[kBits];
    for (uint32_t w = 0; w < kBits; ++w)
        bits[w] = _mm512_set1_epi8(static_cast<char>(1u << from[w]));
    for (std::size_t b = 0; b < n_blocks; ++b) {
        const __m512i bytes = _mm512_loadu_si512(plane + 64 * b);
#pragma GCC unroll 4
        for (uint32_t w = 0; w < kBits; ++w)
            store(dst + w * stride + 8 * b,
                  static_cast<uint64_t>(_mm512_test_epi8_mask(bytes, bits[w])));
    }
}

// Writes `n` raw bits of each byte.
inline void write_raw_blocks_avx512(const uint8_t* plane, std::size_t n_blocks, const uint8_t* from,
                                    uint32_t n, std::size_t stride, uint8_t* dst) {
    for (; n >= 4; n -= 4, from += 4, dst += 4 * stride)
        write_raw_words_avx512<4>(plane, n_blocks, from, stride, dst);
    if (n == 3) write_raw_words_avx512<3>(plane, n_blocks, from, stride, dst);
    if (n == 2) write_raw_words_avx512<2>(plane, n_blocks, from, stride, dst);
    if (n == 1) write_raw_words_avx512<1>(plane, n_blocks, from, stride, dst);
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
