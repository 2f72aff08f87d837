// Turns units of 16 and 32 bits into planes and back with NEON, whose loads and stores of two and
// four interleaved registers do most of it. For other units, compilers make good loops.
#pragma once

#include <type_traits>

#include "common/dispatch.hpp"
#include "planes/planes_portable.hpp"

namespace packhorse {

#if PACKHORSE_ARM

// Rotates the 16 bits of two registers of bytes left, or back.
template <uint32_t kRotation>
PACKHORSE_INLINE void rotate_neon(uint8x16_t& high, uint8x16_t& low) {
    if constexpr (kRotation > 0) {
        const uint8x16_t before = high;
        high = vsriq_n_u8(vshlq_n_u8(high, kRotation), low, 8 - kRotation);
        low = vsriq_n_u8(vshlq_n_u8(low, kRotation), before, 8 - kRotation);
    }
}

template <uint32_t kRotation>
PACKHORSE_INLINE void rotate_back_neon(uint8x16_t& high, uint8x16_t& low) {
    if constexpr (kRotation > 0) {
        const uint8x16_t before = high;
        high = vsliq_n_u8(vshrq_n_u8(high, kRotation), low, 8 - kRotation);
        low = vsliq_n_u8(vshrq_n_u8(low, kRotation), before, 8 - kRotation);
    }
}

// 16 units, with a register for each byte of a unit.
template <uint32_t kBytes>
using UnitsNeon = std::conditional_t<kBytes == 2, uint8x16x2_t, uint8x16x4_t>;

// Each of these functions processes all full blocks of 16 units of two or four bytes. They return
// how many units those have.
template <uint32_t kBytes, uint32_t kRotation>
inline std::size_t split_blocks_neon(const uint8_t* src, std::size_t n, uint8_t* const* planes) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) {
        UnitsNeon<kBytes> units;
        if constexpr (kBytes == 2)
            units = vld2q_u8(src + 2 * at);
        else
            units = vld4q_u8(src + 4 * at);
        rotate_neon<kRotation>(units.val[kBytes - 1], units.val[kBytes - 2]);
        for (uint32_t p = 0; p < kBytes; ++p) vst1q_u8(planes[p] + at, units.val[kBytes - 1 - p]);
    }
    return at;
}

template <uint32_t kBytes, uint32_t kRotation>
inline std::size_t merge_blocks_neon(const uint8_t* const* planes, std::size_t n, uint8_t* dst) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) {
        UnitsNeon<kBytes> units;
        for (uint32_t p = 0; p < kBytes; ++p) units.val[kBytes - 1 - p] = vld1q_u8(planes[p] + at);
        rotate_back_neon<kRotation>(units.val[kBytes - 1], units.val[kBytes - 2]);
        if constexpr (kBytes == 2)
            vst2q_u8(dst + 2 * at, units);
        else
            vst4q_u8(dst + 4 * at, units);
    }
    return at;
}

inline void split_neon(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                       uint8_t* const* planes) {
    std::size_t done = 0;
    if (spec.unit_nbytes == 2)
        done = spec.rotation == 1 ? split_blocks_neon<2, 1>(src, n, planes)
                                  : split_blocks_neon<2, 0>(src, n, planes);
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? split_blocks_neon<4, 1>(src, n, planes)
                                  : split_blocks_neon<4, 0>(src, n, planes);
    split_rest(src, n, spec, done, planes);
}

inline void merge_neon(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                       uint8_t* dst) {
    std::size_t done = 0;
    if (spec.unit_nbytes == 2)
        done = spec.rotation == 1 ? merge_blocks_neon<2, 1>(planes, n, dst)
                                  : merge_blocks_neon<2, 0>(planes, n, dst);
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? merge_blocks_neon<4, 1>(planes, n, dst)
                                  : merge_blocks_neon<4, 0>(planes, n, dst);
    merge_rest(planes, n, spec, done, dst);
}

#endif

}  // namespace packhorse
