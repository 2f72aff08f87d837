// Decoding rounds of 128 lanes with AVX-512 and at most 64 codes (docs/format.md, 6.4): the alias
// tables live in six or ten registers, so nothing is looked up in memory.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decode_avx512.hpp"
#include "rans/decoder.hpp"
#include "rans/tables_avx512.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The alias tables of 32 buckets in registers.
struct NarrowBucketsAvx512 {
    Table32Avx512 threshold, first, second;

    PACKHORSE_AVX512 explicit NarrowBucketsAvx512(const RansDecoder& decoder)
        : threshold(decoder.alias.threshold),
          first(decoder.buckets.first),
          second(decoder.buckets.second) {}

    // Entries of twice 16 slots.
    PACKHORSE_AVX512 PACKHORSE_INLINE void look_up(const __m512i* slots, __m512i* entries) const {
        for (int i = 0; i < 2; ++i) {
            const __m512i bucket = _mm512_srli_epi32(slots[i], 7);
            const __mmask16 in_second =
                _mm512_cmpge_epu32_mask(slots[i], threshold.look_up(bucket));
            entries[i] =
                _mm512_mask_blend_epi32(in_second, first.look_up(bucket), second.look_up(bucket));
        }
    }
};

// The alias tables of 64 buckets in registers, in elements of 16 bits: one permute finds 32 of
// them.
struct WideBucketsAvx512 {
    Table64Avx512 threshold, first_lower, first_upper, second_lower, second_upper;

    PACKHORSE_AVX512 explicit WideBucketsAvx512(const RansDecoder& decoder)
        : threshold(decoder.halves.threshold),
          first_lower(decoder.halves.first_lower),
          first_upper(decoder.halves.first_upper),
          second_lower(decoder.halves.second_lower),
          second_upper(decoder.halves.second_upper) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE void look_up(const __m512i* slots, __m512i* entries) const {
        const __m512i both = _mm512_or_si512(slots[0], _mm512_slli_epi32(slots[1], 16));
        const __m512i bucket = _mm512_srli_epi16(both, 6);
        const __mmask32 in_second = _mm512_cmpge_epu16_mask(both, threshold.look_up(bucket));
        const __m512i lower = _mm512_mask_blend_epi16(in_second, first_lower.look_up(bucket),
                                                      second_lower.look_up(bucket));
        const __m512i upper = _mm512_mask_blend_epi16(in_second, first_upper.look_up(bucket),
                                                      second_upper.look_up(bucket));
        constexpr __mmask32 kOdd = 0xAAAAAAAA;
        entries[0] = _mm512_mask_blend_epi16(kOdd, lower, _mm512_slli_epi32(upper, 16));
        entries[1] = _mm512_mask_blend_epi16(kOdd, _mm512_srli_epi32(lower, 16), upper);
    }
};

// Decodes 16 lanes whose entries are known.
PACKHORSE_AVX512 PACKHORSE_INLINE void decode_step_avx512(__m512i& state, __m512i entry,
                                                          const uint8_t*& words) {
    const __m512i next = next_states_avx512(state, entry);
    state = fill_in_words_avx512(next, need_words_avx512(next), words);
}

// Decodes 32 lanes. The top bytes of the entries are the units.
template <class Buckets>
PACKHORSE_AVX512 PACKHORSE_INLINE void decode_pair_avx512(__m512i* states, const Buckets& buckets,
                                                          const uint8_t*& words, __m512i* entries) {
    const __m512i slot_mask = _mm512_set1_epi32(kProbSum - 1);
    const __m512i slots[2] = {_mm512_and_si512(states[0], slot_mask),
                              _mm512_and_si512(states[1], slot_mask)};
    buckets.look_up(slots, entries);
    for (int i = 0; i < 2; ++i) decode_step_avx512(states[i], entries[i], words);
}

// Collects the top bytes of four registers in one.
PACKHORSE_AVX512 inline __m512i pack_top_bytes_avx512(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i low_half =
        _mm512_or_si512(_mm512_srli_epi32(a, 24),
                        _mm512_and_si512(_mm512_srli_epi32(b, 16), _mm512_set1_epi32(0x0000FF00)));
    const __m512i third = _mm512_and_si512(_mm512_srli_epi32(c, 8), _mm512_set1_epi32(0x00FF0000));
    const __m512i fourth = _mm512_and_si512(d, _mm512_set1_epi32(static_cast<int>(0xFF000000)));
    return _mm512_or_si512(low_half, _mm512_or_si512(third, fourth));
}

template <class Buckets>
PACKHORSE_AVX512 inline void decode_rounds_avx512(RansDecoder& decoder, std::size_t n_rounds,
                                                  uint8_t* dst, Ahead& shared_ahead) {
    const Buckets buckets(decoder);
    Ahead ahead = shared_ahead;
    const uint8_t* words = decoder.words;
    __m512i lanes[8];
    for (int k = 0; k < 8; ++k) lanes[k] = _mm512_load_si512(decoder.states + 16 * k);
    for (std::size_t r = 0; r < n_rounds; ++r, dst += 128) {
        ahead.step();
        __m512i entries[8];
#pragma GCC unroll 4
        for (int k = 0; k < 8; k += 2) decode_pair_avx512(lanes + k, buckets, words, entries + k);
        for (int h = 0; h < 2; ++h)
            _mm512_storeu_si512(
                dst + 64 * h,
                pack_top_bytes_avx512(entries[h], entries[2 + h], entries[4 + h], entries[6 + h]));
    }
    for (int k = 0; k < 8; ++k) _mm512_store_si512(decoder.states + 16 * k, lanes[k]);
    shared_ahead = ahead;
    decoder.words = words;
}

#endif

}  // namespace packhorse
