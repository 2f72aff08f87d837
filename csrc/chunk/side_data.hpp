// Side data of a frame (docs/format.md, 2 and 6.5): the tensor is read as a matrix, and has a byte
// for each row and each column, which together predict plane 0. In optimizer states, and to a
// degree in weights, the logarithm of |value| is a number for the row plus a number for the column
// plus noise. The exponent is that logarithm rounded down, so the means of rows and columns predict
// it.
//
// Zeros (plane 0 is 0) say nothing about size and are left out of the means. All arithmetic is in
// integers, so the side data, and with them the frame, are the same on every machine.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "chunk/choose.hpp"
#include "chunk/chunk.hpp"

namespace packhorse {

// Extracts plane 0 of `n` units.
PACKHORSE_INLINE void lead_bytes(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                                 uint8_t* __restrict dst) {
    const std::size_t unit = spec.unit_nbytes;
    if (unit == 1) return rotate_bytes(src, n, spec.rotation, dst);
    const uint8_t* top = src + unit - 2;
    const uint32_t shift = 8 - spec.rotation;
    if (unit == 2)
        for (std::size_t i = 0; i < n; ++i)
            dst[i] = static_cast<uint8_t>(load<uint16_t>(top + 2 * i) >> shift);
    else if (unit == 4)
        for (std::size_t i = 0; i < n; ++i)
            dst[i] = static_cast<uint8_t>(load<uint32_t>(src + 4 * i) >> (16 + shift));
    else
        for (std::size_t i = 0; i < n; ++i)
            dst[i] = static_cast<uint8_t>(load<uint16_t>(top + 8 * i) >> shift);
}

// The sum of bytes that are not zero, and their number.
struct ByteSums {
    uint32_t sum = 0;
    uint32_t count = 0;
};

PACKHORSE_INLINE ByteSums add_row(const uint8_t* row, std::size_t n, uint32_t* __restrict sums,
                                  uint32_t* __restrict counts) {
    ByteSums of_row;
    for (std::size_t i = 0; i < n; ++i) {
        const uint32_t there = row[i] != 0 ? 1 : 0;
        sums[i] += row[i];
        counts[i] += there;
        of_row.sum += row[i];
        of_row.count += there;
    }
    return of_row;
}

#if PACKHORSE_X86
PACKHORSE_AVX2 inline ByteSums read_row_avx2(const uint8_t* src, std::size_t n,
                                             const PlaneSpec& spec, uint8_t* row, uint32_t* sums,
                                             uint32_t* counts) {
    lead_bytes(src, n, spec, row);
    return add_row(row, n, sums, counts);
}
#endif

// Adds a piece of a row to the sums of its columns. Returns the sums of the piece. `row` is scratch
// memory.
inline ByteSums read_row(const uint8_t* src, std::size_t n, const PlaneSpec& spec, uint8_t* row,
                         uint32_t* sums, uint32_t* counts, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) return read_row_avx2(src, n, spec, row, sums, counts);
#endif
    (void)isa;
    lead_bytes(src, n, spec, row);
    return add_row(row, n, sums, counts);
}

// Four times the mean, in 2^-16, or `otherwise` if there is nothing to average.
constexpr int64_t quarters(uint64_t sum, uint64_t count, int64_t otherwise) {
    return count == 0 ? otherwise : static_cast<int64_t>((sum << 18) / count);
}

// Writes numbers as bytes: shifts them so that the smallest becomes 0, rounds them to whole
// quarters, and limits them to 255.
inline void write_quarters(const std::vector<int64_t>& numbers, uint8_t* dst) {
    const int64_t least = *std::min_element(numbers.begin(), numbers.end());
    for (std::size_t i = 0; i < numbers.size(); ++i)
        dst[i] =
            static_cast<uint8_t>(std::min<int64_t>(255, (numbers[i] - least + (1 << 15)) >> 16));
}

// Part of a matrix: the first `n_columns` units of every `row_step`-th row.
struct MatrixView {
    const uint8_t* src;
    std::size_t n_rows;
    std::size_t n_columns;
    std::size_t row_step;    // in rows
    std::size_t row_nbytes;  // of a row of the whole matrix
};

