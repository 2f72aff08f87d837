// Encoding rounds of 128 lanes with AVX2 (docs/format.md, 6.4), in the steps of
// rans/encode_portable.hpp and with its tables; eight lanes to a register.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decode_portable.hpp"
#include "rans/encode_portable.hpp"
#include "rans/word_order.hpp"

namespace packhorse {

#if PACKHORSE_X86

// As LanesSse2, for eight lanes.
struct alignas(64) EncodeLanesAvx2 {
    uint32_t state[8];
    uint32_t position[8];
};

struct DivisorsAvx2 {
    __m256i freq_start;
    __m256 reciprocal;
};

// The codes of eight neighbouring lanes are four bytes apart.
PACKHORSE_AVX2 PACKHORSE_INLINE DivisorsAvx2 load_divisors_avx2(const uint64_t* divisors,
                                                                const uint8_t* codes) {
    const __m256 even = _mm256_setr_m128(load_divisor_pair(divisors, codes[0], codes[4]),
                                         load_divisor_pair(divisors, codes[16], codes[20]));
    const __m256 odd = _mm256_setr_m128(load_divisor_pair(divisors, codes[8], codes[12]),
                                        load_divisor_pair(divisors, codes[24], codes[28]));
    return {_mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0x88)),
            _mm256_shuffle_ps(even, odd, 0xDD)};
}

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

// Encodes eight lanes up to the position in the slot table. Returns the upper part of the new
// states.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i divide_avx2(EncodeLanesAvx2& lanes, const DivisorsAvx2& by,
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
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.position),
                       _mm256_add_epi16(remainder, _mm256_srli_epi32(by.freq_start, 16)));
    keep_in_memory(lanes);
    return _mm256_slli_epi32(quotient, kProbBits);
}

// The slots of two lanes, joined without a vector unit.
PACKHORSE_AVX2 PACKHORSE_INLINE long long load_two_slots(const uint16_t* slots,
                                                         const uint32_t* position) {
    uint64_t both = uint64_t{slots[static_cast<uint16_t>(position[1])]} << 32 |
                    slots[static_cast<uint16_t>(position[0])];
    keep_in_register(both);
    return static_cast<long long>(both);
}

PACKHORSE_AVX2 PACKHORSE_INLINE __m128i load_four_slots(const uint16_t* slots,
                                                        const uint32_t* position) {
    return _mm_insert_epi64(_mm_cvtsi64_si128(load_two_slots(slots, position)),
                            load_two_slots(slots, position + 2), 1);
}

PACKHORSE_AVX2 PACKHORSE_INLINE void finish_avx2(EncodeLanesAvx2& lanes, const uint16_t* slots,
                                                 __m256i upper) {
    const __m256i eight = _mm256_setr_m128i(load_four_slots(slots, lanes.position),
                                            load_four_slots(slots, lanes.position + 4));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes.state), _mm256_add_epi32(upper, eight));
}

// Encodes rounds of 128 lanes, a quarter of them at a time. The divisors of a group are loaded one
// group ahead, and its slots a quarter of the lanes behind: the chain of these steps is longer than
// a processor looks ahead.
PACKHORSE_AVX2 inline uint8_t* encode_rounds_wide_avx2(const uint8_t* codes, std::size_t n_rounds,
                                                       const RansVectorTables& tables,
                                                       uint32_t* states, uint8_t* words,
                                                       Ahead& ahead) {
    if (n_rounds == 0) return words;
    constexpr std::size_t kGroups = kMaxLanes / 8, kQuarter = kGroups / 4;
    // A quarter more, so that the first one has a predecessor to finish.
    EncodeLanesAvx2 groups[kGroups + kQuarter] = {};
    for (std::size_t g = 0; g < kGroups; ++g)
        std::memcpy(groups[g].state, states + 8 * g, sizeof groups[g].state);
    DivisorsAvx2 by =
        load_divisors_avx2(tables.divisors, codes + kMaxLanes * (n_rounds - 1) + 3 + 96);
    __m256i waiting[kQuarter];
    for (__m256i& upper : waiting) upper = _mm256_setzero_si256();
    EncodeLanesAvx2* before = groups + kGroups;
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        for (std::size_t quarter = 4; quarter-- > 0;) {
            EncodeLanesAvx2* const here = groups + kQuarter * quarter;
            const uint8_t* at = codes + kMaxLanes * r + quarter;
            const uint8_t* next = quarter > 0 ? at - 1 : at + 3 - (r > 0 ? kMaxLanes : 0);
#pragma GCC unroll 4
            for (std::size_t k = kQuarter; k-- > 0;) {
                const __m256i upper = divide_avx2(here[k], by, words);
                by = load_divisors_avx2(tables.divisors, k > 0 ? at + 32 * (k - 1) : next + 96);
                finish_avx2(before[k], tables.slots, waiting[k]);
                waiting[k] = upper;
            }
            before = here;
        }
    }
    for (std::size_t k = kQuarter; k-- > 0;) finish_avx2(groups[k], tables.slots, waiting[k]);
    for (std::size_t g = 0; g < kGroups; ++g)
        std::memcpy(states + 8 * g, groups[g].state, sizeof groups[g].state);
    return words;
}

#endif

}  // namespace packhorse
