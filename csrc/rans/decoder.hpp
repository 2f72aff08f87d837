// A decoder of one stream: its state, and setting it up from the fields of the stream before its
// words (docs/format.md, 6.4).
#pragma once

#include <bit>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/symbols.hpp"
#include "rans/model.hpp"

namespace packhorse {

constexpr std::size_t kRoundWordsNbytes =
    2 * kMaxLanes;                             // a round takes at most one word for each lane
constexpr std::size_t kVectorLoadNbytes = 64;  // words are loaded up to 32 at a time
constexpr std::size_t kWordsMargin = kRoundWordsNbytes + kVectorLoadNbytes;
// What may be read before the words of a stream: the portable path loads a word, and AVX2 a half of
// a register. With 128 lanes their states are there.
constexpr std::size_t kWordsLead = 16;
constexpr std::size_t kTableMargin = 4;  // entries before and behind a table that AVX2 may load

struct alignas(64) RansDecoder {
    uint32_t states[kMaxLanes];
    uint32_t table_memory[kProbSum + 2 * kTableMargin];
    BucketEntries buckets;
    BucketBounds bounds;  // for 16 lanes and AVX-512
    BucketHalves halves;  // of 64 buckets, for AVX-512 without VBMI2
    BucketParts parts;    // for AVX-512 with VBMI2
    PairTables pairs;     // of 32 buckets, for AVX2
    BucketBytes narrow;   // of 32 buckets, for NEON
    AliasTables alias;
    RansModel model;
    bool has_table;  // if not, entries are found in the buckets
    RawPlanes raw;
    uint32_t lanes_log;
    const uint8_t* words;
    const uint8_t* words_end;
    const uint8_t* escapes;
    const uint8_t* escapes_end;
    bool on_padded_copy;
    uint8_t padded[kWordsLead + 2 * kWordsMargin];

    uint32_t* table() { return table_memory + kTableMargin; }
    const uint32_t* table() const { return table_memory + kTableMargin; }
};

// The fields before the model.
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

// Finds states, raw bit planes, escapes and words, which follow the models, at `src`.
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

// Whether a code path of x86-64 finds entries in the buckets rather than in a table of 4096.
inline bool looks_up_buckets(const RansDecoder& decoder, Isa isa) {
    const bool wide = decoder.lanes_log == kMaxLanesLog;
    if (isa >= Isa::kAvx512 && (wide || decoder.lanes_log == kShortLanesLog))
        return decoder.model.n_buckets() > 0;
    return isa >= Isa::kAvx2 && wide && decoder.model.n_buckets() == kNarrowBuckets;
}

// Builds the tables of `decoder.model` that `isa` needs.
inline void build_rans_tables(RansDecoder& decoder, Isa isa) {
    const uint32_t n_buckets = decoder.model.n_buckets();
    if (n_buckets > 0) build_alias(decoder.model, decoder.alias);
    if (looks_up_buckets(decoder, isa)) {
        fill_bucket_entries(decoder.model, decoder.alias, decoder.buckets);
        if (decoder.lanes_log == kShortLanesLog)
            fill_bucket_bounds(n_buckets, decoder.buckets, decoder.bounds);
        else if (isa >= Isa::kAvx512Vbmi2)
            fill_bucket_parts(decoder.model, decoder.alias, decoder.buckets, decoder.parts);
        else if (n_buckets == kWideBuckets)
            fill_bucket_halves(decoder.alias, decoder.buckets, decoder.halves);
        else if (isa < Isa::kAvx512)
            fill_pair_tables(decoder.alias, decoder.buckets, decoder.pairs);
        decoder.has_table = false;
        return;
    }
#if PACKHORSE_ARM
    if (isa >= Isa::kNeon && decoder.lanes_log == kMaxLanesLog && n_buckets == kNarrowBuckets) {
        fill_bucket_entries(decoder.model, decoder.alias, decoder.buckets);
        fill_bucket_bytes(decoder.model, decoder.alias, decoder.buckets, decoder.narrow);
        decoder.has_table = false;
        return;
    }
#endif
    fill_decode_table(decoder.model, decoder.alias, decoder.table());
    decoder.has_table = true;
}

// Parses and checks the stream of a plane of `n` units, without building tables.
inline Status rans_read(const uint8_t* src, std::size_t nbytes, std::size_t n, RansDecoder& out) {
    RansHeader header;
    Status status = read_rans_header(src, nbytes, header, out);
    if (status != Status::kOk) return status;
    std::size_t used = 0;
    status =
        read_model(src + kModelOffset, nbytes - kModelOffset, header.raw.n_bits, out.model, used);
    if (status != Status::kOk) return status;
    if (header.n_escapes > 0 && !out.model.has_escape()) return Status::kEscapeCount;
    const std::size_t at = kModelOffset + used;
    return read_rans_body(src + at, nbytes - at, n, header, out);
}

// Does the same and makes the decoder ready. Units will be rotated by `turn` bits to the right:
// that is free in the tables, and saves a pass over units of one byte.
inline Status rans_open(const uint8_t* src, std::size_t nbytes, std::size_t n, uint32_t turn,
                        Isa isa, RansDecoder& out) {
    const Status status = rans_read(src, nbytes, n, out);
    if (status != Status::kOk) return status;
    out.model.turn = turn;
    out.model.escape_byte = std::rotr(out.model.escape_byte, static_cast<int>(turn));
    for (uint32_t p = 0; p < out.raw.n; ++p)
        out.raw.bits[p] = static_cast<uint8_t>((out.raw.bits[p] + 8 - turn) % 8);
    build_rans_tables(out, isa);
    return status;
}

}  // namespace packhorse
