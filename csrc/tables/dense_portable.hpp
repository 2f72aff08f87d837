// Joins the planes of a dense row to elements by a plain loop.
#pragma once

#include "tables/table.hpp"

namespace packhorse {

// The planes of a dense row: whole bytes, and the bits above them as bytes (null if there are
// none).
struct TablePlanes {
    const uint8_t* whole;
    uint32_t n_whole;
    const uint8_t* high;
    std::size_t n;  // columns
};

// Elements from column `start` on.
template <class U>
inline void join_planes_portable(const TablePlanes& planes, const TableElements<U>& table,
                                 std::size_t start, uint8_t* dst) {
    for (std::size_t c = start; c < planes.n; ++c) {
        uint64_t packed = 0;
        for (uint32_t i = 0; i < planes.n_whole; ++i)
            packed |= static_cast<uint64_t>(planes.whole[i * planes.n + c]) << 8 * i;
        if (planes.high != nullptr)
            packed |= static_cast<uint64_t>(planes.high[c]) << 8 * planes.n_whole;
        store(dst + sizeof(U) * c, table.element(static_cast<U>(packed)));
    }
}

}  // namespace packhorse
