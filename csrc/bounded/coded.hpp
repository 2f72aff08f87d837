// Coded messages (docs/format.md, section 13.2): bounded messages whose codes are entropy coded
// with tables that both sides keep.
#pragma once

#include "bounded/tables.hpp"

namespace packhorse {

constexpr std::size_t kCodedHeaderNbytes = 32;
constexpr uint8_t kCodedMagic[4] = {0x89, 0x50, 0x48, 0x43};

// A run of codes of one segment.
struct CodedPiece {
    std::size_t segment;
    uint64_t n;
    std::size_t codes_at;  // in the bounded message
    std::size_t codes_nbytes;
    std::size_t coded_at;  // in the coded message, once that is known
    std::size_t coded_nbytes;
};

inline std::vector<CodedPiece> cut_pieces(const BoundedMessage& message) {
    std::vector<CodedPiece> pieces;
    for (std::size_t s = 0; s < message.segments.size(); ++s) {
        const BoundedSegment& segment = message.segments[s];
        for (uint64_t at = 0; at < segment.entry.n; at += kCodedPiece) {
            const uint64_t n = std::min(kCodedPiece, segment.entry.n - at);
            const std::size_t before = segment_codes_nbytes(at, segment.entry.bits);
            pieces.push_back({s, n, segment.codes_at + before,
                              segment_codes_nbytes(n, segment.entry.bits), 0, 0});
        }
    }
    return pieces;
}

// Where the codes of a bounded message end.
inline std::size_t codes_end(const BoundedMessage& message) {
    std::size_t end = bounded_head_nbytes(message.segments.size());
    for (const BoundedSegment& segment : message.segments)
        end += segment_codes_nbytes(segment.entry.n, segment.entry.bits);
    return end;
}

// Scratch memory of a thread: a plane, words and escapes of a piece.
constexpr std::size_t kCodedScratchNbytes = 4 * (kCodedPiece + kPlaneSlack);

// Writes the stream of a plane of `n` codes, of at most `capacity` bytes. Returns 0 if it does not
// fit.
inline std::size_t write_codes(const uint8_t* plane, std::size_t n, const CodeTable& table,
                               uint8_t* scratch, uint8_t* dst, std::size_t capacity, Isa isa) {
    const uint32_t lanes_log = choose_lanes_log(n);
    const std::size_t n_lanes = std::size_t{1} << lanes_log;
    uint8_t* const words_end = scratch + 2 * n + kPlaneSlack;
    uint8_t* const escapes_end = words_end + n;
    RansEncoded encoded;
    encoded.words = words_end;
    encoded.escapes = escapes_end;
    std::fill_n(encoded.states, n_lanes, kStateLowerBound);
    Ahead nothing;
    rans_encode(plane, n, table.model, table.encode, lanes_log, encoded, nothing, isa);
    const uint32_t raw_bits = table.model.raw_bits;
    const RawBits raw{raw_bits, used_bits(plane, n, (1u << raw_bits) - 1)};
    const auto words_nbytes = static_cast<std::size_t>(words_end - encoded.words);
    const auto n_escapes = static_cast<std::size_t>(escapes_end - encoded.escapes);
    const std::size_t nbytes =
        kModelOffset + 4 * n_lanes + raw_nbytes(raw, n) + n_escapes + words_nbytes;
    if (nbytes >= capacity) return 0;
    dst[0] = static_cast<uint8_t>(lanes_log);
    dst[1] = static_cast<uint8_t>(kProbBits);
    dst[2] = static_cast<uint8_t>(raw.n_bits);
    dst[3] = static_cast<uint8_t>(raw.mask);
    store(dst + 4, static_cast<uint32_t>(n_escapes));
    std::memcpy(dst + kModelOffset, encoded.states, 4 * n_lanes);
    uint8_t* const at = write_raw_bits(plane, n, raw, dst + kModelOffset + 4 * n_lanes, isa);
    std::memcpy(at, encoded.escapes, n_escapes);
    std::memcpy(at + n_escapes, encoded.words, words_nbytes);
    return nbytes;
}

// Decodes a stream to a plane of `n` codes. `decoder` is a copy of the table's.
inline bool read_codes(const uint8_t* src, std::size_t nbytes, std::size_t n, RansDecoder& decoder,
                       uint8_t* plane, Isa isa) {
    RansHeader header;
    if (read_rans_header(src, nbytes, header, decoder) != Status::kOk) return false;
    if (header.raw.n_bits != decoder.model.raw_bits) return false;
    if (header.n_escapes > 0 && !decoder.model.has_escape()) return false;
    if (read_rans_body(src + kModelOffset, nbytes - kModelOffset, n, header, decoder) !=
        Status::kOk)
        return false;
    decoder.has_table = !looks_up_buckets(decoder, isa);
    Ahead nothing;
    if (rans_decode(decoder, n, plane, nothing, isa) != Status::kOk) return false;
    add_raw_bits(decoder.raw, 0, n, plane, isa);
    uint8_t carried[2 * kMaxLanes];
    return rans_close(decoder, false, carried) == Status::kOk;
}

// Encodes a bounded message without faults to `dst`, which has room for it, the models, and 4 bytes
// for each piece. Returns the bytes that were written.
inline std::size_t encode_coded(const uint8_t* src, std::size_t nbytes,
                                const BoundedMessage& message, const CodeTables& tables,
                                bool with_models, uint8_t* dst, std::size_t threads, Isa isa) {
    std::vector<CodedPiece> pieces = cut_pieces(message);
    const std::size_t head = bounded_head_nbytes(message.segments.size());
    const std::size_t tail = codes_end(message);
    const std::size_t models_nbytes = with_models ? tables.models_nbytes() : 0;
    const std::size_t sizes_at = kCodedHeaderNbytes + models_nbytes;
    const std::size_t head_at = sizes_at + 4 * pieces.size();
    const std::size_t pieces_at = head_at + head + (nbytes - tail);
    if (models_nbytes > 0) std::memcpy(dst + kCodedHeaderNbytes, tables.models(), models_nbytes);
    std::memcpy(dst + head_at, src, head);
    std::memcpy(dst + head_at + head, src + tail, nbytes - tail);
    // Each piece is written where it would lie if none before it was coded.
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, pieces.size()));
    const Scratch scratch(n_workers * kCodedScratchNbytes);
    parallel_for(pieces.size(), n_workers, [&](std::size_t worker, std::size_t p) {
        CodedPiece& piece = pieces[p];
        uint8_t* const to = dst + pieces_at + (piece.codes_at - head);
        const uint32_t bits = message.segments[piece.segment].entry.bits;
        const CodeTable* const table = tables.of(piece.segment);
        if (table != nullptr && bits <= kMaxCodedBits && table->encodes_all()) {
            uint8_t* const plane = scratch.get() + worker * kCodedScratchNbytes;
            unpack_codes(src + piece.codes_at, piece.n, bits, plane, isa);
            piece.coded_nbytes =
                write_codes(plane, piece.n, *table, plane + kCodedPiece + kPlaneSlack, to,
                            piece.codes_nbytes, isa);
        }
        if (piece.coded_nbytes == 0) std::memcpy(to, src + piece.codes_at, piece.codes_nbytes);
    });
    uint8_t* to = dst + pieces_at;
    for (std::size_t p = 0; p < pieces.size(); ++p) {
        const CodedPiece& piece = pieces[p];
        const std::size_t used = piece.coded_nbytes > 0 ? piece.coded_nbytes : piece.codes_nbytes;
        std::memmove(to, dst + pieces_at + (piece.codes_at - head), used);
        store(dst + sizes_at + 4 * p, static_cast<uint32_t>(piece.coded_nbytes));
        to += used;
    }
    const auto coded_nbytes = static_cast<std::size_t>(to - dst);
    std::memset(dst, 0, kCodedHeaderNbytes);
    std::memcpy(dst, kCodedMagic, sizeof kCodedMagic);
    dst[4] = kBoundedVersion;
    dst[5] = with_models ? 1 : 0;
    store(dst + 8, static_cast<uint32_t>(pieces.size()));
    store(dst + 16, static_cast<uint64_t>(coded_nbytes));
    store(dst + 24, static_cast<uint32_t>(tables.models_nbytes()));
    store(dst + 28, tables.crc());
    store(dst + kBoundedCrcOffset, crc32c(dst, coded_nbytes, isa));
    return coded_nbytes;
}

