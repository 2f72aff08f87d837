// Triples: the codes of three columns as one number of 10 bits, by plain loops.
#pragma once

#include "tables/table.hpp"

namespace packhorse {

// The codes of a triple. A number that has none gives codes below 16, too.
struct Triple {
    uint32_t first, second, third;

    PACKHORSE_INLINE Triple(uint32_t low, uint32_t top) {
        const uint32_t triple = low | top << 8;
        third = triple / 100;
        second = triple % 100 / 10;
        first = triple % 10;
    }
};

// The triples of a row.
struct TripleSpan {
    const uint8_t* low;  // low bytes
    const uint8_t* top;  // the bits above, as bytes
    std::size_t n;       // columns
    std::size_t count;   // triples

    // Triples that have three columns. A few others come last.
    std::size_t n_full() const { return n - std::min(n, 2 * count); }
};

// Puts codes above the `kept` bits of each byte of `high`, from triple `start` on.
PACKHORSE_INLINE void put_codes_portable(const TripleSpan& span, std::size_t start, uint32_t kept,
                                         uint8_t* high) {
    const std::size_t n = span.n, t = span.count;
    for (std::size_t i = start; i < t; ++i) {
        const Triple codes(span.low[i], span.top[i]);
        const auto put = [=](std::size_t column, uint32_t code) {
            if (column < n) high[column] = static_cast<uint8_t>(high[column] | code << kept);
        };
        put(i, codes.first);
        put(i + t, codes.second);
        put(i + 2 * t, codes.third);
    }
}

// Makes triples of codes, from triple `start` on: low bytes, and the bits above in place of the
// first codes.
PACKHORSE_INLINE void make_triples_portable(uint8_t* codes, std::size_t count, std::size_t start,
                                            uint8_t* low) {
    for (std::size_t i = start; i < count; ++i) {
        const uint32_t triple = codes[i] + 10u * codes[i + count] + 100u * codes[i + 2 * count];
        low[i] = static_cast<uint8_t>(triple);
        codes[i] = static_cast<uint8_t>(triple >> 8);
    }
}

}  // namespace packhorse
