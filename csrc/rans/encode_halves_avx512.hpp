// Encoding rounds of 128 lanes with AVX-512 and VBMI2, for models that have a SpreadMap
// (docs/format.md, 6.4). Everything is looked up in registers.
//
// A register holds 16 bits of each of 32 lanes, in lane order, and a state is two registers: its
// lower and its upper halves. That takes two thirds of the instructions of 16 whole states to a
// register (rans/encode_avx512.hpp): most numbers here have at most 16 bits, and VBMI2 writes the
// words of 32 lanes at once. Only the quotient needs 32 bits.
#pragma once

#include "common/dispatch.hpp"
#include "rans/spread.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Indices for permutes of two registers of 16-bit elements.
struct alignas(64) HalvesOrder {
    uint16_t even[32], odd[32];     // the lower, or upper, halves of 32-bit elements in order
    uint16_t lower[32], upper[32];  // the same, of elements that unpacks made
    uint16_t first[32], last[32];   // 32-bit elements from lower and upper halves in order
};

constexpr HalvesOrder make_halves_order() {
    HalvesOrder order{};
    for (uint16_t i = 0; i < 32; ++i) {
        order.even[i] = static_cast<uint16_t>(2 * i);
        order.odd[i] = static_cast<uint16_t>(2 * i + 1);
        // Unpacks take four elements of each 128 bits: the lower four, or the upper four.
        const int unpacked = i / 8 * 4 + i % 4 + (i % 8 < 4 ? 0 : 16);
        order.lower[i] = static_cast<uint16_t>(2 * unpacked);
        order.upper[i] = static_cast<uint16_t>(2 * unpacked + 1);
        order.first[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
        order.last[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32 + 16);
    }
    return order;
}

inline constexpr HalvesOrder kHalvesOrder = make_halves_order();

// 32 entries of 16 bits, or 64 if kWide. The members have names, because an array would be kept in
// memory.
template <bool kWide>
struct CodeTableVbmi2 {
    __m512i low, high;

    PACKHORSE_AVX512_VBMI2 explicit CodeTableVbmi2(const uint16_t* entries)
        : low(_mm512_load_si512(entries)), high(_mm512_load_si512(entries + (kWide ? 32 : 0))) {}

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i look_up(__m512i index) const {
        if constexpr (kWide) return _mm512_permutex2var_epi16(low, index, high);
        return _mm512_permutexvar_epi16(index, low);
    }
};

// 64 entries of 16 bits, or 128 if kWide. `upper` says which indices are 64 or more.
template <bool kWide>
struct RunTableVbmi2 {
    __m512i a, b, c, d;

    PACKHORSE_AVX512_VBMI2 explicit RunTableVbmi2(const uint16_t* entries)
        : a(_mm512_load_si512(entries)),
          b(_mm512_load_si512(entries + 32)),
          c(_mm512_load_si512(entries + (kWide ? 64 : 0))),
          d(_mm512_load_si512(entries + (kWide ? 96 : 0))) {}

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i look_up(__m512i index) const {
        const __m512i found = _mm512_permutex2var_epi16(a, index, b);
        if constexpr (!kWide) return found;
        const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
        return _mm512_mask_blend_epi16(upper, found, _mm512_permutex2var_epi16(c, index, d));
    }
};

// A SpreadMap in registers. `kLone`: it has a lone edge.
template <bool kWide, bool kLone>
struct SpreadRegistersVbmi2 {
    CodeTableVbmi2<kWide> freq, start, reciprocal_lower, reciprocal_upper;
    RunTableVbmi2<kWide> entry, delta;
    __m512i lone_edge;

    PACKHORSE_AVX512_VBMI2 explicit SpreadRegistersVbmi2(const SpreadMap& map)
        : freq(map.freq),
          start(map.start),
          reciprocal_lower(map.reciprocal_lower),
          reciprocal_upper(map.reciprocal_upper),
          entry(map.entry),
          delta(map.delta),
          lone_edge(_mm512_set1_epi16(static_cast<short>(map.lone_edge))) {}

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i slots_of(__m512i position) const {
        constexpr unsigned kLog = kWide ? kWideBucketLog : kNarrowBucketLog;
        const __m512i found = entry.look_up(_mm512_srli_epi16(position, kLog));
        __m512i run = _mm512_srli_epi16(_mm512_add_epi16(position, found), 8);
        if constexpr (kLone)
            run = _mm512_mask_sub_epi16(run, _mm512_cmpge_epu16_mask(position, lone_edge), run,
                                        _mm512_set1_epi16(-1));
        return _mm512_add_epi16(position, delta.look_up(run));
    }
};

// The states of 32 lanes.
struct EncodeLanesVbmi2 {
    __m512i lower, upper;
};

// A float of 2^23 more than a number below 2^20, rounded down, has that number in its low bits.
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i quotient_vbmi2(__m512i dividend,
                                                               __m512i reciprocal) {
    constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    return _mm512_castps_si512(_mm512_fmadd_round_ps(
        _mm512_cvt_roundepu32_ps(dividend, kTowardZero), _mm512_castsi512_ps(reciprocal),
        _mm512_set1_ps(0x1p23f), kTowardZero));
}

// Encodes one unit in each of 32 lanes. The low bits of the elements of `codes` are codes.
template <bool kWide, bool kLone>
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void encode_lanes_vbmi2(
    EncodeLanesVbmi2& lanes, __m512i codes, const SpreadRegistersVbmi2<kWide, kLone>& registers,
    uint8_t*& words) {
    const __m512i freq = registers.freq.look_up(codes);
    // A state of freq * 2^20 or more emits a word.
    const __mmask32 emit = _mm512_cmpge_epu16_mask(_mm512_srli_epi16(lanes.upper, 4), freq);
    const auto n_words = static_cast<uint32_t>(__builtin_popcount(emit));
    words -= 2 * static_cast<std::size_t>(n_words);
    _mm512_mask_storeu_epi16(words, _bzhi_u32(~0u, n_words),
                             _mm512_maskz_compress_epi16(emit, lanes.lower));
    const __m512i lower = _mm512_mask_blend_epi16(emit, lanes.lower, lanes.upper);
    const __m512i upper = _mm512_maskz_mov_epi16(~emit, lanes.upper);
    // The quotient is exact or too small by one: two roundings towards zero take less than 3/16 off
    // it.
    const __m512i part_lower = registers.reciprocal_lower.look_up(codes);
    const __m512i part_upper = registers.reciprocal_upper.look_up(codes);
    const __m512i first = quotient_vbmi2(_mm512_unpacklo_epi16(lower, upper),
                                         _mm512_unpacklo_epi16(part_lower, part_upper));
    const __m512i last = quotient_vbmi2(_mm512_unpackhi_epi16(lower, upper),
                                        _mm512_unpackhi_epi16(part_lower, part_upper));
    const __m512i short_quotient =
        _mm512_permutex2var_epi16(first, _mm512_load_si512(kHalvesOrder.lower), last);
    const __m512i top =
        _mm512_permutex2var_epi16(first, _mm512_load_si512(kHalvesOrder.upper), last);
    // The remainder is below 2 * freq, so its low half is enough.
    const __m512i remainder = _mm512_sub_epi16(lower, _mm512_mullo_epi16(short_quotient, freq));
    const __mmask32 low = _mm512_cmpge_epu16_mask(remainder, freq);
    const __m512i position = _mm512_add_epi16(
        registers.start.look_up(codes), _mm512_mask_sub_epi16(remainder, low, remainder, freq));
    const __m512i minus_one = _mm512_set1_epi16(-1);
    const __m512i quotient = _mm512_mask_sub_epi16(short_quotient, low, short_quotient, minus_one);
    const __mmask32 carry = _mm512_mask_testn_epi16_mask(low, quotient, quotient);
    lanes.upper =
        _mm512_shldi_epi16(_mm512_mask_sub_epi16(top, carry, top, minus_one), quotient, kProbBits);
    lanes.lower =
        _mm512_add_epi16(_mm512_slli_epi16(quotient, kProbBits), registers.slots_of(position));
}

template <bool kWide, bool kLone>
PACKHORSE_AVX512_VBMI2 inline uint8_t* encode_rounds_spread_vbmi2(const uint8_t* codes,
                                                                  std::size_t n_rounds,
                                                                  const SpreadMap& map,
                                                                  uint32_t* states, uint8_t* words,
                                                                  Ahead& shared_ahead) {
    const SpreadRegistersVbmi2<kWide, kLone> registers(map);
    Ahead ahead = shared_ahead;
    const __m512i even = _mm512_load_si512(kHalvesOrder.even);
    const __m512i odd = _mm512_load_si512(kHalvesOrder.odd);
    EncodeLanesVbmi2 lanes[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512i first = _mm512_loadu_si512(states + 32 * k);
        const __m512i last = _mm512_loadu_si512(states + 32 * k + 16);
        lanes[k] = {_mm512_permutex2var_epi16(first, even, last),
                    _mm512_permutex2var_epi16(first, odd, last)};
    }
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        // An element of 32 bits has a code of each quarter of the lanes.
        const __m512i first = _mm512_loadu_si512(codes + kMaxLanes * r);
        const __m512i last = _mm512_loadu_si512(codes + kMaxLanes * r + 64);
        const __m512i lower = _mm512_permutex2var_epi16(first, even, last);
        const __m512i upper = _mm512_permutex2var_epi16(first, odd, last);
        encode_lanes_vbmi2(lanes[3], _mm512_srli_epi16(upper, 8), registers, words);
        encode_lanes_vbmi2(lanes[2], upper, registers, words);
        encode_lanes_vbmi2(lanes[1], _mm512_srli_epi16(lower, 8), registers, words);
        encode_lanes_vbmi2(lanes[0], lower, registers, words);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        _mm512_storeu_si512(
            states + 32 * k,
            _mm512_permutex2var_epi16(lanes[k].lower, _mm512_load_si512(kHalvesOrder.first),
                                      lanes[k].upper));
        _mm512_storeu_si512(
            states + 32 * k + 16,
            _mm512_permutex2var_epi16(lanes[k].lower, _mm512_load_si512(kHalvesOrder.last),
                                      lanes[k].upper));
    }
    shared_ahead = ahead;
    return words;
}

// Encodes rounds of 128 lanes with a map that was found.
inline uint8_t* encode_rounds_spread_vbmi2_any(const uint8_t* codes, std::size_t n_rounds,
                                               const SpreadMap& map, uint32_t* states,
                                               uint8_t* words, Ahead& ahead) {
    const bool lone = map.lone_edge < kSpreadSize;
    const auto encode = map.wide ? (lone ? encode_rounds_spread_vbmi2<true, true>
                                         : encode_rounds_spread_vbmi2<true, false>)
                                 : (lone ? encode_rounds_spread_vbmi2<false, true>
                                         : encode_rounds_spread_vbmi2<false, false>);
    return encode(codes, n_rounds, map, states, words, ahead);
}

#endif

}  // namespace packhorse