// The parts of a coded message. The bounded message in it is checked only as far as its parts must
// be found; its own checksum and decode_bounded() check the rest.
struct CodedMessage {
    BoundedFault fault = BoundedFault::kNone;
    bool has_models = false;
    std::size_t models_nbytes = 0;  // of the models that it needs
    uint32_t models_crc = 0;
    std::size_t head_at = 0;
    std::size_t head_nbytes = 0;
    std::size_t tail_nbytes = 0;
    std::size_t message_nbytes = 0;  // of the bounded message
    std::vector<CodedPiece> pieces;
};

inline BoundedFault read_coded_header(const uint8_t* src, std::size_t nbytes, CodedMessage& found,
                                      Isa isa) {
    if (nbytes < kCodedHeaderNbytes) return BoundedFault::kShort;
    if (std::memcmp(src, kCodedMagic, sizeof kCodedMagic) != 0) return BoundedFault::kMagic;
    if (src[4] == 0) return BoundedFault::kVersionZero;
    if (src[4] > kBoundedVersion) return BoundedFault::kVersion;
    const auto declared = load<uint64_t>(src + 16);
    if (declared > nbytes) return BoundedFault::kShort;
    if (declared < nbytes) return BoundedFault::kSize;
    if (src[5] > 1) return BoundedFault::kField;
    if (!all_zero(src + 6, 2)) return BoundedFault::kReserved;
    if (message_crc(src, nbytes, isa) != load<uint32_t>(src + kBoundedCrcOffset))
        return BoundedFault::kChecksum;
    found.has_models = src[5] == 1;
    found.models_nbytes = load<uint32_t>(src + 24);
    found.models_crc = load<uint32_t>(src + 28);
    return BoundedFault::kNone;
}

