// Encoding rounds of 128 lanes with NEON (docs/format.md, 6.4), with states in two halves as in
// rans/decode_neon.hpp.
//
// A quotient is the upper half of a product with a reciprocal, exact or too small by one as in
// rans/encode_portable.hpp. If there is a SpreadMap, everything is looked up in registers, as
// planes of bytes, 16 lanes at a time. Other models load divisors and slots from memory.
//
// A round has three steps: it divides all states, it writes the words of both pieces of 64 lanes,
// and it looks up all slots.
#pragma once

#include "common/dispatch.hpp"
#include "planes/symbols_neon.hpp"
#include "rans/encode_portable.hpp"
#include "rans/spread.hpp"
#include "rans/word_order.hpp"

namespace packhorse {

#if PACKHORSE_ARM

struct alignas(64) EncodeLanesNeon {
    uint16_t high[kMaxLanes];
    uint16_t low[kMaxLanes];
    uint16_t quotient[kMaxLanes];  // its low half
    uint16_t position[kMaxLanes];
    uint8_t code[kMaxLanes];

    explicit EncodeLanesNeon(const uint32_t* states) {
        for (std::size_t i = 0; i < kMaxLanes; ++i) {
            high[i] = static_cast<uint16_t>(states[i] >> 16);
            low[i] = static_cast<uint16_t>(states[i]);
        }
    }

    void store_to(uint32_t* states) const {
        for (std::size_t i = 0; i < kMaxLanes; ++i) states[i] = uint32_t{high[i]} << 16 | low[i];
    }

    // Brings the codes of a round to the order of lanes.
    PACKHORSE_INLINE void take_codes(const uint8_t* codes) {
        for (int h = 0; h < 2; ++h) {
            const uint8x16x4_t quarters = vld4q_u8(codes + 64 * h);
            for (int q = 0; q < 4; ++q) vst1q_u8(code + 32 * q + 16 * h, quarters.val[q]);
        }
    }
};

// The divisors of 16 lanes.
struct DivisorsNeon {
    uint16x8_t freq[2];
    uint16x8_t start[2];
    uint32x4_t reciprocal[4];
};

constexpr std::size_t kNarrowMapSize = kSpreadSize >> kNarrowBucketLog;  // buckets, and runs

// A narrow SpreadMap and its divisors, with numbers cut into bytes.
struct alignas(64) SpreadBytes {
    uint8_t freq[2][kNarrowBuckets];
    uint8_t start[2][kNarrowBuckets];
    uint8_t reciprocal[4][kNarrowBuckets];
    uint8_t entry[2][kNarrowMapSize];
    uint8_t delta[2][kNarrowMapSize];
    uint16_t lone_edge;
};

inline void fill_spread_bytes(const SpreadMap& map, uint32_t n_codes, SpreadBytes& bytes) {
    bytes = {};
    for (uint32_t c = 0; c < n_codes; ++c) {
        const uint32_t freq = map.freq[c], start = map.start[c];
        const uint32_t reciprocal = integer_reciprocal_below(freq);
        for (uint32_t k = 0; k < 2; ++k) {
            bytes.freq[k][c] = static_cast<uint8_t>(freq >> (8 * k));
            bytes.start[k][c] = static_cast<uint8_t>(start >> (8 * k));
        }
        for (uint32_t k = 0; k < 4; ++k)
            bytes.reciprocal[k][c] = static_cast<uint8_t>(reciprocal >> (8 * k));
    }
    for (uint32_t i = 0; i < kNarrowMapSize; ++i)
        for (uint32_t k = 0; k < 2; ++k) {
            bytes.entry[k][i] = static_cast<uint8_t>(map.entry[i] >> (8 * k));
            bytes.delta[k][i] = static_cast<uint8_t>(map.delta[i] >> (8 * k));
        }
    bytes.lone_edge = static_cast<uint16_t>(map.lone_edge);
}

PACKHORSE_INLINE void zip_bytes_neon(uint8x16_t low, uint8x16_t high, uint16x8_t* both) {
    both[0] = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    both[1] = vreinterpretq_u16_u8(vzip2q_u8(low, high));
}

struct SpreadTablesNeon {
    static constexpr bool kExactQuotient = true;
    const SpreadBytes& bytes;

