// The loops of bounded codes with the baseline's instructions.
#pragma once

#include "bounded/numbers.hpp"
#include "planes/symbols_neon.hpp"

#define PACKHORSE_LOOP PACKHORSE_INLINE
#define PACKHORSE_LOOP_ENTRY inline

namespace packhorse::bounded_portable {

constexpr std::size_t kVectorNbytes = 16;

// Which of the 16 codes are 0, as bits.
#if PACKHORSE_X86
PACKHORSE_LOOP uint32_t escapes_among(const uint32_t* codes) {
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < kBoundedLanes; i += 4) {
        const __m128i four = _mm_load_si128(reinterpret_cast<const __m128i*>(codes + i));
        const __m128i zero = _mm_cmpeq_epi32(four, _mm_setzero_si128());
        escapes |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(zero))) << i;
    }
    return escapes;
}
#elif PACKHORSE_ARM
PACKHORSE_LOOP uint32_t escapes_among(const uint32_t* codes) {
    uint16x8_t halves[2];
    for (int h = 0; h < 2; ++h, codes += 8)
        halves[h] = vuzp1q_u16(vreinterpretq_u16_u32(vceqzq_u32(vld1q_u32(codes))),
                               vreinterpretq_u16_u32(vceqzq_u32(vld1q_u32(codes + 4))));
    const uint8x16_t zero =
        vuzp1q_u8(vreinterpretq_u8_u16(halves[0]), vreinterpretq_u8_u16(halves[1]));
    return bits_of_bytes_neon(zero, zero, zero, zero) & 0xFFFF;
}
#else
PACKHORSE_LOOP uint32_t escapes_among(const uint32_t* codes) {
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < kBoundedLanes; ++i)
        escapes |= static_cast<uint32_t>(codes[i] == 0) << i;
    return escapes;
}
#endif

#include "bounded/loops.hpp"

}  // namespace packhorse::bounded_portable

#undef PACKHORSE_LOOP
#undef PACKHORSE_LOOP_ENTRY
