// Joins bytes of rests and of values with AVX-512, 64 columns at a time.
#pragma once

#include "tables/bytes_portable.hpp"
#include "tables/high_avx512.hpp"

namespace packhorse {

#if PACKHORSE_X86

template <class U, uint32_t kWhole>
struct ByteJoiner512 {
    static constexpr std::size_t kTop = sizeof(U) - 1, kFirst = kTop - kWhole;
    __m512i tables[sizeof(U)];
    std::size_t n;  // columns of the row

    PACKHORSE_AVX512 PACKHORSE_INLINE ByteJoiner512(const ValueBytes& values, std::size_t n_columns)
        : n(n_columns) {
        for (std::size_t k = 0; k < sizeof(U); ++k) {
            const auto* const table = reinterpret_cast<const __m128i*>(values.bytes[k]);
            tables[k] = _mm512_broadcast_i32x4(_mm_load_si128(table));
        }
    }

    // `rest` is the first plane at the first column.
    PACKHORSE_AVX512 PACKHORSE_INLINE void put(__m512i code, uint64_t mask, const uint8_t* rest,
                                               uint8_t* dst) const {
        const __m512i sign = _mm512_set1_epi8(-0x80);
        const __m512i index = Interleave512<U>::order(code);
        __m512i bytes[sizeof(U)];
        for (std::size_t k = 0; k < sizeof(U); ++k)
            bytes[k] = _mm512_shuffle_epi8(tables[k], index);
        for (std::size_t i = 0; i < kWhole; ++i) {
            const __m512i plane =
                Interleave512<U>::order(_mm512_maskz_loadu_epi8(mask, rest + i * n));
            if (i + 1 < kWhole) {
                bytes[kFirst + i] = _mm512_or_si512(bytes[kFirst + i], plane);
            } else {
                bytes[kTop - 1] =
                    _mm512_or_si512(bytes[kTop - 1], _mm512_andnot_si512(sign, plane));
                bytes[kTop] = _mm512_or_si512(bytes[kTop], _mm512_and_si512(sign, plane));
            }
        }
        __m512i found[sizeof(U)];
        Interleave512<U>::join(bytes, found);
        put_vectors<U>(dst, mask, found);
    }
};

template <class U, uint32_t kWhole>
PACKHORSE_AVX512 inline void join_bytes_avx512(const HighBits512& high, const uint8_t* row,
                                               std::size_t n, const ValueBytes& values,
                                               uint8_t* scratch, uint8_t* dst) {
    const ByteJoiner512<U, kWhole> joiner(values, n);
    high.for_each(row, scratch, [&](std::size_t c, uint64_t mask, __m512i code) PACKHORSE_AVX512 {
        joiner.put(code, mask, row + c, dst + sizeof(U) * c);
    });
}

#endif

}  // namespace packhorse
