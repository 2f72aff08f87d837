// Cuts differences into bytes and joins them again with AVX-512, 64 units of two or four bytes at a
// time.
#pragma once

#include "common/dispatch.hpp"
#include "delta/rows.hpp"

namespace packhorse {

#if PACKHORSE_X86

// A register of units of two or four bytes.
template <class Unit>
struct DeltaUnits512 {
    static_assert(sizeof(Unit) == 2 || sizeof(Unit) == 4);
    static constexpr bool kShort = sizeof(Unit) == 2;
    static constexpr std::size_t kLanes = 64 / sizeof(Unit);

    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i all(int x) {
        return kShort ? _mm512_set1_epi16(static_cast<short>(x)) : _mm512_set1_epi32(x);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i top() {
        return all(static_cast<int>(Unit{1} << (kUnitBits<Unit> - 1)));
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i sign(__m512i x) {
        return kShort ? _mm512_srai_epi16(x, 15) : _mm512_srai_epi32(x, 31);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i add(__m512i x, __m512i y) {
        return kShort ? _mm512_add_epi16(x, y) : _mm512_add_epi32(x, y);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i subtract(__m512i x, __m512i y) {
        return kShort ? _mm512_sub_epi16(x, y) : _mm512_sub_epi32(x, y);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i shift_right(__m512i x, __m512i n) {
        return kShort ? _mm512_srav_epi16(x, n) : _mm512_srav_epi32(x, n);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i shift_left(__m512i x, __m512i n) {
        return kShort ? _mm512_sllv_epi16(x, n) : _mm512_sllv_epi32(x, n);
    }
    // Moves byte `p` of each unit down, or up from the lowest place.
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i byte_down(__m512i x, uint32_t p) {
        return kShort ? _mm512_srli_epi16(x, 8 * p) : _mm512_srli_epi32(x, 8 * p);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i byte_up(__m512i x, uint32_t p) {
        return kShort ? _mm512_slli_epi16(x, 8 * p) : _mm512_slli_epi32(x, 8 * p);
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i widen(const uint8_t* bytes) {
        if constexpr (kShort)
            return _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(bytes)));
        return _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
    }
    PACKHORSE_AVX512 static PACKHORSE_INLINE void narrow(__m512i x, uint8_t* bytes) {
        if constexpr (kShort)
            _mm256_store_si256(reinterpret_cast<__m256i*>(bytes), _mm512_cvtepi16_epi8(x));
        else
            _mm_store_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(x));
    }
    // Replaces numbers from `limit` on.
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i replace(__m512i x, int limit, int by) {
        if constexpr (kShort)
            return _mm512_mask_mov_epi16(x, _mm512_cmpge_epu16_mask(x, all(limit)), all(by));
        return _mm512_mask_mov_epi32(x, _mm512_cmpge_epu32_mask(x, all(limit)), all(by));
    }
};

template <class Unit, bool kFloat>
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i to_ordered_avx512(__m512i x) {
    using Units = DeltaUnits512<Unit>;
    if constexpr (!kFloat) return x;
    return _mm512_ternarylogic_epi32(x, Units::sign(x), Units::top(), 0x1E);  // x ^ (sign | top)
}

template <class Unit, bool kFloat>
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i from_ordered_avx512(__m512i x) {
    using Units = DeltaUnits512<Unit>;
    if constexpr (!kFloat) return x;
    return _mm512_ternarylogic_epi32(x, Units::sign(x), Units::top(), 0x4B);  // x ^ (~sign | top)
}

// The shifts of the classes of 64 units.
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i shifts_avx512(const uint8_t* keys,
                                                        const DeltaRule& rule) {
    const __m512i key = _mm512_loadu_si512(keys);
    __m512i shifts = _mm512_set1_epi8(static_cast<char>(rule.shifts[0]));
    for (uint32_t t = 0; t + 1 < rule.n_classes; ++t) {
        const __m512i cut = _mm512_set1_epi8(static_cast<char>(rule.thresholds[t]));
        shifts = _mm512_mask_mov_epi8(shifts, _mm512_cmpge_epu8_mask(key, cut),
                                      _mm512_set1_epi8(static_cast<char>(rule.shifts[t + 1])));
    }
    return shifts;
}

// Calls work.template operator()<n_rows>(). Units have at most one more row than bytes.
template <class Unit, class Work>
inline std::size_t with_rows(uint32_t n_rows, const Work& work) {
    if (n_rows == 1) return work.template operator()<1>();
    if (n_rows == 2) return work.template operator()<2>();
    if constexpr (sizeof(Unit) > 2) {
        if (n_rows == 4) return work.template operator()<4>();
        if (n_rows == 5) return work.template operator()<5>();
    }
    return work.template operator()<3>();
}

template <class Unit, bool kFloat, uint32_t kRows>
PACKHORSE_AVX512 inline std::size_t cut_rows_avx512(const uint8_t* src, const uint8_t* base,
                                                    const uint8_t* keys, std::size_t n,
                                                    const DeltaRule& all_fields, BlockRows& rows) {
    using Units = DeltaUnits512<Unit>;
    const DeltaRule rule = all_fields;  // a copy, because stores of bytes might change it
    const __m512i bias = Units::all(kTokenBias);
    alignas(64) uint8_t shifts[64];
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        if (kRows > 1) _mm512_store_si512(shifts, shifts_avx512(keys + i, rule));
#pragma GCC unroll 4
        for (std::size_t k = 0; k < 64; k += Units::kLanes) {
            const std::size_t at = (i + k) * sizeof(Unit);
            const __m512i unit = to_ordered_avx512<Unit, kFloat>(_mm512_loadu_si512(src + at));
            const __m512i before = to_ordered_avx512<Unit, kFloat>(_mm512_loadu_si512(base + at));
            const __m512i difference = Units::subtract(unit, before);
            __m512i t = difference;
            if (kRows > 1) t = Units::shift_right(t, Units::widen(shifts + k));
            t = Units::replace(Units::add(t, bias), kDeltaDirectTokens, kLongMark);
            Units::narrow(t, rows.at[0] + i + k);
#pragma GCC unroll 4
            for (uint32_t p = 1; p < kRows; ++p)
                Units::narrow(Units::byte_down(difference, p - 1), rows.at[p] + i + k);
        }
    }
    return i;
}

template <class Unit, bool kFloat>
inline std::size_t cut_differences_avx512(const uint8_t* src, const uint8_t* base,
                                          const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                                          uint32_t n_rows, BlockRows& rows) {
    return with_rows<Unit>(n_rows, [&]<uint32_t kRows>() {
        return cut_rows_avx512<Unit, kFloat, kRows>(src, base, keys, n, rule, rows);
    });
}

template <class Unit, bool kFloat, uint32_t kRows>
PACKHORSE_AVX512 inline std::size_t join_rows_avx512(const BlockRows& rows, std::size_t n,
                                                     const uint8_t* base, uint8_t* dst) {
    using Units = DeltaUnits512<Unit>;
    const __m512i bias = Units::all(kTokenBias);
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
        for (std::size_t k = 0; k < 64; k += Units::kLanes) {
            const std::size_t at = (i + k) * sizeof(Unit);
            // A token that is not direct becomes the token of zero.
            const __m512i token = Units::widen(rows.at[0] + i + k);
            const __m512i direct = Units::replace(token, kDeltaDirectTokens, kTokenBias);
            __m512i difference = Units::subtract(direct, bias);
            if (kRows > 1)
                difference = Units::shift_left(difference, Units::widen(rows.shifts + i + k));
#pragma GCC unroll 4
            for (uint32_t p = 1; p < kRows; ++p)
                difference = _mm512_or_si512(
                    difference, Units::byte_up(Units::widen(rows.at[p] + i + k), p - 1));
            const __m512i before = to_ordered_avx512<Unit, kFloat>(_mm512_loadu_si512(base + at));
            _mm512_storeu_si512(dst + at,
                                from_ordered_avx512<Unit, kFloat>(Units::add(before, difference)));
        }
    }
    return i;
}

template <class Unit, bool kFloat>
inline std::size_t join_differences_avx512(const BlockRows& rows, uint32_t n_rows, std::size_t n,
                                           const uint8_t* base, uint8_t* dst) {
    return with_rows<Unit>(n_rows, [&]<uint32_t kRows>() {
        return join_rows_avx512<Unit, kFloat, kRows>(rows, n, base, dst);
    });
}

#endif

}  // namespace packhorse
