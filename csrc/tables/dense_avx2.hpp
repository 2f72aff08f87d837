// Joins the planes of a dense row to elements of 8, 16 or 32 bits with AVX2. The values are looked
// up by shuffles, so there may be 16 of them at most.
#pragma once

#include "tables/dense_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

template <class U>
struct Lanes256 {
    static constexpr std::size_t kCount = 32 / sizeof(U);

    PACKHORSE_AVX2 static __m256i widen(const uint8_t* src) {
        if constexpr (sizeof(U) == 1)
            return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
        if constexpr (sizeof(U) == 2)
            return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(src)));
    }

    PACKHORSE_AVX2 static __m256i broadcast(U value) {
        if constexpr (sizeof(U) == 1) return _mm256_set1_epi8(static_cast<char>(value));
        if constexpr (sizeof(U) == 2) return _mm256_set1_epi16(static_cast<int16_t>(value));
        return _mm256_set1_epi32(static_cast<int32_t>(value));
    }

    // Bits of bytes that reach the next byte are none that is kept.
    PACKHORSE_AVX2 static __m256i left(__m256i x, __m128i count) {
        if constexpr (sizeof(U) <= 2) return _mm256_sll_epi16(x, count);
        return _mm256_sll_epi32(x, count);
    }

    PACKHORSE_AVX2 static __m256i right(__m256i x, __m128i count) {
        if constexpr (sizeof(U) <= 2) return _mm256_srl_epi16(x, count);
        return _mm256_srl_epi32(x, count);
    }

    // 16 values, as `look_up` wants them.
    struct Values {
        __m256i first, second;
    };

    PACKHORSE_AVX2 static Values prepare(const U* values) {
        if constexpr (sizeof(U) == 1) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
            return {_mm256_broadcastsi128_si256(bytes), _mm256_setzero_si256()};
        }
        if constexpr (sizeof(U) == 2) {
            alignas(16) uint8_t low[16], high[16];
            for (std::size_t i = 0; i < 16; ++i) {
                low[i] = static_cast<uint8_t>(values[i]);
                high[i] = static_cast<uint8_t>(values[i] >> 8);
            }
            const __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(low));
            const __m128i second = _mm_load_si128(reinterpret_cast<const __m128i*>(high));
            return {_mm256_broadcastsi128_si256(first), _mm256_broadcastsi128_si256(second)};
        }
        const auto* const at = reinterpret_cast<const __m256i*>(values);
        return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
    }

    // The bits of `codes` above the code are zero.
    PACKHORSE_AVX2 static __m256i look_up(__m256i codes, const Values& values) {
        if constexpr (sizeof(U) == 1) return _mm256_shuffle_epi8(values.first, codes);
        if constexpr (sizeof(U) == 2) {
            // A selector above 127 gives zero.
            const __m256i nothing = _mm256_set1_epi16(-0x8000);
            const __m256i low = _mm256_or_si256(codes, nothing);
            const __m256i high =
                _mm256_or_si256(_mm256_slli_epi16(codes, 8), _mm256_srli_epi16(nothing, 8));
            return _mm256_or_si256(_mm256_shuffle_epi8(values.first, low),
                                   _mm256_shuffle_epi8(values.second, high));
        }
        const __m256i first = _mm256_permutevar8x32_epi32(values.first, codes);
        const __m256i second = _mm256_permutevar8x32_epi32(values.second, codes);
        const __m256i bit = _mm256_slli_epi32(codes, 28);  // bit 3 of the code on top
        return _mm256_castps_si256(_mm256_blendv_ps(
            _mm256_castsi256_ps(first), _mm256_castsi256_ps(second), _mm256_castsi256_ps(bit)));
    }
};

// Returns the first column that is left to another loop.
template <class U>
PACKHORSE_AVX2 inline std::size_t join_planes_avx2(const TablePlanes& planes,
                                                   const TableElements<U>& table, uint8_t* dst) {
    using V = Lanes256<U>;
    constexpr uint32_t kBits = 8 * sizeof(U);
    const auto count = [](uint32_t n) { return _mm_cvtsi32_si128(static_cast<int>(n)); };
    const __m256i code_mask = V::broadcast(TableElements<U>::low_bits(table.code_bits));
    const __m256i moved_mask = V::broadcast(table.moved_mask);
    const __m256i sign_bit = V::broadcast(static_cast<U>(U{1} << (kBits - 1)));
    const __m128i shift = count(table.shift), rest = count(table.rest_bits);
    const __m128i to_sign = count(kBits - 1 - table.moved_bits % kBits);
    const __m128i to_high = count(8 * planes.n_whole);
    const typename V::Values values = V::prepare(table.values);
    std::size_t c = 0;
    for (; c + V::kCount <= planes.n; c += V::kCount) {
        __m256i packed = _mm256_setzero_si256();
        for (uint32_t i = 0; i < planes.n_whole; ++i)
            packed = _mm256_or_si256(
                packed, V::left(V::widen(planes.whole + i * planes.n + c), count(8 * i)));
        if (planes.high != nullptr)
            packed = _mm256_or_si256(packed, V::left(V::widen(planes.high + c), to_high));
        __m256i element = V::left(_mm256_and_si256(packed, moved_mask), shift);
        if (table.has_sign)
            element =
                _mm256_or_si256(element, _mm256_and_si256(V::left(packed, to_sign), sign_bit));
        const __m256i codes = _mm256_and_si256(V::right(packed, rest), code_mask);
        element = _mm256_or_si256(element, V::look_up(codes, values));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + sizeof(U) * c), element);
    }
    return c;
}

#endif

}  // namespace packhorse
