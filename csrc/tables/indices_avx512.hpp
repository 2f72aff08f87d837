// Sparse rows and rows of indices with AVX-512, 64 columns at a time. An index is the highest byte
// of a packed element: its code, and what lies between its code and whole bytes of rest. It is
// looked up with VBMI: each byte of an element has a table of 256 bytes. What a bitmap row stores
// is spread to its columns first.
#pragma once

#include "tables/high_avx512.hpp"

namespace packhorse {

// The bytes of 256 elements: all first bytes, then all second bytes and so on. Packed elements have
// an index in their highest byte and n_low bytes of rest below it; these are zero here.
template <class U>
struct IndexedBytes {
    alignas(64) uint8_t bytes[sizeof(U)][kMaxTableValues];
    bool is_wide;  // whether indices have 8 bits

    void fill(const TableElements<U>& table, uint32_t n_low) {
        is_wide = table.code_bits + table.rest_bits == 8 * n_low + 8;
        for (std::size_t i = 0; i < kMaxTableValues; ++i) {
            const U element = table.element(static_cast<U>(uint64_t{i} << 8 * n_low));
            for (std::size_t k = 0; k < sizeof(U); ++k)
                bytes[k][i] = static_cast<uint8_t>(element >> 8 * k);
        }
    }
};

#if PACKHORSE_X86

// The bytes of elements of 64 indices, in order().
template <class U>
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void look_up(const IndexedBytes<U>& values, __m512i indices,
                                                     __m512i (&bytes)[sizeof(U)]) {
    const __m512i index = Interleave512<U>::order(indices);
    for (std::size_t k = 0; k < sizeof(U); ++k)
        bytes[k] = ByteTable512{values.bytes[k], values.is_wide}[index];
}

// How the bytes of rest below an index lie in an element.
struct LowRest {
    uint32_t shift;
    bool has_sign;  // the highest bit of the last byte is the sign
};

// All columns of a row have an index, and kLow bytes of rest, which are or'ed to its element.
template <class U, uint32_t kLow>
struct IndexJoiner512 {
    const IndexedBytes<U>& values;
    LowRest low;
    const uint8_t* row;
    std::size_t n;  // columns
    uint8_t* dst;

    PACKHORSE_AVX512_VBMI2 inline void operator()(std::size_t c, uint64_t mask,
                                                  __m512i indices) const {
        __m512i bytes[sizeof(U)], rest[sizeof(U)], found[sizeof(U)];
        look_up(values, indices, bytes);
        for (std::size_t i = 0; i < sizeof(U); ++i) {
            rest[i] = _mm512_setzero_si512();
            if (i < kLow)
                rest[i] = Interleave512<U>::order(_mm512_maskz_loadu_epi8(mask, row + i * n + c));
        }
        if (kLow > 0 && low.has_sign) {
            const __m512i sign = _mm512_set1_epi8(-0x80);
            constexpr std::size_t kLast = kLow == 0 ? 0 : kLow - 1, kTop = sizeof(U) - 1;
            bytes[kTop] = _mm512_or_si512(bytes[kTop], _mm512_and_si512(sign, rest[kLast]));
            rest[kLast] = _mm512_andnot_si512(sign, rest[kLast]);
        }
        if (kLow == 0 || low.shift == 0) {
            for (std::size_t i = 0; i < kLow; ++i) bytes[i] = _mm512_or_si512(bytes[i], rest[i]);
            Interleave512<U>::join(bytes, found);
        } else {
            Interleave512<U>::join(bytes, found);
            Interleave512<U>::join(rest, bytes);
            const __m128i by = _mm_cvtsi32_si128(static_cast<int>(low.shift));
            for (std::size_t q = 0; q < sizeof(U); ++q)
                found[q] = _mm512_or_si512(found[q],
                                           Lanes512<U>::left(bytes[q], by, static_cast<U>(~U{0})));
        }
        put_vectors<U>(dst + sizeof(U) * c, mask, found);
    }
};

template <class U, uint32_t kLow>
PACKHORSE_AVX512_VBMI2 inline void join_indices_avx512(const HighBits512& high,
                                                       const IndexedBytes<U>& values, LowRest low,
                                                       const uint8_t* row, std::size_t n,
                                                       uint8_t* scratch, uint8_t* dst) {
    high.for_each(row, scratch, IndexJoiner512<U, kLow>{values, low, row, n, dst});
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
    const __m512i other = V::broadcast(background);
    for (std::size_t c = 0; c < row.n; c += 64) {
        const BitmapWord word = row.word(c, row.capacity);
        const __m512i packed = _mm512_maskz_loadu_epi8(first_columns(word.count), row.stored);
        row.stored += word.count;
        row.capacity -= word.count;
        __m512i bytes[sizeof(U)], found[sizeof(U)];
        look_up(values, _mm512_maskz_expand_epi8(word.held, packed), bytes);
        Interleave512<U>::join(bytes, found);
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
