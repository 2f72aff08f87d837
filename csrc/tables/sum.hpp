// Sums of rows of a packed table: bags of embeddings, without the rows in between.
#pragma once

#include "tables/gather.hpp"

namespace packhorse {

// Elements that are numbers. Sums are added up in fp32.
struct Fp32 {
    using Bits = uint32_t;
    static PACKHORSE_INLINE float widen(uint32_t bits) { return std::bit_cast<float>(bits); }
    static PACKHORSE_INLINE uint32_t round(float number) { return std::bit_cast<uint32_t>(number); }
};

struct Bf16 {
    using Bits = uint16_t;
    static PACKHORSE_INLINE float widen(uint16_t bits) {
        return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    // To the nearest number, and the one of two that is farther from zero, as FBGEMM does.
    static PACKHORSE_INLINE uint16_t round(float number) {
        return static_cast<uint16_t>((std::bit_cast<uint32_t>(number) + 0x8000) >> 16);
    }
};

// The sum of the rows of a bag, and its place in the output.
template <class Number>
class TableBagSum {
  public:
    using U = typename Number::Bits;

    TableBagSum(std::size_t n_columns, Isa isa)
        : n_(n_columns), isa_(isa), memory_(round_up(n_columns * (sizeof(float) + sizeof(U)), 64)) {
        clear();
    }

    // Memory for the next row.
    uint8_t* row() const { return memory_.get() + n_ * sizeof(float); }

    // Adds what row() holds.
    void add() const {
        float* const sums = totals();
        const uint8_t* const src = row();
        const std::size_t n = n_;
        vectorised_wide(isa_, [=]() PACKHORSE_VECTORISED {
            float* __restrict const to = sums;
            const uint8_t* __restrict const from = src;
            for (std::size_t c = 0; c < n; ++c)
                to[c] += Number::widen(load<U>(from + sizeof(U) * c));
        });
    }

    // Stores the sum, and begins another one.
    void store_to(uint8_t* dst) const {
        const float* const sums = totals();
        const std::size_t n = n_;
        vectorised_wide(isa_, [=]() PACKHORSE_VECTORISED {
            const float* __restrict const from = sums;
            uint8_t* __restrict const to = dst;
            for (std::size_t c = 0; c < n; ++c) store(to + sizeof(U) * c, Number::round(from[c]));
        });
        clear();
    }

  private:
    float* totals() const { return reinterpret_cast<float*>(memory_.get()); }
    void clear() const { std::memset(totals(), 0, n_ * sizeof(float)); }

    std::size_t n_;
    Isa isa_;
    Scratch memory_;
};

// Bag b has the ids from starts[b] to starts[b + 1] - 1 of n; there are n_bags + 1 starts. Another
// thread may write to them, so no start is trusted. Each bag is added up in the order of its ids.
template <class Number>
inline void sum_rows_of_bags(const TableShape& shape, const TableRows& from, const int64_t* ids,
                             std::size_t n, const int64_t* starts, std::size_t n_bags, uint8_t* dst,
                             std::size_t threads, Isa isa) {
    using U = typename Number::Bits;
    constexpr std::size_t kRunsOfThread = 16;
    const TableReader<U> reader(shape, isa);
    const TableIds numbers(ids), bounds(starts);
    const std::size_t row_nbytes = shape.row_nbytes();
    const std::size_t at_once = n_bags / (kRunsOfThread * threads) + 1;
    parallel_for((n_bags + at_once - 1) / at_once, threads, [&](std::size_t, std::size_t run) {
        const TableBagSum<Number> sum(shape.n_columns, isa);
        const std::size_t stop = std::min((run + 1) * at_once, n_bags);
        std::size_t bag = run * at_once;
        const std::size_t begin = std::min(bounds[bag], n), end = std::min(bounds[stop], n);
        const auto finish_until = [&](std::size_t i) {  // bags that end before id i
            for (; bag < stop && bounds[bag + 1] <= i; ++bag) sum.store_to(dst + bag * row_nbytes);
        };
        gather_some_rows(
            reader, from, numbers, begin, end,
            [&](std::size_t i) {
                finish_until(i);
                return sum.row();
            },
            [&](std::size_t) { sum.add(); });
        for (; bag < stop; ++bag) sum.store_to(dst + bag * row_nbytes);
    });
}

}  // namespace packhorse
