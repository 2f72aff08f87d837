// Decoding rounds of 128 lanes with NEON (docs/format.md, 6.4).
//
// A state is kept as two halves of 16 bits, `high` and `low`, so that a register holds eight lanes:
//     freq * (x >> 12) + rank = 16 * freq * high + (freq * (low >> 12) + rank),
// where the term in brackets is below 2^16. With at most 32 codes, the alias tables live in
// registers as planes of bytes, and 16 lanes are looked up at once. With more codes, entries are
// loaded one by one.
//
// A piece of 64 lanes has 64 bits that say which lanes need a word. A product of their counts gives
// the place of the words of each group of eight. The words of a piece are filled in after the next
// piece is computed, so that few steps wait for these bits.
#pragma once

#include "common/dispatch.hpp"
#include "planes/symbols_neon.hpp"
#include "rans/decoder.hpp"
#include "rans/word_order.hpp"

namespace packhorse {

#if PACKHORSE_ARM

constexpr std::size_t kPieceLanes = 64;

struct alignas(64) LaneHalvesNeon {
    uint16_t high[kMaxLanes];
    uint16_t low[kMaxLanes];

    explicit LaneHalvesNeon(const uint32_t* states) {
        for (std::size_t i = 0; i < kMaxLanes; ++i) {
            high[i] = static_cast<uint16_t>(states[i] >> 16);
            low[i] = static_cast<uint16_t>(states[i]);
        }
    }

    void store_to(uint32_t* states) const {
        for (std::size_t i = 0; i < kMaxLanes; ++i) states[i] = uint32_t{high[i]} << 16 | low[i];
    }
};

// What the tables say about 16 lanes: 16 * freq, a bias whose bits above 12 are undefined, and the
// units.
struct FoundNeon {
    uint16x8_t f16[2];
    uint16x8_t bias[2];
    uint8x16_t units;
};

// A table of the two parts of 32 buckets. Two looks-up in 32 bytes and a choice take less time than
// one in 64 on Neoverse.
struct PartTableNeon {
    uint8x16x2_t first, second;

    explicit PartTableNeon(const uint8_t* table)
        : first(vld1q_u8_x2(table)), second(vld1q_u8_x2(table + kNarrowBuckets)) {}

    PACKHORSE_INLINE uint8x16_t look_up(uint8x16_t bucket, uint8x16_t in_second) const {
        return vbslq_u8(in_second, vqtbl2q_u8(second, bucket), vqtbl2q_u8(first, bucket));
    }
};

// The alias tables of 32 buckets in registers.
struct NarrowTablesNeon {
    uint8x16x2_t threshold, f16_low, f16_high, value;
    PartTableNeon code, bias_low, bias_high;

    explicit NarrowTablesNeon(const RansDecoder& decoder)
        : threshold(vld1q_u8_x2(decoder.narrow.threshold)),
          f16_low(vld1q_u8_x2(decoder.narrow.f16_low)),
          f16_high(vld1q_u8_x2(decoder.narrow.f16_high)),
          value(vld1q_u8_x2(decoder.narrow.value)),
          code(decoder.narrow.code),
          bias_low(decoder.narrow.bias_low),
          bias_high(decoder.narrow.bias_high) {}

    PACKHORSE_INLINE FoundNeon look_up(const uint16_t*, uint16x8_t low0, uint16x8_t low1) const {
        constexpr int kSlotBits = 7;  // of 128 slots in a bucket
        const uint8x16_t bytes = vuzp1q_u8(vreinterpretq_u8_u16(low0), vreinterpretq_u8_u16(low1));
        const uint8x16_t offset = vandq_u8(bytes, vdupq_n_u8((1 << kSlotBits) - 1));
        const uint8x16_t upper = vshrn_high_n_u16(vshrn_n_u16(low0, kSlotBits), low1, kSlotBits);
        const uint8x16_t bucket = vandq_u8(upper, vdupq_n_u8(kNarrowBuckets - 1));
        const uint8x16_t second = vcgeq_u8(offset, vqtbl2q_u8(threshold, bucket));
        const uint8x16_t codes = code.look_up(bucket, second);
        const uint8x16_t freqs[2] = {vqtbl2q_u8(f16_low, codes), vqtbl2q_u8(f16_high, codes)};
        const uint8x16_t biases[2] = {bias_low.look_up(bucket, second),
                                      bias_high.look_up(bucket, second)};
        return {{vreinterpretq_u16_u8(vzip1q_u8(freqs[0], freqs[1])),
                 vreinterpretq_u16_u8(vzip2q_u8(freqs[0], freqs[1]))},
                {vreinterpretq_u16_u8(vzip1q_u8(biases[0], biases[1])),
                 vreinterpretq_u16_u8(vzip2q_u8(biases[0], biases[1]))},
                vqtbl2q_u8(value, codes)};
    }
};

// The table of 4096 entries.
struct LargeTableNeon {
    const uint32_t* entries;

