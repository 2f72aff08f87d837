// Decoding rounds of 128 lanes with AVX2 and more than 32 codes (docs/format.md, 6.4), in the steps
// of rans/decode_parts_avx2.hpp. Entries are loaded one by one.
//
// An entry is blended into its register straight from memory: the load begins so far before the
// entry that it lands in its place. A gather instruction does the same, but on the machines that
// were measured it takes longer than everything else together (docs/decisions.md, section 4). Slots
// are cut out of four states at a time, because loading each by itself would double the loads.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decode_parts_avx2.hpp"
#include "rans/decoder.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The slots of four lanes.
struct FourSlots {
    uint64_t at[4];

    PACKHORSE_AVX2 explicit FourSlots(const uint16_t* low) {
        const auto states = load<uint64_t>(low);
        for (uint32_t i = 0; i < 4; ++i)
            // From the intrinsic, compilers make shifts and masks, which are more instructions.
            asm("bextr %2, %1, %0"
                : "=r"(at[i])
                : "r"(states), "r"(uint64_t{kProbBits << 8 | 16 * i})
                : "cc");
    }
};

PACKHORSE_AVX2 PACKHORSE_INLINE __m128i load_four_from(const uint32_t* entry) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(entry));
}

// Loads the entries of eight lanes, of even ones to `even` and of odd ones to `odd`. Three entries
// before each are read, and two behind it.
PACKHORSE_AVX2 PACKHORSE_INLINE void load_entries(const uint32_t* table, const uint16_t* low,
                                                  __m128i& even, __m128i& odd) {
    const FourSlots a(low), b(low + 4);
    even = _mm_cvtsi32_si128(static_cast<int>(table[a.at[0]]));
    odd = _mm_cvtsi32_si128(static_cast<int>(table[a.at[1]]));
    even = _mm_blend_epi32(even, load_four_from(table + a.at[2] - 1), 0x02);
    odd = _mm_blend_epi32(odd, load_four_from(table + a.at[3] - 1), 0x02);
    even = _mm_blend_epi32(even, load_four_from(table + b.at[0] - 2), 0x04);
    odd = _mm_blend_epi32(odd, load_four_from(table + b.at[1] - 2), 0x04);
    even = _mm_blend_epi32(even, load_four_from(table + b.at[2] - 3), 0x08);
    odd = _mm_blend_epi32(odd, load_four_from(table + b.at[3] - 3), 0x08);
}

// The entries of 16 lanes, of the even and of the odd ones.
struct LoadedEntries {
    __m256i even, odd;

    PACKHORSE_AVX2 PACKHORSE_INLINE LoadedEntries(const uint32_t* table, const uint16_t* low) {
        __m128i parts[4];
        load_entries(table, low, parts[0], parts[1]);
        load_entries(table, low + 8, parts[2], parts[3]);
        even = _mm256_setr_m128i(parts[0], parts[2]);
        odd = _mm256_setr_m128i(parts[1], parts[3]);
    }

    // Joins halves of the elements of two registers.
    static PACKHORSE_AVX2 PACKHORSE_INLINE __m256i join(__m256i low_halves, __m256i high_halves) {
        return _mm256_blend_epi16(low_halves, high_halves, 0xAA);
    }

    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i f16() const {
        return join(_mm256_slli_epi32(even, 4), _mm256_slli_epi32(odd, 20));
    }

    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i bias() const {
        return join(_mm256_srli_epi32(even, kProbBits), _mm256_slli_epi32(odd, 16 - kProbBits));
    }

    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i units() const {
        return join(_mm256_srli_epi32(even, 24), _mm256_srli_epi32(odd, 8));
    }
};

// Decodes quarter `q` but for its words, and returns its units. `needs` is the set of lanes of the
// quarter before that wait for words, and becomes that of this one.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i decode_quarter_large(PackedLanes& lanes, std::size_t q,
                                                             const uint32_t* table, uint32_t& needs,
                                                             const uint8_t*& words) {
    uint16_t* const high = lanes.high + kQuarterLanes * q;
    uint16_t* const low = lanes.low + kQuarterLanes * q;
    const LoadedEntries a(table, low), b(table, low + 16);
    const __m256i first = step_halves_avx2(high, low, a.f16(), a.bias());
    const __m256i first_units = a.units();
    fill_words(needs, words, lanes.low + kQuarterLanes * ((q + 3) % 4));
    const __m256i second = step_halves_avx2(high + 16, low + 16, b.f16(), b.bias());
    needs = set_of_lanes(first, second);
    keep_in_memory(lanes);
    return _mm256_packus_epi16(first_units, b.units());
}

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round, one
// register of words more, and kWordsLead bytes before them.
PACKHORSE_AVX2 inline void decode_rounds_large_avx2(RansDecoder& decoder, std::size_t n_rounds,
                                                    uint8_t* dst, Ahead& ahead) {
    PackedLanes lanes(decoder.states);
    const uint8_t* words = decoder.words;
    uint32_t needs = 0;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        ahead.step();
        __m256i units[4];
#pragma GCC unroll 4
        for (std::size_t q = 0; q < 4; ++q)
            units[q] = decode_quarter_large(lanes, q, decoder.table(), needs, words);
        order_units_avx2(units, dst);
    }
    fill_words(needs, words, lanes.low + kMaxLanes - kQuarterLanes);
    lanes.store_to(decoder.states);
    decoder.words = words;
}

#endif

}  // namespace packhorse
