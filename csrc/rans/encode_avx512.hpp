// Encoding rounds of 128 lanes with AVX-512 and at most 64 codes (docs/format.md, 6.4); a register
// holds 16 lanes. With more codes, the divisors would have to be loaded from memory, which AVX2
// does just as fast.
// If there is a SpreadMap, the first loop looks everything up in registers, and needs two thirds of
// the instructions of the second. The second loop takes the same steps as rans/encode_portable.hpp,
// with its table of slots, and has only the divisors in registers.
#pragma once

#include "common/dispatch.hpp"
#include "rans/encode_avx2.hpp"
#include "rans/encode_portable.hpp"
#include "rans/spread.hpp"
#include "rans/tables_avx512.hpp"

namespace packhorse {

#if PACKHORSE_X86

// 32 numbers of 32 bits from their lower and upper halves.
PACKHORSE_AVX512 inline Table32Avx512 join_halves_avx512(const uint16_t* lower,
                                                         const uint16_t* upper, unsigned shift) {
    uint32_t entries[kNarrowBuckets];
    for (uint32_t c = 0; c < kNarrowBuckets; ++c)
        entries[c] = lower[c] | static_cast<uint32_t>(upper[c]) << shift;
    return Table32Avx512(entries);
}

// A narrow SpreadMap without a lone edge, in registers.
struct SpreadRegistersAvx512 {
    Table32Avx512 freq_start;  // freq (bits 0-11) and start (12-24)
    Table32Avx512 reciprocal;  // floats
    Table64Avx512 entry, delta;

    PACKHORSE_AVX512 explicit SpreadRegistersAvx512(const SpreadMap& map)
        : freq_start(join_halves_avx512(map.freq, map.start, kProbBits)),
          reciprocal(join_halves_avx512(map.reciprocal_lower, map.reciprocal_upper, 16)),
          entry(map.entry),
          delta(map.delta) {}

    // Slots of 32 positions of 16 bits.
    PACKHORSE_AVX512 PACKHORSE_INLINE __m512i slots_of(__m512i positions) const {
        const __m512i found = entry.look_up(_mm512_srli_epi16(positions, kNarrowBucketLog));
        const __m512i run = _mm512_srli_epi16(_mm512_add_epi16(positions, found), 8);
        return _mm512_add_epi16(positions, delta.look_up(run));
    }
};

// Writes the words of the lanes in `emit`, in lane order, below `words`.
PACKHORSE_AVX512 PACKHORSE_INLINE uint8_t* emit_avx512(__m512i state, __mmask16 emit,
                                                       uint8_t* words) {
    const auto n_words = static_cast<uint32_t>(__builtin_popcount(emit));
    words -= 2 * static_cast<std::size_t>(n_words);
    _mm512_mask_cvtepi32_storeu_epi16(words, static_cast<__mmask16>(_bzhi_u32(~0u, n_words)),
                                      _mm512_maskz_compress_epi32(emit, state));
    return words;
}

struct Divided {
    __m512i quotient, position;
};

// Encodes one unit in each of 16 lanes, up to the position in the map. `codes` has one code in each
// 32-bit element.
PACKHORSE_AVX512 PACKHORSE_INLINE Divided divide_spread_avx512(
    __m512i state, __m512i codes, const SpreadRegistersAvx512& registers, uint8_t*& words) {
    constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    const __m512i freq_start = registers.freq_start.look_up(codes);
    const __m512 reciprocal = _mm512_castsi512_ps(registers.reciprocal.look_up(codes));
    const __m512i freq = _mm512_and_si512(freq_start, _mm512_set1_epi32(kProbSum - 1));
    const __m512i start = _mm512_srli_epi32(freq_start, kProbBits);
    // A state of freq * 2^20 or more emits a word.
    const __mmask16 emit = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(state, 20), freq);
    words = emit_avx512(state, emit, words);
    state = _mm512_mask_srli_epi32(state, emit, state, 16);
    // The quotient is below 2^20, and three roundings towards zero take less than one off it.
    const __m512 estimate =
        _mm512_mul_round_ps(_mm512_cvt_roundepu32_ps(state, kTowardZero), reciprocal, kTowardZero);
    const __m512i quotient = _mm512_cvttps_epi32(estimate);
    const __m512i remainder = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, freq));
    const __mmask16 low = _mm512_cmpge_epu32_mask(remainder, freq);
    return {_mm512_mask_add_epi32(quotient, low, quotient, _mm512_set1_epi32(1)),
            _mm512_add_epi32(start, _mm512_mask_sub_epi32(remainder, low, remainder, freq))};
}

