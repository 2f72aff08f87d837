// Messages of bounded codes (docs/format.md, section 13): the header, the table of segments, and
// where the parts of a message lie. Reading checks everything that can be known without looking at
// codes.
#pragma once

#include <vector>

#include "bounded/blocks.hpp"
#include "common/checksum.hpp"

namespace packhorse {

enum class BoundedForm : uint32_t { kPlain = 0, kFixed = 1 };

constexpr uint8_t kBoundedMagic[4] = {0x89, 0x50, 0x48, 0x42};

// An entry of the table.
struct BoundedEntry {
    uint64_t n;
    uint64_t n_escapes;
    double step;
    double center;
    double bound;
    uint32_t bits;
    uint32_t doublings;
};

// What is said about a whole message.
struct BoundedHeader {
    uint32_t dtype_code;
    Rounding rounding;
    BoundedForm form;
    uint64_t n_segments;
};

constexpr std::size_t bounded_head_nbytes(uint64_t n_segments) {
    return round_up(kBoundedHeaderNbytes + n_segments * kBoundedEntryNbytes, kBoundedAlignment);
}

// Slots for escapes in the fixed form.
constexpr uint64_t n_bounded_slots(uint64_t n) {
    return std::min(n, kBoundedFreeSlots + n / kBoundedSlotShare);
}

constexpr std::size_t counts_nbytes(uint64_t n_counts) {
    return round_up(2 * n_counts, 8);
}

inline void write_entry(const BoundedEntry& entry, uint8_t* dst) {
    std::memset(dst, 0, kBoundedEntryNbytes);
    store(dst, static_cast<uint32_t>(entry.n));
    store(dst + 4, static_cast<uint32_t>(entry.n_escapes));
    store(dst + 8, entry.step);
    store(dst + 16, entry.center);
    store(dst + 24, entry.bound);
    dst[32] = static_cast<uint8_t>(entry.bits);
    store(dst + 34, static_cast<uint16_t>(entry.doublings));
}

// Writes the header of a message whose other bytes are there, with its checksum.
inline void seal_message(const BoundedHeader& header, uint8_t* dst, std::size_t nbytes, Isa isa) {
    std::memset(dst, 0, kBoundedHeaderNbytes);
    std::memcpy(dst, kBoundedMagic, sizeof kBoundedMagic);
    dst[4] = kBoundedVersion;
    dst[5] = static_cast<uint8_t>(header.dtype_code);
    dst[6] = static_cast<uint8_t>(header.rounding);
    dst[7] = static_cast<uint8_t>(header.form);
    store(dst + 8, static_cast<uint32_t>(header.n_segments));
    store(dst + 16, static_cast<uint64_t>(nbytes));
    store(dst + kBoundedCrcOffset, crc32c(dst, nbytes, isa));
}

// The CRC of a message, with the field that holds it as zero.
inline uint32_t message_crc(const uint8_t* src, std::size_t nbytes, Isa isa) {
    const uint8_t zeros[4] = {};
    uint32_t crc = crc32c_continue(~0u, src, kBoundedCrcOffset, isa);
    crc = crc32c_continue(crc, zeros, sizeof zeros, isa);
    const std::size_t rest = kBoundedCrcOffset + sizeof zeros;
    return ~crc32c_continue(crc, src + rest, nbytes - rest, isa);
}

// A segment of a message, with the offsets of its parts. Where it has no counts, no block has
// escapes.
struct BoundedSegment {
    BoundedEntry entry;
    std::size_t codes_at;
    std::size_t counts_at;
    bool has_counts;
    std::size_t escapes_at;
    uint64_t first_element;  // of the message's elements
};

struct BoundedMessage {
    BoundedHeader header;
    std::vector<BoundedSegment> segments;
    uint64_t n_elements = 0;
    BoundedFault fault = BoundedFault::kNone;
    std::size_t fault_segment = 0;
};

inline bool all_zero(const uint8_t* src, std::size_t nbytes) {
    uint8_t any = 0;
    for (std::size_t i = 0; i < nbytes; ++i) any |= src[i];
    return any == 0;
}

// Whether a step has so few digits that its products with steps are exact.
template <class Numbers>
inline bool is_valid_step(double step, uint32_t bits) {
    return step > 0 && step <= static_cast<double>(Numbers::kMax) &&
           cut_digits<Numbers>(step, bits) == step;
}

template <class Numbers>
inline bool is_number_of(double x) {
    return std::fabs(x) <= static_cast<double>(Numbers::kMax) &&
           static_cast<double>(static_cast<typename Numbers::Real>(x)) == x;
}

template <class Numbers>
inline BoundedFault check_entry(const BoundedEntry& entry, const uint8_t* src) {
    if (src[33] != 0 || load<uint32_t>(src + 36) != 0) return BoundedFault::kReserved;
    const bool in_range = entry.bits >= 1 && entry.bits <= kMaxBoundedBits &&
                          entry.n_escapes <= entry.n && entry.bound > 0 &&
                          std::isfinite(entry.bound) && is_number_of<Numbers>(entry.center);
    if (!in_range || !is_valid_step<Numbers>(entry.step, entry.bits)) return BoundedFault::kTable;
    return BoundedFault::kNone;
}

inline BoundedEntry read_entry(const uint8_t* src) {
    return {load<uint32_t>(src),     load<uint32_t>(src + 4), load<double>(src + 8),
            load<double>(src + 16),  load<double>(src + 24),  src[32],
            load<uint16_t>(src + 34)};
}

inline BoundedFault check_header(const uint8_t* src, std::size_t nbytes, BoundedHeader& header) {
    if (nbytes < kBoundedHeaderNbytes) return BoundedFault::kShort;
    if (std::memcmp(src, kBoundedMagic, sizeof kBoundedMagic) != 0) return BoundedFault::kMagic;
    if (src[4] == 0) return BoundedFault::kVersionZero;
    if (src[4] > kBoundedVersion) return BoundedFault::kVersion;
    const auto declared = load<uint64_t>(src + 16);
    if (declared > nbytes) return BoundedFault::kShort;
    if (declared < nbytes) return BoundedFault::kSize;
    header = {src[5], static_cast<Rounding>(src[6]), static_cast<BoundedForm>(src[7]),
              load<uint32_t>(src + 8)};
    if (!with_element(header.dtype_code, []<class Element>() {})) return BoundedFault::kOtherDtype;
    if (src[6] > 1 || src[7] > 1) return BoundedFault::kField;
    if (header.form == BoundedForm::kFixed && header.n_segments != 1) return BoundedFault::kField;
    if (!all_zero(src + 24, 8)) return BoundedFault::kReserved;
    return BoundedFault::kNone;
}

// Reads the table, and finds the parts. `found.header` is set.
template <class Element>
inline BoundedFault read_table(const uint8_t* src, std::size_t nbytes, BoundedMessage& found) {
    const uint64_t n_segments = found.header.n_segments;
    const std::size_t head = bounded_head_nbytes(n_segments);
    if (head > nbytes) return BoundedFault::kSize;
    const std::size_t table_end = kBoundedHeaderNbytes + n_segments * kBoundedEntryNbytes;
    if (!all_zero(src + table_end, head - table_end)) return BoundedFault::kReserved;
    const bool is_fixed = found.header.form == BoundedForm::kFixed;
    found.segments.resize(n_segments);
    uint64_t at = head, n_counts = 0, n_escapes = 0;
    for (std::size_t s = 0; s < n_segments; ++s) {
        const uint8_t* const entry_at = src + kBoundedHeaderNbytes + s * kBoundedEntryNbytes;
        BoundedSegment& segment = found.segments[s];
        segment.entry = read_entry(entry_at);
        found.fault_segment = s;
        const BoundedFault fault = check_entry<Element>(segment.entry, entry_at);
        if (fault != BoundedFault::kNone) return fault;
        if (!is_fixed && segment.entry.doublings != 0) return BoundedFault::kTable;
        if (is_fixed && segment.entry.n_escapes > n_bounded_slots(segment.entry.n))
            return BoundedFault::kTable;
        segment.first_element = found.n_elements;
        segment.codes_at = at;
        segment.has_counts = is_fixed || segment.entry.n_escapes > 0;
        segment.counts_at = n_counts;    // in counts, from their start, for now
        segment.escapes_at = n_escapes;  // in elements
        found.n_elements += segment.entry.n;
        at += segment_codes_nbytes(segment.entry.n, segment.entry.bits);
        if (segment.has_counts) n_counts += n_bounded_blocks(segment.entry.n);
        n_escapes += is_fixed ? n_bounded_slots(segment.entry.n) : segment.entry.n_escapes;
        // Sums stay far from overflow: each segment adds less than 2^38.
        if (at > nbytes) return BoundedFault::kSize;
    }
    found.fault_segment = 0;
    const std::size_t escapes_start = at + counts_nbytes(n_counts);
    const std::size_t element_nbytes = Element::kNbytes;
    if (escapes_start > nbytes || n_escapes != (nbytes - escapes_start) / element_nbytes ||
        (nbytes - escapes_start) % element_nbytes != 0)
        return BoundedFault::kSize;
    if (!all_zero(src + at + 2 * n_counts, counts_nbytes(n_counts) - 2 * n_counts))
        return BoundedFault::kReserved;
    if (is_fixed) {
        const std::size_t used = escapes_start + element_nbytes * found.segments[0].entry.n_escapes;
        if (!all_zero(src + used, nbytes - used)) return BoundedFault::kReserved;
    }
    for (BoundedSegment& segment : found.segments) {
        segment.counts_at = at + 2 * segment.counts_at;
        segment.escapes_at = escapes_start + element_nbytes * segment.escapes_at;
    }
    return BoundedFault::kNone;
}

// Whether the counts of a segment sum to its escapes.
inline bool counts_sum_up(const uint8_t* src, const BoundedSegment& segment) {
    if (!segment.has_counts) return true;
    uint64_t total = 0;
    const uint64_t n_blocks = n_bounded_blocks(segment.entry.n);
    for (uint64_t b = 0; b < n_blocks; ++b)
        total += load<uint16_t>(src + segment.counts_at + 2 * b);
    return total == segment.entry.n_escapes;
}

// Reads a message up to its codes, and checks its checksum.
inline BoundedMessage read_bounded(const uint8_t* src, std::size_t nbytes, Isa isa) {
    BoundedMessage found;
    found.fault = check_header(src, nbytes, found.header);
    if (found.fault != BoundedFault::kNone) return found;
    if (message_crc(src, nbytes, isa) != load<uint32_t>(src + kBoundedCrcOffset)) {
        found.fault = BoundedFault::kChecksum;
        return found;
    }
    with_element(found.header.dtype_code,
                 [&]<class Element>() { found.fault = read_table<Element>(src, nbytes, found); });
    for (std::size_t s = 0; s < found.segments.size() && found.fault == BoundedFault::kNone; ++s) {
        found.fault_segment = s;
        if (!counts_sum_up(src, found.segments[s])) found.fault = BoundedFault::kEscapeCount;
    }
    return found;
}

}  // namespace packhorse