// Finds the pieces of a bounded message whose head is at `head`; it may have at most `capacity`
// bytes.
inline BoundedFault find_pieces(const uint8_t* head, std::size_t left, std::size_t capacity,
                                CodedMessage& found) {
    if (left < kBoundedHeaderNbytes) return BoundedFault::kSize;
    const uint64_t n_segments = load<uint32_t>(head + 8);
    found.message_nbytes = load<uint64_t>(head + 16);
    found.head_nbytes = bounded_head_nbytes(n_segments);
    if (found.head_nbytes > left || found.message_nbytes > capacity) return BoundedFault::kSize;
    std::size_t at = found.head_nbytes;
    for (uint64_t s = 0; s < n_segments; ++s) {
        const BoundedEntry entry =
            read_entry(head + kBoundedHeaderNbytes + s * kBoundedEntryNbytes);
        if (entry.bits < 1 || entry.bits > kMaxBoundedBits) return BoundedFault::kTable;
        const std::size_t codes_nbytes = segment_codes_nbytes(entry.n, entry.bits);
        if (at > found.message_nbytes || codes_nbytes > found.message_nbytes - at)
            return BoundedFault::kSize;
        for (uint64_t first = 0; first < entry.n; first += kCodedPiece) {
            const uint64_t n = std::min(kCodedPiece, entry.n - first);
            const std::size_t before = segment_codes_nbytes(first, entry.bits);
            found.pieces.push_back({s, n, at + before, segment_codes_nbytes(n, entry.bits), 0, 0});
        }
        at += codes_nbytes;
    }
    if (at > found.message_nbytes) return BoundedFault::kSize;
    found.tail_nbytes = found.message_nbytes - at;
    return BoundedFault::kNone;
}

