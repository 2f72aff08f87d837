// Encoding rounds of 16 lanes, which short streams have, with AVX-512, IFMA and VBMI2, and at most
// 32 codes (docs/format.md, 6.4).
//
// A round waits for the round before it, so what counts is the length of the chain from one state
// to the next, not the number of instructions. A state is kept as a quotient and a slot, and all
// that follows from the quotient is computed while slots are loaded: whether a lane emits a word,
// and the dividend of one that does. What is left on the chain are a load for each lane and two
// products of 52 bits, which are exact.
//
// Lanes have elements of 64 bits, so that there are two registers of eight lanes.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "rans/tables_avx512.hpp"

namespace packhorse {

#if PACKHORSE_X86

// 32 entries of 64 bits.
struct Table32Vbmi2 {
    __m512i a, b, c, d;

    PACKHORSE_AVX512_VBMI2 explicit Table32Vbmi2(const uint64_t* entries)
        : a(_mm512_loadu_si512(entries)),
          b(_mm512_loadu_si512(entries + 8)),
          c(_mm512_loadu_si512(entries + 16)),
          d(_mm512_loadu_si512(entries + 24)) {}

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i look_up(__m512i index) const {
        const __mmask8 upper = _mm512_test_epi64_mask(index, _mm512_set1_epi64(16));
        return _mm512_mask_mov_epi64(_mm512_permutex2var_epi64(a, index, b), upper,
                                     _mm512_permutex2var_epi64(c, index, d));
    }
};

// Eight states: state / 4096, and the rest of it in the low 12 bits of `slot`.
struct EncodeEightVbmi2 {
    __m512i quotient, slot;

    PACKHORSE_AVX512_VBMI2 explicit EncodeEightVbmi2(const uint32_t* states)
        : slot(
              _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(states)))) {
        quotient = _mm512_srli_epi64(slot, kProbBits);
    }

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i states() const {
        const __m512i slot_mask = _mm512_set1_epi64(kProbSum - 1);
        return _mm512_ternarylogic_epi64(_mm512_slli_epi64(quotient, kProbBits), slot, slot_mask,
                                         0xF8);  // quotient | (slot & mask)
    }
};

// Encodes one unit in each of eight lanes. `freq_start` and `inverse` are those of RansEncodeTables
// for the units. Returns which lanes emit the low halves of the states that they had.
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __mmask8 encode_eight_vbmi2(EncodeEightVbmi2& lanes,
                                                                    __m512i freq_start,
                                                                    __m512i inverse,
                                                                    const uint16_t* slots) {
    constexpr unsigned kShift = 8;  // 2^44 / freq times 2^8 times the dividend, divided by 2^52
    constexpr long long kProductSize = 1LL << 52;
    const __m512i freq = _mm512_and_si512(freq_start, _mm512_set1_epi64(kProbSum - 1));
    // A state of freq * 2^20 or more emits a word, and no slot can make a state that large.
    const __mmask8 emit =
        _mm512_cmpge_epu64_mask(lanes.quotient, _mm512_slli_epi64(freq, 20 - kProbBits));
    const __m512i kept = _mm512_slli_epi64(lanes.quotient, kProbBits + kShift);
    const __m512i upper = _mm512_mask_slli_epi64(
        kept, emit, _mm512_srli_epi64(lanes.quotient, 16 - kProbBits), kShift);
    const __m512i lower = _mm512_maskz_mov_epi64(static_cast<__mmask8>(~emit),
                                                 _mm512_set1_epi64((kProbSum - 1) << kShift));
    const __m512i dividend = _mm512_ternarylogic_epi64(upper, _mm512_slli_epi64(lanes.slot, kShift),
                                                       lower, 0xF8);  // upper | (slot & lower)
    lanes.quotient = _mm512_madd52hi_epu64(_mm512_setzero_si512(), dividend, inverse);
    // The position is start + dividend - quotient * freq. A product has only its low 52 bits, so
    // -freq is 2^52 - freq. The quotient is at least 1, so that adds 2^52, which `start` lacks.
    const __m512i start = _mm512_add_epi64(_mm512_srli_epi64(freq_start, kProbBits),
                                           _mm512_set1_epi64(-kProductSize));
    const __m512i position = _mm512_madd52lo_epu64(
        _mm512_add_epi64(_mm512_srli_epi64(dividend, kShift), start), lanes.quotient,
        _mm512_sub_epi64(_mm512_set1_epi64(kProductSize), freq));
    lanes.slot = _mm512_i64gather_epi64(position, slots, sizeof *slots);
    return emit;
}

// Encodes rounds of 16 lanes. The tables are those of RansEncodeTables.
PACKHORSE_AVX512_VBMI2 inline uint8_t* encode_rounds_short_vbmi2(
    const uint8_t* codes, std::size_t n_rounds, const uint32_t* freq_start_of,
    const uint64_t* inverse_of, const uint16_t* slots, uint32_t* states, uint8_t* words) {
    const Table32Avx512 freq_starts(freq_start_of);
    const Table32Vbmi2 inverses(inverse_of);
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    EncodeEightVbmi2 low(states), high(states + 8);
    for (std::size_t r = n_rounds; r-- > 0;) {
        const __m128i round = _mm_shuffle_epi8(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * r)), order);
        const __m512i freq_start = freq_starts.look_up(_mm512_cvtepu8_epi32(round));
        const __m512i low_inverse = inverses.look_up(_mm512_cvtepu8_epi64(round));
        const __m512i high_inverse =
            inverses.look_up(_mm512_cvtepu8_epi64(_mm_srli_si128(round, 8)));
        const __m256i halves = _mm256_setr_m128i(_mm512_cvtepi64_epi16(low.states()),
                                                 _mm512_cvtepi64_epi16(high.states()));
        const uint32_t high_emits = encode_eight_vbmi2(
            high, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(freq_start, 1)), high_inverse,
            slots);
        const uint32_t low_emits = encode_eight_vbmi2(
            low, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(freq_start)), low_inverse, slots);
        const auto emit = static_cast<__mmask16>(low_emits | high_emits << 8);
        const auto n_words = static_cast<uint32_t>(__builtin_popcount(emit));
        words -= 2 * static_cast<std::size_t>(n_words);
        _mm256_mask_storeu_epi16(words, static_cast<__mmask16>(_bzhi_u32(~0u, n_words)),
                                 _mm256_maskz_compress_epi16(emit, halves));
    }
    const auto store_states = [](uint32_t* dst, __m512i eight) PACKHORSE_AVX512_VBMI2 {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm512_cvtepi64_epi32(eight));
    };
    store_states(states, low.states());
    store_states(states + 8, high.states());
    return words;
}

#endif

}  // namespace packhorse