    static PACKHORSE_INLINE uint8x16_t of_code(const uint8_t* table, uint8x16_t code) {
        return vqtbl2q_u8(vld1q_u8_x2(table), code);
    }
    static PACKHORSE_INLINE void of_64(const uint8_t (&table)[2][kNarrowMapSize], uint8x16_t at,
                                       uint16x8_t* both) {
        zip_bytes_neon(vqtbl4q_u8(vld1q_u8_x4(table[0]), at), vqtbl4q_u8(vld1q_u8_x4(table[1]), at),
                       both);
    }

    PACKHORSE_INLINE void look_up(const uint8_t* codes, DivisorsNeon& by) const {
        const uint8x16_t code = vld1q_u8(codes);
        zip_bytes_neon(of_code(bytes.freq[0], code), of_code(bytes.freq[1], code), by.freq);
        zip_bytes_neon(of_code(bytes.start[0], code), of_code(bytes.start[1], code), by.start);
        uint16x8_t lower[2], upper[2];
        zip_bytes_neon(of_code(bytes.reciprocal[0], code), of_code(bytes.reciprocal[1], code),
                       lower);
        zip_bytes_neon(of_code(bytes.reciprocal[2], code), of_code(bytes.reciprocal[3], code),
                       upper);
        for (int h = 0; h < 2; ++h) {
            by.reciprocal[2 * h] = vreinterpretq_u32_u16(vzip1q_u16(lower[h], upper[h]));
            by.reciprocal[2 * h + 1] = vreinterpretq_u32_u16(vzip2q_u16(lower[h], upper[h]));
        }
    }

    // The slots of 16 positions, with undefined bits above the lower 12.
    PACKHORSE_INLINE void find_slots(const uint16_t* positions, uint16x8_t* slots) const {
        const uint16x8_t at[2] = {vld1q_u16(positions), vld1q_u16(positions + 8)};
        const uint8x16_t bucket =
            vshrn_high_n_u16(vshrn_n_u16(at[0], kNarrowBucketLog), at[1], kNarrowBucketLog);
        uint16x8_t run[2];
        of_64(bytes.entry, bucket, run);
        for (int h = 0; h < 2; ++h) {
            const uint16x8_t beyond = vcgeq_u16(at[h], vdupq_n_u16(bytes.lone_edge));
            run[h] = vsubq_u16(vshrq_n_u16(vaddq_u16(run[h], at[h]), 8), beyond);
        }
        of_64(bytes.delta, vmovn_high_u16(vmovn_u16(run[0]), run[1]), slots);
        for (int h = 0; h < 2; ++h) slots[h] = vaddq_u16(slots[h], at[h]);
    }
};

// The tables of RansVectorTables. Quotients may be too small by one; then the slot is 4096 larger.
struct VectorTablesNeon {
    static constexpr bool kExactQuotient = false;
    const RansVectorTables& tables;

