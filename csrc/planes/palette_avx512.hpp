// Turns blocks of 64 units into palette codes and back with AVX-512, one register to a block. A
// word of a bit plane is a mask.
#pragma once

#include "common/dispatch.hpp"
#include "planes/palette_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

template <uint32_t kBits>
PACKHORSE_AVX512 std::size_t palette_encode_blocks_avx512(const uint8_t* src, std::size_t n_blocks,
                                                          const PaletteModel& model, uint8_t* codes,
                                                          std::size_t plane_stride,
                                                          uint8_t*& escapes,
                                                          const uint8_t* escapes_end) {
    const __m512i symbol_mask = _mm512_set1_epi8(static_cast<char>(model.symbol_mask()));
    std::size_t b = 0;
    for (; b < n_blocks && escapes_end - escapes >= 64; ++b) {
        const __m512i units = _mm512_and_si512(symbol_mask, _mm512_loadu_si512(src + 64 * b));
        uint64_t masks[1u << kBits];
#pragma GCC unroll 16
        for (uint32_t c = 0; c < (1u << kBits) - 1; ++c)
            masks[c] =
                _mm512_cmpeq_epi8_mask(units, _mm512_set1_epi8(static_cast<char>(model.values[c])));
        const uint64_t escaped =
            write_codes<kBits>(masks, ~uint64_t{0}, model.has_escape, codes + 8 * b, plane_stride);
        escapes = append_escapes(src + 64 * b, escaped, model.raw_bits, escapes);
    }
    return b;
}

template <uint32_t kBits>
PACKHORSE_AVX512 std::size_t palette_decode_blocks_avx512(PaletteDecoder& decoder,
                                                          std::size_t first, std::size_t n_blocks,
                                                          uint8_t* dst, Ahead& ahead) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(decoder.values)));
    const uint8_t* escapes = decoder.escapes;
    std::size_t b = 0;
    for (; b < n_blocks; ++b) {
        uint64_t planes[kBits];
        const uint64_t escaped = load_codes<kBits>(decoder, first + 64 * b, planes);
        if (decoder.escapes_end - escapes < __builtin_popcountll(escaped)) break;
        if (b % 2 == 0) ahead.step();
        __m512i code = _mm512_setzero_si512();
        for (uint32_t j = 0; j < kBits; ++j)
            code = _mm512_mask_add_epi8(code, planes[j], code,
                                        _mm512_set1_epi8(static_cast<char>(1 << j)));
        _mm512_storeu_si512(dst + 64 * b, _mm512_shuffle_epi8(values, code));
        escapes = take_escapes(escapes, escaped, decoder.raw_bits, dst + 64 * b);
    }
    decoder.escapes = escapes;
    return b;
}

#endif

}  // namespace packhorse
