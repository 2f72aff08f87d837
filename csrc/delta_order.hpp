// Whole units in the order by class and back, for up to eight classes (docs/format.md, 6.6). A
// unit's class is the number of cuts that are at most its key.
//
// AVX-512 compresses and expands 16 units at a time as elements of 32 bits (8 of 64), which the
// first processors with AVX-512 do as well as later ones; the baseline moves unit by unit.
#pragma once

#include <algorithm>

#include "delta.hpp"

namespace packhorse {

constexpr std::size_t kDeltaBlockUnits = 1024;  // of the widest unit, for all classes: 64 KiB
constexpr std::size_t kDeltaSlackNbytes = 64;   // that may be read or written behind a class

// Where each class begins in the order by class.
struct DeltaStarts {
    std::size_t at[kMaxDeltaClasses + 1] = {};

    std::size_t count(uint32_t c) const { return at[c + 1] - at[c]; }
};

inline void fill_classes(const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                         uint8_t* __restrict classes, Isa isa) {
    std::memset(classes, 0, n);
    for (uint32_t t = 0; t + 1 < rule.n_classes; ++t) {
        const uint8_t cut = rule.thresholds[t];
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                classes[i] = static_cast<uint8_t>(classes[i] + (keys[i] >= cut ? 1 : 0));
        });
    }
}

inline std::size_t count_from(const uint8_t* keys, std::size_t n, uint8_t cut, Isa isa) {
    std::size_t total = 0;
    std::size_t* const out = &total;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t at = 0; at < n; at += 128) {
            const std::size_t end = n - at < 128 ? n : at + 128;
            uint8_t few = 0;
            for (std::size_t i = at; i < end; ++i)
                few = static_cast<uint8_t>(few + (keys[i] >= cut ? 1 : 0));
            *out += few;
        }
    });
    return total;
}

inline DeltaStarts count_delta_classes(const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                                       Isa isa) {
    DeltaStarts starts;
    for (uint32_t c = 1; c <= kMaxDeltaClasses; ++c)
        starts.at[c] = c < rule.n_classes ? n - count_from(keys, n, rule.thresholds[c - 1], isa) : n;
    return starts;
}

#if PACKHORSE_X86

// The 16 (or 8) units that a register holds, one class each.
PACKHORSE_AVX512 inline __attribute__((always_inline)) void delta_sets_avx512(
    const uint8_t* keys, const DeltaRule& rule, __mmask16* sets) {
    const __m128i key = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys));
    __mmask16 from = 0xFFFF;
    for (uint32_t c = 0; c + 1 < rule.n_classes; ++c) {
        const __mmask16 above = _mm_cmpge_epu8_mask(
            key, _mm_set1_epi8(static_cast<char>(rule.thresholds[c])));
        sets[c] = static_cast<__mmask16>(from & ~above);
        from = above;
    }
    sets[rule.n_classes - 1] = from;
}

template <class Unit>
PACKHORSE_AVX512 inline __attribute__((always_inline)) __m512i load_units_avx512(const Unit* src) {
    if constexpr (sizeof(Unit) == 1)
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
    else if constexpr (sizeof(Unit) == 2)
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
    else
        return _mm512_loadu_si512(src);
}

template <class Unit>
PACKHORSE_AVX512 inline __attribute__((always_inline)) void store_units_avx512(Unit* dst,
                                                                               __m512i units) {
    if constexpr (sizeof(Unit) == 1)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi32_epi8(units));
    else if constexpr (sizeof(Unit) == 2)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm512_cvtepi32_epi16(units));
    else
        _mm512_storeu_si512(dst, units);
}

template <class Unit>
constexpr std::size_t kLanes512 = sizeof(Unit) == 8 ? 8 : 16;

template <class Unit>
PACKHORSE_AVX512 inline std::size_t unsort_units_avx512(const Unit** from, const uint8_t* keys,
                                                        std::size_t n, const DeltaRule& rule,
                                                        Unit* dst) {
    constexpr std::size_t n_lanes = kLanes512<Unit>;
    const Unit* next[kMaxDeltaClasses];
    for (uint32_t c = 0; c < rule.n_classes; ++c) next[c] = from[c];
    std::size_t i = 0;
    for (; i + 16 <= n; i += n_lanes) {
        __mmask16 sets[kMaxDeltaClasses];
        delta_sets_avx512(keys + i, rule, sets);
        __m512i units = _mm512_setzero_si512();
        for (uint32_t c = 0; c < rule.n_classes; ++c) {
            const __m512i fresh = load_units_avx512(next[c]);
            if constexpr (sizeof(Unit) == 8) {
                const auto set = static_cast<__mmask8>(sets[c]);
                units = _mm512_mask_expand_epi64(units, set, fresh);
                next[c] += __builtin_popcount(set);
            } else {
                units = _mm512_mask_expand_epi32(units, sets[c], fresh);
                next[c] += __builtin_popcount(sets[c]);
            }
        }
        store_units_avx512(dst + i, units);
    }
    for (uint32_t c = 0; c < rule.n_classes; ++c) from[c] = next[c];
    return i;
}

template <class Unit>
PACKHORSE_AVX512 inline std::size_t sort_units_avx512(const Unit* src, const uint8_t* keys,
                                                      std::size_t n, const DeltaRule& rule,
                                                      Unit** to) {
    constexpr std::size_t n_lanes = kLanes512<Unit>;
    std::size_t i = 0;
    for (; i + 16 <= n; i += n_lanes) {
        __mmask16 sets[kMaxDeltaClasses];
        delta_sets_avx512(keys + i, rule, sets);
        const __m512i units = load_units_avx512(src + i);
        for (uint32_t c = 0; c < rule.n_classes; ++c) {
            if constexpr (sizeof(Unit) == 8) {
                const auto set = static_cast<__mmask8>(sets[c]);
                store_units_avx512(to[c], _mm512_maskz_compress_epi64(set, units));
                to[c] += __builtin_popcount(set);
            } else {
                store_units_avx512(to[c], _mm512_maskz_compress_epi32(sets[c], units));
                to[c] += __builtin_popcount(sets[c]);
            }
        }
    }
    return i;
}

#endif

// At most kDeltaBlockUnits units in the order of units; `from` points at the next of each class and
// is moved on. kDeltaSlackNbytes behind the last unit may be read.
template <class Unit>
inline void unsort_units(const Unit** from, const uint8_t* keys, std::size_t n,
                         const DeltaRule& rule, Unit* dst, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) done = unsort_units_avx512(from, keys, n, rule, dst);
#endif
    uint8_t classes[kDeltaBlockUnits];
    fill_classes(keys + done, n - done, rule, classes, isa);
    for (std::size_t i = done; i < n; ++i) dst[i] = *from[classes[i - done]]++;
}

// At most kDeltaBlockUnits units to the places that `to` points at; kDeltaSlackNbytes behind each
// class may be written.
template <class Unit>
inline void sort_block_of_units(const Unit* src, const uint8_t* keys, std::size_t n,
                                const DeltaRule& rule, Unit** to, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) done = sort_units_avx512(src, keys, n, rule, to);
#endif
    uint8_t classes[kDeltaBlockUnits];
    fill_classes(keys + done, n - done, rule, classes, isa);
    for (std::size_t i = done; i < n; ++i) *to[classes[i - done]]++ = src[i];
}

}  // namespace packhorse
