// A few differences from a base (docs/format.md, 6.7): code that encoding and decoding share. Only
// the units that differ take bytes. Each is named by the number of units of its class that are left
// out before it, and the class of a unit follows from the base alone: the smaller a float is, the
// smaller are its steps, and the likelier it is that an update changes it.
#pragma once

#include <algorithm>

#include "delta/delta.hpp"
#include "delta/sparse_sets.hpp"

namespace packhorse {

// A chunk with more changes than one in this number is not coded as a few differences. It would
// take as many bytes as other differences do, and longer.
constexpr std::size_t kUnitsOfSparseChange = 16;

constexpr std::size_t max_sparse_changes(std::size_t n) {
    return n / kUnitsOfSparseChange;
}

// Bytes of a row of units of changes (delta/sparse_encode.hpp). Four of them lie in the row of
// differences, and places and gaps in the rows of keys and tokens.
constexpr std::size_t sparse_row_nbytes(std::size_t n, uint32_t unit_nbytes) {
    return round_up((max_sparse_changes(n) + kSetUnits) * unit_nbytes, 64);
}

// The fields of a class.
struct SparseClass {
    uint32_t n_changes = 0;
    uint32_t gap_shift = 0;
    uint32_t run_shift = 0;  // or kSparseNoSizes, or kSparseEverySize
    uint32_t size_shift = 0;
};

// The fields before the numbers of a stream.
template <class Unit>
struct SparseHeader {
    uint32_t n_classes = 1;
    Unit cuts[kMaxSparseClasses - 1];  // unused ones are above all units
    SparseClass classes[kMaxSparseClasses] = {};

    SparseHeader() { std::fill(std::begin(cuts), std::end(cuts), static_cast<Unit>(~Unit{0})); }

    std::size_t nbytes() const {
        return 1 + (n_classes - 1) * sizeof(Unit) + n_classes * kSparseClassNbytes;
    }

    std::size_t n_changes() const {
        std::size_t sum = 0;
        for (uint32_t c = 0; c < n_classes; ++c) sum += classes[c].n_changes;
        return sum;
    }
};

template <class Unit>
inline uint8_t* write_sparse_header(const SparseHeader<Unit>& header, uint8_t* dst) {
    *dst++ = static_cast<uint8_t>(header.n_classes);
    for (uint32_t t = 0; t + 1 < header.n_classes; ++t, dst += sizeof(Unit))
        store(dst, header.cuts[t]);
    for (uint32_t c = 0; c < header.n_classes; ++c, dst += kSparseClassNbytes) {
        const SparseClass& fields = header.classes[c];
        dst[0] = static_cast<uint8_t>(fields.n_changes);
        dst[1] = static_cast<uint8_t>(fields.n_changes >> 8);
        dst[2] = static_cast<uint8_t>(fields.n_changes >> 16);
        dst[3] = static_cast<uint8_t>(fields.gap_shift);
        dst[4] = static_cast<uint8_t>(fields.run_shift);
        dst[5] = static_cast<uint8_t>(fields.size_shift);
    }
    return dst;
}

inline Status check_sparse_class(const SparseClass& fields, uint32_t unit_bits) {
    const bool has_sizes = fields.run_shift != kSparseNoSizes;
    if (fields.n_changes == 0)
        return fields.gap_shift == 0 && fields.run_shift == 0 && fields.size_shift == 0
                   ? Status::kOk
                   : Status::kReserved;
    if (fields.gap_shift > kMaxSparseCountShift) return Status::kBadField;
    if (has_sizes && fields.run_shift != kSparseEverySize &&
        fields.run_shift > kMaxSparseCountShift)
        return Status::kBadField;
    if (!has_sizes) return fields.size_shift == 0 ? Status::kOk : Status::kReserved;
    return fields.size_shift <= std::min(unit_bits - 1, kMaxSparseSizeShift) ? Status::kOk
                                                                             : Status::kBadField;
}

// Parses the fields before the numbers of a stream of `n` units.
template <class Unit>
inline Status read_sparse_header(const uint8_t* src, std::size_t nbytes, std::size_t n,
                                 SparseHeader<Unit>& header) {
    if (nbytes < 1) return Status::kStreamLength;
    header.n_classes = src[0];
    if (header.n_classes < 1 || header.n_classes > kMaxSparseClasses) return Status::kBadField;
    if (nbytes < header.nbytes()) return Status::kStreamLength;
    const uint8_t* at = src + 1;
    for (uint32_t t = 0; t + 1 < header.n_classes; ++t, at += sizeof(Unit)) {
        header.cuts[t] = load<Unit>(at);
        if (header.cuts[t] >> (kUnitBits<Unit> - 1) != 0) return Status::kBadField;
        if (t > 0 && header.cuts[t] < header.cuts[t - 1]) return Status::kBadField;
    }
    for (uint32_t c = 0; c < header.n_classes; ++c, at += kSparseClassNbytes) {
        header.classes[c] = {static_cast<uint32_t>(at[0] | at[1] << 8 | at[2] << 16), at[3], at[4],
                             at[5]};
        const Status status = check_sparse_class(header.classes[c], kUnitBits<Unit>);
        if (status != Status::kOk) return status;
    }
    // Each change takes at least two bits, so a short stream cannot ask for much memory.
    const std::size_t n_changes = header.n_changes();
    if (n_changes > n || n_changes > 4 * (nbytes - header.nbytes())) return Status::kBadField;
    return Status::kOk;
}

// Calls work.template operator()<kCuts>() for a number of cuts that is at least n_classes - 1. No
// unit is at or above a cut that the header leaves unused. (A function for each number of cuts
// would be as fast, but there would be four times as many.)
template <class Unit, class Work>
inline auto with_cuts(const SparseHeader<Unit>& header, const Work& work) {
    return header.n_classes <= 4 ? work.template operator()<3>()
                                 : work.template operator()<kMaxSparseClasses - 1>();
}

// Memory for the changes of a chunk. `places` ascend, and units[i] is the new unit at places[i].
template <class Unit>
struct SparseChanges {
    uint32_t* places;
    Unit* units;
    std::size_t n = 0;
};

// Writes some changes into a copy of units [first, end) of their chunk, and returns the next one.
template <class Unit>
inline std::size_t apply_changes(const SparseChanges<Unit>& changes, std::size_t next,
                                 std::size_t first, std::size_t end, uint8_t* copy) {
    for (; next < changes.n && changes.places[next] < end; ++next)
        store(copy + (changes.places[next] - first) * sizeof(Unit), changes.units[next]);
    return next;
}

}  // namespace packhorse
