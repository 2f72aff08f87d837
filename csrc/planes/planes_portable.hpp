// Turns units into planes and back by plain loops, for any unit. The loops with intrinsics leave
// the units after their last full block to these.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/planes_sse2.hpp"

namespace packhorse {

// The number of bits by which the top 16 bits of a unit (8 for one-byte units) are rotated left: r
// of section 4. 0 leaves bytes as they are.
constexpr uint32_t rotation_of(uint32_t unit_nbytes, Split split) {
    if (split != Split::kFloat) return 0;
    return unit_nbytes == 8 ? 4 : 1;
}

struct PlaneSpec {
    uint32_t unit_nbytes;  // 1, 2, 4 or 8
    uint32_t n_planes;
    uint32_t rotation;  // rotation_of()

    // Whether planes differ from the units in memory.
    bool splits() const { return n_planes > 1 || rotation > 0; }
};

PACKHORSE_INLINE uint32_t rotate_left16(uint32_t top, uint32_t by) {
    return (top << by | top >> (16 - by)) & 0xFFFF;
}

PACKHORSE_INLINE void rotate_bytes(const uint8_t* src, std::size_t n, uint32_t left, uint8_t* dst) {
    for (std::size_t i = 0; i < n; ++i)
        dst[i] = static_cast<uint8_t>(src[i] << left | src[i] >> (8 - left));
}

template <class Unit, uint32_t kRotation>
PACKHORSE_INLINE void split_units(const uint8_t* src, std::size_t n, uint8_t* const* planes) {
    constexpr std::size_t n_planes = sizeof(Unit);
    uint8_t* __restrict plane0 = planes[0];
    uint8_t* __restrict plane1 = planes[1];
    for (std::size_t i = 0; i < n; ++i) {
        const auto top =
            static_cast<uint32_t>(load<Unit>(src + i * n_planes) >> (8 * n_planes - 16)) & 0xFFFF;
        const uint32_t rotated = rotate_left16(top, kRotation);
        plane0[i] = static_cast<uint8_t>(rotated >> 8);
        plane1[i] = static_cast<uint8_t>(rotated);
    }
    for (std::size_t p = 2; p < n_planes; ++p) {
        uint8_t* __restrict plane = planes[p];
        const uint8_t* __restrict from = src + (n_planes - 1 - p);
        for (std::size_t i = 0; i < n; ++i) plane[i] = from[i * n_planes];
    }
}

template <class Unit, uint32_t kRotation>
PACKHORSE_INLINE void merge_units(const uint8_t* const* planes, std::size_t n, uint8_t* dst) {
    constexpr std::size_t n_planes = sizeof(Unit);
    const uint8_t* __restrict plane0 = planes[0];
    const uint8_t* __restrict plane1 = planes[1];
    for (std::size_t i = 0; i < n; ++i) {
        const uint32_t top = rotate_left16(uint32_t{plane0[i]} << 8 | plane1[i], 16 - kRotation);
        Unit unit = static_cast<Unit>(static_cast<Unit>(top) << (8 * n_planes - 16));
        for (std::size_t p = 2; p < n_planes; ++p)
            unit = static_cast<Unit>(unit | static_cast<Unit>(planes[p][i])
                                                << (8 * (n_planes - 1 - p)));
        store(dst + i * n_planes, unit);
    }
}

PACKHORSE_INLINE void split_any(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                                uint8_t* const* planes) {
    if (spec.unit_nbytes == 1) rotate_bytes(src, n, spec.rotation, planes[0]);
    if (spec.unit_nbytes == 2 && spec.rotation == 0) split_units<uint16_t, 0>(src, n, planes);
    if (spec.unit_nbytes == 2 && spec.rotation == 1) split_units<uint16_t, 1>(src, n, planes);
    if (spec.unit_nbytes == 4 && spec.rotation == 0) split_units<uint32_t, 0>(src, n, planes);
    if (spec.unit_nbytes == 4 && spec.rotation == 1) split_units<uint32_t, 1>(src, n, planes);
    if (spec.unit_nbytes == 8 && spec.rotation == 0) split_units<uint64_t, 0>(src, n, planes);
    if (spec.unit_nbytes == 8 && spec.rotation == 4) split_units<uint64_t, 4>(src, n, planes);
}

PACKHORSE_INLINE void merge_any(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                                uint8_t* dst) {
    if (spec.unit_nbytes == 1) rotate_bytes(planes[0], n, 8 - spec.rotation, dst);
    if (spec.unit_nbytes == 2 && spec.rotation == 0) merge_units<uint16_t, 0>(planes, n, dst);
    if (spec.unit_nbytes == 2 && spec.rotation == 1) merge_units<uint16_t, 1>(planes, n, dst);
    if (spec.unit_nbytes == 4 && spec.rotation == 0) merge_units<uint32_t, 0>(planes, n, dst);
    if (spec.unit_nbytes == 4 && spec.rotation == 1) merge_units<uint32_t, 1>(planes, n, dst);
    if (spec.unit_nbytes == 8 && spec.rotation == 0) merge_units<uint64_t, 0>(planes, n, dst);
    if (spec.unit_nbytes == 8 && spec.rotation == 4) merge_units<uint64_t, 4>(planes, n, dst);
}

// Processes the units from `done` on; other loops have processed the units before.
PACKHORSE_INLINE void split_rest(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                                 std::size_t done, uint8_t* const* planes) {
    uint8_t* rest[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p) rest[p] = planes[p] + done;
    split_any(src + done * spec.unit_nbytes, n - done, spec, rest);
}

PACKHORSE_INLINE void merge_rest(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                                 std::size_t done, uint8_t* dst) {
    const uint8_t* rest[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p) rest[p] = planes[p] + done;
    merge_any(rest, n - done, spec, dst + done * spec.unit_nbytes);
}

inline void split_portable(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                           uint8_t* const* planes) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? split32_blocks_sse2<1>(src, n, planes)
                                  : split32_blocks_sse2<0>(src, n, planes);
#endif
    split_rest(src, n, spec, done, planes);
}

inline void merge_portable(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                           uint8_t* dst) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (spec.unit_nbytes == 4)
        done = spec.rotation == 1 ? merge32_blocks_sse2<1>(planes, n, dst)
                                  : merge32_blocks_sse2<0>(planes, n, dst);
#endif
    merge_rest(planes, n, spec, done, dst);
}

}  // namespace packhorse
