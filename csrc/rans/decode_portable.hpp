// Decoding rounds of 128 lanes with the baseline's instructions (docs/format.md, 6.4).
//
// Two things make a plain loop slow: no predictor can guess a branch on "needs a word", and without
// the branch every lane waits for the word pointer. So a step first computes the new states of a
// group of lanes, and the words that they need are filled in later.
//
// On x86-64 the baseline has SSE2. A state is kept as two halves of 16 bits, `high` and `low`, so
// that a register holds eight lanes and the products are 16-bit ones: with f16 = 16 * freq,
//     freq * (x >> 12) + rank = f16 * high + (f16 * (low & 0xF000) >> 16) + rank,
// where the last two terms are below 2^16, so their sum with the low half of the product carries at
// most once. On other machines, a plain loop lists the lanes that need a word.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

#if PACKHORSE_X86

// For each of the 256 sets of lanes that need a word: where to load the words of lanes 0 and 1, 2
// and 3, and so on, in bytes, so that each lane that needs a word gets its own. If only the second
// lane of a pair needs a word, its pair is loaded one word earlier.
struct alignas(64) PairOffsets {
    int8_t offset[256][4];
    uint8_t nbytes[256];  // of all words taken
};

constexpr PairOffsets make_pair_offsets() {
    PairOffsets pairs{};
    for (uint32_t mask = 0; mask < 256; ++mask) {
        int taken = 0;
        for (uint32_t pair = 0; pair < 4; ++pair) {
            const int first = mask >> (2 * pair) & 1;
            const int second = mask >> (2 * pair + 1) & 1;
            pairs.offset[mask][pair] = static_cast<int8_t>(2 * (taken - 1 + first));
            taken += first + second;
        }
        pairs.nbytes[mask] = static_cast<uint8_t>(2 * taken);
    }
    return pairs;
}

inline constexpr PairOffsets kPairOffsets = make_pair_offsets();

PACKHORSE_INLINE __m128i load_sse2(const uint16_t* src) {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(src));
}

PACKHORSE_INLINE void store_sse2(uint16_t* dst, __m128i value) {
    _mm_store_si128(reinterpret_cast<__m128i*>(dst), value);
}

// The states of 128 lanes, and the slots that the next look-ups load one by one. The words of a
// group are filled in while the next group is computed. A group of zeros in front of the first one
// serves as its predecessor.
constexpr std::size_t kGroupLanes = 16;

struct alignas(64) LaneHalves {
    uint16_t high[kGroupLanes + kMaxLanes];
    uint16_t low[kGroupLanes + kMaxLanes];
    uint16_t slot[kGroupLanes + kMaxLanes];

    explicit LaneHalves(const uint32_t* states) {
        for (std::size_t i = 0; i < kGroupLanes; ++i) high[i] = low[i] = slot[i] = 0;
        for (std::size_t i = 0; i < kMaxLanes; ++i) {
            high[kGroupLanes + i] = static_cast<uint16_t>(states[i] >> 16);
            low[kGroupLanes + i] = static_cast<uint16_t>(states[i]);
            slot[kGroupLanes + i] = static_cast<uint16_t>(states[i] & (kProbSum - 1));
        }
        keep_in_memory(*this);
    }

    void store_to(uint32_t* states) const {
        for (std::size_t i = 0; i < kMaxLanes; ++i)
            states[i] = uint32_t{high[kGroupLanes + i]} << 16 | low[kGroupLanes + i];
    }
};

// Computes the new states of eight lanes, before words are filled in. `need` is all ones where high
// is zero.
struct Stepped {
    __m128i high, low, need;
};

// Loads the entries of eight slots: the lower halves (freq, low bits of bias) go to one register,
// the upper halves (rest of bias, value) to another.
PACKHORSE_INLINE void look_up_sse2(const uint32_t* table, const uint16_t* slot, __m128i& lower,
                                   __m128i& upper) {
    __m128i four[2];
    for (int h = 0; h < 2; ++h) {
        __m128i entry[4];
        for (int i = 0; i < 4; ++i)
            entry[i] = _mm_cvtsi32_si128(static_cast<int>(table[slot[4 * h + i]]));
        four[h] = _mm_unpacklo_epi32(_mm_unpacklo_epi16(entry[0], entry[1]),
                                     _mm_unpacklo_epi16(entry[2], entry[3]));
    }
    lower = _mm_unpacklo_epi64(four[0], four[1]);
    upper = _mm_unpackhi_epi64(four[0], four[1]);
}

// `lane` is counted from the start of the group of zeros. Returns the units as eight 16-bit
// elements.
PACKHORSE_INLINE Stepped step_sse2(const LaneHalves& lanes, std::size_t lane, const uint32_t* table,
                                   __m128i& units) {
    __m128i lower, upper;
    look_up_sse2(table, lanes.slot + lane, lower, upper);
    units = _mm_srli_epi16(upper, 8);
    const __m128i low = load_sse2(lanes.low + lane);
    const __m128i high = load_sse2(lanes.high + lane);
    const __m128i f16 = _mm_slli_epi16(lower, 4);
    const __m128i bias =
        _mm_or_si128(_mm_srli_epi16(lower, kProbBits), _mm_srli_epi16(_mm_slli_epi16(upper, 8), 4));
    // The carry is found by comparing sums as signed numbers, so their top bit must be inverted. In
    // `rank` it is inverted already.
    const __m128i top_bit = _mm_set1_epi16(static_cast<short>(0x8000));
    const __m128i rank = _mm_or_si128(
        _mm_and_si128(_mm_add_epi16(low, bias), _mm_set1_epi16(kProbSum - 1)), top_bit);
    const __m128i middle = _mm_and_si128(low, _mm_set1_epi16(static_cast<short>(0xF000)));
    const __m128i rest = _mm_add_epi16(_mm_mulhi_epu16(middle, f16), rank);
    const __m128i sum = _mm_add_epi16(_mm_mullo_epi16(high, f16), rest);
    Stepped next;
    next.high = _mm_sub_epi16(_mm_mulhi_epu16(f16, high), _mm_cmpgt_epi16(rest, sum));
    next.low = _mm_xor_si128(sum, top_bit);
    next.need = _mm_cmpeq_epi16(next.high, _mm_setzero_si128());
    return next;
}

