// Unpacks rows of weights in memory to BF16 elements, and checks arrays from elsewhere.
// Unpacking never accesses memory outside of the arrays, whatever they hold, as long as their
// shapes are right: it checks each exception's place before it writes there. check_weights checks
// all other rules of section 12.
#pragma once

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "rows/weights_slices.hpp"

namespace packhorse {

// The arrays of a packed weight, n_rows rows.
struct PackedWeights {
    const uint8_t* low_bytes;
    const uint8_t* high_bits;
    const uint8_t* first_exponents;
    const uint8_t* exception_starts;  // i32, at any address
    const uint8_t* exceptions;        // u32, at any address
    std::size_t n_rows;
    std::size_t n_exceptions;

    int64_t start(std::size_t row) const { return load<int32_t>(exception_starts + 4 * row); }
    uint32_t exception(std::size_t i) const { return load<uint32_t>(exceptions + 4 * i); }
};

enum class WeightFault : int {
    kNone = 0,
    kFirstExponent = 1,  // out of range
    kEnds = 2,      // the starts do not begin with 0, or do not end with the number of exceptions
    kDescend = 3,   // the starts descend
    kColumn = 4,    // an exception's column is out of range
    kAscend = 5,    // columns do not ascend
    kHole = 6,      // an exception has a packed element
    kMantissa = 7,  // code 0 has a mantissa
    kPadding = 8,   // padding is not zero
};

// A fault, where it is, and what was found there.
struct WeightCheck {
    WeightFault fault = WeightFault::kNone;
    std::size_t row = 0;
    int64_t place = 0;  // a column, or the index of an exception
    int64_t found = 0;
};

template <class Format, uint32_t... kSlices>
inline void unpack_row(const WeightShape<Format>& shape, const PackedWeights& from, std::size_t row,
                       uint8_t* dst, Isa isa, std::integer_sequence<uint32_t, kSlices...>) {
    const std::size_t n_steps = shape.n_steps;
    const uint8_t* const low = from.low_bytes + row * shape.n_padded;
    const uint8_t* const high = from.high_bits + row * shape.n_high_bytes;
    const auto unpack = [&]<uint32_t kSlice>() {
        const std::size_t start = kSlice * n_steps;
        if (start >= shape.n_columns) return;
        unpack_slice<Format, kSlice>(
            {low + start, high, n_steps, std::min(n_steps, shape.n_columns - start),
             from.first_exponents[row], dst + 2 * start},
            isa);
    };
    (unpack.template operator()<kSlices>(), ...);
}

// Writes a row's exceptions to their places. Returns false if an exception's place is outside of
// the row.
inline bool fill_holes(const PackedWeights& from, std::size_t row, std::size_t n_columns,
                       uint8_t* dst) {
    const int64_t start = from.start(row), stop = from.start(row + 1);
    if (start < 0 || start > stop || stop > static_cast<int64_t>(from.n_exceptions)) return false;
    for (auto i = static_cast<std::size_t>(start); i < static_cast<std::size_t>(stop); ++i) {
        const uint32_t exception = from.exception(i);
        const std::size_t column = exception & 0xFFFF;
        if (column >= n_columns) return false;
        store(dst + 2 * column, static_cast<uint16_t>(exception >> 16));
    }
    return true;
}

// Unpacks rows [row_start, row_stop). Returns the number of all rows on success, otherwise a row
// that has an exception outside of it.
template <class Format>
inline std::size_t unpack_weights(const PackedWeights& from, std::size_t n_columns,
                                  std::size_t row_start, std::size_t row_stop, uint8_t* dst,
                                  std::size_t threads, Isa isa) {
    const WeightShape<Format> shape(n_columns);
    const std::size_t n_rows = row_stop - row_start, at_once = weight_rows_at_once(n_columns);
    std::atomic<std::size_t> bad{from.n_rows};
    parallel_for((n_rows + at_once - 1) / at_once, threads, [&](std::size_t, std::size_t block) {
        const std::size_t start = row_start + block * at_once;
        const std::size_t stop = std::min(start + at_once, row_stop);
        uint8_t* const to = dst + 2 * (start - row_start) * n_columns;
        for (std::size_t row = start; row < stop; ++row) {
            uint8_t* const elements = to + 2 * (row - start) * n_columns;
            unpack_row<Format>(shape, from, row, elements, isa,
                               std::make_integer_sequence<uint32_t, Format::kSlices>());
            if (!fill_holes(from, row, n_columns, elements)) bad = row;
        }
    });
    return bad;
}

template <class Format, uint32_t... kSlices>
PACKHORSE_INLINE void part_high_bits(const WeightShape<Format>& shape,
                                     const uint8_t* __restrict bits, uint8_t* __restrict dst,
                                     std::integer_sequence<uint32_t, kSlices...>) {
    const auto part = [&]<uint32_t kSlice>() PACKHORSE_VECTORISED {
        for (std::size_t j = 0; j < shape.n_steps; ++j)
            dst[kSlice * shape.n_steps + j] =
                take_high_bits<Format, kSlice>(bits, shape.n_steps, j);
    };
    (part.template operator()<kSlices>(), ...);
}

// The bytes of the packed elements of a row.
struct PackedRow {
    const uint8_t* low;
    const uint8_t* high;

