// The shape of a packed table: fields of its header, and the lengths that follow from them.
#pragma once

#include <algorithm>
#include <bit>

#include "common/dispatch.hpp"

namespace packhorse {

enum class TableMode : int { kRaw = 0, kDense = 1, kBitmap = 2, kList = 3 };

constexpr std::size_t kMaxTableColumns = 65536;
constexpr std::size_t kMaxTableValues = 256;
constexpr std::size_t kTableStrideAlignment = 32;
constexpr std::size_t kListEnd = 0xFFFF;
constexpr uint32_t kTripleCodes = 10;    // 10 * 10 * 10 codes fit in 10 bits
constexpr uint32_t kTripleCodeBits = 4;  // of such a code, once it is read

// The mask of the first `n` columns of 64.
PACKHORSE_INLINE uint64_t first_columns(std::size_t n) {
    return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// Bytes of a narrow plane.
constexpr std::size_t narrow_nbytes(std::size_t bits, std::size_t n_columns) {
    return bits * ((n_columns + 7) / 8);
}

// A shape that fits() need not be valid, but no code here leaves a row or its output.
struct TableShape {
    TableMode mode;
    uint32_t element_nbytes;
    std::size_t n_columns;
    uint32_t code_bits;
    uint32_t rest_bits;
    uint32_t shift;
    bool has_sign;
    std::size_t capacity;
    uint64_t background;
    bool has_row_value;
    bool has_triples;  // the codes of three columns are one number
    std::size_t stride;
    uint64_t values[kMaxTableValues];

    bool is_sparse() const { return mode == TableMode::kBitmap || mode == TableMode::kList; }
    std::size_t row_nbytes() const { return n_columns * element_nbytes; }
    uint32_t packed_bits() const { return code_bits + rest_bits; }
    // Bits of a packed element that are in the planes of a dense row.
    uint32_t plane_bits() const { return has_triples ? rest_bits : packed_bits(); }
    uint32_t n_whole() const { return plane_bits() / 8; }
    uint32_t narrow_bits() const { return plane_bits() % 8; }
    std::size_t n_triples() const { return has_triples ? (n_columns + 2) / 3 : 0; }
    std::size_t row_value_nbytes() const { return has_row_value ? element_nbytes : 0; }
    std::size_t bitmap_nbytes() const {
        return mode == TableMode::kBitmap ? (n_columns + 63) / 64 * 8 : 0;
    }
    std::size_t first_nbytes() const { return row_value_nbytes() + bitmap_nbytes(); }
    std::size_t entry_nbytes() const { return n_whole() + (mode == TableMode::kList ? 2 : 0); }

    std::size_t content_nbytes() const {
        if (mode == TableMode::kRaw) return row_nbytes();
        if (is_sparse()) return first_nbytes() + capacity * entry_nbytes();
        return triples_offset() + n_triples() + narrow_nbytes(2, n_triples());
    }

    // Bytes of a dense row before its triples.
    std::size_t triples_offset() const {
        std::size_t nbytes = n_columns * n_whole();
        for (const uint32_t bits : {4u, 2u, 1u})
            if ((narrow_bits() & bits) != 0) nbytes += narrow_nbytes(bits, n_columns);
        return nbytes;
    }

    // Whether rows of this shape can be packed and gathered.
    bool fits() const {
        const uint32_t element_bits = 8 * element_nbytes, b = packed_bits();
        if (element_nbytes != 1 && element_nbytes != 2 && element_nbytes != 4 &&
            element_nbytes != 8)
            return false;
        if (n_columns < 1 || n_columns > kMaxTableColumns || code_bits > 8) return false;
        if (rest_bits < (has_sign ? 1u : 0u) || rest_bits > element_bits || b > element_bits)
            return false;
        if (shift + rest_bits > element_bits) return false;
        if (mode == TableMode::kDense ? b < 1 : has_sign || has_triples) return false;
        if (has_triples && (code_bits != kTripleCodeBits || rest_bits % 8 > 4)) return false;
        if (is_sparse()) {
            if (capacity < 1 || capacity > n_columns || (b != 0 && b != 8 && b != element_bits))
                return false;
            if (has_row_value && b != 0) return false;
            if (mode == TableMode::kList && n_columns >= kListEnd + 1) return false;
        } else if (has_row_value) {
            return false;
        }
        return stride % kTableStrideAlignment == 0 && stride >= content_nbytes();
    }
};

// What turns packed elements to elements of type U.
template <class U>
struct TableElements {
    static constexpr uint32_t kBits = 8 * sizeof(U);

    uint32_t code_bits, rest_bits, shift;
    uint32_t moved_bits;  // of the rest without its sign
    bool has_sign;
    U moved_mask;
    alignas(64) U values[kMaxTableValues];

    explicit TableElements(const TableShape& shape)
        : code_bits(shape.code_bits),
          rest_bits(shape.rest_bits),
          shift(shape.shift),
          moved_bits(shape.rest_bits - (shape.has_sign ? 1 : 0)),
          has_sign(shape.has_sign),
          moved_mask(low_bits(moved_bits)) {
        for (std::size_t i = 0; i < kMaxTableValues; ++i)
            values[i] = static_cast<U>(shape.values[i]);
    }

    static U low_bits(uint32_t n) {
        return static_cast<U>(n >= kBits ? ~U{0} : static_cast<U>((uint64_t{1} << n) - 1));
    }

    U rest_mask() const {
        const auto moved = static_cast<U>(static_cast<uint64_t>(moved_mask) << shift % 64);
        const auto sign = static_cast<U>(U{1} << (kBits - 1));
        return static_cast<U>(moved | (has_sign ? sign : U{0}));
    }

    PACKHORSE_INLINE uint32_t code(U packed) const {
        return code_bits == 0
                   ? 0
                   : static_cast<uint32_t>(static_cast<uint64_t>(packed) >> rest_bits) & 0xFF;
    }

    PACKHORSE_INLINE U rest(U packed) const {
        const auto wide = static_cast<uint64_t>(packed);
        const uint64_t sign = has_sign ? (wide >> moved_bits & 1) << (kBits - 1) : 0;
        return static_cast<U>((wide & moved_mask) << shift % 64 | sign);
    }

    PACKHORSE_INLINE U element(U packed) const {
        return static_cast<U>(values[code(packed)] | rest(packed));
    }

    // The rest of an element, in its place within a packed element.
    PACKHORSE_INLINE U packed_rest(U element) const {
        const auto wide = static_cast<uint64_t>(element);
        const uint64_t sign = has_sign ? (wide >> (kBits - 1)) << moved_bits : 0;
        return static_cast<U>((wide >> shift % 64 & moved_mask) | sign);
    }
};

// The exceptions of a table. The lengths are those of the arrays; the content may be anything.
struct TableExceptions {
    const uint32_t* marks;
    const uint32_t* ranks;
    const uint32_t* starts;   // n_marked + 1
    const uint16_t* columns;  // n_exceptions
    const uint8_t* elements;  // n_exceptions
    std::size_t n_marked;
    std::size_t n_exceptions;

    static constexpr std::size_t kNone = ~std::size_t{0};

    // The number of a row among those that have exceptions, or kNone.
    PACKHORSE_INLINE std::size_t find(std::size_t row) const {
        const uint32_t word = marks[row / 32];
        if ((word >> row % 32 & 1) == 0) return kNone;
        const std::size_t k = ranks[row / 32] + count_bits(word & ((1u << row % 32) - 1));
        return k < n_marked ? k : kNone;
    }

    // Puts the exceptions of a row that find() has found.
    template <class U>
    PACKHORSE_INLINE void put(std::size_t k, std::size_t n_columns, uint8_t* dst) const {
        const std::size_t stop = std::min<std::size_t>(starts[k + 1], n_exceptions);
        for (std::size_t i = starts[k]; i < stop; ++i)
            if (columns[i] < n_columns)
                std::memcpy(dst + sizeof(U) * columns[i], elements + sizeof(U) * i, sizeof(U));
    }

  private:
    // std::popcount() is a call where the compiler may not use the instruction.
    static PACKHORSE_INLINE uint32_t count_bits(uint32_t word) {
        word -= word >> 1 & 0x55555555u;
        word = (word & 0x33333333u) + (word >> 2 & 0x33333333u);
        return ((word + (word >> 4)) & 0x0F0F0F0Fu) * 0x01010101u >> 24;
    }
};

// Bits of the narrow planes of packed elements, as bytes. kNarrow is b mod 8. Slice `i` of a plane
// of v bits has the columns from i * nbytes on, at bits v * i of each byte.
template <uint32_t kNarrow, uint32_t kBits, uint32_t kLowest, uint32_t kSlice>
PACKHORSE_INLINE void unpack_slice_of(const uint8_t* __restrict plane, std::size_t nbytes,
                                      std::size_t n, uint8_t* __restrict high) {
    constexpr uint32_t kMask = (1u << kBits) - 1;
    constexpr bool kFirst = kLowest == 0;
    const std::size_t start = kSlice * nbytes;
    if (start < n) {
        const std::size_t count = std::min(nbytes, n - start);
        uint8_t* __restrict const to = high + start;
        for (std::size_t j = 0; j < count; ++j) {
            const uint32_t field = (plane[j] >> kBits * kSlice & kMask) << kLowest;
            to[j] = static_cast<uint8_t>(kFirst ? field : to[j] | field);
        }
    }
    if constexpr (kBits * (kSlice + 1) < 8)
        unpack_slice_of<kNarrow, kBits, kLowest, kSlice + 1>(plane, nbytes, n, high);
}

template <uint32_t kNarrow, uint32_t kBits = 4, uint32_t kLowest = 0>
PACKHORSE_INLINE void unpack_narrow(const uint8_t* __restrict planes, std::size_t n,
                                    uint8_t* __restrict high) {
    constexpr bool kHas = (kNarrow & kBits) != 0;
    const std::size_t nbytes = kHas ? narrow_nbytes(kBits, n) : 0;
    if constexpr (kHas) unpack_slice_of<kNarrow, kBits, kLowest, 0>(planes, nbytes, n, high);
    if constexpr (kBits > 1)
        unpack_narrow<kNarrow, kBits / 2, kLowest + (kHas ? kBits : 0)>(planes + nbytes, n, high);
}

// The other way. The planes are zero before.
template <uint32_t kNarrow, uint32_t kBits, uint32_t kLowest, uint32_t kSlice>
PACKHORSE_INLINE void pack_slice_of(const uint8_t* __restrict high, std::size_t nbytes,
                                    std::size_t n, uint8_t* __restrict plane) {
    constexpr uint32_t kMask = (1u << kBits) - 1;
    const std::size_t start = kSlice * nbytes;
    if (start < n) {
        const std::size_t count = std::min(nbytes, n - start);
        const uint8_t* __restrict const from = high + start;
        for (std::size_t j = 0; j < count; ++j) {
            const uint32_t field = (from[j] >> kLowest & kMask) << kBits * kSlice;
            plane[j] = static_cast<uint8_t>(plane[j] | field);
        }
    }
    if constexpr (kBits * (kSlice + 1) < 8)
        pack_slice_of<kNarrow, kBits, kLowest, kSlice + 1>(high, nbytes, n, plane);
}

template <uint32_t kNarrow, uint32_t kBits = 4, uint32_t kLowest = 0>
PACKHORSE_INLINE void pack_narrow(const uint8_t* __restrict high, std::size_t n,
                                  uint8_t* __restrict planes) {
    constexpr bool kHas = (kNarrow & kBits) != 0;
    const std::size_t nbytes = kHas ? narrow_nbytes(kBits, n) : 0;
    if constexpr (kHas) pack_slice_of<kNarrow, kBits, kLowest, 0>(high, nbytes, n, planes);
    if constexpr (kBits > 1)
        pack_narrow<kNarrow, kBits / 2, kLowest + (kHas ? kBits : 0)>(high, n, planes + nbytes);
}

// Calls work.operator()<kNarrow>() for the number of bits above whole bytes, 1 to 7.
template <class Work>
PACKHORSE_INLINE void with_narrow(uint32_t bits, const Work& work) {
    switch (bits) {
        case 1:
            return work.template operator()<1>();
        case 2:
            return work.template operator()<2>();
        case 3:
            return work.template operator()<3>();
        case 4:
            return work.template operator()<4>();
        case 5:
            return work.template operator()<5>();
        case 6:
            return work.template operator()<6>();
        case 7:
            return work.template operator()<7>();
        default:
            return;
    }
}

// Calls work.operator()<U>() for elements of a size.
template <class Work>
PACKHORSE_INLINE auto with_elements(uint32_t nbytes, const Work& work) {
    switch (nbytes) {
        case 1:
            return work.template operator()<uint8_t>();
        case 2:
            return work.template operator()<uint16_t>();
        case 4:
            return work.template operator()<uint32_t>();
        default:
            return work.template operator()<uint64_t>();
    }
}

}  // namespace packhorse
