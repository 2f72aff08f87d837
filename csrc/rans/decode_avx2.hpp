// Decoding rounds of 128 lanes with AVX2 (docs/format.md, 6.4).
// A register holds eight lanes, whose entries are loaded one by one. A gather instruction would do
// the same, but on the machine that was measured it more than doubled the time of decoding
//(docs/decisions.md, section 4).
//
// A step has a long chain of dependent instructions (slot, entry, product, set of lanes that need a
// word, words), more than a processor can look ahead. So the chain is cut: slots are stored as soon
// as they are known, and the words of a group are filled in two groups after its product is
// computed.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decode_portable.hpp"
#include "rans/model.hpp"
#include "rans/word_order.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The states of 128 lanes, and the slots that the next look-ups load one by one.
struct alignas(64) LanesAvx2 {
    uint32_t state[kMaxLanes];
    uint32_t slot[kMaxLanes];
};

PACKHORSE_AVX2 PACKHORSE_INLINE __m128i load_four(const uint32_t* table, const uint32_t* slot) {
    __m128i entries = _mm_cvtsi32_si128(static_cast<int>(table[slot[0]]));
    entries = _mm_insert_epi32(entries, static_cast<int>(table[slot[1]]), 1);
    entries = _mm_insert_epi32(entries, static_cast<int>(table[slot[2]]), 2);
    return _mm_insert_epi32(entries, static_cast<int>(table[slot[3]]), 3);
}

// Computes the new states of eight lanes, before words are filled in.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i step_avx2(const LanesAvx2& lanes, std::size_t lane,
                                                  const uint32_t* table, __m256i& entry) {
    const uint32_t* slot = lanes.slot + lane;
    entry = _mm256_setr_m128i(load_four(table, slot), load_four(table, slot + 4));
    const __m256i state = _mm256_load_si256(reinterpret_cast<const __m256i*>(lanes.state + lane));
    const __m256i slot_mask = _mm256_set1_epi32(kProbSum - 1);
    const __m256i rank =
        _mm256_and_si256(_mm256_add_epi32(state, _mm256_srli_epi32(entry, kProbBits)), slot_mask);
    return _mm256_add_epi32(
        _mm256_mullo_epi32(_mm256_and_si256(entry, slot_mask), _mm256_srli_epi32(state, kProbBits)),
        rank);
}

// Fills in words and stores the states with their slots.
PACKHORSE_AVX2 PACKHORSE_INLINE void refill_avx2(__m256i next, const uint8_t*& words,
                                                 LanesAvx2& lanes, std::size_t lane) {
    const __m256i need = _mm256_cmpeq_epi32(_mm256_srli_epi32(next, 16), _mm256_setzero_si256());
    const auto mask = static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(need)));
    const __m128i order =
        _mm_load_si128(reinterpret_cast<const __m128i*>(kWordOrder.byte_of_place[mask]));
    const __m128i fresh =
        _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words)), order);
    words += 2 * static_cast<std::size_t>(__builtin_popcount(mask));
    const __m256i shift = _mm256_and_si256(need, _mm256_set1_epi32(16));
    const __m256i state =
        _mm256_or_si256(_mm256_sllv_epi32(next, shift), _mm256_cvtepu16_epi32(fresh));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.state + lane), state);
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.slot + lane),
                       _mm256_and_si256(state, _mm256_set1_epi32(kProbSum - 1)));
}

// Adds the values, the top bytes of `entry`, as byte `quarter` of each element.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i add_units_avx2(__m256i units, __m256i entry, int quarter) {
    if (quarter == 0) return _mm256_srli_epi32(entry, 24);
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xFFu << (8 * quarter)));
    const __m256i value = _mm256_srli_epi32(entry, 24 - 8 * quarter);
    return _mm256_or_si256(units, _mm256_and_si256(value, mask));
}

PACKHORSE_AVX2 PACKHORSE_INLINE void decode_round_avx2(LanesAvx2& lanes, const uint32_t* table,
                                                       const uint8_t*& words, uint8_t* dst) {
    constexpr std::size_t kGroups = kMaxLanes / 8, kBehind = 2;
    __m256i units[4] = {};
    __m256i waiting[kBehind];
#pragma GCC unroll 16
    for (std::size_t g = 0; g < kGroups; ++g) {  // four groups share a position mod 4
        __m256i entry;
        const __m256i next = step_avx2(lanes, 8 * g, table, entry);
        if (g >= kBehind) refill_avx2(waiting[g % kBehind], words, lanes, 8 * (g - kBehind));
        waiting[g % kBehind] = next;
        units[g % 4] = add_units_avx2(units[g % 4], entry, static_cast<int>(g / 4));
        keep_in_memory(lanes);
    }
    for (std::size_t g = kGroups - kBehind; g < kGroups; ++g)
        refill_avx2(waiting[g % kBehind], words, lanes, 8 * g);
    keep_in_memory(lanes);
    for (int h = 0; h < 4; ++h)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 32 * h), units[h]);
}

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round, and one
// register of words more.
PACKHORSE_AVX2 inline void decode_rounds_wide_avx2(uint32_t* states, const uint32_t* table,
                                                   std::size_t n_rounds, const uint8_t*& words_at,
                                                   uint8_t* dst, Ahead& ahead) {
    LanesAvx2 lanes;
    for (std::size_t i = 0; i < kMaxLanes; ++i) {
        lanes.state[i] = states[i];
        lanes.slot[i] = states[i] & (kProbSum - 1);
    }
    keep_in_memory(lanes);
    const uint8_t* words = words_at;
    for (std::size_t r = 0; r < n_rounds; ++r) {
        ahead.step();
        decode_round_avx2(lanes, table, words, dst + kMaxLanes * r);
    }
    std::memcpy(states, lanes.state, sizeof lanes.state);
    words_at = words;
}

#endif

}  // namespace packhorse
