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

// The states of 128 lanes, and a code for each of them in the low bits of the elements.
struct EncodeLanesVbmi2 {
    __m512i lower[4], upper[4];
};

struct EncodeCodesVbmi2 {
    __m512i of[4];
};

// A float of 2^23 more than a number below 2^20, rounded down, has that number in its low bits.
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i quotient_vbmi2(__m512i dividend,
                                                               __m512i reciprocal) {
    constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    return _mm512_castps_si512(_mm512_fmadd_round_ps(
        _mm512_cvt_roundepu32_ps(dividend, kTowardZero), _mm512_castsi512_ps(reciprocal),
        _mm512_set1_ps(0x1p23f), kTowardZero));
}

// Writes the words of the lanes in `emit`, those of the last register first.
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void emit_vbmi2(const __m512i* lower, const __mmask32* emit,
                                                        uint8_t*& words) {
    for (int k = 3; k >= 0; --k) {
        const auto n_words = static_cast<uint32_t>(__builtin_popcount(emit[k]));
        words -= 2 * static_cast<std::size_t>(n_words);
        _mm512_mask_storeu_epi16(words, _bzhi_u32(~0u, n_words),
                                 _mm512_maskz_compress_epi16(emit[k], lower[k]));
    }
}

// Encodes one unit in each lane. All registers take each step together: a processor looks ahead by
// some 64 vector instructions only, and there are more in the steps of one register.
template <bool kWide, bool kLone>
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void encode_round_vbmi2(
    EncodeLanesVbmi2& lanes, const EncodeCodesVbmi2& codes,
    const SpreadRegistersVbmi2<kWide, kLone>& registers, uint8_t*& words) {
    const __m512i minus_one = _mm512_set1_epi16(-1);
    __m512i freq[4], part_lower[4], part_upper[4], lower[4], upper[4];
    __mmask32 emit[4];
    for (int k = 0; k < 4; ++k) {
        freq[k] = registers.freq.look_up(codes.of[k]);
        // A state of freq * 2^20 or more emits a word.
        emit[k] = _mm512_cmpge_epu16_mask(_mm512_srli_epi16(lanes.upper[k], 4), freq[k]);
    }
    for (int k = 0; k < 4; ++k) {
        part_lower[k] = registers.reciprocal_lower.look_up(codes.of[k]);
        part_upper[k] = registers.reciprocal_upper.look_up(codes.of[k]);
    }
    for (int k = 0; k < 4; ++k) {
        lower[k] = _mm512_mask_blend_epi16(emit[k], lanes.lower[k], lanes.upper[k]);
        upper[k] = _mm512_maskz_mov_epi16(~emit[k], lanes.upper[k]);
    }
    emit_vbmi2(lanes.lower, emit, words);
    // The quotient is exact or too small by one: two roundings towards zero take less than 3/16 off
    // it.
    __m512i first[4], last[4], short_quotient[4], top[4], remainder[4], position[4], quotient[4];
    for (int k = 0; k < 4; ++k) {
        first[k] = quotient_vbmi2(_mm512_unpacklo_epi16(lower[k], upper[k]),
                                  _mm512_unpacklo_epi16(part_lower[k], part_upper[k]));
        last[k] = quotient_vbmi2(_mm512_unpackhi_epi16(lower[k], upper[k]),
                                 _mm512_unpackhi_epi16(part_lower[k], part_upper[k]));
    }
    for (int k = 0; k < 4; ++k) {
        short_quotient[k] =
            _mm512_permutex2var_epi16(first[k], _mm512_load_si512(kHalvesOrder.lower), last[k]);
        top[k] =
            _mm512_permutex2var_epi16(first[k], _mm512_load_si512(kHalvesOrder.upper), last[k]);
    }
    __mmask32 low[4];
    for (int k = 0; k < 4; ++k) {
        // The remainder is below 2 * freq, so its low half is enough.
        remainder[k] = _mm512_sub_epi16(lower[k], _mm512_mullo_epi16(short_quotient[k], freq[k]));
        low[k] = _mm512_cmpge_epu16_mask(remainder[k], freq[k]);
    }
    for (int k = 0; k < 4; ++k) {
        position[k] =
            _mm512_add_epi16(registers.start.look_up(codes.of[k]),
                             _mm512_mask_sub_epi16(remainder[k], low[k], remainder[k], freq[k]));
        quotient[k] =
            _mm512_mask_sub_epi16(short_quotient[k], low[k], short_quotient[k], minus_one);
    }
    for (int k = 0; k < 4; ++k) {
        const __mmask32 carry = _mm512_mask_testn_epi16_mask(low[k], quotient[k], quotient[k]);
        lanes.upper[k] = _mm512_shldi_epi16(_mm512_mask_sub_epi16(top[k], carry, top[k], minus_one),
                                            quotient[k], kProbBits);
    }
    for (int k = 0; k < 4; ++k)
        lanes.lower[k] = _mm512_add_epi16(_mm512_slli_epi16(quotient[k], kProbBits),
                                          registers.slots_of(position[k]));
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
    EncodeLanesVbmi2 lanes;
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512i first = _mm512_loadu_si512(states + 32 * k);
        const __m512i last = _mm512_loadu_si512(states + 32 * k + 16);
        lanes.lower[k] = _mm512_permutex2var_epi16(first, even, last);
        lanes.upper[k] = _mm512_permutex2var_epi16(first, odd, last);
    }
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        // An element of 32 bits has a code of each quarter of the lanes.
        const __m512i first = _mm512_loadu_si512(codes + kMaxLanes * r);
        const __m512i last = _mm512_loadu_si512(codes + kMaxLanes * r + 64);
        const __m512i lower = _mm512_permutex2var_epi16(first, even, last);
        const __m512i upper = _mm512_permutex2var_epi16(first, odd, last);
        const EncodeCodesVbmi2 round{
            {lower, _mm512_srli_epi16(lower, 8), upper, _mm512_srli_epi16(upper, 8)}};
        encode_round_vbmi2(lanes, round, registers, words);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        const __m512i lower = lanes.lower[k], upper = lanes.upper[k];
        _mm512_storeu_si512(
            states + 32 * k,
            _mm512_permutex2var_epi16(lower, _mm512_load_si512(kHalvesOrder.first), upper));
        _mm512_storeu_si512(
            states + 32 * k + 16,
            _mm512_permutex2var_epi16(lower, _mm512_load_si512(kHalvesOrder.last), upper));
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
