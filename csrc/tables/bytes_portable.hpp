// Dense rows whose codes lie above whole bytes of rest: the exponents of BF16 and FP32. Each byte
// of an element is then a byte that its code stands for, or'ed with a byte of the row. The vector
// paths look the bytes up by shuffles.
#pragma once

#include "tables/table.hpp"

namespace packhorse {

// The bytes of 16 values: all first bytes, then all second bytes and so on.
struct ValueBytes {
    alignas(64) uint8_t bytes[8][16];
};

template <class U>
inline ValueBytes part_values(const TableElements<U>& table) {
    ValueBytes found{};
    for (std::size_t i = 0; i < 16; ++i)
        for (std::size_t k = 0; k < sizeof(U); ++k)
            found.bytes[k][i] =
                static_cast<uint8_t>(static_cast<uint64_t>(table.values[i]) >> 8 * k);
    return found;
}

// Whether elements are such: codes of at most 4 bits, a sign, and rests of whole bytes up to the
// second byte from the top.
template <class U>
inline bool has_byte_rests(const TableShape& shape) {
    if (sizeof(U) != 2 && sizeof(U) != 4) return false;
    return shape.has_sign && shape.rest_bits % 8 == 0 && shape.code_bits >= 1 &&
           shape.code_bits <= 4 && shape.rest_bits / 8 < sizeof(U) &&
           shape.shift == 8 * (sizeof(U) - 1 - shape.rest_bits / 8);
}

// Columns [start, start + count) of a row of n columns.
struct ColumnSpan {
    const uint8_t* whole;  // planes of whole bytes, of all columns
    std::size_t n;
    std::size_t start;
    std::size_t count;
    uint8_t* dst;  // of all columns
};

}  // namespace packhorse