// Fills in words for the set `mask` of eight lanes, and stores them.
PACKHORSE_INLINE void refill_sse2(const Stepped& next, uint32_t mask, const uint8_t*& words,
                                  LaneHalves& lanes, std::size_t lane) {
    __m128i pair[4];
    for (int i = 0; i < 4; ++i)
        pair[i] = _mm_cvtsi32_si128(load<int>(words + kPairOffsets.offset[mask][i]));
    const __m128i fresh = _mm_unpacklo_epi64(_mm_unpacklo_epi32(pair[0], pair[1]),
                                             _mm_unpacklo_epi32(pair[2], pair[3]));
    words += kPairOffsets.nbytes[mask];
    const __m128i high = _mm_or_si128(next.high, _mm_and_si128(next.need, next.low));
    const __m128i low =
        _mm_or_si128(_mm_and_si128(fresh, next.need), _mm_andnot_si128(next.need, next.low));
    store_sse2(lanes.high + lane, high);
    store_sse2(lanes.low + lane, low);
    store_sse2(lanes.slot + lane, _mm_and_si128(low, _mm_set1_epi16(kProbSum - 1)));
}

// Moves units from the order of lanes to their positions: lane l is unit 4 (l mod 32) + l div 32.
PACKHORSE_INLINE void order_units_sse2(const uint16_t* by_lane, uint8_t* dst) {
    for (int h = 0; h < 2; ++h, by_lane += 8, dst += 64) {
        const __m128i a = load_sse2(by_lane), b = load_sse2(by_lane + 16);
        const __m128i c = load_sse2(by_lane + 32), d = load_sse2(by_lane + 48);
        const __m128i ab[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
        const __m128i cd[2] = {_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d)};
        auto* at = reinterpret_cast<__m128i*>(dst);
        for (int i = 0; i < 2; ++i) {
            _mm_storeu_si128(at + 2 * i, _mm_unpacklo_epi16(ab[i], cd[i]));
            _mm_storeu_si128(at + 2 * i + 1, _mm_unpackhi_epi16(ab[i], cd[i]));
        }
    }
}

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round, and one
// word before them.
inline void decode_rounds_wide_portable(uint32_t* states, const uint32_t* table,
                                        std::size_t n_rounds, const uint8_t*& words_at,
                                        uint8_t* dst, Ahead& ahead) {
    LaneHalves lanes(states);
    const uint8_t* words = words_at;
    const __m128i zero = _mm_setzero_si128();
    Stepped before[2] = {{zero, zero, zero}, {zero, zero, zero}};
    uint32_t mask = 0;
    std::size_t lane_before = 0;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        ahead.step();
        alignas(16) uint16_t by_lane[kMaxLanes / 2];
        for (std::size_t g = 0; g < kMaxLanes / kGroupLanes; ++g) {
            const std::size_t lane = kGroupLanes * (g + 1);
            __m128i units[2];
            const Stepped first = step_sse2(lanes, lane, table, units[0]);
            refill_sse2(before[0], mask & 0xFF, words, lanes, lane_before);
            const Stepped second = step_sse2(lanes, lane + 8, table, units[1]);
            refill_sse2(before[1], mask >> 8, words, lanes, lane_before + 8);
            mask =
                static_cast<uint32_t>(_mm_movemask_epi8(_mm_packs_epi16(first.need, second.need)));
            store_sse2(by_lane + 8 * g, _mm_packus_epi16(units[0], units[1]));
            before[0] = first;
            before[1] = second;
            lane_before = lane;
            keep_in_memory(lanes);
        }
        order_units_sse2(by_lane, dst);
    }
    refill_sse2(before[0], mask & 0xFF, words, lanes, lane_before);
    refill_sse2(before[1], mask >> 8, words, lanes, lane_before + 8);
    lanes.store_to(states);
    words_at = words;
}

#else

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round.
inline void decode_rounds_wide_portable(uint32_t* states, const uint32_t* table,
                                        std::size_t n_rounds, const uint8_t*& words_at,
                                        uint8_t* dst, Ahead& ahead) {
    const uint8_t* words = words_at;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        ahead.step();
        uint8_t needing[kMaxLanes + 1];
        std::size_t n = 0;
        for (uint32_t lane = 0; lane < kMaxLanes; ++lane) {
            const uint32_t state = states[lane];
            const uint32_t entry = table[state & (kProbSum - 1)];
            const uint32_t next = (entry & (kProbSum - 1)) * (state >> kProbBits) +
                                  ((state + (entry >> kProbBits)) & (kProbSum - 1));
            states[lane] = next;
            needing[n] = static_cast<uint8_t>(lane);
            n += next < kStateLowerBound;
            dst[4 * (lane % 32) + lane / 32] = static_cast<uint8_t>(entry >> 24);
        }
        for (std::size_t i = 0; i < n; ++i) {
            uint32_t& state = states[needing[i]];
            state = state << 16 | load<uint16_t>(words + 2 * i);
        }
        words += 2 * n;
    }
    words_at = words;
}

#endif

}  // namespace packhorse
