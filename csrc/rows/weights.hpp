// Weights in memory (docs/format.md, section 12): what a row takes, and how rows are shared out.
//
// Packing and unpacking work row by row, in a few passes over bytes that stay in L1: plain loops
// that compilers vectorise, one function for each instruction set. An exception is rare, so nothing
// but its own few instructions knows about it.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

// How many exponents have a code.
template <class Format>
constexpr uint32_t kWindowWidth = (1u << Format::kCodeBits) - Format::kFirstCode;

// What a row takes, in columns and bytes.
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

// Rows that one thread works on at a time: what fits L2 with what it becomes.
inline std::size_t weight_rows_at_once(std::size_t n_columns) {
    constexpr std::size_t kElements = 1 << 16;
    return n_columns >= kElements ? 1 : kElements / n_columns;
}

}  // namespace packhorse
