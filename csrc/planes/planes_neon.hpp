// Turns units of 16 and 32 bits into planes and back with NEON, whose loads and stores of two and
// four interleaved registers do most of it. For other units, compilers make good loops.
#pragma once

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

// Each of these functions processes all full blocks of 16 units. They return how many units those
// have.
template <uint32_t kRotation>
inline std::size_t split16_blocks_neon(const uint8_t* src, std::size_t n, uint8_t* const* planes) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) {
        uint8x16x2_t bytes = vld2q_u8(src + 2 * at);
        rotate_neon<kRotation>(bytes.val[1], bytes.val[0]);
        for (int p = 0; p < 2; ++p) vst1q_u8(planes[p] + at, bytes.val[1 - p]);
    }
    return at;
}

template <uint32_t kRotation>
inline std::size_t split32_blocks_neon(const uint8_t* src, std::size_t n, uint8_t* const* planes) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) {
        uint8x16x4_t bytes = vld4q_u8(src + 4 * at);
        rotate_neon<kRotation>(bytes.val[3], bytes.val[2]);
        for (int p = 0; p < 4; ++p) vst1q_u8(planes[p] + at, bytes.val[3 - p]);
    }
    return at;
}

template <uint32_t kRotation>
inline std::size_t merge16_blocks_neon(const uint8_t* const* planes, std::size_t n, uint8_t* dst) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) {
        uint8x16x2_t bytes = {{vld1q_u8(planes[1] + at), vld1q_u8(planes[0] + at)}};
        rotate_back_neon<kRotation>(bytes.val[1], bytes.val[0]);
        vst2q_u8(dst + 2 * at, bytes);
    }
    return at;
}

template <uint32_t kRotation>
inline std::size_t merge32_blocks_neon(const uint8_t* const* planes, std::size_t n, uint8_t* dst) {
    std::size_t at = 0;
    for (; at + 16 <= n; at += 16) {
        uint8x16x4_t bytes = {{vld1q_u8(planes[3] + at), vld1q_u8(planes[2] + at),
                               vld1q_u8(planes[1] + at), vld1q_u8(planes[0] + at)}};
        rotate_back_neon<kRotation>(bytes.val[3], bytes.val[2]);
        vst4q_u8(dst + 4 * at, bytes);
    }
    return at;
}

inline void split_neon(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                       uint8_t* const* planes) {
    std::size_t done = 0;
    if (spec.unit_nbytes == 2)
        done = spec.rotation == 1 ? split16_blocks_neon<1>(src, n, planes)
                                  : split16_blocks_neon<0>(src, n, planes);
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? split32_blocks_neon<1>(src, n, planes)
                                  : split32_blocks_neon<0>(src, n, planes);
    split_rest(src, n, spec, done, planes);
}

inline void merge_neon(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                       uint8_t* dst) {
    std::size_t done = 0;
    if (spec.unit_nbytes == 2)
        done = spec.rotation == 1 ? merge16_blocks_neon<1>(planes, n, dst)
                                  : merge16_blocks_neon<0>(planes, n, dst);
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? merge32_blocks_neon<1>(planes, n, dst)
                                  : merge32_blocks_neon<0>(planes, n, dst);
    merge_rest(planes, n, spec, done, dst);
}

#endif

}  // namespace packhorse
