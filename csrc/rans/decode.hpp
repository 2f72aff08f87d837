// rANS decoding (docs/format.md, 6.4).
//
// A RansDecoder is set up once for a stream (rans_open) and then yields units in order, any number
// of rounds at a time, so that a chunk can be decoded and merged block by block in L1. There are
// several inner loops for the same stream:
// - AVX-512, at most 64 codes: the alias tables live in registers (rans/decode_parts_avx512.hpp; if
// VBMI2 is missing, rans/decode_buckets_avx512.hpp);
// - AVX2, at most 32 codes: they are looked up by byte shuffles (rans/decode_parts_avx2.hpp);
// - others, 128 lanes: one load a lane from a table of 4096 entries (16 KiB, in L1), with AVX-512,
// AVX2 or the baseline (rans/decode_avx512.hpp, rans/decode_avx2.hpp, rans/decode_portable.hpp);
// - 16 lanes and AVX-512: the alias tables in registers, or else that table
// (rans/decode_short_avx512.hpp);
// - else that table, one lane at a time.
//
// Vector loops read whole registers of words. Near the end of the stream they run on a zero-padded
// copy of its last bytes, so that nothing beyond the stream is read. There they check after a round
// or a few that they took no more words than there were.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decode_avx2.hpp"
#include "rans/decode_avx512.hpp"
#include "rans/decode_buckets_avx512.hpp"
#include "rans/decode_neon.hpp"
#include "rans/decode_parts_avx2.hpp"
#include "rans/decode_parts_avx512.hpp"
#include "rans/decode_portable.hpp"
#include "rans/decode_short_avx512.hpp"
#include "rans/decoder.hpp"

