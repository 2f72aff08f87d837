// Joins bytes of rests and of values with AVX2, 32 columns at a time.
#pragma once

#include "tables/bytes_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Codes, one in a byte.
struct ByteCodesAvx2 {
    const uint8_t* codes;
    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i at(std::size_t j) const {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + j));
    }
};

// Codes of 4 bits, two in a byte.
template <bool kUpper>
struct NibbleCodesAvx2 {
    const uint8_t* plane;
    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i at(std::size_t j) const {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane + j));
        return _mm256_and_si256(kUpper ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(0x0F));
    }
};

PACKHORSE_AVX2 PACKHORSE_INLINE void put_lanes_avx2(uint8_t* dst, __m256i low, __m256i high) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                        _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 32),
                        _mm256_permute2x128_si256(low, high, 0x31));
}

// Joins 32 columns whose codes are in a register.
template <class U, uint32_t kWhole>
struct ByteJoinerAvx2 {
    static constexpr std::size_t kTop = sizeof(U) - 1, kFirst = kTop - kWhole;
    __m256i tables[sizeof(U)];
    std::size_t n;  // columns of the row

    PACKHORSE_AVX2 PACKHORSE_INLINE ByteJoinerAvx2(const ValueBytes& values, std::size_t n_columns)
        : n(n_columns) {
        for (std::size_t k = 0; k < sizeof(U); ++k) {
            const auto* const table = reinterpret_cast<const __m128i*>(values.bytes[k]);
            tables[k] = _mm256_broadcastsi128_si256(_mm_load_si128(table));
        }
    }

    // `rest` is the first plane at the first column.
    PACKHORSE_AVX2 PACKHORSE_INLINE void put(__m256i code, const uint8_t* rest,
                                             uint8_t* dst) const {
        const __m256i sign = _mm256_set1_epi8(-0x80);
        __m256i bytes[sizeof(U)];
        for (std::size_t k = 0; k < sizeof(U); ++k) bytes[k] = _mm256_shuffle_epi8(tables[k], code);
        for (std::size_t i = 0; i < kWhole; ++i) {
            const __m256i plane =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rest + i * n));
            if (i + 1 < kWhole) {
                bytes[kFirst + i] = _mm256_or_si256(bytes[kFirst + i], plane);
            } else {
                bytes[kTop - 1] =
                    _mm256_or_si256(bytes[kTop - 1], _mm256_andnot_si256(sign, plane));
                bytes[kTop] = _mm256_or_si256(bytes[kTop], _mm256_and_si256(sign, plane));
            }
        }
        const __m256i low = _mm256_unpacklo_epi8(bytes[0], bytes[1]);
        const __m256i high = _mm256_unpackhi_epi8(bytes[0], bytes[1]);
        if constexpr (sizeof(U) == 2) {
            put_lanes_avx2(dst, low, high);
        } else {
            const __m256i low_top = _mm256_unpacklo_epi8(bytes[2], bytes[3]);
            const __m256i high_top = _mm256_unpackhi_epi8(bytes[2], bytes[3]);
            // Columns 0 to 3 and 16 to 19, then 4 to 7 and 20 to 23, and so on.
            const __m256i a = _mm256_unpacklo_epi16(low, low_top);
            const __m256i b = _mm256_unpackhi_epi16(low, low_top);
            const __m256i c = _mm256_unpacklo_epi16(high, high_top);
            const __m256i d = _mm256_unpackhi_epi16(high, high_top);
            auto* const to = reinterpret_cast<__m256i*>(dst);
            _mm256_storeu_si256(to, _mm256_permute2x128_si256(a, b, 0x20));
            _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(c, d, 0x20));
            _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(a, b, 0x31));
            _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(c, d, 0x31));
        }
    }
};

// The span has 32 columns at least: the last ones may be written twice.
template <class U, uint32_t kWhole, class Codes>
PACKHORSE_AVX2 inline void join_bytes_avx2(const ColumnSpan& span, const ValueBytes& values,
                                           const Codes& codes) {
    const ByteJoinerAvx2<U, kWhole> joiner(values, span.n);
    for (std::size_t next = 0; next < span.count; next += 32) {
        const std::size_t j = std::min(next, span.count - 32), column = span.start + j;
        joiner.put(codes.at(j), span.whole + column, span.dst + sizeof(U) * column);
    }
}

#endif

}  // namespace packhorse
