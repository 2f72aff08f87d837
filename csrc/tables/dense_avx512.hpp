// Joins the planes of a dense row to elements with AVX-512, 64 bytes of elements at a time. The
// values are looked up by a permute, so there may be 16 of them at most.
#pragma once

#include "tables/dense_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Operations on vectors of U.
template <class U>
struct Lanes512 {
    static constexpr std::size_t kCount = 64 / sizeof(U);

    // The first elements of a row, or all of a vector.
    PACKHORSE_AVX512 static __m512i widen(const uint8_t* src, uint64_t mask) {
        if constexpr (sizeof(U) == 1) return _mm512_maskz_loadu_epi8(mask, src);
        if constexpr (sizeof(U) == 2)
            return _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(static_cast<__mmask32>(mask), src));
        const __m128i bytes = _mm_maskz_loadu_epi8(static_cast<__mmask16>(mask), src);
        if constexpr (sizeof(U) == 4) return _mm512_cvtepu8_epi32(bytes);
        return _mm512_cvtepu8_epi64(bytes);
    }

    PACKHORSE_AVX512 static __m512i broadcast(U value) {
        if constexpr (sizeof(U) == 1) return _mm512_set1_epi8(static_cast<char>(value));
        if constexpr (sizeof(U) == 2) return _mm512_set1_epi16(static_cast<int16_t>(value));
        if constexpr (sizeof(U) == 4) return _mm512_set1_epi32(static_cast<int32_t>(value));
        return _mm512_set1_epi64(static_cast<int64_t>(value));
    }

    PACKHORSE_AVX512 static __m512i left(__m512i x, __m128i count, U keep) {
        if constexpr (sizeof(U) == 1)
            return _mm512_and_si512(_mm512_sll_epi16(x, count), broadcast(keep));
        if constexpr (sizeof(U) == 2) return _mm512_sll_epi16(x, count);
        if constexpr (sizeof(U) == 4) return _mm512_sll_epi32(x, count);
        return _mm512_sll_epi64(x, count);
    }

    PACKHORSE_AVX512 static __m512i right(__m512i x, __m128i count, U keep) {
        if constexpr (sizeof(U) == 1)
            return _mm512_and_si512(_mm512_srl_epi16(x, count), broadcast(keep));
        if constexpr (sizeof(U) == 2) return _mm512_srl_epi16(x, count);
        if constexpr (sizeof(U) == 4) return _mm512_srl_epi32(x, count);
        return _mm512_srl_epi64(x, count);
    }

    // `values` has 16 elements.
    PACKHORSE_AVX512 static __m512i look_up(__m512i codes, const U* values) {
        if constexpr (sizeof(U) == 1)
            return _mm512_shuffle_epi8(
                _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values))),
                codes);
        if constexpr (sizeof(U) == 2)
            return _mm512_permutexvar_epi16(codes, _mm512_loadu_si512(values));
        if constexpr (sizeof(U) == 4)
            return _mm512_permutexvar_epi32(codes, _mm512_loadu_si512(values));
        return _mm512_permutex2var_epi64(_mm512_loadu_si512(values), codes,
                                         _mm512_loadu_si512(values + 8));
    }

    PACKHORSE_AVX512 static __m512i get(const uint8_t* src, uint64_t mask) {
        if constexpr (sizeof(U) == 1) return _mm512_maskz_loadu_epi8(mask, src);
        if constexpr (sizeof(U) == 2)
            return _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), src);
        if constexpr (sizeof(U) == 4)
            return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), src);
        return _mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), src);
    }

    // Lanes of `b` where the mask is set, of `a` elsewhere.
    PACKHORSE_AVX512 static __m512i blend(uint64_t mask, __m512i a, __m512i b) {
        if constexpr (sizeof(U) == 1) return _mm512_mask_blend_epi8(mask, a, b);
        if constexpr (sizeof(U) == 2)
            return _mm512_mask_blend_epi16(static_cast<__mmask32>(mask), a, b);
        if constexpr (sizeof(U) == 4)
            return _mm512_mask_blend_epi32(static_cast<__mmask16>(mask), a, b);
        return _mm512_mask_blend_epi64(static_cast<__mmask8>(mask), a, b);
    }

    // All bits of the lanes that differ.
    PACKHORSE_AVX512 static __m512i differing(__m512i a, __m512i b) {
        if constexpr (sizeof(U) == 1) return _mm512_movm_epi8(_mm512_cmpneq_epi8_mask(a, b));
        if constexpr (sizeof(U) == 2) return _mm512_movm_epi16(_mm512_cmpneq_epi16_mask(a, b));
        if constexpr (sizeof(U) == 4) return _mm512_movm_epi32(_mm512_cmpneq_epi32_mask(a, b));
        return _mm512_movm_epi64(_mm512_cmpneq_epi64_mask(a, b));
    }

    PACKHORSE_AVX512 static void put(uint8_t* dst, uint64_t mask, __m512i x) {
        if constexpr (sizeof(U) == 1) return _mm512_mask_storeu_epi8(dst, mask, x);
        if constexpr (sizeof(U) == 2)
            return _mm512_mask_storeu_epi16(dst, static_cast<__mmask32>(mask), x);
        if constexpr (sizeof(U) == 4)
            return _mm512_mask_storeu_epi32(dst, static_cast<__mmask16>(mask), x);
        _mm512_mask_storeu_epi64(dst, static_cast<__mmask8>(mask), x);
    }
};