// Computes the side data of a view, n_rows + n_columns bytes.
inline void fill_side(const MatrixView& view, const PlaneSpec& spec, uint8_t* side, Isa isa) {
    constexpr std::size_t kPiece =
        8192;  // units of a row at a time, so that scratch memory stays in L1
    std::vector<uint32_t> sums(view.n_columns), counts(view.n_columns);
    std::vector<ByteSums> rows(view.n_rows);
    std::vector<uint8_t> row(std::min(kPiece, view.n_columns));
    for (std::size_t i = 0; i < view.n_rows; ++i)
        for (std::size_t at = 0; at < view.n_columns; at += kPiece) {
            const std::size_t n = std::min(kPiece, view.n_columns - at);
            const uint8_t* from =
                view.src + i * view.row_step * view.row_nbytes + at * spec.unit_nbytes;
            const ByteSums piece =
                read_row(from, n, spec, row.data(), sums.data() + at, counts.data() + at, isa);
            rows[i].sum += piece.sum;
            rows[i].count += piece.count;
        }
    uint64_t total = 0, count = 0;
    for (const ByteSums& of_row : rows) {
        total += of_row.sum;
        count += of_row.count;
    }
    const int64_t mean = quarters(total, count, 0);
    std::vector<int64_t> numbers(view.n_rows);
    for (std::size_t i = 0; i < view.n_rows; ++i)
        numbers[i] = quarters(rows[i].sum, rows[i].count, mean);
    write_quarters(numbers, side);
    numbers.resize(view.n_columns);
    for (std::size_t j = 0; j < view.n_columns; ++j)
        numbers[j] = quarters(sums[j], counts[j], mean);
    write_quarters(numbers, side + view.n_rows);
}

// The estimated bytes of plane 0 of a matrix, without and with prediction.
struct SideEstimate {
    std::size_t plain_nbytes;
    std::size_t predicted_nbytes;
};

inline std::size_t entropy_nbytes(const uint8_t* units, std::size_t n) {
    if (n == 0) return 0;
    Histogram histogram;
    count_bytes(units, n, 0, histogram);
    return scale_cost(entropy_cost(histogram), histogram.total, n);
}

// Estimates from a sample of at most `most_rows` rows and `most_columns` columns.
inline SideEstimate estimate_side(const uint8_t* src, std::size_t n_rows, std::size_t n_columns,
                                  const PlaneSpec& spec, std::size_t most_rows,
                                  std::size_t most_columns, Isa isa) {
    MatrixView view{src, std::min(n_rows, most_rows), std::min(n_columns, most_columns), 1,
                    n_columns * spec.unit_nbytes};
    view.row_step = view.n_rows > 1 ? (n_rows - 1) / (view.n_rows - 1) : 1;
    const std::size_t n = view.n_rows * view.n_columns;
    std::vector<uint8_t> side(view.n_rows + view.n_columns);
    fill_side(view, spec, side.data(), isa);
    const auto scratch = std::make_unique_for_overwrite<uint8_t[]>(4 * n);
    uint8_t* const plane = scratch.get();
    uint8_t* const yielded = plane + n;
    uint8_t* const sorted = yielded + n;
    uint8_t* const classes = sorted + n;
    for (std::size_t i = 0; i < view.n_rows; ++i)
        lead_bytes(src + i * view.row_step * view.row_nbytes, view.n_columns, spec,
                   plane + i * view.n_columns);
    const SideData data{side.data(), side.data() + view.n_rows, view.n_columns};
    apply_prediction(data, 0, n, plane, classes, yielded, isa);
    const ClassStarts starts = count_classes(classes, n, kCutsOfClasses, isa);
    sort_by_class(yielded, classes, n, kCutsOfClasses, starts, sorted, isa);
    std::size_t predicted = 0;
    for (uint32_t c = 0; c < kPredictionClasses; ++c)
        predicted += entropy_nbytes(sorted + starts.at[c], starts.count(c));
    const std::size_t plain = entropy_nbytes(plane, n);
    const auto scale = [&](std::size_t nbytes) {
        return static_cast<std::size_t>(static_cast<double>(nbytes) * static_cast<double>(n_rows) /
                                        static_cast<double>(view.n_rows) *
                                        static_cast<double>(n_columns) /
                                        static_cast<double>(view.n_columns));
    };
    return {scale(plain), scale(predicted)};
}

}  // namespace packhorse
