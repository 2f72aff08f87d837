// Moves bytes to the order by class and back with NEON, by byte shuffles from tables, for up to
// eight classes (docs/format.md, 6.5 and 6.6).
//
// For a block of 64 bytes, each class has a set of places. A product of the counts of its eight
// bytes says where in the class each group of eight begins.
#pragma once

#include "common/dispatch.hpp"
#include "planes/class_order_portable.hpp"
#include "planes/place_shuffles.hpp"
#include "planes/symbols_neon.hpp"

namespace packhorse {

#if PACKHORSE_ARM

// The places of a class in a block, and how many of them are up to each group of eight.
struct ClassPlacesNeon {
    uint64_t set;
    uint64_t counts;

    PACKHORSE_INLINE uint32_t in_group(uint32_t g) const { return set >> (8 * g) & 0xFF; }
    PACKHORSE_INLINE std::size_t before_group(uint32_t g) const {
        return counts << 8 >> (8 * g) & 0xFF;
    }
    PACKHORSE_INLINE std::size_t all() const { return counts >> 56; }
};

// The bytes of a block that are at or above a cut.
PACKHORSE_INLINE uint64_t above_neon(const uint8x16_t* keys, uint8_t cut) {
    const uint8x16_t least = vdupq_n_u8(cut);
    return bits_of_bytes_neon(vcgeq_u8(keys[0], least), vcgeq_u8(keys[1], least),
                              vcgeq_u8(keys[2], least), vcgeq_u8(keys[3], least));
}

template <uint32_t kClasses>
PACKHORSE_INLINE void class_places_neon(const uint8_t* keys, const uint8_t* cuts,
                                        ClassPlacesNeon* places) {
    uint8x16_t key[4];
    for (int k = 0; k < 4; ++k) key[k] = vld1q_u8(keys + 16 * k);
    uint64_t from_here = ~uint64_t{0};
#pragma GCC unroll 8
    for (uint32_t c = 0; c < kClasses; ++c) {
        const uint64_t above = c + 1 < kClasses ? above_neon(key, cuts[c]) : 0;
        const uint64_t set = from_here & ~above;
        const uint8x8_t counts = vcnt_u8(vcreate_u8(set));
        places[c] = {set, vget_lane_u64(vreinterpret_u64_u8(counts), 0) * 0x0101010101010101};
        from_here = above;
    }
}

// Puts a block back in the order of units. Up to eight bytes behind the last unit of a class are
// read.
template <uint32_t kClasses>
PACKHORSE_INLINE void unsort_block_neon(const uint8_t* const* next, const ClassPlacesNeon* places,
                                        uint8_t* dst) {
#pragma GCC unroll 8
    for (uint32_t g = 0; g < 8; ++g) {
        uint8x8_t units = vdup_n_u8(0);
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const uint8x8_t fresh = vld1_u8(next[c] + places[c].before_group(g));
            const uint8x8_t order = vld1_u8(kPlaceShuffles.expand[places[c].in_group(g)]);
            units = vorr_u8(units, vtbl1_u8(fresh, order));
        }
        vst1_u8(dst + 8 * g, units);
    }
}

// Moves a block to the order by class. Up to eight bytes behind each class are written.
template <uint32_t kClasses>
PACKHORSE_INLINE void sort_block_neon(const uint8_t* src, const ClassPlacesNeon* places,
                                      uint8_t* const* next) {
#pragma GCC unroll 8
    for (uint32_t g = 0; g < 8; ++g) {
        const uint8x8_t units = vld1_u8(src + 8 * g);
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const uint8x8_t order = vld1_u8(kPlaceShuffles.compress[places[c].in_group(g)]);
            vst1_u8(next[c] + places[c].before_group(g), vtbl1_u8(units, order));
        }
    }
}

// Calls move(i, places, next) for each full block of 64 units, whose first one is unit `i`, and
// moves on `next`, the places or addresses of the next unit of each class. Returns how many units
// the blocks have.
template <uint32_t kClasses, class Place, class Move>
PACKHORSE_INLINE std::size_t for_each_block_neon(Place* next_of, const uint8_t* keys, std::size_t n,
                                                 const uint8_t* cuts, const Move& move) {
    Place next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = next_of[c];
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        ClassPlacesNeon places[kClasses];
        class_places_neon<kClasses>(keys + i, cuts, places);
        move(i, static_cast<const ClassPlacesNeon*>(places), static_cast<const Place*>(next));
        for (uint32_t c = 0; c < kClasses; ++c) next[c] += places[c].all();
    }
    for (uint32_t c = 0; c < kClasses; ++c) next_of[c] = next[c];
    return i;
}

// Puts full blocks back in the order of units, and moves `from` on. Returns how many units they
// have.
template <uint32_t kClasses>
inline std::size_t unsort_bytes_neon(const uint8_t** from, const uint8_t* keys, std::size_t n,
                                     const uint8_t* cuts, uint8_t* dst) {
    return for_each_block_neon<kClasses>(
        from, keys, n, cuts,
        [=](std::size_t i, const ClassPlacesNeon* places, const uint8_t* const* next)
            PACKHORSE_VECTORISED { unsort_block_neon<kClasses>(next, places, dst + i); });
}

// Moves full blocks to the order by class, and moves `to` on.
template <uint32_t kClasses>
inline std::size_t sort_bytes_neon(const uint8_t* src, const uint8_t* keys, std::size_t n,
                                   const uint8_t* cuts, uint8_t** to) {
    return for_each_block_neon<kClasses>(
        to, keys, n, cuts,
        [=](std::size_t i, const ClassPlacesNeon* places, uint8_t* const* next)
            PACKHORSE_VECTORISED { sort_block_neon<kClasses>(src + i, places, next); });
}

// Calls work<number of classes>() for the cuts of a plane.
template <class Work>
PACKHORSE_INLINE std::size_t with_cuts_neon(const ClassCuts& cuts, const Work& work) {
    switch (cuts.count()) {
        case 0:
            return work.template operator()<1>();
        case 1:
            return work.template operator()<2>();
        case 2:
            return work.template operator()<3>();
        default:
            return work.template operator()<4>();
    }
}

#endif

}  // namespace packhorse
