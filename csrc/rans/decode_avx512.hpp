// Decodes rounds of 128 lanes with AVX-512 if the alphabet is too large for registers
// (docs/format.md, 6.4). A register holds 16 lanes, whose entries are loaded one by one. Slots are
// stored as soon as they are known.
#pragma once

#include "common/dispatch.hpp"
#include "rans/model.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The states of 128 lanes, and the slots that the next look-ups load one by one.
struct alignas(64) LanesAvx512 {
    uint32_t state[kMaxLanes];
    uint32_t slot[kMaxLanes];
};

// Uses broadcasting loads and blends, which are not bound to one port, as insertions are.
PACKHORSE_AVX512 PACKHORSE_INLINE __m256i load_eight(const uint32_t* table, const uint32_t* slot) {
    __m256i entry[8];
    for (int i = 0; i < 8; ++i) entry[i] = _mm256_set1_epi32(static_cast<int>(table[slot[i]]));
    const __m256i low = _mm256_blend_epi32(_mm256_blend_epi32(entry[0], entry[1], 0x02),
                                           _mm256_blend_epi32(entry[2], entry[3], 0x08), 0x0C);
    const __m256i high = _mm256_blend_epi32(_mm256_blend_epi32(entry[4], entry[5], 0x20),
                                            _mm256_blend_epi32(entry[6], entry[7], 0x80), 0xC0);
    return _mm256_blend_epi32(low, high, 0xF0);
}

// The new states of 16 lanes, before words are filled in.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i next_states_avx512(__m512i state, __m512i entry) {
    const __m512i slot_mask = _mm512_set1_epi32(kProbSum - 1);
    const __m512i rank =
        _mm512_and_si512(_mm512_add_epi32(state, _mm512_srli_epi32(entry, kProbBits)), slot_mask);
    const __m512i freq = _mm512_and_si512(entry, slot_mask);
    return _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(state, kProbBits)), rank);
}

PACKHORSE_AVX512 PACKHORSE_INLINE __mmask16 need_words_avx512(__m512i next) {
    return _mm512_cmplt_epu32_mask(next, _mm512_set1_epi32(kStateLowerBound));
}

// Fills in the words of the lanes that need one. The low half of a shifted state is zero, so the
// state is complete when words are expanded over that half under the mask.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i fill_in_words_avx512(__m512i next, __mmask16 need,
                                                               const uint8_t*& words) {
    const __m512i fresh =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    words += 2 * static_cast<std::size_t>(__builtin_popcount(need));
    return _mm512_mask_or_epi32(next, need, _mm512_slli_epi32(next, 16),
                                _mm512_maskz_expand_epi32(need, fresh));
}

// Computes the new states of 16 lanes in memory, before words are filled in.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i step_avx512(const LanesAvx512& lanes, std::size_t lane,
                                                      const uint32_t* table, __m512i& entry) {
    const __m512i low = _mm512_castsi256_si512(load_eight(table, lanes.slot + lane));
    entry = _mm512_inserti64x4(low, load_eight(table, lanes.slot + lane + 8), 1);
    return next_states_avx512(_mm512_load_si512(lanes.state + lane), entry);
}

// Fills in words and stores the states with their slots.
PACKHORSE_AVX512 PACKHORSE_INLINE void refill_avx512(__m512i next, const uint8_t*& words,
                                                     LanesAvx512& lanes, std::size_t lane) {
    const __m512i state = fill_in_words_avx512(next, need_words_avx512(next), words);
    _mm512_store_si512(lanes.state + lane, state);
    _mm512_store_si512(lanes.slot + lane, _mm512_and_si512(state, _mm512_set1_epi32(kProbSum - 1)));
}

// Adds the values, the top bytes of `entry`, as byte `quarter` of each element.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i add_units_avx512(__m512i units, __m512i entry,
                                                           unsigned quarter) {
    const __m512i value = _mm512_srli_epi32(entry, 24 - 8 * quarter);
    if (quarter == 0) return value;
    const __m512i mask = _mm512_set1_epi32(static_cast<int>(0xFFu << (8 * quarter)));
    return _mm512_ternarylogic_epi32(units, value, mask, 0xF8);  // units | (value & mask)
}

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round, and one
// register of words more. The words of a group are filled in one group after its product is
// computed.
PACKHORSE_AVX512 inline void decode_rounds_large_avx512(uint32_t* states, const uint32_t* table,
                                                        std::size_t n_rounds,
                                                        const uint8_t*& words_at, uint8_t* dst,
                                                        Ahead& shared_ahead) {
    LanesAvx512 lanes;
    for (std::size_t i = 0; i < kMaxLanes; ++i) {
        lanes.state[i] = states[i];
        lanes.slot[i] = states[i] & (kProbSum - 1);
    }
    keep_in_memory(lanes);
    Ahead ahead = shared_ahead;
    const uint8_t* words = words_at;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        ahead.step();
        __m512i units[2] = {}, waiting = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (unsigned g = 0; g < 8; ++g) {  // two groups share a position mod 4
            __m512i entry;
            const __m512i next = step_avx512(lanes, 16 * g, table, entry);
            if (g > 0) refill_avx512(waiting, words, lanes, 16 * (g - 1));
            waiting = next;
            units[g % 2] = add_units_avx512(units[g % 2], entry, g / 2);
            keep_in_memory(lanes);
        }
        refill_avx512(waiting, words, lanes, kMaxLanes - 16);
        keep_in_memory(lanes);
        for (int h = 0; h < 2; ++h) _mm512_storeu_si512(dst + 64 * h, units[h]);
    }
    std::memcpy(states, lanes.state, sizeof lanes.state);
    shared_ahead = ahead;
    words_at = words;
}

#endif

}  // namespace packhorse
