// Turns blocks of 64 units into palette codes and back with NEON, four registers to a block.
#pragma once

#include "common/dispatch.hpp"
#include "planes/palette_portable.hpp"
#include "planes/symbols_neon.hpp"

namespace packhorse {

#if PACKHORSE_ARM

template <uint32_t kBits>
std::size_t palette_encode_blocks_neon(const uint8_t* src, std::size_t n_blocks,
                                       const PaletteModel& model, uint8_t* codes,
                                       std::size_t plane_stride, uint8_t*& escapes,
                                       const uint8_t* escapes_end) {
    const uint8x16_t symbol_mask = vdupq_n_u8(model.symbol_mask());
    std::size_t b = 0;
    for (; b < n_blocks && escapes_end - escapes >= 64; ++b) {
        uint8x16_t units[4];
        for (int k = 0; k < 4; ++k)
            units[k] =
                vandq_u8(symbol_mask, vld1q_u8(src + 64 * b + 16 * static_cast<unsigned>(k)));
        uint64_t masks[1u << kBits];
#pragma GCC unroll 16
        for (uint32_t c = 0; c < (1u << kBits) - 1; ++c) {
            const uint8x16_t wanted = vdupq_n_u8(model.values[c]);
            masks[c] = bits_of_bytes_neon(vceqq_u8(units[0], wanted), vceqq_u8(units[1], wanted),
                                          vceqq_u8(units[2], wanted), vceqq_u8(units[3], wanted));
        }
        const uint64_t escaped =
            write_codes<kBits>(masks, ~uint64_t{0}, model.has_escape, codes + 8 * b, plane_stride);
        escapes = append_escapes(src + 64 * b, escaped, model.raw_bits, escapes);
    }
    return b;
}

template <uint32_t kBits>
PACKHORSE_INLINE void palette_values_neon(const uint64_t* planes, const uint8_t* palette,
                                          uint8_t* dst) {
    const uint8x16_t values = vld1q_u8(palette);
    for (int k = 0; k < 4; ++k) {
        uint8x16_t code = vdupq_n_u8(0);
        for (uint32_t j = 0; j < kBits; ++j)
            code = vorrq_u8(code, vandq_u8(bytes_of_bits_neon(planes[j], k),
                                           vdupq_n_u8(static_cast<uint8_t>(1u << j))));
        vst1q_u8(dst + 16 * k, vqtbl1q_u8(values, code));
    }
}

template <uint32_t kBits>
std::size_t palette_decode_blocks_neon(PaletteDecoder& decoder, std::size_t first,
                                       std::size_t n_blocks, uint8_t* dst, Ahead& ahead) {
    const uint8_t* escapes = decoder.escapes;
    std::size_t b = 0;
    for (; b < n_blocks; ++b) {
        uint64_t planes[kBits];
        const uint64_t escaped = load_codes<kBits>(decoder, first + 64 * b, planes);
        if (decoder.escapes_end - escapes < std::popcount(escaped)) break;
        if (b % 2 == 0) ahead.step();
        palette_values_neon<kBits>(planes, decoder.values, dst + 64 * b);
        escapes = take_escapes(escapes, escaped, decoder.raw_bits, dst + 64 * b);
    }
    decoder.escapes = escapes;
    return b;
}

#endif

}  // namespace packhorse
