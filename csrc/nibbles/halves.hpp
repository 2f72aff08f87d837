// Bytes and their halves (docs/format.md, 6.9). A half stands in the upper four bits of a byte of
// its own, the lower half of a byte in front of the upper one.
#pragma once

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

// Writes the 2 * n halves of n bytes.
inline void spread_halves(const uint8_t* src, std::size_t n, uint8_t* __restrict dst, Isa isa) {
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i) {
            const uint32_t byte = src[i];
            store(dst + 2 * i, static_cast<uint16_t>((byte << 8 | byte << 4) & 0xF0F0));
        }
    });
}

// Puts n bytes together from their 2 * n halves, whose lower four bits are zero.
inline void join_halves(const uint8_t* src, std::size_t n, uint8_t* __restrict dst, Isa isa) {
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i) {
            const uint32_t halves = load<uint16_t>(src + 2 * i);
            dst[i] = static_cast<uint8_t>(halves >> 4 | halves >> 8);
        }
    });
}

}  // namespace packhorse
