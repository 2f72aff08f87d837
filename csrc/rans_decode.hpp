// rANS decoding (docs/format.md, 6.4).
//
// A RansDecoder is set up once for a stream (rans_open) and then yields units in order, any number
// of rounds at a time, so that a chunk can be decoded and merged block by block in L1. Several
// inner loops read the same stream:
// - AVX-512, at most 64 codes: the alias tables live in six or ten registers, nothing is looked
// up in memory;
// - others, 128 lanes: one load a lane from a table of 4096 entries (16 KiB, in L1), with AVX-512,
// AVX2 or the baseline (rans_decode_avx512.hpp, rans_decode_avx2.hpp, rans_decode_portable.hpp);
// - fewer lanes: the same table, one lane at a time.
// Vector loops read whole registers of words. Near the end of the stream they run on a zero-padded
// copy of its last bytes, so that nothing beyond the stream is read, and check after every round
// that no more words were taken than there were.
#pragma once

#include "dispatch.hpp"
#include "rans_decode_avx2.hpp"
#include "rans_decode_avx512.hpp"
#include "rans_decode_portable.hpp"
#include "rans_model.hpp"
#include "tables_avx512.hpp"

namespace packhorse {

constexpr std::size_t kRoundWordsNbytes = 2 * kMaxLanes;  // a round takes at most one word a lane
constexpr std::size_t kVectorLoadNbytes = 32;             // words are loaded 16 at a time
constexpr std::size_t kWordsMargin = kRoundWordsNbytes + kVectorLoadNbytes;
constexpr std::size_t kWordsLead = 2;  // the portable path may load the word before

struct alignas(64) RansDecoder {
    uint32_t states[kMaxLanes];
    uint32_t table[kProbSum];
    BucketEntries buckets;
    BucketHalves halves;  // of 64 buckets
    AliasTables alias;
    RansModel model;
    bool has_table;  // or else its entries are found in the buckets
    RawPlanes raw;
    uint32_t lanes_log;
    const uint8_t* words;
    const uint8_t* words_end;
    const uint8_t* escapes;
    const uint8_t* escapes_end;
    bool on_padded_copy;
    uint8_t padded[kWordsLead + 2 * kWordsMargin];
};

// What the fields before the model say.
struct RansHeader {
    RawBits raw;
    std::size_t n_escapes;
};

inline Status read_rans_header(const uint8_t* src, std::size_t nbytes, RansHeader& header,
                               RansDecoder& out) {
    if (nbytes < kModelOffset) return Status::kStreamLength;
    out.lanes_log = src[0];
    if (out.lanes_log < kMinLanesLog || out.lanes_log > kMaxLanesLog || src[1] != kProbBits)
        return Status::kBadField;
    header.n_escapes = load<uint32_t>(src + 4);
    return parse_raw_bits(src[2], src[3], kMaxRansRawBits, header.raw);
}

// Finds states, raw bit planes, escapes and words in what follows the models, at `src`.
inline Status read_rans_body(const uint8_t* src, std::size_t nbytes, std::size_t n,
                             const RansHeader& header, RansDecoder& out) {
    const std::size_t n_lanes = std::size_t{1} << out.lanes_log;
    const std::size_t raw = raw_nbytes(header.raw, n);
    const std::size_t before_escapes = 4 * n_lanes + raw;
    if (nbytes < before_escapes || nbytes - before_escapes < header.n_escapes)
        return Status::kStreamLength;
    std::memcpy(out.states, src, 4 * n_lanes);
    for (std::size_t lane = 0; lane < n_lanes; ++lane)
        if (out.states[lane] < kStateLowerBound) return Status::kBadField;
    out.raw = find_raw_planes(header.raw, src + 4 * n_lanes, n);
    out.escapes = src + before_escapes;
    out.escapes_end = out.escapes + header.n_escapes;
    out.words = out.escapes_end;
    out.words_end = src + nbytes;
    out.on_padded_copy = false;
    if (!symbols_fit(out.escapes, header.n_escapes, header.raw)) return Status::kBadField;
    return (out.words_end - out.words) % 2 == 0 ? Status::kOk : Status::kStreamLength;
}

// Builds the tables of `decoder.model`, those that `isa` needs.
inline void build_rans_tables(RansDecoder& decoder, Isa isa) {
    if (decoder.model.n_buckets() > 0) {
        build_alias(decoder.model, decoder.alias);
        if (isa >= Isa::kAvx512 && decoder.lanes_log == kMaxLanesLog) {
            fill_bucket_entries(decoder.model, decoder.alias, decoder.buckets);
            if (decoder.model.n_buckets() == kWideBuckets)
                fill_bucket_halves(decoder.alias, decoder.buckets, decoder.halves);
            decoder.has_table = false;
            return;
        }
    }
    fill_decode_table(decoder.model, decoder.alias, decoder.table);
    decoder.has_table = true;
}

// Parses and checks a whole stream of a plane of `n` units.
inline Status rans_open(const uint8_t* src, std::size_t nbytes, std::size_t n, Isa isa,
                        RansDecoder& out) {
    RansHeader header;
    Status status = read_rans_header(src, nbytes, header, out);
    if (status != Status::kOk) return status;
    std::size_t used = 0;
    status =
        read_model(src + kModelOffset, nbytes - kModelOffset, header.raw.n_bits, out.model, used);
    if (status != Status::kOk) return status;
    if (header.n_escapes > 0 && !out.model.has_escape()) return Status::kEscapeCount;
    const std::size_t at = kModelOffset + used;
    status = read_rans_body(src + at, nbytes - at, n, header, out);
    if (status == Status::kOk) build_rans_tables(out, isa);
    return status;
}

// The entry of a slot, from the buckets.
PACKHORSE_INLINE uint32_t entry_in_buckets(const RansDecoder& decoder, uint32_t slot) {
    const uint32_t bucket = slot * decoder.model.n_buckets() / kProbSum;
    const bool in_second = slot >= decoder.alias.threshold[bucket];
    return in_second ? decoder.buckets.second[bucket] : decoder.buckets.first[bucket];
}

// A round of `n` <= n_lanes units, for any number of lanes, every word checked.
template <bool kHasTable>
inline Status decode_round(RansDecoder& decoder, std::size_t n, uint8_t* dst) {
    const uint32_t quarter_log = decoder.lanes_log - 2;
    const uint32_t n_lanes = 1u << decoder.lanes_log;
    for (uint32_t lane = 0; lane < n_lanes; ++lane) {
        const uint32_t position = 4 * (lane & ((1u << quarter_log) - 1)) + (lane >> quarter_log);
        if (position >= n) continue;
        uint32_t state = decoder.states[lane];
        const uint32_t slot = state & (kProbSum - 1);
        const uint32_t entry = kHasTable ? decoder.table[slot] : entry_in_buckets(decoder, slot);
        state = (entry & (kProbSum - 1)) * (state >> kProbBits) +
                ((state + (entry >> kProbBits)) & (kProbSum - 1));
        if (state < kStateLowerBound) {
            if (decoder.words_end - decoder.words < 2) return Status::kWordsExhausted;
            state = state << 16 | load<uint16_t>(decoder.words);
            decoder.words += 2;
        }
        decoder.states[lane] = state;
        dst[position] = static_cast<uint8_t>(entry >> 24);
    }
    return Status::kOk;
}

// Full rounds without a check, for a caller that knows n_rounds * n_lanes words to be there.
// Branch-free: whether a lane needs a word is a coin toss that no predictor wins.
PACKHORSE_INLINE void decode_rounds_unchecked(RansDecoder& decoder, std::size_t n_rounds,
                                              uint8_t* dst) {
    const uint32_t quarter = 1u << (decoder.lanes_log - 2);
    const uint8_t* words = decoder.words;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += 4 * quarter)
        for (uint32_t k = 0; k < 4; ++k) {
            uint32_t* states = decoder.states + k * quarter;
            for (uint32_t j = 0; j < quarter; ++j) {
                const uint32_t state = states[j];
                const uint32_t entry = decoder.table[state & (kProbSum - 1)];
                const uint32_t next = (entry & (kProbSum - 1)) * (state >> kProbBits) +
                                      ((state + (entry >> kProbBits)) & (kProbSum - 1));
                const uint32_t need = next < kStateLowerBound;
                states[j] = next << (16 * need) | (load<uint16_t>(words) & (0 - need));
                words += 2 * need;
                dst[4 * j + k] = static_cast<uint8_t>(entry >> 24);
            }
        }
    decoder.words = words;
}

