// Decoding rounds of 128 lanes with AVX2 and at most 32 codes (docs/format.md, 6.4). Entries come
// from tables of 16 bytes, which a byte shuffle looks up for 32 lanes at a time.
//
// States are halves of 16 bits, and products are 16-bit ones, as in rans/decode_parts_avx512.hpp.
// A step takes longer than a processor looks ahead, so it is cut: while a quarter of the lanes gets
// its new states, entries are looked up for the next quarter, words are filled in for the quarter
// before, and slots are cut into bytes for the next but one. The order of these pieces in
// decode_quarter matters: other orders are up to a tenth slower.
//
// Shuffles, packs, shifts by a constant, blends by a mask of bytes and insertions share two of the
// four vector units of Zen 4 (half of the units elsewhere), and they are most of the loop. So words
// are filled in with plain logic, and two loads are joined by a blend by a constant, which any unit
// does.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decoder.hpp"
#include "rans/word_order.hpp"

namespace packhorse {

#if PACKHORSE_X86

constexpr std::size_t kQuarterLanes = kMaxLanes / 4;

PACKHORSE_AVX2 PACKHORSE_INLINE __m256i load_avx2(const void* src) {
    return _mm256_load_si256(static_cast<const __m256i*>(src));
}

PACKHORSE_AVX2 PACKHORSE_INLINE void store_avx2(void* dst, __m256i value) {
    _mm256_store_si256(static_cast<__m256i*>(dst), value);
}

PACKHORSE_AVX2 PACKHORSE_INLINE __m256i load_twice(const uint8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
}

// 16 bytes from each of two places. The 16 bytes before `b` are read, too.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i load_both(const uint8_t* a, const uint8_t* b) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b - 16));
    return _mm256_blend_epi32(_mm256_castsi128_si256(low), high, 0xF0);
}

// Takes b where the top bit of `mask` is set. (From the intrinsic, GCC makes a comparison as well.)
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i blend_by_top_bit(__m256i a, __m256i b, __m256i mask) {
    __m256i out;
    asm("vpblendvb %3, %2, %1, %0" : "=x"(out) : "x"(a), "x"(b), "x"(mask));
    return out;
}

// The states of 128 lanes. A quarter has two registers: the first holds its lanes 0 to 7 and 16 to
// 23, the second the others. Packed to bytes they are in order. Where a word is due, `high` has it
// already, as it moved up from `low`, and `low` is zero until the word is filled in.
struct alignas(64) PackedLanes {
    uint16_t high[kMaxLanes];
    uint16_t low[kMaxLanes];

    PACKHORSE_AVX2 explicit PackedLanes(const uint32_t* states) {
        for (std::size_t at = 0; at < kMaxLanes; at += 16) {
            const uint32_t* const from = states + at - at % 32 + at % 32 / 2;
            const __m256i a = load_avx2(from), b = load_avx2(from + 16);
            const __m256i lower = _mm256_set1_epi32(0xFFFF);
            const __m256i lows =
                _mm256_packus_epi32(_mm256_and_si256(a, lower), _mm256_and_si256(b, lower));
            const __m256i highs =
                _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
            store_avx2(low + at, _mm256_permute4x64_epi64(lows, 0xD8));
            store_avx2(high + at, _mm256_permute4x64_epi64(highs, 0xD8));
        }
        keep_in_memory(*this);
    }

    PACKHORSE_AVX2 void store_to(uint32_t* states) const {
        for (std::size_t at = 0; at < kMaxLanes; at += 16) {
            uint32_t* const to = states + at - at % 32 + at % 32 / 2;
            const __m256i lows = load_avx2(low + at), highs = load_avx2(high + at);
            const __m256i a = _mm256_unpacklo_epi16(lows, highs);
            const __m256i b = _mm256_unpackhi_epi16(lows, highs);
            store_avx2(to, _mm256_permute2x128_si256(a, b, 0x20));
            store_avx2(to + 16, _mm256_permute2x128_si256(a, b, 0x31));
        }
    }
};

// Where to look up 32 lanes: the pairs of buckets of their slots, and which part each slot is in.
struct PlacesAvx2 {
    __m256i
        slot_low;  // the lower bytes of the slots; the top bit tells the buckets of a pair apart
    __m256i pair;
    __m256i in_second;  // all ones in lanes that are in the second part, if in the first bucket
    __m256i in_fourth;  // the same, if in the second bucket
};

PACKHORSE_AVX2 PACKHORSE_INLINE void cut_slots(const uint16_t* low, PlacesAvx2& places) {
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    const __m256i a = _mm256_shuffle_epi8(load_avx2(low), order);
    const __m256i b = _mm256_shuffle_epi8(load_avx2(low + 16), order);
    places.slot_low = _mm256_unpacklo_epi64(a, b);
    places.pair = _mm256_and_si256(_mm256_unpackhi_epi64(a, b), _mm256_set1_epi8(0x0F));
}

