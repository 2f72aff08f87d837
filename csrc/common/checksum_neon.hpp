// CRC32C with the instruction for it, in three streams, and XXH3-128 with NEON.
#pragma once

#include "common/checksum_portable.hpp"
#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_ARM

// An assembler takes these instructions for every processor, where compilers want a flag or an
// attribute that they do not spell alike. Only callers that know has_crc32() get here.
PACKHORSE_INLINE uint32_t crc32c_step_neon(uint32_t crc, uint64_t eight) {
    asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(eight));
    return crc;
}

PACKHORSE_INLINE uint32_t crc32c_byte_neon(uint32_t crc, uint32_t byte) {
    asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(byte));
    return crc;
}

inline uint32_t crc32c_three_streams_neon(uint32_t crc, const uint8_t*& src, std::size_t& nbytes,
                                          std::size_t run, const CrcShift& shift) {
    while (nbytes >= 3 * run) {
        uint32_t a = crc, b = 0, c = 0;
        for (std::size_t i = 0; i < run; i += 16)
            for (std::size_t k = i; k < i + 16; k += 8) {
                a = crc32c_step_neon(a, load<uint64_t>(src + k));
                b = crc32c_step_neon(b, load<uint64_t>(src + run + k));
                c = crc32c_step_neon(c, load<uint64_t>(src + 2 * run + k));
            }
        crc = shift_crc(shift, shift_crc(shift, a) ^ b) ^ c;
        src += 3 * run;
        nbytes -= 3 * run;
    }
    return crc;
}

inline uint32_t crc32c_neon(uint32_t crc, const uint8_t* src, std::size_t nbytes) {
    crc = crc32c_three_streams_neon(crc, src, nbytes, kCrcLongNbytes, kCrcLongShift);
    crc = crc32c_three_streams_neon(crc, src, nbytes, kCrcShortNbytes, kCrcShortShift);
    for (; nbytes >= 8; src += 8, nbytes -= 8) crc = crc32c_step_neon(crc, load<uint64_t>(src));
    for (; nbytes > 0; ++src, --nbytes) crc = crc32c_byte_neon(crc, *src);
    return crc;
}

// Adds half a stripe to the lanes. Halves of keys are sorted so that one instruction multiplies and
// adds two of them.
PACKHORSE_INLINE void xxh3_half_stripe_neon(uint64x2_t* lanes, uint64x2_t first, uint64x2_t second,
                                            const uint8_t* secret) {
    const uint32x4_t a =
        vreinterpretq_u32_u64(veorq_u64(first, vreinterpretq_u64_u8(vld1q_u8(secret))));
    const uint32x4_t b =
        vreinterpretq_u32_u64(veorq_u64(second, vreinterpretq_u64_u8(vld1q_u8(secret + 16))));
    const uint32x4_t low = vuzp1q_u32(a, b), high = vuzp2q_u32(a, b);
    lanes[0] = vmlal_u32(vaddq_u64(lanes[0], vextq_u64(first, first, 1)), vget_low_u32(low),
                         vget_low_u32(high));
    lanes[1] = vmlal_high_u32(vaddq_u64(lanes[1], vextq_u64(second, second, 1)), low, high);
}

PACKHORSE_INLINE void xxh3_stripe_neon(uint64x2_t* lanes, const uint64x2_t* line,
                                       const uint8_t* secret) {
    for (int h = 0; h < 2; ++h)
        xxh3_half_stripe_neon(lanes + 2 * h, line[2 * h], line[2 * h + 1], secret + 32 * h);
}

PACKHORSE_INLINE uint64x2_t load_u64_neon(const uint8_t* src) {
    return vreinterpretq_u64_u8(vld1q_u8(src));
}

inline void xxh3_stripes_neon(Xxh3Accumulator& acc, const uint8_t* src, std::size_t n_stripes) {
    uint64x2_t lanes[4];
    for (int i = 0; i < 4; ++i) lanes[i] = vld1q_u64(acc.lanes + 2 * i);
    for (std::size_t s = 0; s < n_stripes; ++s, src += kXxh3StripeNbytes) {
        const uint64x2_t line[4] = {load_u64_neon(src), load_u64_neon(src + 16),
                                    load_u64_neon(src + 32), load_u64_neon(src + 48)};
        xxh3_stripe_neon(lanes, line, kXxh3Secret + 8 * s);
    }
    for (int i = 0; i < 4; ++i) vst1q_u64(acc.lanes + 2 * i, lanes[i]);
}

#endif

}  // namespace packhorse
