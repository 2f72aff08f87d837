// Looks up elements of 32 bits by indices of 8 bits with AVX-512 VBMI, 64 columns at a time. Four
// tables of 256 bytes, one for each byte of the values, lie in registers. Indices of a bitmap row
// are spread to their columns first.
#pragma once

#include "tables/table.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The bytes of 256 values: all first bytes, then all second bytes and so on.
struct IndexedBytes {
    alignas(64) uint8_t bytes[4][kMaxTableValues];

    explicit IndexedBytes(const TableElements<uint32_t>& table) {
        for (std::size_t i = 0; i < kMaxTableValues; ++i)
            for (std::size_t k = 0; k < 4; ++k)
                bytes[k][i] = static_cast<uint8_t>(table.values[i] >> 8 * k);
    }
};

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

struct IndexTables512 {
    ByteTable512 bytes[4];

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE explicit IndexTables512(const IndexedBytes& values)
        : bytes{ByteTable512(values.bytes[0]), ByteTable512(values.bytes[1]),
                ByteTable512(values.bytes[2]), ByteTable512(values.bytes[3])} {}

    // The elements of 64 indices, the first 16 in found[0] and so on.
    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void look_up(__m512i indices, __m512i* found) const {
        // Unpacking works within quarters of a register, so quarters of quarters are exchanged.
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

// The mask of the first `n` bits.
PACKHORSE_INLINE uint64_t first_columns(std::size_t n) {
    return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

// All columns of a row have an index.
PACKHORSE_AVX512_VBMI2 inline void look_up_dense_avx512(const uint8_t* indices, std::size_t n,
                                                        const IndexedBytes& values, uint8_t* dst) {
    const IndexTables512 tables(values);
    for (std::size_t c = 0; c < n; c += 64) {
        const uint64_t mask = first_columns(n - c);
        __m512i found[4];
        tables.look_up(_mm512_maskz_loadu_epi8(mask, indices + c), found);
        for (std::size_t q = 0; q < 4; ++q)
            _mm512_mask_storeu_epi32(dst + 4 * c + 64 * q, static_cast<__mmask16>(mask >> 16 * q),
                                     found[q]);
    }
}

// Columns whose bit is set have an index, the others the background. There are `left` indices at
// most.
PACKHORSE_AVX512_VBMI2 inline void look_up_bitmap_avx512(const uint8_t* bitmap, std::size_t n,
                                                         const uint8_t* indices, std::size_t left,
                                                         uint32_t background,
                                                         const IndexedBytes& values, uint8_t* dst) {
    const IndexTables512 tables(values);
    const __m512i other = _mm512_set1_epi32(static_cast<int32_t>(background));
    for (std::size_t c = 0; c < n; c += 64) {
        const uint64_t mask = first_columns(n - c);
        const uint64_t word = load<uint64_t>(bitmap + c / 8) & mask;
        const std::size_t wanted = static_cast<std::size_t>(std::popcount(word));
        const std::size_t count = std::min(wanted, left);
        const __m512i packed = _mm512_maskz_loadu_epi8(first_columns(count), indices);
        // Of more bits than are left, the last ones get no index.
        const uint64_t held = count == wanted ? word : _pdep_u64(first_columns(count), word);
        indices += count;
        left -= count;
        __m512i found[4];
        tables.look_up(_mm512_maskz_expand_epi8(held, packed), found);
        for (std::size_t q = 0; q < 4; ++q) {
            const __m512i element =
                _mm512_mask_blend_epi32(static_cast<__mmask16>(held >> 16 * q), other, found[q]);
            _mm512_mask_storeu_epi32(dst + 4 * c + 64 * q, static_cast<__mmask16>(mask >> 16 * q),
                                     element);
        }
    }
}

// The same for elements that are stored as they are.
PACKHORSE_AVX512 inline void spread_bitmap_avx512(const uint8_t* bitmap, std::size_t n,
                                                  const uint8_t* elements, std::size_t left,
                                                  uint32_t background, uint8_t* dst) {
    const __m512i other = _mm512_set1_epi32(static_cast<int32_t>(background));
    for (std::size_t c = 0; c < n; c += 16) {
        const auto mask = static_cast<__mmask16>(n - c >= 16 ? 0xFFFF : (1u << (n - c)) - 1);
        uint32_t word = load<uint16_t>(bitmap + c / 8) & mask;
        std::size_t count = static_cast<std::size_t>(std::popcount(word));
        if (count > left) {
            count = left;
            word = _pdep_u32((1u << count) - 1, word);
        }
        const auto held = static_cast<__mmask16>(word);
        const auto some = static_cast<__mmask16>((1u << count) - 1);
        const __m512i packed = _mm512_maskz_loadu_epi32(some, elements);
        _mm512_mask_storeu_epi32(dst + 4 * c, mask, _mm512_mask_expand_epi32(other, held, packed));
        elements += 4 * count;
        left -= count;
    }
}

#endif

}  // namespace packhorse