PACKHORSE_AVX2 PACKHORSE_INLINE void find_parts(const PairTables& tables, PlacesAvx2& places) {
    places.in_second = _mm256_cmpgt_epi8(
        places.slot_low, _mm256_shuffle_epi8(load_twice(tables.last_of_first), places.pair));
    places.in_fourth = _mm256_cmpgt_epi8(
        places.slot_low, _mm256_shuffle_epi8(load_twice(tables.last_of_third), places.pair));
}

// Looks up one byte of the entries of 32 lanes.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i look_up_avx2(const uint8_t (*part)[16],
                                                     const PlacesAvx2& places) {
    const auto in_part = [&](int p) PACKHORSE_AVX2 {
        return _mm256_shuffle_epi8(load_twice(part[p]), places.pair);
    };
    const __m256i low = blend_by_top_bit(in_part(0), in_part(1), places.in_second);
    const __m256i high = blend_by_top_bit(in_part(2), in_part(3), places.in_fourth);
    return blend_by_top_bit(low, high, places.slot_low);
}

// Computes the new states of 16 lanes but for their words, and returns which need one. `f16` is 16
// times the frequency. `bias` has something else in its four high bits.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i step_halves_avx2(uint16_t* high_at, uint16_t* low_at,
                                                         __m256i f16, __m256i bias) {
    const __m256i high = load_avx2(high_at), low = load_avx2(low_at);
    const __m256i slot_mask = _mm256_set1_epi16(kProbSum - 1);
    const __m256i rank = _mm256_and_si256(_mm256_add_epi16(low, bias), slot_mask);
    const __m256i rest =
        _mm256_add_epi16(_mm256_mulhi_epu16(_mm256_andnot_si256(slot_mask, low), f16), rank);
    const __m256i sum = _mm256_add_epi16(_mm256_mullo_epi16(high, f16), rest);
    const __m256i carry = _mm256_min_epu16(_mm256_subs_epu16(rest, sum), _mm256_set1_epi16(1));
    const __m256i upper = _mm256_add_epi16(_mm256_mulhi_epu16(high, f16), carry);
    const __m256i need = _mm256_cmpeq_epi16(upper, _mm256_setzero_si256());
    store_avx2(high_at, _mm256_or_si256(upper, _mm256_and_si256(need, sum)));
    store_avx2(low_at, _mm256_andnot_si256(need, sum));
    return need;
}

// The set of lanes of a quarter, in their order in memory, that need a word.
PACKHORSE_AVX2 PACKHORSE_INLINE uint32_t set_of_lanes(__m256i first, __m256i second) {
    return static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(first, second)));
}

// Where the shuffle of a set of eight lanes lies, in bytes. It has as many ones as the set.
PACKHORSE_AVX2 PACKHORSE_INLINE const uint8_t* word_order_at(uint32_t offset) {
    return reinterpret_cast<const uint8_t*>(&kWordOrder) + sizeof kWordOrder.before + offset;
}

PACKHORSE_AVX2 PACKHORSE_INLINE const uint8_t* skip_words(const uint8_t* words, uint32_t needs) {
    return words + 2 * static_cast<std::size_t>(__builtin_popcount(needs));
}

// Fills in the words of a quarter. Its lanes take words in order, and eight neighbours make up half
// of a register.
PACKHORSE_AVX2 PACKHORSE_INLINE void fill_words(uint32_t needs, const uint8_t*& words,
                                                uint16_t* low) {
    constexpr uint32_t kSet = 0xFF0;  // of eight lanes, times the length of a shuffle
    const uint32_t a = needs << 4 & kSet, b = needs >> 4 & kSet;
    const uint32_t c = needs >> 12 & kSet, d = needs >> 20 & kSet;
    const uint8_t* const at_b = skip_words(words, a);
    const uint8_t* const at_c = skip_words(at_b, b);
    const uint8_t* const at_d = skip_words(at_c, c);
    const __m256i first =
        _mm256_shuffle_epi8(load_both(words, at_c), load_both(word_order_at(a), word_order_at(c)));
    const __m256i second =
        _mm256_shuffle_epi8(load_both(at_b, at_d), load_both(word_order_at(b), word_order_at(d)));
    store_avx2(low, _mm256_or_si256(load_avx2(low), first));
    store_avx2(low + 16, _mm256_or_si256(load_avx2(low + 16), second));
    words = skip_words(at_d, d);
}

// The entries of 32 lanes, byte by byte.
struct EntriesAvx2 {
    __m256i f16_low, f16_high, bias, units;
};

// Interleaves the bytes of half of two registers.
template <int kHalf>
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i unpack_half(__m256i a, __m256i b) {
    return kHalf == 0 ? _mm256_unpacklo_epi8(a, b) : _mm256_unpackhi_epi8(a, b);
}