    int64_t operator[](std::size_t column) const { return high[column] << 8 | low[column]; }
};

// Checks the exceptions of one row.
inline WeightCheck check_exceptions(const PackedWeights& from, std::size_t row,
                                    std::size_t n_columns, const PackedRow& packed) {
    const int64_t start = from.start(row), stop = from.start(row + 1);
    if (start < 0 || start > stop || stop > static_cast<int64_t>(from.n_exceptions))
        return {WeightFault::kDescend, row, start, stop};
    int64_t before = -1;
    for (int64_t i = start; i < stop; ++i) {
        const int64_t column = from.exception(static_cast<std::size_t>(i)) & 0xFFFF;
        if (column >= static_cast<int64_t>(n_columns))
            return {WeightFault::kColumn, row, i, column};
        if (column <= before) return {WeightFault::kAscend, row, i, column};
        const int64_t element = packed[static_cast<std::size_t>(column)];
        if (element != 0) return {WeightFault::kHole, row, column, element};
        before = column;
    }
    return {};
}

// Returns a number other than 0 if a single packed element of a row breaks a rule, or if padding is
// not zero.
template <class Format>
PACKHORSE_INLINE uint8_t wrong_bits(const WeightShape<Format>& shape, const PackedRow& packed) {
    const uint8_t* __restrict const low = packed.low;
    const uint8_t* __restrict const high = packed.high;
    uint8_t wrong = 0;
    if (Format::kFirstCode != 0)
        for (std::size_t i = 0; i < shape.n_columns; ++i) {
            const bool coded = ((high[i] & 7) | (low[i] & 0x80)) != 0;
            wrong = static_cast<uint8_t>(wrong | (coded ? 0 : low[i]));
        }
    for (std::size_t i = shape.n_columns; i < shape.n_padded; ++i)
        wrong = static_cast<uint8_t>(wrong | low[i] | high[i]);
    return wrong;
}

// Finds the first place where wrong_bits() is not 0.
template <class Format>
inline WeightCheck find_wrong_bits(const WeightShape<Format>& shape, std::size_t row,
                                   const PackedRow& packed) {
    for (std::size_t i = 0; i < shape.n_padded; ++i) {
        const auto place = static_cast<int64_t>(i);
        const int64_t element = packed[i], magnitude = element & 0x7FF;
        if (i >= shape.n_columns && element != 0)
            return {WeightFault::kPadding, row, place, element};
        if (Format::kFirstCode != 0 && magnitude > 0 && magnitude < 0x80)
            return {WeightFault::kMantissa, row, place, element};
    }
    return {};
}

template <class Format>
PACKHORSE_INLINE WeightCheck check_row(const PackedWeights& from, std::size_t row,
                                       const WeightShape<Format>& shape, uint8_t* scratch) {
    const uint8_t first = from.first_exponents[row];
    if (first < Format::kMinFirst || first > Format::kMaxFirst)
        return {WeightFault::kFirstExponent, row, 0, first};
    const PackedRow packed{from.low_bytes + row * shape.n_padded, scratch};
    part_high_bits<Format>(shape, from.high_bits + row * shape.n_high_bytes, scratch,
                           std::make_integer_sequence<uint32_t, Format::kSlices>());
    const WeightCheck check = check_exceptions(from, row, shape.n_columns, packed);
    if (check.fault != WeightFault::kNone || wrong_bits(shape, packed) == 0) return check;
    return find_wrong_bits(shape, row, packed);
}

// Finds the first fault of arrays whose shapes are right.
template <class Format>
inline WeightCheck check_weights(const PackedWeights& from, std::size_t n_columns, Isa isa) {
    const int64_t first = from.start(0), last = from.start(from.n_rows);
    if (first != 0) return {WeightFault::kEnds, 0, 0, first};
    if (last != static_cast<int64_t>(from.n_exceptions))
        return {WeightFault::kEnds, from.n_rows, static_cast<int64_t>(from.n_exceptions), last};
    const WeightShape<Format> shape(n_columns);
    const Scratch scratch(shape.n_padded);
    uint8_t* const high = scratch.get();
    WeightCheck check;
    for (std::size_t row = 0; row < from.n_rows && check.fault == WeightFault::kNone; ++row)
        vectorised(
            isa, [=, &check]() PACKHORSE_VECTORISED { check = check_row(from, row, shape, high); });
    return check;
}

}  // namespace packhorse