// Finds all parts of a coded message that stands for at most `capacity` bytes.
inline CodedMessage read_coded(const uint8_t* src, std::size_t nbytes, std::size_t capacity,
                               Isa isa) {
    CodedMessage found;
    found.fault = read_coded_header(src, nbytes, found, isa);
    if (found.fault != BoundedFault::kNone) return found;
    const std::size_t sizes_at = kCodedHeaderNbytes + (found.has_models ? found.models_nbytes : 0);
    const uint64_t n_pieces = load<uint32_t>(src + 8);
    found.fault = BoundedFault::kSize;
    if (sizes_at > nbytes || 4 * n_pieces > nbytes - sizes_at) return found;
    found.head_at = sizes_at + 4 * n_pieces;
    const BoundedFault fault =
        find_pieces(src + found.head_at, nbytes - found.head_at, capacity, found);
    if (fault != BoundedFault::kNone) {
        found.fault = fault;
        return found;
    }
    std::size_t left = nbytes - found.head_at - found.head_nbytes;
    if (n_pieces != found.pieces.size() || left < found.tail_nbytes) return found;
    left -= found.tail_nbytes;
    for (std::size_t p = 0; p < found.pieces.size(); ++p) {
        CodedPiece& piece = found.pieces[p];
        piece.coded_nbytes = load<uint32_t>(src + sizes_at + 4 * p);
        piece.coded_at = nbytes - left;
        const std::size_t used = piece.coded_nbytes > 0 ? piece.coded_nbytes : piece.codes_nbytes;
        if (used > left) return found;
        left -= used;
    }
    if (left == 0) found.fault = BoundedFault::kNone;
    return found;
}

inline bool decode_piece(const uint8_t* src, const CodedPiece& piece, uint32_t bits,
                         const CodeTables& tables, RansDecoder& decoder, uint8_t* plane,
                         uint8_t* dst, Isa isa) {
    if (piece.coded_nbytes == 0) {
        std::memcpy(dst + piece.codes_at, src + piece.coded_at, piece.codes_nbytes);
        return true;
    }
    const CodeTable* const table = tables.of(piece.segment);
    if (table == nullptr || bits > kMaxCodedBits) return false;
    std::memcpy(&decoder, &table->decoder, sizeof decoder);
    if (!read_codes(src + piece.coded_at, piece.coded_nbytes, piece.n, decoder, plane, isa))
        return false;
    std::memset(plane + piece.n, 0, kBoundedLanes);
    pack_codes(plane, piece.n, bits, dst + piece.codes_at, isa);
    return true;
}

// Decodes a coded message without a fault, whose models are those of the tables, to the bytes of
// its bounded message. Returns whether all streams are valid.
inline bool decode_coded(const uint8_t* src, const CodedMessage& message, const CodeTables& tables,
                         uint8_t* dst, std::size_t threads, Isa isa) {
    const uint8_t* const head = src + message.head_at;
    std::memcpy(dst, head, message.head_nbytes);
    std::memcpy(dst + message.message_nbytes - message.tail_nbytes, head + message.head_nbytes,
                message.tail_nbytes);
    const std::size_t n_workers =
        std::max<std::size_t>(1, std::min(threads, message.pieces.size()));
    const Scratch planes(n_workers * kCodedScratchNbytes);
    const auto decoders = std::make_unique<RansDecoder[]>(n_workers);
    std::atomic<bool> is_valid{true};
    parallel_for(message.pieces.size(), n_workers, [&](std::size_t worker, std::size_t p) {
        const CodedPiece& piece = message.pieces[p];
        const uint8_t* const entry =
            head + kBoundedHeaderNbytes + piece.segment * kBoundedEntryNbytes;
        if (!decode_piece(src, piece, read_entry(entry).bits, tables, decoders[worker],
                          planes.get() + worker * kCodedScratchNbytes, dst, isa))
            is_valid = false;
    });
    return is_valid;
}

}  // namespace packhorse