// Encodes 32 lanes. Positions and slots have 16 bits, so the slots of both halves are looked up at
// once.
PACKHORSE_AVX512 PACKHORSE_INLINE void encode_pair_avx512(__m512i* states, const __m512i* codes,
                                                          const SpreadRegistersAvx512& registers,
                                                          uint8_t*& words) {
    const Divided upper = divide_spread_avx512(states[1], codes[1], registers, words);
    const Divided lower = divide_spread_avx512(states[0], codes[0], registers, words);
    const __m512i slots =
        registers.slots_of(_mm512_or_si512(lower.position, _mm512_slli_epi32(upper.position, 16)));
    states[0] = _mm512_or_si512(_mm512_slli_epi32(lower.quotient, kProbBits),
                                _mm512_and_si512(slots, _mm512_set1_epi32(0xFFFF)));
    states[1] =
        _mm512_or_si512(_mm512_slli_epi32(upper.quotient, kProbBits), _mm512_srli_epi32(slots, 16));
}

// Encodes rounds of 128 lanes, with eight registers of states and two of codes (a 32-bit element
// has four neighbouring units).
PACKHORSE_AVX512 inline uint8_t* encode_rounds_spread_avx512(const uint8_t* codes,
                                                             std::size_t n_rounds,
                                                             const SpreadMap& map, uint32_t* states,
                                                             uint8_t* words, Ahead& shared_ahead) {
    const SpreadRegistersAvx512 registers(map);
    Ahead ahead = shared_ahead;
    const __m512i byte = _mm512_set1_epi32(0xFF);
    __m512i lanes[8];
    for (int k = 0; k < 8; ++k) lanes[k] = _mm512_loadu_si512(states + 16 * k);
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        const __m512i units[2] = {_mm512_loadu_si512(codes + kMaxLanes * r),
                                  _mm512_loadu_si512(codes + kMaxLanes * r + 64)};
#pragma GCC unroll 4
        for (int k = 6; k >= 0; k -= 2) {
            const unsigned shift = 4 * static_cast<unsigned>(k);  // a byte for each pair
            const __m512i pair[2] = {_mm512_and_si512(_mm512_srli_epi32(units[0], shift), byte),
                                     _mm512_and_si512(_mm512_srli_epi32(units[1], shift), byte)};
            encode_pair_avx512(lanes + k, pair, registers, words);
        }
    }
    for (int k = 0; k < 8; ++k) _mm512_storeu_si512(states + 16 * k, lanes[k]);
    shared_ahead = ahead;
    return words;
}

// As LanesSse2, for 16 lanes.
struct alignas(64) EncodeLanesAvx512 {
    uint32_t state[16];
    uint32_t position[16];
};

struct DivisorsAvx512 {
    __m512i freq_start;
    __m512 reciprocal;  // of freq itself: AVX-512 converts unsigned numbers, so nothing is halved
};

// The divisors of 16 codes from `first` on.
PACKHORSE_AVX512 PACKHORSE_INLINE DivisorsAvx512 load_divisors_avx512(const uint64_t* first) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512i low = _mm512_load_si512(first);
    const __m512i high = _mm512_load_si512(first + 8);
    const __m512 halved = _mm512_castsi512_ps(_mm512_permutex2var_epi32(low, odd, high));
    return {_mm512_permutex2var_epi32(low, even, high),
            _mm512_mul_ps(halved, _mm512_set1_ps(0.5f))};
}

// For 32 or 64 codes. The members have names, because an array would be kept in memory.
template <bool kWide>
struct DivisorTableAvx512 {
    DivisorsAvx512 a, b, c, d;

    PACKHORSE_AVX512 explicit DivisorTableAvx512(const uint64_t* divisors)
        : a(load_divisors_avx512(divisors)),
          b(load_divisors_avx512(divisors + 16)),
          c(load_divisors_avx512(divisors + (kWide ? 32 : 0))),
          d(load_divisors_avx512(divisors + (kWide ? 48 : 0))) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE DivisorsAvx512 look_up(__m512i code) const {
        DivisorsAvx512 found = {_mm512_permutex2var_epi32(a.freq_start, code, b.freq_start),
                                _mm512_permutex2var_ps(a.reciprocal, code, b.reciprocal)};
        if constexpr (kWide) {
            const __mmask16 upper = _mm512_test_epi32_mask(code, _mm512_set1_epi32(32));
            found.freq_start = _mm512_mask_blend_epi32(
                upper, found.freq_start,
                _mm512_permutex2var_epi32(c.freq_start, code, d.freq_start));
            found.reciprocal = _mm512_mask_blend_ps(
                upper, found.reciprocal, _mm512_permutex2var_ps(c.reciprocal, code, d.reciprocal));
        }
        return found;
    }
};

