// Sums of rows in the order that they are given, in fp32: bags of embeddings, and their gradients.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "common/dispatch.hpp"
#include "common/parallel.hpp"

namespace packhorse {

// A matrix of `width` columns whose rows lie in several blocks, one after the other.
template <class Number>
class Rows {
  public:
    Rows(const uint64_t* addresses, const uint64_t* counts, std::size_t n_blocks, std::size_t width)
        : width_(width) {
        if (n_blocks == 1) {
            first_ = at(addresses[0]);
            n_ = counts[0];
            return;
        }
        rows_.reserve(std::accumulate(counts, counts + n_blocks, std::size_t{0}));
        for (std::size_t b = 0; b < n_blocks; ++b)
            for (std::size_t i = 0; i < counts[b]; ++i)
                rows_.push_back(at(addresses[b]) + i * width);
        n_ = rows_.size();
    }

    std::size_t size() const { return n_; }

    Number* operator[](std::size_t row) const {
        return first_ != nullptr ? first_ + row * width_ : rows_[row];
    }

  private:
    static Number* at(uint64_t address) {
        return reinterpret_cast<Number*>(static_cast<uintptr_t>(address));
    }

    std::size_t width_;
    std::size_t n_ = 0;
    Number* first_ = nullptr;  // of a single block
    std::vector<Number*> rows_;
};

// What is summed: sum i has the rows `order[starts[i]]` to `order[starts[i + 1] - 1]`; where `via`
// is given, row r of these is row `via[r]` of the matrix.
struct RowSums {
    const int64_t* order;
    const int64_t* via;
    const int64_t* starts;
    std::size_t width;

    std::size_t row(std::size_t place) const {
        const int64_t index = order[place];
        return static_cast<std::size_t>(via == nullptr ? index : via[index]);
    }
};

// Whether all indices are inside: `order` has `n_order` numbers, `via` has `n_via`, and there are
// `n_rows` rows and `n_sums` sums.
inline bool are_inside(const RowSums& sums, std::size_t n_order, std::size_t n_via,
                       std::size_t n_rows, std::size_t n_sums) {
    const auto is_below = [](const int64_t* numbers, std::size_t n, std::size_t end) {
        uint64_t most = 0;
        for (std::size_t i = 0; i < n; ++i)
            most = std::max(most, static_cast<uint64_t>(numbers[i]));
        return n == 0 || most < end;
    };
    if (!is_below(sums.order, n_order, sums.via == nullptr ? n_rows : n_via)) return false;
    if (sums.via != nullptr && !is_below(sums.via, n_via, n_rows)) return false;
    bool ascends = sums.starts[0] == 0;
    for (std::size_t i = 0; i < n_sums; ++i) ascends &= sums.starts[i] <= sums.starts[i + 1];
    return ascends && static_cast<uint64_t>(sums.starts[n_sums]) == n_order;
}

template <std::size_t kFloats>
struct FloatsOf {
    typedef float Type __attribute__((vector_size(4 * kFloats)));
};

// Rows this far ahead are asked for early.
constexpr std::size_t kRowsAhead = 12;

// Sums kVectors * kFloats columns of a sum's places; the sums stay in registers.
template <std::size_t kVectors, std::size_t kFloats>
PACKHORSE_INLINE void sum_columns(const RowSums& sums, const Rows<const float>& rows,
                                  std::size_t n_places, std::size_t begin, std::size_t end,
                                  std::size_t column, float* dst) {
    using Floats = typename FloatsOf<kFloats>::Type;
    constexpr std::size_t kColumns = kVectors * kFloats;
    Floats total[kVectors];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v) total[v] = Floats{};
    for (std::size_t place = begin; place < end; ++place) {
        if (place + kRowsAhead < n_places) {
            const float* const ahead = rows[sums.row(place + kRowsAhead)] + column;
#pragma GCC unroll 2
            for (std::size_t c = 0; c < kColumns; c += 16) __builtin_prefetch(ahead + c);
        }
        const float* const row = rows[sums.row(place)] + column;
#pragma GCC unroll 8
        for (std::size_t v = 0; v < kVectors; ++v) {
            Floats part;
            std::memcpy(&part, row + kFloats * v, sizeof part);
            total[v] += part;
        }
    }
#pragma GCC unroll 8
    for (std::size_t v = 0; v < kVectors; ++v)
        std::memcpy(dst + column + kFloats * v, &total[v], sizeof total[v]);
}

PACKHORSE_INLINE void sum_column(const RowSums& sums, const Rows<const float>& rows,
                                 std::size_t begin, std::size_t end, std::size_t column,
                                 float* dst) {
    float total = 0;
    for (std::size_t place = begin; place < end; ++place) total += rows[sums.row(place)][column];
    dst[column] = total;
}

// Fills rows `first` to `stop` of `dst`. A register holds kFloats numbers.
template <std::size_t kFloats>
PACKHORSE_INLINE void sum_some_rows(const RowSums& sums, const Rows<const float>& rows,
                                    const Rows<float>& dst, std::size_t n_places, std::size_t first,
                                    std::size_t stop) {
    for (std::size_t i = first; i < stop; ++i) {
        const auto begin = static_cast<std::size_t>(sums.starts[i]);
        const auto end = static_cast<std::size_t>(sums.starts[i + 1]);
        std::size_t column = 0;
        for (; column + 32 <= sums.width; column += 32)
            sum_columns<32 / kFloats, kFloats>(sums, rows, n_places, begin, end, column, dst[i]);
        for (; column + 4 <= sums.width; column += 4)
            sum_columns<1, 4>(sums, rows, n_places, begin, end, column, dst[i]);
        for (; column < sums.width; ++column) sum_column(sums, rows, begin, end, column, dst[i]);
    }
}

// Fills `dst`, one row for each sum.
inline void sum_rows(const RowSums& sums, const Rows<const float>& rows, const Rows<float>& dst,
                     std::size_t threads, Isa isa) {
    constexpr std::size_t kRun = 4096;  // sums for one thread
    const std::size_t n_runs = (dst.size() + kRun - 1) / kRun;
    const auto n_places = static_cast<std::size_t>(sums.starts[dst.size()]);
    parallel_for(n_runs, threads, [&](std::size_t, std::size_t run) {
        const std::size_t stop = std::min(dst.size(), (run + 1) * kRun);
        // Vectors wider than registers would spill.
        if (isa >= Isa::kAvx512)
            vectorised_wide(isa, [=, &rows, &dst]() PACKHORSE_VECTORISED {
                sum_some_rows<16>(sums, rows, dst, n_places, run * kRun, stop);
            });
        else if (isa >= Isa::kAvx2)
            vectorised(isa, [=, &rows, &dst]() PACKHORSE_VECTORISED {
                sum_some_rows<8>(sums, rows, dst, n_places, run * kRun, stop);
            });
        else
            sum_some_rows<4>(sums, rows, dst, n_places, run * kRun, stop);
    });
}

}  // namespace packhorse
