// Encoding rounds of 128 lanes with the baseline's instructions (docs/format.md, 6.4), which is
// SSE2 on x86-64, and the tables that the AVX2 path shares.
// Vectors of integers cannot be divided. So the quotient of a state by its frequency is estimated
// in floating point. The estimate is either exact or too small by one, and needs no correction: the
// remainder is below 2 * freq, and a table maps it to the slot, plus 4096 if the quotient was too
// small.
#pragma once

#include <array>
#include <bit>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "rans/decode_portable.hpp"
#include "rans/model.hpp"

namespace packhorse {

constexpr std::size_t kSegmentUnits = 4096;  // codes of a segment stay in L1

struct alignas(64) RansVectorTables {
    // By code: freq (bits 0-15), 2 * start (16-31), and the bits of a float, about 2 / freq, or for
    // NEON an integer, about 2^32 / freq.
    uint64_t divisors[256];
    // By 2 * start + remainder: the lower part of the next state. Loads take up to eight bytes, and
    // may begin four bytes early, in the divisors. Behind the slots is a zero.
    uint16_t slots[2 * kProbSum + 4];
};

constexpr uint32_t kZeroSlotAt = 2 * kProbSum;

// A float that is exactly 2 / freq for freq 1 and 2, else at most 2 / freq * (1 - 2^-22).
//
// For a state x < freq * 2^20, let y be x / 2 rounded down. float(y) and the product are each off
// by less than 2^-23 in proportion, however the processor rounds, so the estimate float(y) * r is
// never above x / freq. It is below x / freq by at most 5 * 2^-23 of x / freq < 2^20, plus 1 / freq
// for the bit that halving drops. From freq 3 on, that is less than 1 in total. For freq 1 and 2,
// floats are exact, because y < 2^20.
inline uint32_t half_reciprocal_below(uint32_t freq) {
    if (freq <= 2) return std::bit_cast<uint32_t>(2.0f / static_cast<float>(freq));
    const double limit = 2.0 / freq * (1.0 - 0x1p-22);
    const auto nearest = static_cast<float>(limit);
    const auto bits = std::bit_cast<uint32_t>(nearest);
    return static_cast<double>(nearest) <= limit ? bits : bits - 1;
}

// The largest m with freq * m < 2^32, and at least 2^32 - freq. The upper half of x * m, for any
// state x, is x / freq rounded down, or less by one: it lacks at most x / 2^32.
inline uint32_t integer_reciprocal_below(uint32_t freq) {
    return ~uint32_t{0} / freq;
}

// `slots` maps start + rank to the slot.
inline void fill_vector_tables(const RansModel& model, const uint16_t* slots,
                               RansVectorTables& tables) {
    uint32_t start = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t freq = model.freqs[c];
        const uint32_t reciprocal =
            PACKHORSE_ARM ? integer_reciprocal_below(freq) : half_reciprocal_below(freq);
        tables.divisors[c] = freq | start << 17 | static_cast<uint64_t>(reciprocal) << 32;
        uint16_t* const dst = tables.slots + 2 * start;
        std::memcpy(dst, slots + start, freq * sizeof *slots);
        for (uint32_t rank = 0; rank < freq; ++rank)
            dst[freq + rank] = static_cast<uint16_t>(kProbSum + dst[rank]);
        start += freq;
    }
    tables.slots[kZeroSlotAt] = 0;
}

#if PACKHORSE_X86

// How the words of four lanes are written below a pointer, those of the higher lanes first. Words
// are written in pairs. If only the second word of a pair is due, the first one is junk; if only
// the first is due, it is copied to the place of the second. Later words overwrite junk.
struct alignas(64) WordPairs {
    uint16_t in_place[8];       // bits of the four words that stay where they are,
    uint16_t from_first[8];     // and of those that come from the first of the pair
    std::ptrdiff_t lower_pair;  // where the lower pair goes, in bytes from the pointer
    std::ptrdiff_t nbytes;      // of the words written
};

// Indexed by the set of lanes that keep their words.
constexpr std::array<WordPairs, 16> make_word_pairs() {
    std::array<WordPairs, 16> by_set{};
    for (uint32_t keeps = 0; keeps < 16; ++keeps) {
        WordPairs& pairs = by_set[keeps];
        pairs.lower_pair = -4;
        for (uint32_t lane = 0; lane < 4; ++lane) {
            const bool due = (keeps >> lane & 1) == 0;
            const bool stays = lane % 2 == 0 || due;
            pairs.in_place[lane] = stays ? 0xFFFF : 0;
            pairs.from_first[lane] = stays ? 0 : 0xFFFF;
            pairs.nbytes += due ? 2 : 0;
            pairs.lower_pair -= due && lane >= 2 ? 2 : 0;
        }
    }
    return by_set;
}

inline constexpr std::array<WordPairs, 16> kWordPairs = make_word_pairs();

// The states of four lanes, and their positions in the slot table while a lane is between two
// states.
struct alignas(32) LanesSse2 {
    uint32_t state[4];
    uint32_t position[4];
};

// The divisors of four lanes: freq, 2 * start, and the reciprocals.
struct DivisorsSse2 {
    __m128i freq_start;
    __m128 reciprocal;
};

PACKHORSE_INLINE __m128 load_divisor_pair(const uint64_t* divisors, uint8_t a, uint8_t b) {
    const __m128d low = _mm_load_sd(reinterpret_cast<const double*>(divisors + a));
    return _mm_castpd_ps(_mm_loadh_pd(low, reinterpret_cast<const double*>(divisors + b)));
}

