// Decoding rounds of 16 lanes, which short streams have, with AVX-512 (docs/format.md, 6.4).
//
// A round waits for the round before it, so what counts is the length of the chain from one state
// to the next. Its longest part is to give words to the lanes that need one. With at most 64 codes
// that part does not wait for the products: the alias tables live in registers, and beside each
// entry is the largest state after which a lane needs a word (BucketBounds).
#pragma once

#include <bit>

#include "common/dispatch.hpp"
#include "rans/decode_avx512.hpp"
#include "rans/decoder.hpp"
#include "rans/tables_avx512.hpp"

namespace packhorse {

#if PACKHORSE_X86

// 16 lanes with their entries and new states, but for the words.
struct ShortStepAvx512 {
    __m512i entry, next;
    __mmask16 need;
};

// Entries are loaded from the table of 4096.
class LoadedEntriesAvx512 {
  public:
    PACKHORSE_AVX512 explicit LoadedEntriesAvx512(const RansDecoder& decoder)
        : table_(decoder.table()) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE ShortStepAvx512 step(__m512i state) const {
        const __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(kProbSum - 1));
        const __m512i entry = _mm512_i32gather_epi32(slot, table_, sizeof *table_);
        const __m512i next = next_states_avx512(state, entry);
        return {entry, next, need_words_avx512(next)};
    }

  private:
    const uint32_t* table_;
};

// 64 entries of 32 bits.
struct WideTableAvx512 {
    Table32Avx512 lower, upper;

    PACKHORSE_AVX512 explicit WideTableAvx512(const uint32_t* entries)
        : lower(entries), upper(entries + 32) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE __m512i look_up(__m512i index) const {
        const __mmask16 in_upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        return _mm512_mask_mov_epi32(lower.look_up(index), in_upper, upper.look_up(index));
    }
};

// Entries are found in the alias tables.
template <class Table, uint32_t kBuckets>
class BucketEntriesAvx512 {
  public:
    PACKHORSE_AVX512 explicit BucketEntriesAvx512(const RansDecoder& decoder)
        : threshold_(decoder.alias.threshold),
          first_(decoder.buckets.first),
          second_(decoder.buckets.second),
          first_bound_(decoder.bounds.first),
          second_bound_(decoder.bounds.second) {}

    PACKHORSE_AVX512 PACKHORSE_INLINE ShortStepAvx512 step(__m512i state) const {
        constexpr unsigned kSlotsLog = std::countr_zero(kProbSum / kBuckets);
        const __m512i bucket = _mm512_srli_epi32(state, kSlotsLog);  // and bits that tables ignore
        const __m512i slot = _mm512_and_si512(state, _mm512_set1_epi32(kProbSum - 1));
        // All ones in lanes whose slot is below the threshold. A mask register would take longer.
        const __m512i in_first =
            _mm512_srai_epi32(_mm512_sub_epi32(slot, threshold_.look_up(bucket)), 31);
        const __m512i bound =
            pick(in_first, first_bound_.look_up(bucket), second_bound_.look_up(bucket));
        const __m512i entry = pick(in_first, first_.look_up(bucket), second_.look_up(bucket));
        return {entry, next_states_avx512(state, entry), _mm512_cmple_epu32_mask(state, bound)};
    }

  private:
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i pick(__m512i in_first, __m512i first,
                                                          __m512i second) {
        return _mm512_ternarylogic_epi32(in_first, first, second, 0xCA);
    }

    Table threshold_, first_, second_, first_bound_, second_bound_;
};

// Decodes rounds of 16 lanes in one register. The caller knows that there are 16 words for each
// round, and one register of words more.
template <class Entries>
PACKHORSE_AVX512 inline void decode_rounds_short_avx512(RansDecoder& decoder, std::size_t n_rounds,
                                                        uint8_t* dst) {
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const Entries entries(decoder);
    __m512i state = _mm512_load_si512(decoder.states);
    const uint8_t* words = decoder.words;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += 16) {
        const ShortStepAvx512 step = entries.step(state);
        state = fill_in_words_avx512(step.next, step.need, words);
        const __m128i units = _mm512_cvtepi32_epi8(_mm512_srli_epi32(step.entry, 24));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm_shuffle_epi8(units, order));
    }
    _mm512_store_si512(decoder.states, state);
    decoder.words = words;
}

PACKHORSE_AVX512 inline void decode_rounds_short_avx512_any(RansDecoder& decoder,
                                                            std::size_t n_rounds, uint8_t* dst) {
    using Narrow = BucketEntriesAvx512<Table32Avx512, kNarrowBuckets>;
    using Wide = BucketEntriesAvx512<WideTableAvx512, kWideBuckets>;
    switch (decoder.model.n_buckets()) {
        case kNarrowBuckets:
            return decode_rounds_short_avx512<Narrow>(decoder, n_rounds, dst);
        case kWideBuckets:
            return decode_rounds_short_avx512<Wide>(decoder, n_rounds, dst);
        default:
            return decode_rounds_short_avx512<LoadedEntriesAvx512>(decoder, n_rounds, dst);
    }
}

#endif

}  // namespace packhorse