    PACKHORSE_INLINE void look_up(const uint8_t* codes, DivisorsNeon& by) const {
        for (int h = 0; h < 2; ++h) {
            uint16x8_t freq_start[2];
            for (int k = 0; k < 2; ++k) {
                const uint8_t* four = codes + 8 * h + 4 * k;
                const uint64x2_t a = vld1q_lane_u64(tables.divisors + four[1],
                                                    vdupq_n_u64(tables.divisors[four[0]]), 1);
                const uint64x2_t b = vld1q_lane_u64(tables.divisors + four[3],
                                                    vdupq_n_u64(tables.divisors[four[2]]), 1);
                freq_start[k] = vreinterpretq_u16_u32(
                    vuzp1q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b)));
                by.reciprocal[2 * h + k] =
                    vuzp2q_u32(vreinterpretq_u32_u64(a), vreinterpretq_u32_u64(b));
            }
            by.freq[h] = vuzp1q_u16(freq_start[0], freq_start[1]);
            by.start[h] = vuzp2q_u16(freq_start[0], freq_start[1]);
        }
    }

    PACKHORSE_INLINE void find_slots(const uint16_t* positions, uint16x8_t* slots) const {
        for (int h = 0; h < 2; ++h) {
            uint64_t fours[2];
            for (int k = 0; k < 2; ++k) {
                const uint16_t* at = positions + 8 * h + 4 * k;
                fours[k] = tables.slots[at[0]] | uint64_t{tables.slots[at[1]]} << 16 |
                           uint64_t{tables.slots[at[2]]} << 32 |
                           uint64_t{tables.slots[at[3]]} << 48;
            }
            slots[h] =
                vreinterpretq_u16_u64(vcombine_u64(vcreate_u64(fours[0]), vcreate_u64(fours[1])));
        }
    }
};

// The upper halves of products. Conversions to floats and back have half the throughput on
// Neoverse.
PACKHORSE_INLINE uint32x4_t multiply_high_neon(uint32x4_t a, uint32x4_t b) {
    const uint64x2_t lower = vmull_u32(vget_low_u32(a), vget_low_u32(b));
    const uint64x2_t upper = vmull_high_u32(a, b);
    return vuzp2q_u32(vreinterpretq_u32_u64(lower), vreinterpretq_u32_u64(upper));
}

// Divides the states of eight lanes, after their words are taken off them. Returns the lanes that
// keep their words.
template <bool kExactQuotient>
PACKHORSE_INLINE uint16x8_t divide_neon(EncodeLanesNeon& lanes, std::size_t lane, uint16x8_t freq,
                                        uint16x8_t start, const uint32x4_t* reciprocal) {
    const uint16x8_t high = vld1q_u16(lanes.high + lane), low = vld1q_u16(lanes.low + lane);
    // A state of freq * 2^20 or more emits a word.
    const uint16x8_t keeps = vcgtq_u16(freq, vshrq_n_u16(high, 4));
    const uint16x8_t upper = vandq_u16(high, keeps), lower = vbslq_u16(keeps, low, high);
    const uint32x4_t states[2] = {vreinterpretq_u32_u16(vzip1q_u16(lower, upper)),
                                  vreinterpretq_u32_u16(vzip2q_u16(lower, upper))};
    uint32x4_t quotient[2];
    for (int k = 0; k < 2; ++k) quotient[k] = multiply_high_neon(states[k], reciprocal[k]);
    uint16x8_t narrow =
        vuzp1q_u16(vreinterpretq_u16_u32(quotient[0]), vreinterpretq_u16_u32(quotient[1]));
    // The remainder is below 2 * freq, so its low half is enough.
    uint16x8_t remainder = vmlsq_u16(lower, narrow, freq);
    if constexpr (kExactQuotient) {
        const uint16x8_t too_low = vcgeq_u16(remainder, freq);
        remainder = vsubq_u16(remainder, vandq_u16(too_low, freq));
        narrow = vsubq_u16(narrow, too_low);
        const int16x8_t minus_one = vreinterpretq_s16_u16(too_low);
        quotient[0] = vreinterpretq_u32_s32(
            vsubw_s16(vreinterpretq_s32_u32(quotient[0]), vget_low_s16(minus_one)));
        quotient[1] =
            vreinterpretq_u32_s32(vsubw_high_s16(vreinterpretq_s32_u32(quotient[1]), minus_one));
    }
    vst1q_u16(lanes.high + lane, vshrn_high_n_u32(vshrn_n_u32(quotient[0], 4), quotient[1], 4));
    vst1q_u16(lanes.quotient + lane, narrow);
    vst1q_u16(lanes.position + lane, vaddq_u16(start, remainder));
    return keeps;
}