    explicit LargeTableNeon(const RansDecoder& decoder) : entries(decoder.table()) {}

    PACKHORSE_INLINE uint32x4_t load_four(uint64_t lows) const {
        constexpr uint64_t kMask = kProbSum - 1;
        uint32x4_t four = vdupq_n_u32(entries[lows & kMask]);
        four = vld1q_lane_u32(entries + (lows >> 16 & kMask), four, 1);
        four = vld1q_lane_u32(entries + (lows >> 32 & kMask), four, 2);
        return vld1q_lane_u32(entries + (lows >> 48 & kMask), four, 3);
    }

    // `lows` are the same numbers in memory.
    PACKHORSE_INLINE FoundNeon look_up(const uint16_t* lows, uint16x8_t, uint16x8_t) const {
        FoundNeon found;
        uint8x16_t upper[2];
        for (int h = 0; h < 2; ++h) {
            const uint16x8_t a = vreinterpretq_u16_u32(load_four(load<uint64_t>(lows + 8 * h)));
            const uint16x8_t b = vreinterpretq_u16_u32(load_four(load<uint64_t>(lows + 8 * h + 4)));
            const uint16x8_t lower_halves = vuzp1q_u16(a, b), upper_halves = vuzp2q_u16(a, b);
            found.f16[h] = vshlq_n_u16(lower_halves, 4);
            found.bias[h] = vsliq_n_u16(vshrq_n_u16(lower_halves, kProbBits), upper_halves, 4);
            upper[h] = vreinterpretq_u8_u16(upper_halves);
        }
        found.units = vuzp2q_u8(upper[0], upper[1]);
        return found;
    }
};

// Computes the new states of eight lanes, before words are filled in. Those that need a word have
// zero in `high`.
PACKHORSE_INLINE void step_neon(uint16x8_t& high, uint16x8_t& low, uint16x8_t f16,
                                uint16x8_t bias) {
    const uint16x8_t rank = vandq_u16(vaddq_u16(low, bias), vdupq_n_u16(kProbSum - 1));
    const uint16x8_t rest = vmlaq_u16(rank, vshrq_n_u16(f16, 4), vshrq_n_u16(low, kProbBits));
    const uint32x4_t first =
        vaddw_u16(vmull_u16(vget_low_u16(f16), vget_low_u16(high)), vget_low_u16(rest));
    const uint32x4_t second = vaddw_high_u16(vmull_high_u16(f16, high), rest);
    low = vuzp1q_u16(vreinterpretq_u16_u32(first), vreinterpretq_u16_u32(second));
    high = vuzp2q_u16(vreinterpretq_u16_u32(first), vreinterpretq_u16_u32(second));
}

// Steps 16 lanes. Returns the bytes of those that need a word.
template <class Tables>
PACKHORSE_INLINE uint8x16_t step_16_neon(LaneHalvesNeon& lanes, std::size_t lane,
                                         const Tables& tables, uint8_t* by_lane) {
    uint16x8_t high[2] = {vld1q_u16(lanes.high + lane), vld1q_u16(lanes.high + lane + 8)};
    uint16x8_t low[2] = {vld1q_u16(lanes.low + lane), vld1q_u16(lanes.low + lane + 8)};
    const FoundNeon found = tables.look_up(lanes.low + lane, low[0], low[1]);
    vst1q_u8(by_lane + lane, found.units);
    uint8x16_t need[2];
    for (int h = 0; h < 2; ++h) {
        step_neon(high[h], low[h], found.f16[h], found.bias[h]);
        vst1q_u16(lanes.high + lane + 8 * h, high[h]);
        vst1q_u16(lanes.low + lane + 8 * h, low[h]);
        need[h] = vreinterpretq_u8_u16(vceqzq_u16(high[h]));
    }
    return vuzp1q_u8(need[0], need[1]);
}

// The lanes of a piece that need a word, as bits, and the bytes of the words of all groups of eight
// up to each group.
struct PieceNeeds {
    uint64_t lanes = 0;
    uint64_t nbytes = 0;
};

template <class Tables>
PACKHORSE_INLINE PieceNeeds step_piece_neon(LaneHalvesNeon& lanes, std::size_t first,
                                            const Tables& tables, uint8_t* by_lane) {
    uint8x16_t need[4];
#pragma GCC unroll 1  // or compilers mix the steps, and run out of registers
    for (std::size_t k = 0; k < 4; ++k)
        need[k] = step_16_neon(lanes, first + 16 * k, tables, by_lane);
    const uint64_t bits = bits_of_bytes_neon(need[0], need[1], need[2], need[3]);
    const uint64_t counts = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(bits))), 0);
    return {bits, counts * 0x0202020202020202};
}

