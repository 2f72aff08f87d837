// Encoding rounds of 128 lanes with AVX2 (docs/format.md, 6.4), in the steps of
// rans/encode_portable.hpp and with its tables; eight lanes to a register.
#pragma once

#include <algorithm>
#include <utility>

#include "common/dispatch.hpp"
#include "rans/divisors_avx2.hpp"
#include "rans/encode_portable.hpp"
#include "rans/word_order.hpp"

namespace packhorse {

#if PACKHORSE_X86

// As LanesSse2, for eight lanes.
struct alignas(64) EncodeLanesAvx2 {
    uint32_t state[8];
    uint32_t position[8];
};

// Writes the words of the lanes that are not in the set `keeps`. The bytes below them in the
// register are junk.
PACKHORSE_AVX2 PACKHORSE_INLINE uint8_t* emit_avx2(__m256i state, uint32_t keeps, uint8_t* words) {
    const __m256i low_halves = _mm256_setr_epi64x(0x0D0C090805040100, -1, 0x0D0C090805040100, -1);
    const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(state, low_halves), 0x08);
    const __m128i order =
        _mm_load_si128(reinterpret_cast<const __m128i*>(kEmitOrder.byte_at[keeps]));
    words -= 16;
    _mm_storeu_si128(reinterpret_cast<__m128i*>(words),
                     _mm_shuffle_epi8(_mm256_castsi256_si128(halves), order));
    return words + 2 * static_cast<std::size_t>(__builtin_popcount(keeps));
}

// Encodes eight lanes up to the position in the slot table, and the upper part of the new states.
PACKHORSE_AVX2 PACKHORSE_INLINE void divide_avx2(EncodeLanesAvx2& lanes, const DivisorsAvx2& by,
                                                 uint8_t*& words) {
    const __m256i state = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.state));
    // A state below freq * 2^20 keeps its words.
    const __m256i keeps =
        _mm256_cmpgt_epi32(_mm256_slli_epi32(by.freq_start, 16), _mm256_srli_epi32(state, 4));
    words = emit_avx2(state, static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(keeps))),
                      words);
    const __m256i dividend =
        _mm256_srlv_epi32(state, _mm256_andnot_si256(keeps, _mm256_set1_epi32(16)));
    const __m256 halved = _mm256_cvtepi32_ps(_mm256_srli_epi32(dividend, 1));
    const __m256i quotient = _mm256_cvttps_epi32(_mm256_mul_ps(halved, by.reciprocal));
    // The remainder is below 2 * freq, so its low half is enough.
    const __m256i remainder =
        _mm256_sub_epi16(dividend, _mm256_mullo_epi16(quotient, by.freq_start));
    const __m256i position = _mm256_add_epi16(remainder, _mm256_srli_epi32(by.freq_start, 16));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.position),
                       _mm256_blend_epi16(position, _mm256_setzero_si256(), 0xAA));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.state),
                       _mm256_slli_epi32(quotient, kProbBits));
    keep_in_memory(lanes);
}

// The slots of two neighbouring lanes.
struct TwoSlotsAvx2 {
    const double* even;
    const double* odd;

    // Two positions are loaded at once, because there are enough loads without them. The odd slot
    // is loaded with the four bytes before it, so that it lands in its place.
    PACKHORSE_AVX2 PACKHORSE_INLINE TwoSlotsAvx2(const uint16_t* slots, const uint32_t* position) {
        auto both = load<uint64_t>(position);
        keep_in_register(both);
        even = reinterpret_cast<const double*>(slots + static_cast<uint32_t>(both));
        odd = reinterpret_cast<const double*>(slots + (both >> 32) - 2);
    }
};

// The slots of four lanes, with something else in the upper halves.
PACKHORSE_AVX2 PACKHORSE_INLINE __m128i load_four_slots_avx2(const uint16_t* slots,
                                                             const uint32_t* position) {
    const TwoSlotsAvx2 a(slots, position), b(slots, position + 2);
    const __m128d even = _mm_loadh_pd(_mm_load_sd(a.even), b.even);
    const __m128d odd = _mm_loadh_pd(_mm_load_sd(a.odd), b.odd);
    return _mm_blend_epi32(_mm_castpd_si128(even), _mm_castpd_si128(odd), 0x0A);
}

PACKHORSE_AVX2 PACKHORSE_INLINE void finish_avx2(EncodeLanesAvx2& lanes, const uint16_t* slots) {
    const __m256i eight = _mm256_setr_m128i(load_four_slots_avx2(slots, lanes.position),
                                            load_four_slots_avx2(slots, lanes.position + 4));
    auto* const state = reinterpret_cast<__m256i*>(lanes.state);
    const __m256i slot = _mm256_blend_epi16(eight, _mm256_setzero_si256(), 0xAA);
    _mm256_store_si256(state, _mm256_add_epi32(_mm256_load_si256(state), slot));
    keep_in_memory(lanes);
}

constexpr std::size_t kEncodeGroups = kMaxLanes / 8;

// Encodes a round, a group of eight lanes at a time. The divisors of a group are loaded one group
// ahead, and its slots half of the lanes behind: the chain of these steps is longer than a
// processor looks ahead. The steps of all groups are written out, because in a loop, a compiler
// shares addresses among them, and each round takes a tenth longer.
template <class Divisors, std::size_t... kReverse>
PACKHORSE_AVX2 PACKHORSE_INLINE void encode_round_avx2(EncodeLanesAvx2* groups,
                                                       const Divisors& divisors, std::size_t round,
                                                       const uint16_t* slots, DivisorsAvx2& by,
                                                       uint8_t*& words,
                                                       std::index_sequence<kReverse...>) {
    const auto encode_group = [&](std::size_t g) PACKHORSE_AVX2 PACKHORSE_VECTORISED {
        const std::size_t next = (g + kEncodeGroups - 1) % kEncodeGroups;
        finish_avx2(groups[(g + kEncodeGroups / 2) % kEncodeGroups], slots);
        divide_avx2(groups[g], by, words);
        // Behind the last round, this loads something that is not used.
        by = divisors.load(round - (g == 0 && round > 0 ? 1 : 0), next / 4, next % 4);
    };
    (encode_group(kEncodeGroups - 1 - kReverse), ...);
}

template <class Divisors>
PACKHORSE_AVX2 inline uint8_t* encode_rounds_wide_avx2(const Divisors& divisors,
                                                       std::size_t n_rounds, const uint16_t* slots,
                                                       uint32_t* states, uint8_t* words,
                                                       Ahead& ahead) {
    if (n_rounds == 0) return words;
    EncodeLanesAvx2 groups[kEncodeGroups];
    for (std::size_t g = 0; g < kEncodeGroups; ++g) {
        std::memcpy(groups[g].state, states + 8 * g, sizeof groups[g].state);
        // The groups that are finished first have no slots yet.
        std::fill(std::begin(groups[g].position), std::end(groups[g].position), kZeroSlotAt);
    }
    DivisorsAvx2 by = divisors.load(n_rounds - 1, 3, 3);
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        encode_round_avx2(groups, divisors, r, slots, by, words,
                          std::make_index_sequence<kEncodeGroups>());
    }
    for (std::size_t g = 0; g < kEncodeGroups / 2; ++g) finish_avx2(groups[g], slots);
    for (std::size_t g = 0; g < kEncodeGroups; ++g)
        std::memcpy(states + 8 * g, groups[g].state, sizeof groups[g].state);
    return words;
}

#endif

}  // namespace packhorse