// Divides a piece of 64 lanes. Returns the lanes that keep their words, as bits.
template <class Tables>
PACKHORSE_INLINE uint64_t divide_piece_neon(EncodeLanesNeon& lanes, std::size_t first,
                                            const Tables& tables) {
    uint8x16_t keeps[4];
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; ++k) {
        const std::size_t lane = first + 16 * k;
        DivisorsNeon by;
        tables.look_up(lanes.code + lane, by);
        uint8x16_t halves[2];
        for (int h = 0; h < 2; ++h)
            halves[h] = vreinterpretq_u8_u16(divide_neon<Tables::kExactQuotient>(
                lanes, lane + 8 * h, by.freq[h], by.start[h], by.reciprocal + 2 * h));
        keeps[k] = vuzp1q_u8(halves[0], halves[1]);
    }
    return bits_of_bytes_neon(keeps[0], keeps[1], keeps[2], keeps[3]);
}

// Writes the words of a piece, those of the highest lanes first. What is written below the words of
// a group is overwritten by those of lower groups.
PACKHORSE_INLINE uint8_t* emit_piece_neon(const EncodeLanesNeon& lanes, std::size_t first,
                                          uint64_t keeps, uint8_t* words) {
    const uint64_t counts = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(~keeps))), 0);
    const uint64_t ends = counts * 0x0202020202020202;  // of the groups, in bytes from the lowest
    words -= ends >> 56;
#pragma GCC unroll 8
    for (std::size_t g = 8; g-- > 0;) {
        const uint8x16_t low = vreinterpretq_u8_u16(vld1q_u16(lanes.low + first + 8 * g));
        const uint8x16_t order = vld1q_u8(kEmitOrder.byte_at[keeps >> (8 * g) & 0xFF]);
        vst1q_u8(words + (ends >> (8 * g) & 0xFF) - 16, vqtbl1q_u8(low, order));
    }
    return words;
}

template <class Tables>
PACKHORSE_INLINE void finish_16_neon(EncodeLanesNeon& lanes, std::size_t lane,
                                     const Tables& tables) {
    uint16x8_t slots[2];
    tables.find_slots(lanes.position + lane, slots);
    for (int h = 0; h < 2; ++h, lane += 8) {
        const uint16x8_t quotient = vld1q_u16(lanes.quotient + lane);
        if constexpr (Tables::kExactQuotient) {
            vst1q_u16(lanes.low + lane, vsliq_n_u16(slots[h], quotient, kProbBits));
        } else {
            const uint16x8_t low = vaddq_u16(slots[h], vshlq_n_u16(quotient, kProbBits));
            const uint16x8_t carry = vcltq_u16(low, slots[h]);  // minus one
            vst1q_u16(lanes.low + lane, low);
            vst1q_u16(lanes.high + lane, vsubq_u16(vld1q_u16(lanes.high + lane), carry));
        }
    }
}

template <class Tables>
inline uint8_t* encode_rounds_neon(const uint8_t* codes, std::size_t n_rounds, const Tables& tables,
                                   uint32_t* states, uint8_t* words, Ahead& shared_ahead) {
    constexpr std::size_t kHalf = kMaxLanes / 2;
    EncodeLanesNeon lanes(states);
    Ahead ahead = shared_ahead;
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        lanes.take_codes(codes + kMaxLanes * r);
        const uint64_t upper = divide_piece_neon(lanes, kHalf, tables);
        const uint64_t lower = divide_piece_neon(lanes, 0, tables);
        words = emit_piece_neon(lanes, kHalf, upper, words);
        words = emit_piece_neon(lanes, 0, lower, words);
#pragma GCC unroll 8
        for (std::size_t lane = 0; lane < kMaxLanes; lane += 16)
            finish_16_neon(lanes, lane, tables);
    }
    lanes.store_to(states);
    shared_ahead = ahead;
    return words;
}

#endif

}  // namespace packhorse
