// Moves the bytes of differences to the order by class and back with NEON, for up to eight classes,
// row after row as in planes/class_order_neon.hpp.
#pragma once

#include "common/dispatch.hpp"
#include "delta/rows.hpp"
#include "planes/class_order_neon.hpp"

namespace packhorse {

#if PACKHORSE_ARM

// The places of the next unit of each class in a row.
template <uint32_t kClasses, class Byte>
struct RowPlacesNeon {
    Byte* at[kClasses];

    PACKHORSE_INLINE RowPlacesNeon(Byte* row, const std::size_t* next) {
        for (uint32_t c = 0; c < kClasses; ++c) at[c] = row + next[c];
    }
};

template <uint32_t kClasses>
inline std::size_t unsort_rows_neon(ClassRows<const uint8_t>& rows, const uint8_t* keys,
                                    std::size_t n, const DeltaRule& rule, uint32_t n_rows,
                                    BlockRows& dst) {
    return for_each_block_neon<kClasses>(
        rows.next, keys, n, rule.thresholds,
        [&](std::size_t i, const ClassPlacesNeon* places, const std::size_t* next)
            PACKHORSE_VECTORISED {
                for (uint32_t p = 0; p < n_rows; ++p) {
                    const RowPlacesNeon<kClasses, const uint8_t> from(rows.at[p], next);
                    unsort_block_neon<kClasses>(from.at, places, dst.at[p] + i);
                }
            });
}

template <uint32_t kClasses>
inline std::size_t sort_rows_neon(const BlockRows& src, const uint8_t* keys, std::size_t n,
                                  const DeltaRule& rule, uint32_t n_rows,
                                  ClassRows<uint8_t>& rows) {
    return for_each_block_neon<kClasses>(
        rows.next, keys, n, rule.thresholds,
        [&](std::size_t i, const ClassPlacesNeon* places, const std::size_t* next)
            PACKHORSE_VECTORISED {
                for (uint32_t p = 0; p < n_rows; ++p) {
                    const RowPlacesNeon<kClasses, uint8_t> to(rows.at[p], next);
                    sort_block_neon<kClasses>(src.at[p] + i, places, to.at);
                }
            });
}

#endif

}  // namespace packhorse
