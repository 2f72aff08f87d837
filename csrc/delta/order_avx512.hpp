// Moves units and tokens to the order by class and back with AVX-512, for up to eight classes. With
// VBMI2 they keep their own length; without it they are widened to 32 bits.
#pragma once

#include <type_traits>

#include "common/dispatch.hpp"
#include "delta/delta.hpp"

namespace packhorse {

#if PACKHORSE_X86

// A register of units, narrow ones as elements of 32 bits.
template <class Unit>
struct Units512 {
    static constexpr std::size_t kLanes = sizeof(Unit) == 8 ? 8 : 16;
    using Mask = std::conditional_t<sizeof(Unit) == 8, __mmask8, __mmask16>;
    using Keys = __m128i;

    PACKHORSE_AVX512 static PACKHORSE_INLINE Keys load_keys(const uint8_t* keys) {
        return sizeof(Unit) == 8 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(keys))
                                 : _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys));
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE Mask at_least(Keys keys, uint8_t cut) {
        return static_cast<Mask>(_mm_cmpge_epu8_mask(keys, _mm_set1_epi8(static_cast<char>(cut))));
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i load(const Unit* src) {
        if constexpr (sizeof(Unit) == 1)
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
        else if constexpr (sizeof(Unit) == 2)
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
        else
            return _mm512_loadu_si512(src);
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE void store(Unit* dst, __m512i units) {
        if constexpr (sizeof(Unit) == 1)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi32_epi8(units));
        else if constexpr (sizeof(Unit) == 2)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm512_cvtepi32_epi16(units));
        else
            _mm512_storeu_si512(dst, units);
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i expand(__m512i over, Mask set, __m512i units) {
        if constexpr (sizeof(Unit) == 8)
            return _mm512_mask_expand_epi64(over, set, units);
        else
            return _mm512_mask_expand_epi32(over, set, units);
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i compress(Mask set, __m512i units) {
        if constexpr (sizeof(Unit) == 8)
            return _mm512_maskz_compress_epi64(set, units);
        else
            return _mm512_maskz_compress_epi32(set, units);
    }
};

// The same for elements that only VBMI2 moves.
template <class Unit>
struct UnitsVbmi2;

template <>
struct UnitsVbmi2<uint8_t> {
    static constexpr std::size_t kLanes = 64;
    using Mask = __mmask64;
    using Keys = __m512i;

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE Keys load_keys(const uint8_t* keys) {
        return _mm512_loadu_si512(keys);
    }

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE Mask at_least(Keys keys, uint8_t cut) {
        return _mm512_cmpge_epu8_mask(keys, _mm512_set1_epi8(static_cast<char>(cut)));
    }

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE __m512i expand(__m512i over, Mask set,
                                                                  __m512i units) {
        return _mm512_mask_expand_epi8(over, set, units);
    }

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE __m512i compress(Mask set, __m512i units) {
        return _mm512_maskz_compress_epi8(set, units);
    }
};

template <>
struct UnitsVbmi2<uint16_t> {
    static constexpr std::size_t kLanes = 32;
    using Mask = __mmask32;
    using Keys = __m256i;

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE Keys load_keys(const uint8_t* keys) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
    }

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE Mask at_least(Keys keys, uint8_t cut) {
        return _mm256_cmpge_epu8_mask(keys, _mm256_set1_epi8(static_cast<char>(cut)));
    }

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE __m512i expand(__m512i over, Mask set,
                                                                  __m512i units) {
        return _mm512_mask_expand_epi16(over, set, units);
    }

    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE __m512i compress(Mask set, __m512i units) {
        return _mm512_maskz_compress_epi16(set, units);
    }
};

// Puts the units of kClasses classes, from class `first` on, in order into `dst`. The other units
// of `dst` stay.
template <class Unit, uint32_t kClasses>
PACKHORSE_AVX512 inline std::size_t unsort_units_avx512(const Unit** from, const uint8_t* keys,
                                                        std::size_t n, const DeltaRule& rule,
                                                        uint32_t first, Unit* dst) {
    using Units = Units512<Unit>;
    using Mask = typename Units::Mask;
    const Unit* next[kClasses];
    for (uint32_t k = 0; k < kClasses; ++k) next[k] = from[first + k];
    std::size_t i = 0;
    for (; i + Units::kLanes <= n; i += Units::kLanes) {
        const auto key = Units::load_keys(keys + i);
        auto from_here = first > 0 ? Units::at_least(key, rule.thresholds[first - 1])
                                   : static_cast<Mask>(~Mask{0});
        __m512i units = Units::load(dst + i);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < kClasses; ++k) {
            const Mask above = first + k + 1 < rule.n_classes
                                   ? Units::at_least(key, rule.thresholds[first + k])
                                   : Mask{0};
            const auto set = static_cast<Mask>(from_here & ~above);
            from_here = above;
            units = Units::expand(units, set, Units::load(next[k]));
            next[k] += __builtin_popcountll(set);
        }
        Units::store(dst + i, units);
    }
    for (uint32_t k = 0; k < kClasses; ++k) from[first + k] = next[k];
    return i;
}