inline void decode_rounds_portable(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst,
                                   Ahead& ahead) {
    if (decoder.lanes_log == kMaxLanesLog)
        return decode_rounds_wide_portable(decoder.states, decoder.table, n_rounds, decoder.words,
                                           dst, ahead);
    decode_rounds_unchecked(decoder, n_rounds, dst);
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline void decode_rounds_avx2(RansDecoder& decoder, std::size_t n_rounds,
                                              uint8_t* dst, Ahead& ahead) {
    decode_rounds_wide_avx2(decoder.states, decoder.table, n_rounds, decoder.words, dst, ahead);
}

PACKHORSE_AVX2 inline void decode_rounds_scalar_avx2(RansDecoder& decoder, std::size_t n_rounds,
                                                     uint8_t* dst) {
    decode_rounds_unchecked(decoder, n_rounds, dst);
}

// The alias tables of 32 buckets in registers.
struct NarrowBucketsAvx512 {
    Table32Avx512 threshold, first, second;

    PACKHORSE_AVX512 explicit NarrowBucketsAvx512(const RansDecoder& decoder)
        : threshold(decoder.alias.threshold),
          first(decoder.buckets.first),
          second(decoder.buckets.second) {}

    // Entries of twice 16 slots.
    PACKHORSE_AVX512 inline __attribute__((always_inline)) void look_up(const __m512i* slots,
                                                                        __m512i* entries) const {
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

    PACKHORSE_AVX512 inline __attribute__((always_inline)) void look_up(const __m512i* slots,
                                                                        __m512i* entries) const {
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

// 16 lanes, whose entries are known.
PACKHORSE_AVX512 inline __attribute__((always_inline)) void decode_step_avx512(
    __m512i& state, __m512i entry, const uint8_t*& words) {
    const __m512i slot_mask = _mm512_set1_epi32(kProbSum - 1);
    const __m512i rank =
        _mm512_and_si512(_mm512_add_epi32(state, _mm512_srli_epi32(entry, kProbBits)), slot_mask);
    const __m512i freq = _mm512_and_si512(entry, slot_mask);
    state = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(state, kProbBits)), rank);
    const __mmask16 need = _mm512_cmplt_epu32_mask(state, _mm512_set1_epi32(kStateLowerBound));
    const __m512i fresh =
        _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    // The low half of a shifted state is zero, so expanding the words over it under the mask
    // completes the state.
    const __m512i shifted = _mm512_slli_epi32(state, 16);
    state = _mm512_mask_or_epi32(state, need, shifted, _mm512_maskz_expand_epi32(need, fresh));
    words += 2 * static_cast<std::size_t>(__builtin_popcount(need));
}

// 32 lanes; the top bytes of the entries are the units.
template <class Buckets>
PACKHORSE_AVX512 inline __attribute__((always_inline)) void decode_pair_avx512(
    __m512i* states, const Buckets& buckets, const uint8_t*& words, __m512i* entries) {
    const __m512i slot_mask = _mm512_set1_epi32(kProbSum - 1);
    const __m512i slots[2] = {_mm512_and_si512(states[0], slot_mask),
                              _mm512_and_si512(states[1], slot_mask)};
    buckets.look_up(slots, entries);
    for (int i = 0; i < 2; ++i) decode_step_avx512(states[i], entries[i], words);
}

// The top bytes of four registers, side by side in one.
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

PACKHORSE_AVX512 inline void decode_rounds_avx512_any(RansDecoder& decoder, std::size_t n_rounds,
                                                      uint8_t* dst, Ahead& ahead) {
    switch (decoder.model.n_buckets()) {
        case kNarrowBuckets:
            return decode_rounds_avx512<NarrowBucketsAvx512>(decoder, n_rounds, dst, ahead);
        case kWideBuckets:
            return decode_rounds_avx512<WideBucketsAvx512>(decoder, n_rounds, dst, ahead);
        default:
            return decode_rounds_large_avx512(decoder.states, decoder.table, n_rounds,
                                              decoder.words, dst, ahead);
    }
}

#endif

inline void decode_rounds(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst, Ahead& ahead,
                          Isa isa) {
#if PACKHORSE_X86
    const bool wide = decoder.lanes_log == kMaxLanesLog;
    if (isa >= Isa::kAvx512 && wide) return decode_rounds_avx512_any(decoder, n_rounds, dst, ahead);
    if (isa >= Isa::kAvx2)
        return wide ? decode_rounds_avx2(decoder, n_rounds, dst, ahead)
                    : decode_rounds_scalar_avx2(decoder, n_rounds, dst);
#endif
    (void)isa;
    decode_rounds_portable(decoder, n_rounds, dst, ahead);
}

// Moves to a zero-padded copy of the stream's last words.
inline void pad_words(RansDecoder& decoder) {
    const auto left = static_cast<std::size_t>(decoder.words_end - decoder.words);
    std::memset(decoder.padded, 0, sizeof decoder.padded);
    std::memcpy(decoder.padded + kWordsLead, decoder.words, left);
    decoder.words = decoder.padded + kWordsLead;
    decoder.words_end = decoder.words + left;
    decoder.on_padded_copy = true;
}

// `n_rounds` full rounds with as few checks as the words left allow.
inline Status decode_full_rounds(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst,
                                 Ahead& ahead, Isa isa) {
    const std::size_t n_lanes = std::size_t{1} << decoder.lanes_log;
    while (n_rounds > 0) {
        const auto left = static_cast<std::size_t>(decoder.words_end - decoder.words);
        std::size_t safe = 1;
        if (!decoder.on_padded_copy) {
            if (left < kWordsMargin) {
                pad_words(decoder);
                continue;
            }
            safe = (left - kVectorLoadNbytes) / (2 * n_lanes);
        }
        const std::size_t run = safe < n_rounds ? safe : n_rounds;
        decode_rounds(decoder, run, dst, ahead, isa);
        if (decoder.words > decoder.words_end) return Status::kWordsExhausted;
        dst += run * n_lanes;
        n_rounds -= run;
    }
    return Status::kOk;
}

// Gives the next escapes to the units that decoded to the stand-in value.
inline Status patch_escapes(RansDecoder& decoder, uint8_t* dst, std::size_t n) {
    if (!decoder.model.has_escape()) return Status::kOk;
    uint8_t* const end = dst + n;
    for (uint8_t* at = dst; at < end; ++at) {
        at = static_cast<uint8_t*>(
            std::memchr(at, decoder.model.escape_byte, static_cast<std::size_t>(end - at)));
        if (at == nullptr) break;
        if (decoder.escapes == decoder.escapes_end) return Status::kEscapeCount;
        *at = static_cast<uint8_t>(*decoder.escapes++ << decoder.model.raw_bits);
    }
    return Status::kOk;
}

// The next `n` units, without their raw bits; a multiple of n_lanes, except for the last call of a
// stream or class.
inline Status rans_decode(RansDecoder& decoder, std::size_t n, uint8_t* dst, Ahead& ahead,
                          Isa isa) {
    const std::size_t n_rounds = n >> decoder.lanes_log;
    const std::size_t done = n_rounds << decoder.lanes_log;
    Status status = decode_full_rounds(decoder, n_rounds, dst, ahead, isa);
    if (status == Status::kOk && done < n)
        status = decoder.has_table ? decode_round<true>(decoder, n - done, dst + done)
                                   : decode_round<false>(decoder, n - done, dst + done);
    return status == Status::kOk ? patch_escapes(decoder, dst, n) : status;
}

// After the last unit: everything used, and every lane in a state an encoder can have started from.
// Writes the 2 * n_lanes carried bytes, which must be zero if nothing is carried.
inline Status rans_close(const RansDecoder& decoder, bool carries, uint8_t* carried) {
    if (decoder.words != decoder.words_end) return Status::kWordsLeft;
    if (decoder.escapes != decoder.escapes_end) return Status::kEscapeCount;
    for (uint32_t lane = 0; lane < 1u << decoder.lanes_log; ++lane) {
        const uint32_t state = decoder.states[lane];
        if (state >> 16 != 1 || (!carries && state != kStateLowerBound)) return Status::kFinalState;
        store(carried + 2 * lane, static_cast<uint16_t>(state));
    }
    return Status::kOk;
}

}  // namespace packhorse