PACKHORSE_INLINE void refill_piece_neon(LaneHalvesNeon& lanes, std::size_t first,
                                        const PieceNeeds& needs, const uint8_t*& words) {
    uint64_t before = needs.nbytes << 8;
#pragma GCC unroll 8
    for (std::size_t g = 0; g < 8; ++g) {
        uint16_t* const high_at = lanes.high + first + 8 * g;
        uint16_t* const low_at = lanes.low + first + 8 * g;
        const uint8x16_t order = vld1q_u8(kWordOrder.byte_of_place[needs.lanes >> (8 * g) & 0xFF]);
        const uint16x8_t fresh =
            vreinterpretq_u16_u8(vqtbl1q_u8(vld1q_u8(words + (before >> (8 * g) & 0xFF)), order));
        const uint16x8_t high = vld1q_u16(high_at), low = vld1q_u16(low_at);
        const uint16x8_t need = vceqzq_u16(high);
        vst1q_u16(high_at, vbslq_u16(need, low, high));
        vst1q_u16(low_at, vbslq_u16(need, fresh, low));
    }
    words += needs.nbytes >> 56;
}

// Moves units from the order of lanes to their positions: lane l is unit 4 (l mod 32) + l div 32.
PACKHORSE_INLINE void order_units_neon(const uint8_t* by_lane, uint8_t* dst) {
    for (int h = 0; h < 2; ++h, by_lane += 16, dst += 64) {
        uint8x16x4_t quarters;
        for (int q = 0; q < 4; ++q) quarters.val[q] = vld1q_u8(by_lane + 32 * q);
        vst4q_u8(dst, quarters);
    }
}

// The caller knows that there are 128 words for each round, and one register of words more.
template <class Tables>
inline void decode_rounds_neon(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst,
                               Ahead& shared_ahead) {
    const Tables tables(decoder);
    LaneHalvesNeon lanes(decoder.states);
    Ahead ahead = shared_ahead;
    const uint8_t* words = decoder.words;
    PieceNeeds upper;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        ahead.step();
        alignas(16) uint8_t by_lane[kMaxLanes];
        const PieceNeeds lower = step_piece_neon(lanes, 0, tables, by_lane);
        refill_piece_neon(lanes, kPieceLanes, upper, words);
        upper = step_piece_neon(lanes, kPieceLanes, tables, by_lane);
        refill_piece_neon(lanes, 0, lower, words);
        order_units_neon(by_lane, dst);
    }
    refill_piece_neon(lanes, kPieceLanes, upper, words);
    lanes.store_to(decoder.states);
    shared_ahead = ahead;
    decoder.words = words;
}

inline void decode_rounds_neon_any(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst,
                                   Ahead& ahead) {
    decoder.has_table ? decode_rounds_neon<LargeTableNeon>(decoder, n_rounds, dst, ahead)
                      : decode_rounds_neon<NarrowTablesNeon>(decoder, n_rounds, dst, ahead);
}

#endif

}  // namespace packhorse