namespace packhorse {

// Finds the entry of a slot in the buckets.
PACKHORSE_INLINE uint32_t entry_in_buckets(const RansDecoder& decoder, uint32_t slot) {
    const uint32_t bucket = slot * decoder.model.n_buckets() / kProbSum;
    const bool in_second = slot >= decoder.alias.threshold[bucket];
    return in_second ? decoder.buckets.second[bucket] : decoder.buckets.first[bucket];
}

// Decodes a round of `n` <= n_lanes units, for any number of lanes. Checks every word.
template <bool kHasTable>
inline Status decode_round(RansDecoder& decoder, std::size_t n, uint8_t* dst) {
    const uint32_t quarter_log = decoder.lanes_log - 2;
    const uint32_t n_lanes = 1u << decoder.lanes_log;
    for (uint32_t lane = 0; lane < n_lanes; ++lane) {
        const uint32_t position = 4 * (lane & ((1u << quarter_log) - 1)) + (lane >> quarter_log);
        if (position >= n) continue;
        uint32_t state = decoder.states[lane];
        const uint32_t slot = state & (kProbSum - 1);
        const uint32_t entry = kHasTable ? decoder.table()[slot] : entry_in_buckets(decoder, slot);
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

// Decodes a unit of each of four neighbouring lanes, from `lane` on. There are no branches, because
// no predictor can guess whether a lane needs a word. The words of all four are loaded at once, so
// that no lane waits for a load whose address depends on the lanes before it.
PACKHORSE_INLINE void decode_four_lanes(const uint32_t* table, uint32_t* states, uint32_t lane,
                                        uint32_t lanes_log, const uint8_t*& words, uint8_t* dst) {
    const uint32_t quarter_log = lanes_log - 2;
    const auto fresh = load<uint64_t>(words);
    uint32_t taken = 0;  // bits
#pragma GCC unroll 4
    for (uint32_t i = lane; i < lane + 4; ++i) {
        const uint32_t state = states[i];
        const uint32_t entry = table[state & (kProbSum - 1)];
        uint32_t next = (entry & (kProbSum - 1)) * (state >> kProbBits) +
                        ((state + (entry >> kProbBits)) & (kProbSum - 1));
        keep_in_register(next);
        const uint32_t n_bits = uint32_t{next < kStateLowerBound} << 4;
        states[i] = next << n_bits | (static_cast<uint32_t>(fresh >> taken) & ((1u << n_bits) - 1));
        taken += n_bits;
        dst[4 * (i & ((1u << quarter_log) - 1)) + (i >> quarter_log)] =
            static_cast<uint8_t>(entry >> 24);
    }
    words += taken / 8;
}

// Decodes full rounds. The caller knows that there are n_rounds * n_lanes words, and one register
// of words more. With a constant number of lanes, states live in registers.
PACKHORSE_INLINE void decode_rounds_unchecked(RansDecoder& decoder, uint32_t lanes_log,
                                              std::size_t n_rounds, uint8_t* dst) {
    const uint32_t n_lanes = 1u << lanes_log;
    uint32_t states[kMaxLanes];
    std::memcpy(states, decoder.states, n_lanes * sizeof *states);
    const uint8_t* words = decoder.words;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += n_lanes)
#pragma GCC unroll 4
        for (uint32_t lane = 0; lane < n_lanes; lane += 4)
            decode_four_lanes(decoder.table(), states, lane, lanes_log, words, dst);
    std::memcpy(decoder.states, states, n_lanes * sizeof *states);
    decoder.words = words;
}

// Does that for any number of lanes. Encoders use 4, 16 and 128.
PACKHORSE_INLINE void decode_rounds_any(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst) {
    switch (decoder.lanes_log) {
        case kMinLanesLog:
            return decode_rounds_unchecked(decoder, kMinLanesLog, n_rounds, dst);
        case kShortLanesLog:
            return decode_rounds_unchecked(decoder, kShortLanesLog, n_rounds, dst);
        default:
            return decode_rounds_unchecked(decoder, decoder.lanes_log, n_rounds, dst);
    }
}

inline void decode_rounds_portable(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst,
                                   Ahead& ahead) {
    if (decoder.lanes_log == kMaxLanesLog)
        return decode_rounds_wide_portable(decoder.states, decoder.table(), n_rounds, decoder.words,
                                           dst, ahead);
    decode_rounds_any(decoder, n_rounds, dst);
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline void decode_rounds_avx2(RansDecoder& decoder, std::size_t n_rounds,
                                              uint8_t* dst, Ahead& ahead) {
    if (!decoder.has_table) return decode_rounds_pairs_avx2(decoder, n_rounds, dst, ahead);
    decode_rounds_large_avx2(decoder, n_rounds, dst, ahead);
}

PACKHORSE_AVX2 inline void decode_rounds_any_avx2(RansDecoder& decoder, std::size_t n_rounds,
                                                  uint8_t* dst) {
    decode_rounds_any(decoder, n_rounds, dst);
}

PACKHORSE_AVX512 inline void decode_rounds_avx512_any(RansDecoder& decoder, std::size_t n_rounds,
                                                      uint8_t* dst, Ahead& ahead) {
    switch (decoder.model.n_buckets()) {
        case kNarrowBuckets:
            return decode_rounds_avx512<NarrowBucketsAvx512>(decoder, n_rounds, dst, ahead);
        case kWideBuckets:
            return decode_rounds_avx512<WideBucketsAvx512>(decoder, n_rounds, dst, ahead);
        default:
            return decode_rounds_large_avx512(decoder.states, decoder.table(), n_rounds,
                                              decoder.words, dst, ahead);
    }
}

PACKHORSE_AVX512_VBMI2 inline void decode_rounds_vbmi2_any(RansDecoder& decoder,
                                                           std::size_t n_rounds, uint8_t* dst,
                                                           Ahead& ahead) {
    switch (decoder.model.n_buckets()) {
        case kNarrowBuckets:
            return decode_rounds_vbmi2<NarrowPartsVbmi2>(decoder, n_rounds, dst, ahead);
        case kWideBuckets:
            return decode_rounds_vbmi2<WidePartsVbmi2>(decoder, n_rounds, dst, ahead);
        default:
            return decode_rounds_large_avx512(decoder.states, decoder.table(), n_rounds,
                                              decoder.words, dst, ahead);
    }
}

#endif

inline void decode_rounds(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst, Ahead& ahead,
                          Isa isa) {
#if PACKHORSE_X86
    const bool wide = decoder.lanes_log == kMaxLanesLog;
    if (isa >= Isa::kAvx512Vbmi2 && wide)
        return decode_rounds_vbmi2_any(decoder, n_rounds, dst, ahead);
    if (isa >= Isa::kAvx512 && wide) return decode_rounds_avx512_any(decoder, n_rounds, dst, ahead);
    if (isa >= Isa::kAvx512 && decoder.lanes_log == kShortLanesLog)
        return decode_rounds_short_avx512_any(decoder, n_rounds, dst);
    if (isa >= Isa::kAvx2)
        return wide ? decode_rounds_avx2(decoder, n_rounds, dst, ahead)
                    : decode_rounds_any_avx2(decoder, n_rounds, dst);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon && decoder.lanes_log == kMaxLanesLog)
        return decode_rounds_neon_any(decoder, n_rounds, dst, ahead);
#endif
    (void)isa;
    decode_rounds_portable(decoder, n_rounds, dst, ahead);
}

// Continues on a zero-padded copy of the stream's last words.
inline void pad_words(RansDecoder& decoder) {
    const auto left = static_cast<std::size_t>(decoder.words_end - decoder.words);
    std::memset(decoder.padded, 0, sizeof decoder.padded);
    std::memcpy(decoder.padded + kWordsLead, decoder.words, left);
    decoder.words = decoder.padded + kWordsLead;
    decoder.words_end = decoder.words + left;
    decoder.on_padded_copy = true;
}

// Decodes `n_rounds` full rounds with as few checks as the number of words left allows.
inline Status decode_full_rounds(RansDecoder& decoder, std::size_t n_rounds, uint8_t* dst,
                                 Ahead& ahead, Isa isa) {
    const std::size_t n_lanes = std::size_t{1} << decoder.lanes_log;
    while (n_rounds > 0) {
        const auto left = static_cast<std::size_t>(decoder.words_end - decoder.words);
        if (!decoder.on_padded_copy && left < kWordsMargin) {
            pad_words(decoder);
            continue;
        }
        const std::size_t there =
            decoder.on_padded_copy
                ? static_cast<std::size_t>(std::end(decoder.padded) - decoder.words)
                : left;
        const std::size_t safe = (there - kVectorLoadNbytes) / (2 * n_lanes);
        const std::size_t run = safe < n_rounds ? safe : n_rounds;
        decode_rounds(decoder, run, dst, ahead, isa);
        if (decoder.words > decoder.words_end) return Status::kWordsExhausted;
        dst += run * n_lanes;
        n_rounds -= run;
    }
    return Status::kOk;
}

// Replaces the units that decoded to the stand-in value by the next escapes.
inline Status patch_escapes(RansDecoder& decoder, uint8_t* dst, std::size_t n) {
    if (!decoder.model.has_escape()) return Status::kOk;
    uint8_t* const end = dst + n;
    for (uint8_t* at = dst; at < end; ++at) {
        at = static_cast<uint8_t*>(
            std::memchr(at, decoder.model.escape_byte, static_cast<std::size_t>(end - at)));
        if (at == nullptr) break;
        if (decoder.escapes == decoder.escapes_end) return Status::kEscapeCount;
        *at = decoder.model.unit_of(*decoder.escapes++);
    }
    return Status::kOk;
}

// Decodes the next `n` units, without their raw bits. `n` is a multiple of n_lanes, except in the
// last call for a stream or class.
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

// Called after the last unit. Checks that everything was used and that every lane is in a state
// that an encoder can start from. Writes the 2 * n_lanes carried bytes, which must be zero if
// nothing is carried.
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
