// The differences of a block as rows of bytes, and those of a chunk in the order by class.
#pragma once

#include "common/layout.hpp"
#include "delta/delta.hpp"

namespace packhorse {

constexpr std::size_t kDeltaBlockUnits = 2048;  // their rows stay in L1
constexpr std::size_t kDeltaSlackNbytes = 64;   // may be read or written behind a class
constexpr uint32_t kMaxDeltaRows = 1 + 8;       // tokens, and the bytes of raw bits

// How many rows each class has: its tokens, and the bytes that hold its raw bits.
struct DeltaRowCounts {
    uint32_t of[kMaxDeltaClasses] = {};  // 0 for classes that do not exist
    uint32_t most = 0;

    explicit DeltaRowCounts(const DeltaRule& rule) {
        for (uint32_t c = 0; c < rule.n_classes; ++c) {
            of[c] = 1 + (rule.shifts[c] + 7u) / 8;
            most = most < of[c] ? of[c] : most;
        }
    }
};

// The rows of a chunk, in the order by class. All rows have the same places.
template <class Byte>
struct ClassRows {
    Byte* at[kMaxDeltaRows] = {};
    std::size_t next[kMaxDeltaClasses] = {};  // the place of the next unit of each class
};

// The rows of a block, in the order of units.
struct alignas(64) BlockRows {
    uint8_t at[kMaxDeltaRows][kDeltaBlockUnits];
    uint8_t shifts[kDeltaBlockUnits];  // of the classes of the units
};

}  // namespace packhorse