// Computes the new states of half of a quarter.
template <int kHalf>
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i step_half(const EntriesAvx2& entries, uint16_t* high,
                                                  uint16_t* low) {
    const __m256i f16 = _mm256_and_si256(unpack_half<kHalf>(entries.f16_low, entries.f16_high),
                                         _mm256_set1_epi16(static_cast<short>(0xFFF0)));
    return step_halves_avx2(high + 16 * kHalf, low + 16 * kHalf, f16,
                            unpack_half<kHalf>(entries.bias, entries.f16_low));
}

PACKHORSE_AVX2 PACKHORSE_INLINE EntriesAvx2 look_up_entries(const PairTables& tables,
                                                            const PlacesAvx2& places) {
    return {look_up_avx2(tables.byte[0], places), look_up_avx2(tables.byte[1], places),
            look_up_avx2(tables.byte[2], places), look_up_avx2(tables.byte[3], places)};
}

// Decodes quarter `q` but for its words, and returns its units. `entries` are its own, and become
// those of the next quarter; `places` are where to look up that one, and become those of the next
// but one. `needs` is the set of lanes of the quarter before that wait for words, and becomes that
// of this one.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i decode_quarter(PackedLanes& lanes, std::size_t q,
                                                       const PairTables& tables,
                                                       EntriesAvx2& entries, PlacesAvx2& places,
                                                       uint32_t& needs, const uint8_t*& words) {
    uint16_t* const high = lanes.high + kQuarterLanes * q;
    uint16_t* const low = lanes.low + kQuarterLanes * q;
    EntriesAvx2 next;
    const __m256i units = entries.units;
    const __m256i first = step_half<0>(entries, high, low);
    next.f16_low = look_up_avx2(tables.byte[0], places);
    const __m256i second = step_half<1>(entries, high, low);
    next.f16_high = look_up_avx2(tables.byte[1], places);
    fill_words(needs, words, lanes.low + kQuarterLanes * ((q + 3) % 4));
    next.bias = look_up_avx2(tables.byte[2], places);
    next.units = look_up_avx2(tables.byte[3], places);
    keep_in_memory(lanes);
    PlacesAvx2 next_places;
    cut_slots(lanes.low + kQuarterLanes * ((q + 2) % 4), next_places);
    find_parts(tables, next_places);
    places = next_places;
    entries = next;
    needs = set_of_lanes(first, second);
    keep_in_memory(lanes);
    return units;
}

// Interleaves the units of the quarters.
PACKHORSE_AVX2 PACKHORSE_INLINE void order_units_avx2(const __m256i* units, uint8_t* dst) {
    const __m256i ab[2] = {_mm256_unpacklo_epi8(units[0], units[1]),
                           _mm256_unpackhi_epi8(units[0], units[1])};
    const __m256i cd[2] = {_mm256_unpacklo_epi8(units[2], units[3]),
                           _mm256_unpackhi_epi8(units[2], units[3])};
    auto* to = reinterpret_cast<__m256i*>(dst);
    for (int i = 0; i < 2; ++i) {
        const __m256i a = _mm256_unpacklo_epi16(ab[i], cd[i]);
        const __m256i b = _mm256_unpackhi_epi16(ab[i], cd[i]);
        _mm256_storeu_si256(to + i, _mm256_permute2x128_si256(a, b, 0x20));
        _mm256_storeu_si256(to + 2 + i, _mm256_permute2x128_si256(a, b, 0x31));
    }
}

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round, one
// register of words more, and kWordsLead bytes before them.
PACKHORSE_AVX2 inline void decode_rounds_pairs_avx2(RansDecoder& decoder, std::size_t n_rounds,
                                                    uint8_t* dst, Ahead& shared_ahead) {
    constexpr std::size_t kLast = kMaxLanes - kQuarterLanes;
    PackedLanes lanes(decoder.states);
    Ahead ahead = shared_ahead;
    const uint8_t* words = decoder.words;
    const PairTables& tables = decoder.pairs;
    PlacesAvx2 places;
    cut_slots(lanes.low, places);
    find_parts(tables, places);
    EntriesAvx2 entries = look_up_entries(tables, places);
    cut_slots(lanes.low + kQuarterLanes, places);
    find_parts(tables, places);
    uint32_t needs = 0;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        __m256i units[4];
#pragma GCC unroll 4
        for (std::size_t q = 0; q < 4; ++q) {
            ahead.quarter_step();
            units[q] = decode_quarter(lanes, q, tables, entries, places, needs, words);
        }
        order_units_avx2(units, dst);
    }
    fill_words(needs, words, lanes.low + kLast);
    lanes.store_to(decoder.states);
    shared_ahead = ahead;
    decoder.words = words;
}

#endif

}  // namespace packhorse