// The codes of four neighbouring lanes are four bytes apart.
PACKHORSE_INLINE DivisorsSse2 load_divisors_sse2(const uint64_t* divisors, const uint8_t* codes) {
    const __m128 low = load_divisor_pair(divisors, codes[0], codes[4]);
    const __m128 high = load_divisor_pair(divisors, codes[8], codes[12]);
    return {_mm_castps_si128(_mm_shuffle_ps(low, high, 0x88)), _mm_shuffle_ps(low, high, 0xDD)};
}

// Writes the words of the lanes that are not in the set `keeps`.
PACKHORSE_INLINE uint8_t* emit_sse2(__m128i state, std::size_t keeps, uint8_t* words) {
    const WordPairs& order = kWordPairs[keeps];
    const auto bits = [](const uint16_t* mask) {
        return _mm_load_si128(reinterpret_cast<const __m128i*>(mask));
    };
    const __m128i low_halves = _mm_shufflehi_epi16(_mm_shufflelo_epi16(state, 0x88), 0x88);
    const __m128i four = _mm_shuffle_epi32(low_halves, 0x88);
    const __m128i pairs =
        _mm_or_si128(_mm_and_si128(four, bits(order.in_place)),
                     _mm_and_si128(_mm_slli_epi32(four, 16), bits(order.from_first)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(words - 8), pairs);
    store(words + order.lower_pair, _mm_cvtsi128_si32(pairs));
    return words - order.nbytes;
}

// Encodes four lanes up to the position in the slot table. Returns the upper part of the new
// states.
PACKHORSE_INLINE __m128i divide_sse2(LanesSse2& lanes, const DivisorsSse2& by, uint8_t*& words) {
    const __m128i state = _mm_load_si128(reinterpret_cast<const __m128i*>(lanes.state));
    // A state below freq * 2^20 keeps its words.
    const __m128i keeps =
        _mm_cmpgt_epi32(_mm_slli_epi32(by.freq_start, 16), _mm_srli_epi32(state, 4));
    words =
        emit_sse2(state, static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(keeps))), words);
    const __m128i shorter = _mm_srli_epi32(state, 16);
    const __m128i dividend =
        _mm_xor_si128(shorter, _mm_and_si128(keeps, _mm_xor_si128(state, shorter)));
    const __m128 halved = _mm_cvtepi32_ps(_mm_srli_epi32(dividend, 1));
    const __m128i quotient = _mm_cvttps_epi32(_mm_mul_ps(halved, by.reciprocal));
    // The remainder is below 2 * freq, so its low half is enough.
    const __m128i remainder = _mm_sub_epi16(dividend, _mm_mullo_epi16(quotient, by.freq_start));
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes.position),
                    _mm_add_epi16(remainder, _mm_srli_epi32(by.freq_start, 16)));
    keep_in_memory(lanes);
    return _mm_slli_epi32(quotient, kProbBits);
}

PACKHORSE_INLINE void finish_sse2(LanesSse2& lanes, const uint16_t* slots, __m128i upper) {
    __m128i slot[4];
    for (std::size_t i = 0; i < 4; ++i)
        slot[i] = _mm_cvtsi32_si128(load<int>(slots + static_cast<uint16_t>(lanes.position[i])));
    const __m128i four = _mm_unpacklo_epi64(_mm_unpacklo_epi32(slot[0], slot[1]),
                                            _mm_unpacklo_epi32(slot[2], slot[3]));
    _mm_store_si128(reinterpret_cast<__m128i*>(lanes.state),
                    _mm_add_epi32(upper, _mm_and_si128(four, _mm_set1_epi32(0xFFFF))));
}

// Encodes rounds of 128 lanes. The divisors of a group are loaded one group ahead, and its slots
// two groups behind: without that, the chain of these steps is longer than a processor can look
// ahead.
inline uint8_t* encode_rounds_wide_portable(const uint8_t* codes, std::size_t n_rounds,
                                            const RansVectorTables& tables, uint32_t* states,
                                            uint8_t* words, Ahead& ahead) {
    if (n_rounds == 0) return words;
    constexpr std::size_t kGroups = kMaxLanes / 4;
    LanesSse2 groups[kGroups + 2] = {};  // two more, so that the first have predecessors to finish
    for (std::size_t g = 0; g < kGroups; ++g)
        std::memcpy(groups[g].state, states + 4 * g, sizeof groups[g].state);
    DivisorsSse2 by =
        load_divisors_sse2(tables.divisors, codes + kMaxLanes * (n_rounds - 1) + 3 + 112);
    __m128i waiting[2] = {_mm_setzero_si128(), _mm_setzero_si128()};
    LanesSse2* before = groups + kGroups;
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        for (std::size_t quarter = 4; quarter-- > 0;) {
            LanesSse2* const here = groups + 8 * quarter;
            const uint8_t* at = codes + kMaxLanes * r + quarter;
            const uint8_t* next = quarter > 0 ? at - 1 : at + 3 - (r > 0 ? kMaxLanes : 0);
#pragma GCC unroll 8
            for (std::size_t k = 8; k-- > 0;) {
                const __m128i upper = divide_sse2(here[k], by, words);
                by = load_divisors_sse2(tables.divisors, k > 0 ? at + 16 * (k - 1) : next + 112);
                finish_sse2(k < 6 ? here[k + 2] : before[k - 6], tables.slots, waiting[k % 2]);
                waiting[k % 2] = upper;
            }
            before = here;
        }
    }
    for (std::size_t k = 2; k-- > 0;) finish_sse2(groups[k], tables.slots, waiting[k]);
    for (std::size_t g = 0; g < kGroups; ++g)
        std::memcpy(states + 4 * g, groups[g].state, sizeof groups[g].state);
    return words;
}

#endif

}  // namespace packhorse
