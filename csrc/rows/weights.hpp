// Weights in memory (docs/format.md, section 12): the shape of a row, and how threads share rows.
//
// Packing and unpacking work row by row, in a few passes over bytes that stay in L1: plain loops
// that compilers vectorise, one function for each instruction set. Exceptions are rare, so the
// loops ignore them, and separate code handles them.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

// The number of exponents that have a code.
template <class Format>
constexpr uint32_t kWindowWidth = (1u << Format::kCodeBits) - Format::kFirstCode;

// The size of a row, in columns and bytes.
template <class Format>
struct WeightShape {
    std::size_t n_columns;
    std::size_t n_steps;
    std::size_t n_padded;
    std::size_t n_high_bytes;

    explicit constexpr WeightShape(std::size_t n_columns)
        : n_columns(n_columns),
          n_steps(
              round_up((n_columns + Format::kSlices - 1) / Format::kSlices, kWeightStepAlignment)),
          n_padded(Format::kSlices * n_steps),
          n_high_bytes(n_padded * (Format::kBits - 8) / 8) {}
};

// Rows that one thread works on at a time: they fit L2 together with their packed form.
inline std::size_t weight_rows_at_once(std::size_t n_columns) {
    constexpr std::size_t kElements = 1 << 16;
    return n_columns >= kElements ? 1 : kElements / n_columns;
}

}  // namespace packhorse
