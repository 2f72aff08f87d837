// Moves raw bits out of planes and back, block by block, with NEON: 16 bytes to a register.
#pragma once

#include "common/dispatch.hpp"
#include "planes/symbols_portable.hpp"

namespace packhorse {

#if PACKHORSE_ARM

// Bit i mod 8 in byte i.
PACKHORSE_INLINE uint8x16_t places_neon() {
    return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201));
}

// One bit for each of 64 bytes that are zero or all ones.
PACKHORSE_INLINE uint64_t bits_of_bytes_neon(uint8x16_t a, uint8x16_t b, uint8x16_t c,
                                             uint8x16_t d) {
    const uint8x16_t place = places_neon();
    const uint8x16_t ab = vpaddq_u8(vandq_u8(a, place), vandq_u8(b, place));
    const uint8x16_t cd = vpaddq_u8(vandq_u8(c, place), vandq_u8(d, place));
    const uint8x16_t all = vpaddq_u8(ab, cd);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(all, all)), 0);
}

// The opposite, for bits 16 * quarter to 16 * quarter + 15.
PACKHORSE_INLINE uint8x16_t bytes_of_bits_neon(uint64_t bits, int quarter) {
    const uint8x16_t place = places_neon();
    const uint8x16_t first =
        vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(0), vcreate_u64(0x0101010101010101)));
    const uint8x16_t byte = vaddq_u8(first, vdupq_n_u8(static_cast<uint8_t>(2 * quarter)));
    const uint8x16_t spread = vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(bits)), byte);
    return vtstq_u8(spread, place);
}

inline std::size_t write_raw_blocks_neon(const uint8_t* plane, std::size_t n_blocks, uint32_t j,
                                         uint8_t* dst) {
    const uint8x16_t bit = vdupq_n_u8(static_cast<uint8_t>(1u << j));
    for (std::size_t b = 0; b < n_blocks; ++b, plane += 64)
        store(dst + 8 * b, bits_of_bytes_neon(vtstq_u8(vld1q_u8(plane), bit),
                                              vtstq_u8(vld1q_u8(plane + 16), bit),
                                              vtstq_u8(vld1q_u8(plane + 32), bit),
                                              vtstq_u8(vld1q_u8(plane + 48), bit)));
    return n_blocks;
}

inline void add_raw_blocks_neon(const RawPlanes& raw, std::size_t first, std::size_t n_blocks,
                                uint8_t* dst) {
    uint64_t words[8];
    for (std::size_t b = 0; b < n_blocks; ++b, dst += 64) {
        load_raw_words(raw, first + 64 * b, words);
        uint8x16_t bytes[4];
        for (int k = 0; k < 4; ++k) bytes[k] = vld1q_u8(dst + 16 * k);
        for (uint32_t w = 0; w < raw.n; ++w) {
            const uint8x16_t bit = vdupq_n_u8(static_cast<uint8_t>(1u << raw.bits[w]));
            for (int k = 0; k < 4; ++k)
                bytes[k] = vorrq_u8(bytes[k], vandq_u8(bytes_of_bits_neon(words[w], k), bit));
        }
        for (int k = 0; k < 4; ++k) vst1q_u8(dst + 16 * k, bytes[k]);
    }
}

#endif

}  // namespace packhorse