// Encodes 16 lanes up to the position in the slot table. Returns the upper part of the new states.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i divide_avx512(EncodeLanesAvx512& lanes,
                                                        const DivisorsAvx512& by, uint8_t*& words) {
    const __m512i state = _mm512_load_si512(lanes.state);
    // A state of freq * 2^20 or more emits a word.
    const __mmask16 emit =
        _mm512_cmple_epu32_mask(_mm512_slli_epi32(by.freq_start, 16), _mm512_srli_epi32(state, 4));
    words = emit_avx512(state, emit, words);
    const __m512i dividend = _mm512_mask_srli_epi32(state, emit, state, 16);
    const __m512i quotient =
        _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_cvtepu32_ps(dividend), by.reciprocal));
    // The remainder is below 2 * freq, so its low half is enough.
    const __m512i remainder =
        _mm512_sub_epi16(dividend, _mm512_mullo_epi16(quotient, by.freq_start));
    _mm512_store_si512(lanes.position,
                       _mm512_add_epi16(remainder, _mm512_srli_epi32(by.freq_start, 16)));
    keep_in_memory(lanes);
    return _mm512_slli_epi32(quotient, kProbBits);
}

// The slots of two lanes, joined without a vector unit.
PACKHORSE_AVX512 PACKHORSE_INLINE long long load_two_slots(const uint16_t* slots,
                                                           const uint32_t* position) {
    uint64_t both = uint64_t{slots[static_cast<uint16_t>(position[1])]} << 32 |
                    slots[static_cast<uint16_t>(position[0])];
    keep_in_register(both);
    return static_cast<long long>(both);
}

PACKHORSE_AVX512 PACKHORSE_INLINE __m128i load_four_slots(const uint16_t* slots,
                                                          const uint32_t* position) {
    return _mm_insert_epi64(_mm_cvtsi64_si128(load_two_slots(slots, position)),
                            load_two_slots(slots, position + 2), 1);
}

PACKHORSE_AVX512 PACKHORSE_INLINE void finish_avx512(EncodeLanesAvx512& lanes,
                                                     const uint16_t* slots, __m512i upper) {
    const __m256i low = _mm256_setr_m128i(load_four_slots(slots, lanes.position),
                                          load_four_slots(slots, lanes.position + 4));
    const __m256i high = _mm256_setr_m128i(load_four_slots(slots, lanes.position + 8),
                                           load_four_slots(slots, lanes.position + 12));
    const __m512i slot = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    _mm512_store_si512(lanes.state,
                       _mm512_add_epi32(upper, _mm512_and_si512(slot, _mm512_set1_epi32(0xFFFF))));
}

// Encodes rounds of 128 lanes. A 32-bit element of codes has one code of each quarter of the lanes.
// The divisors of a group are looked up one group ahead, and its slots two groups behind.
template <bool kWide>
PACKHORSE_AVX512 inline uint8_t* encode_rounds_wide_avx512(const uint8_t* codes,
                                                           std::size_t n_rounds,
                                                           const RansVectorTables& tables,
                                                           uint32_t* states, uint8_t* words,
                                                           Ahead& shared_ahead) {
    if (n_rounds == 0) return words;
    const DivisorTableAvx512<kWide> divisors(tables.divisors);
    Ahead ahead = shared_ahead;
    EncodeLanesAvx512 groups[8 + 2] =
        {};  // two more, so that the first have predecessors to finish
    for (int g = 0; g < 8; ++g)
        _mm512_store_si512(groups[g].state, _mm512_loadu_si512(states + 16 * g));
    const __m512i byte = _mm512_set1_epi32(0xFF);
    const uint8_t* at = codes + kMaxLanes * (n_rounds - 1);
    __m512i units[2] = {_mm512_loadu_si512(at), _mm512_loadu_si512(at + 64)};
    DivisorsAvx512 by = divisors.look_up(_mm512_srli_epi32(units[1], 24));
    __m512i waiting[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    EncodeLanesAvx512* before = groups + 8;
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
#pragma GCC unroll 8
        for (int k = 7; k >= 0; --k) {
            const __m512i upper = divide_avx512(groups[k], by, words);
            if (k == 0) {  // the previous round follows; if there is none, this one is loaded again
                at -= r > 0 ? kMaxLanes : 0;
                units[0] = _mm512_loadu_si512(at);
                units[1] = _mm512_loadu_si512(at + 64);
            }
            const int next = (k + 7) % 8;
            by = divisors.look_up(_mm512_and_si512(
                _mm512_srli_epi32(units[next % 2], 8 * static_cast<unsigned>(next / 2)), byte));
            finish_avx512(k < 6 ? groups[k + 2] : before[k - 6], tables.slots, waiting[k % 2]);
            waiting[k % 2] = upper;
        }
        before = groups;
    }
    for (int k = 1; k >= 0; --k) finish_avx512(groups[k], tables.slots, waiting[k]);
    for (int g = 0; g < 8; ++g)
        _mm512_storeu_si512(states + 16 * g, _mm512_load_si512(groups[g].state));
    shared_ahead = ahead;
    return words;
}

#endif

}  // namespace packhorse