template <class Unit, uint32_t kClasses>
PACKHORSE_AVX512 inline std::size_t sort_units_avx512(const Unit* src, const uint8_t* keys,
                                                      std::size_t n, const DeltaRule& rule,
                                                      uint32_t first, Unit** to) {
    using Units = Units512<Unit>;
    using Mask = typename Units::Mask;
    Unit* next[kClasses];
    for (uint32_t k = 0; k < kClasses; ++k) next[k] = to[first + k];
    std::size_t i = 0;
    for (; i + Units::kLanes <= n; i += Units::kLanes) {
        const auto key = Units::load_keys(keys + i);
        auto from_here = first > 0 ? Units::at_least(key, rule.thresholds[first - 1])
                                   : static_cast<Mask>(~Mask{0});
        const __m512i units = Units::load(src + i);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < kClasses; ++k) {
            const Mask above = first + k + 1 < rule.n_classes
                                   ? Units::at_least(key, rule.thresholds[first + k])
                                   : Mask{0};
            const auto set = static_cast<Mask>(from_here & ~above);
            from_here = above;
            Units::store(next[k], Units::compress(set, units));
            next[k] += __builtin_popcountll(set);
        }
    }
    for (uint32_t k = 0; k < kClasses; ++k) to[first + k] = next[k];
    return i;
}

template <class Unit, uint32_t kClasses>
PACKHORSE_AVX512_VBMI2 inline std::size_t unsort_units_vbmi2(const Unit** from, const uint8_t* keys,
                                                             std::size_t n, const DeltaRule& rule,
                                                             uint32_t first, Unit* dst) {
    using Units = UnitsVbmi2<Unit>;
    using Mask = typename Units::Mask;
    const Unit* next[kClasses];
    for (uint32_t k = 0; k < kClasses; ++k) next[k] = from[first + k];
    std::size_t i = 0;
    for (; i + Units::kLanes <= n; i += Units::kLanes) {
        const auto key = Units::load_keys(keys + i);
        auto from_here = first > 0 ? Units::at_least(key, rule.thresholds[first - 1])
                                   : static_cast<Mask>(~Mask{0});
        __m512i units = _mm512_loadu_si512(dst + i);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < kClasses; ++k) {
            const Mask above = first + k + 1 < rule.n_classes
                                   ? Units::at_least(key, rule.thresholds[first + k])
                                   : Mask{0};
            const auto set = static_cast<Mask>(from_here & ~above);
            from_here = above;
            units = Units::expand(units, set, _mm512_loadu_si512(next[k]));
            next[k] += __builtin_popcountll(set);
        }
        _mm512_storeu_si512(dst + i, units);
    }
    for (uint32_t k = 0; k < kClasses; ++k) from[first + k] = next[k];
    return i;
}

template <class Unit, uint32_t kClasses>
PACKHORSE_AVX512_VBMI2 inline std::size_t sort_units_vbmi2(const Unit* src, const uint8_t* keys,
                                                           std::size_t n, const DeltaRule& rule,
                                                           uint32_t first, Unit** to) {
    using Units = UnitsVbmi2<Unit>;
    using Mask = typename Units::Mask;
    Unit* next[kClasses];
    for (uint32_t k = 0; k < kClasses; ++k) next[k] = to[first + k];
    std::size_t i = 0;
    for (; i + Units::kLanes <= n; i += Units::kLanes) {
        const auto key = Units::load_keys(keys + i);
        auto from_here = first > 0 ? Units::at_least(key, rule.thresholds[first - 1])
                                   : static_cast<Mask>(~Mask{0});
        const __m512i units = _mm512_loadu_si512(src + i);
#pragma GCC unroll 8
        for (uint32_t k = 0; k < kClasses; ++k) {
            const Mask above = first + k + 1 < rule.n_classes
                                   ? Units::at_least(key, rule.thresholds[first + k])
                                   : Mask{0};
            const auto set = static_cast<Mask>(from_here & ~above);
            from_here = above;
            _mm512_storeu_si512(next[k], Units::compress(set, units));
            next[k] += __builtin_popcountll(set);
        }
    }
    for (uint32_t k = 0; k < kClasses; ++k) to[first + k] = next[k];
    return i;
}

template <class Unit>
constexpr bool kVbmi2Moves = sizeof(Unit) <= 2;

#endif

}  // namespace packhorse