// Stores 64 elements. Stores with masks are slow on some processors, so only the last ones have
// one.
template <class U>
PACKHORSE_AVX512 PACKHORSE_INLINE void put_vectors(uint8_t* dst, uint64_t mask,
                                                   const __m512i (&found)[sizeof(U)]) {
    for (std::size_t q = 0; q < sizeof(U); ++q) {
        if (mask == ~uint64_t{0})
            _mm512_storeu_si512(dst + 64 * q, found[q]);
        else
            Lanes512<U>::put(dst + 64 * q, mask >> q * Lanes512<U>::kCount, found[q]);
    }
}

// A table of 256 bytes, of which only the first 128 count if no index is above them.
struct ByteTable512 {
    const uint8_t* bytes;
    bool is_wide;

    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i operator[](__m512i index) const {
        const __m512i low = half(0, index);
        if (!is_wide) return low;
        return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, half(128, index));
    }

  private:
    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i half(std::size_t at, __m512i index) const {
        return _mm512_permutex2var_epi8(_mm512_load_si512(bytes + at), index,
                                        _mm512_load_si512(bytes + at + 64));
    }
};

// Puts bytes of 64 elements together: each byte of U has a vector. Unpacking works within quarters
// of a register, so parts of the bytes change places before.
template <class U>
struct Interleave512 {
    PACKHORSE_AVX512 PACKHORSE_INLINE static __m512i order(__m512i bytes) {
        if constexpr (sizeof(U) == 2)
            return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes);
        if constexpr (sizeof(U) == 4)
            return _mm512_permutexvar_epi32(
                _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), bytes);
        return bytes;
    }

    // `bytes` are in order(). The first elements are in found[0].
    PACKHORSE_AVX512 PACKHORSE_INLINE static void join(const __m512i (&bytes)[sizeof(U)],
                                                       __m512i (&found)[sizeof(U)]) {
        if constexpr (sizeof(U) == 1) {
            found[0] = bytes[0];
        } else {
            const __m512i low = _mm512_unpacklo_epi8(bytes[0], bytes[1]);
            const __m512i high = _mm512_unpackhi_epi8(bytes[0], bytes[1]);
            if constexpr (sizeof(U) == 2) {
                found[0] = low;
                found[1] = high;
            } else {
                const __m512i low_top = _mm512_unpacklo_epi8(bytes[2], bytes[3]);
                const __m512i high_top = _mm512_unpackhi_epi8(bytes[2], bytes[3]);
                found[0] = _mm512_unpacklo_epi16(low, low_top);
                found[1] = _mm512_unpackhi_epi16(low, low_top);
                found[2] = _mm512_unpacklo_epi16(high, high_top);
                found[3] = _mm512_unpackhi_epi16(high, high_top);
            }
        }
    }
};

template <class U>
PACKHORSE_AVX512 inline void join_planes_avx512(const TablePlanes& planes,
                                                const TableElements<U>& table, uint8_t* dst) {
    using V = Lanes512<U>;
    constexpr uint32_t kBits = 8 * sizeof(U);
    const auto count = [](uint32_t n) { return _mm_cvtsi32_si128(static_cast<int>(n)); };
    const bool has_code = table.code_bits != 0, has_high = planes.high != nullptr;
    const U code_mask = TableElements<U>::low_bits(table.code_bits);
    const __m512i moved_mask = V::broadcast(table.moved_mask);
    const U moved_high =
        static_cast<U>(static_cast<uint64_t>(table.moved_mask) << table.shift % 64);
    const __m512i sign_bit = V::broadcast(static_cast<U>(U{1} << (kBits - 1)));
    const __m128i shift = count(table.shift), rest = count(table.rest_bits);
    const __m128i to_sign = count(kBits - 1 - table.moved_bits % kBits);
    const __m128i to_high = count(8 * planes.n_whole);
    const __m512i one = V::broadcast(table.values[0]);
    for (std::size_t c = 0; c < planes.n; c += V::kCount) {
        const std::size_t left = planes.n - c;
        const uint64_t mask = left >= 64 ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
        __m512i packed = _mm512_setzero_si512();
        if (planes.n_whole > 0) packed = V::widen(planes.whole + c, mask);
        for (uint32_t i = 1; i < planes.n_whole; ++i)
            packed = _mm512_or_si512(
                packed,
                V::left(V::widen(planes.whole + i * planes.n + c, mask), count(8 * i), U{0}));
        if (has_high) {
            const __m512i high = V::widen(planes.high + c, mask);
            packed =
                planes.n_whole == 0 ? high : _mm512_or_si512(packed, V::left(high, to_high, U{0}));
        }
        __m512i element = _mm512_and_si512(packed, moved_mask);
        element = V::left(element, shift, moved_high);
        if (table.has_sign)
            element = _mm512_or_si512(
                element,
                _mm512_and_si512(V::left(packed, to_sign, static_cast<U>(~U{0})), sign_bit));
        const __m512i value =
            has_code ? V::look_up(V::right(packed, rest, code_mask), table.values) : one;
        V::put(dst + sizeof(U) * c, mask, _mm512_or_si512(element, value));
    }
}

#endif

}  // namespace packhorse
