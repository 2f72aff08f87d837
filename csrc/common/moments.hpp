// Mean and summed squared deviations of rows that come one by one: Welford's method
// (Technometrics 4, 1962), in double precision. Each element has its own sums, so the result is the
// same for every instruction set, and for rows that are added together or one by one.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/dispatch.hpp"

namespace packhorse {

// Adds `n_rows` rows of `numel` elements to the sums of the `count` rows before them. Sums of a
// block stay in L1, so they go through memory once for all rows.
inline void add_to_moments(const float* const* rows, std::size_t n_rows, std::size_t numel,
                           std::size_t count, double* mean, double* squares, Isa isa) {
    constexpr std::size_t kBlock = 1024;
    for (std::size_t at = 0; at < numel; at += kBlock) {
        const std::size_t n = std::min(kBlock, numel - at);
        for (std::size_t r = 0; r < n_rows; ++r) {
            const double share = 1 / static_cast<double>(count + r + 1);
            const double rest = static_cast<double>(count + r) / static_cast<double>(count + r + 1);
            const float* const row = rows[r] + at;
            double* const m = mean + at;
            double* const s = squares + at;
            vectorised(isa, [=]() PACKHORSE_VECTORISED {
                double* __restrict to_m = m;
                double* __restrict to_s = s;
                for (std::size_t i = 0; i < n; ++i) {
                    const double delta = static_cast<double>(row[i]) - to_m[i];
                    to_m[i] += delta * share;
                    to_s[i] += delta * delta * rest;
                }
            });
        }
    }
}

}  // namespace packhorse
