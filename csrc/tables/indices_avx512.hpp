// Sparse rows and rows of indices with AVX-512, 64 columns at a time. Indices of 8 bits are looked
// up with VBMI: a table of 256 bytes for each byte of the values lies in registers. What a bitmap
// row stores is spread to its columns first.
#pragma once

#include "tables/dense_avx512.hpp"

namespace packhorse {

// The bytes of 256 values: all first bytes, then all second bytes and so on.
template <class U>
struct IndexedBytes {
    alignas(64) uint8_t bytes[sizeof(U)][kMaxTableValues];

    void fill(const TableElements<U>& table) {
        for (std::size_t i = 0; i < kMaxTableValues; ++i)
            for (std::size_t k = 0; k < sizeof(U); ++k)
                bytes[k][i] = static_cast<uint8_t>(table.values[i] >> 8 * k);
    }
};

#if PACKHORSE_X86

// A table of 256 bytes.
struct ByteTable512 {
    __m512i parts[4];

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE explicit ByteTable512(const uint8_t* bytes) {
        for (std::size_t i = 0; i < 4; ++i) parts[i] = _mm512_load_si512(bytes + 64 * i);
    }

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i operator[](__m512i index) const {
        const __m512i low = _mm512_permutex2var_epi8(parts[0], index, parts[1]);
        const __m512i high = _mm512_permutex2var_epi8(parts[2], index, parts[3]);
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
    }
};

// Elements of 64 indices, the first ones in found[0]. Unpacking works within quarters of a
// register, so parts of the indices change places before.
template <class U>
struct IndexTables512;

template <>
struct IndexTables512<uint16_t> {
    ByteTable512 low, high;

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE explicit IndexTables512(
        const IndexedBytes<uint16_t>& values)
        : low(values.bytes[0]), high(values.bytes[1]) {}

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void look_up(__m512i indices, __m512i* found) const {
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        const __m512i index = _mm512_permutexvar_epi64(order, indices);
        const __m512i a = low[index], b = high[index];
        found[0] = _mm512_unpacklo_epi8(a, b);
        found[1] = _mm512_unpackhi_epi8(a, b);
    }
};

template <>
struct IndexTables512<uint32_t> {
    ByteTable512 bytes[4];

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE explicit IndexTables512(
        const IndexedBytes<uint32_t>& values)
        : bytes{ByteTable512(values.bytes[0]), ByteTable512(values.bytes[1]),
                ByteTable512(values.bytes[2]), ByteTable512(values.bytes[3])} {}

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void look_up(__m512i indices, __m512i* found) const {
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i index = _mm512_permutexvar_epi32(order, indices);
        const __m512i a = bytes[0][index], b = bytes[1][index];
        const __m512i c = bytes[2][index], d = bytes[3][index];
        const __m512i low = _mm512_unpacklo_epi8(a, b), low_top = _mm512_unpacklo_epi8(c, d);
        const __m512i high = _mm512_unpackhi_epi8(a, b), high_top = _mm512_unpackhi_epi8(c, d);
        found[0] = _mm512_unpacklo_epi16(low, low_top);
        found[1] = _mm512_unpackhi_epi16(low, low_top);
        found[2] = _mm512_unpacklo_epi16(high, high_top);
        found[3] = _mm512_unpackhi_epi16(high, high_top);
    }
};

// All columns of a row have an index.
template <class U>
PACKHORSE_AVX512_VBMI2 inline void look_up_dense_avx512(const uint8_t* indices, std::size_t n,
                                                        const IndexedBytes<U>& values,
                                                        uint8_t* dst) {
    using V = Lanes512<U>;
    const IndexTables512<U> tables(values);
    for (std::size_t c = 0; c < n; c += 64) {
        const uint64_t mask = first_columns(n - c);
        __m512i found[sizeof(U)];
        tables.look_up(_mm512_maskz_loadu_epi8(mask, indices + c), found);
        for (std::size_t q = 0; q < sizeof(U); ++q)
            V::put(dst + sizeof(U) * c + 64 * q, mask >> q * V::kCount, found[q]);
    }
}

// Which of 64 columns of a bitmap row are stored. Of more bits than are `left`, the last ones are
// not.
struct BitmapWord {
    uint64_t held;
    std::size_t count;

    PACKHORSE_AVX512 PACKHORSE_INLINE BitmapWord(uint64_t word, std::size_t left) : held(word) {
        count = static_cast<std::size_t>(std::popcount(word));
        if (count <= left) return;
        count = left;
        held = _pdep_u64(first_columns(left), word);
    }
};

// What all rows of a bitmap have.
struct BitmapRow {
    const uint8_t* bitmap;
    std::size_t n;          // columns
    const uint8_t* stored;  // packed elements
    std::size_t capacity;

    PACKHORSE_AVX512 PACKHORSE_INLINE BitmapWord word(std::size_t column, std::size_t left) const {
        return {load<uint64_t>(bitmap + column / 8) & first_columns(n - column), left};
    }
};

// Columns that are stored have an index, the others the background.
template <class U>
PACKHORSE_AVX512_VBMI2 inline void look_up_bitmap_avx512(BitmapRow row, U background,
                                                         const IndexedBytes<U>& values,
                                                         uint8_t* dst) {
    using V = Lanes512<U>;
    const IndexTables512<U> tables(values);
    const __m512i other = V::broadcast(background);
    for (std::size_t c = 0; c < row.n; c += 64) {
        const BitmapWord word = row.word(c, row.capacity);
        const __m512i packed = _mm512_maskz_loadu_epi8(first_columns(word.count), row.stored);
        row.stored += word.count;
        row.capacity -= word.count;
        __m512i found[sizeof(U)];
        tables.look_up(_mm512_maskz_expand_epi8(word.held, packed), found);
        const uint64_t mask = first_columns(row.n - c);
        for (std::size_t q = 0; q < sizeof(U); ++q) {
            const std::size_t first = q * V::kCount;
            V::put(dst + sizeof(U) * c + 64 * q, mask >> first,
                   V::blend(word.held >> first, other, found[q]));
        }
    }
}

// Columns that are stored have an element as it is.
template <class U>
PACKHORSE_AVX512_VBMI2 inline void spread_bitmap_avx512(BitmapRow row, U background, uint8_t* dst) {
    using V = Lanes512<U>;
    const __m512i other = V::broadcast(background);
    for (std::size_t c = 0; c < row.n; c += 64) {
        const BitmapWord word = row.word(c, row.capacity);
        const uint64_t mask = first_columns(row.n - c);
        row.capacity -= word.count;
        for (std::size_t q = 0; q < sizeof(U); ++q) {
            const std::size_t first = q * V::kCount;
            const uint64_t held = word.held >> first & first_columns(V::kCount);
            const auto count = static_cast<std::size_t>(std::popcount(held));
            const __m512i packed = V::get(row.stored, first_columns(count));
            row.stored += sizeof(U) * count;
            __m512i element;
            if constexpr (sizeof(U) == 1) {
                element = _mm512_mask_expand_epi8(other, held, packed);
            } else if constexpr (sizeof(U) == 2) {
                element = _mm512_mask_expand_epi16(other, static_cast<__mmask32>(held), packed);
            } else if constexpr (sizeof(U) == 4) {
                element = _mm512_mask_expand_epi32(other, static_cast<__mmask16>(held), packed);
            } else {
                element = _mm512_mask_expand_epi64(other, static_cast<__mmask8>(held), packed);
            }
            V::put(dst + sizeof(U) * c + 64 * q, mask >> first, element);
        }
    }
}

#endif

}  // namespace packhorse
