// Turns blocks of 64 units into palette codes and back with AVX2, two registers to a block.
#pragma once

#include "common/dispatch.hpp"
#include "planes/palette_portable.hpp"
#include "planes/symbols_avx2.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX2 PACKHORSE_INLINE uint64_t equal_mask_avx2(__m256i low, __m256i high, uint8_t value) {
    const __m256i wanted = _mm256_set1_epi8(static_cast<char>(value));
    const auto a = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, wanted)));
    const auto b = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, wanted)));
    return a | uint64_t{b} << 32;
}

template <uint32_t kBits>
PACKHORSE_AVX2 std::size_t palette_encode_blocks_avx2(const uint8_t* src, std::size_t n_blocks,
                                                      const PaletteModel& model, uint8_t* codes,
                                                      std::size_t plane_stride, uint8_t*& escapes,
                                                      const uint8_t* escapes_end) {
    const __m256i symbol_mask = _mm256_set1_epi8(static_cast<char>(model.symbol_mask()));
    std::size_t b = 0;
    for (; b < n_blocks && escapes_end - escapes >= 64; ++b) {
        const __m256i low = _mm256_and_si256(
            symbol_mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 64 * b)));
        const __m256i high = _mm256_and_si256(
            symbol_mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 64 * b + 32)));
        uint64_t masks[1u << kBits];
#pragma GCC unroll 16
        for (uint32_t c = 0; c < (1u << kBits) - 1; ++c)
            masks[c] = equal_mask_avx2(low, high, model.values[c]);
        const uint64_t escaped =
            write_codes<kBits>(masks, ~uint64_t{0}, model.has_escape, codes + 8 * b, plane_stride);
        escapes = append_escapes(src + 64 * b, escaped, model.raw_bits, escapes);
    }
    return b;
}

template <uint32_t kBits>
PACKHORSE_AVX2 PACKHORSE_INLINE void palette_values_avx2(const uint64_t* planes,
                                                         const uint8_t* palette, uint8_t* dst) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(palette)));
    for (int h = 0; h < 2; ++h) {
        __m256i code = _mm256_setzero_si256();
        for (uint32_t j = 0; j < kBits; ++j) {
            const __m256i is_set = bytes_of_bits_avx2(static_cast<uint32_t>(planes[j] >> (32 * h)));
            code = _mm256_or_si256(
                code, _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(1 << j))));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst) + h, _mm256_shuffle_epi8(values, code));
    }
}

template <uint32_t kBits>
PACKHORSE_AVX2 std::size_t palette_decode_blocks_avx2(PaletteDecoder& decoder, std::size_t first,
                                                      std::size_t n_blocks, uint8_t* dst,
                                                      Ahead& ahead) {
    const uint8_t* escapes = decoder.escapes;
    std::size_t b = 0;
    for (; b < n_blocks; ++b) {
        uint64_t planes[kBits];
        const uint64_t escaped = load_codes<kBits>(decoder, first + 64 * b, planes);
        if (decoder.escapes_end - escapes < __builtin_popcountll(escaped)) break;
        if (b % 2 == 0) ahead.step();
        palette_values_avx2<kBits>(planes, decoder.values, dst + 64 * b);
        escapes = take_escapes(escapes, escaped, decoder.raw_bits, dst + 64 * b);
    }
    decoder.escapes = escapes;
    return b;
}

#endif

}  // namespace packhorse
