// Whole units in the order by class and back, for up to eight classes (docs/format.md, 6.6). A
// unit's class is the number of cuts that are at most its key.
//
// AVX-512 compresses and expands 16 units at a time as elements of 32 bits (8 of 64); with VBMI2
// 32 of two bytes. The baseline moves unit by unit.
#pragma once

#include <algorithm>

#include "class_order.hpp"
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

#if PACKHORSE_X86

// Keys of blocks of 64 that are at or above each cut; rounds as in class_order.hpp.
template <uint32_t kClasses>
PACKHORSE_AVX512 inline void count_cuts_avx512(const uint8_t* keys, std::size_t n_blocks,
                                               const DeltaRule& rule, std::size_t* above) {
    constexpr uint32_t n_cuts = kClasses - 1;
    while (n_blocks > 0) {
        const std::size_t run = std::min(n_blocks, kCountRounds);
        __m512i few[kClasses] = {};
        for (std::size_t b = 0; b < run; ++b, keys += 64) {
            const __m512i key = _mm512_loadu_si512(keys);
#pragma GCC unroll 8
            for (uint32_t t = 0; t < n_cuts; ++t) {
                const __m512i cut = _mm512_set1_epi8(static_cast<char>(rule.thresholds[t]));
                const __mmask64 mine = _mm512_cmpge_epu8_mask(key, cut);
                few[t] = _mm512_mask_sub_epi8(few[t], mine, few[t], _mm512_set1_epi8(-1));
            }
        }
        for (uint32_t t = 0; t < n_cuts; ++t)
            above[t] += static_cast<std::size_t>(
                _mm512_reduce_add_epi64(_mm512_sad_epu8(few[t], _mm512_setzero_si512())));
        n_blocks -= run;
    }
}

// A register of units, narrow ones as elements of 32 bits.
template <class Unit>
struct Units512 {
    static constexpr std::size_t kLanes = sizeof(Unit) == 8 ? 8 : 16;
    using Mask = std::conditional_t<sizeof(Unit) == 8, __mmask8, __mmask16>;

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) __m512i load(const Unit* src) {
        if constexpr (sizeof(Unit) == 1)
            return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src)));
        else if constexpr (sizeof(Unit) == 2)
            return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src)));
        else
            return _mm512_loadu_si512(src);
    }

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) void store(Unit* dst,
                                                                             __m512i units) {
        if constexpr (sizeof(Unit) == 1)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), _mm512_cvtepi32_epi8(units));
        else if constexpr (sizeof(Unit) == 2)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), _mm512_cvtepi32_epi16(units));
        else
            _mm512_storeu_si512(dst, units);
    }

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) __m512i expand(__m512i over,
                                                                                 Mask set,
                                                                                 __m512i units) {
        if constexpr (sizeof(Unit) == 8)
            return _mm512_mask_expand_epi64(over, set, units);
        else
            return _mm512_mask_expand_epi32(over, set, units);
    }

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) __m512i compress(Mask set,
                                                                                   __m512i units) {
        if constexpr (sizeof(Unit) == 8)
            return _mm512_maskz_compress_epi64(set, units);
        else
            return _mm512_maskz_compress_epi32(set, units);
    }
};

// Which units of a register are of class `c`, from their keys; `from_here` are those of this class
// and the ones behind it.
template <uint32_t kClasses, class Mask>
PACKHORSE_AVX512 inline __attribute__((always_inline)) Mask
next_set_avx512(__m128i keys, uint32_t c, const DeltaRule& rule, Mask& from_here) {
    Mask above = 0;
    if (c + 1 < kClasses) {
        const __m128i cut = _mm_set1_epi8(static_cast<char>(rule.thresholds[c]));
        above = static_cast<Mask>(_mm_cmpge_epu8_mask(keys, cut));
    }
    const auto set = static_cast<Mask>(from_here & ~above);
    from_here = above;
    return set;
}

template <class Unit, uint32_t kClasses>
PACKHORSE_AVX512 inline std::size_t unsort_units_avx512(const Unit** from, const uint8_t* keys,
                                                        std::size_t n, const DeltaRule& rule,
                                                        Unit* dst) {
    using Units = Units512<Unit>;
    using Mask = typename Units::Mask;
    const Unit* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = from[c];
    std::size_t i = 0;
    for (; i + 16 <= n; i += Units::kLanes) {
        const __m128i key = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i));
        auto from_here = static_cast<Mask>(~Mask{0});
        __m512i units = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const Mask set = next_set_avx512<kClasses>(key, c, rule, from_here);
            units = Units::expand(units, set, Units::load(next[c]));
            next[c] += __builtin_popcount(set);
        }
        Units::store(dst + i, units);
    }
    for (uint32_t c = 0; c < kClasses; ++c) from[c] = next[c];
    return i;
}

template <class Unit, uint32_t kClasses>
PACKHORSE_AVX512 inline std::size_t sort_units_avx512(const Unit* src, const uint8_t* keys,
                                                      std::size_t n, const DeltaRule& rule,
                                                      Unit** to) {
    using Units = Units512<Unit>;
    using Mask = typename Units::Mask;
    Unit* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = to[c];
    std::size_t i = 0;
    for (; i + 16 <= n; i += Units::kLanes) {
        const __m128i key = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i));
        auto from_here = static_cast<Mask>(~Mask{0});
        const __m512i units = Units::load(src + i);
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const Mask set = next_set_avx512<kClasses>(key, c, rule, from_here);
            Units::store(next[c], Units::compress(set, units));
            next[c] += __builtin_popcount(set);
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) to[c] = next[c];
    return i;
}

template <uint32_t kClasses>
PACKHORSE_AVX512_VBMI2 inline __attribute__((always_inline)) __mmask32
next_set_vbmi2(__m256i keys, uint32_t c, const DeltaRule& rule, __mmask32& from_here) {
    __mmask32 above = 0;
    if (c + 1 < kClasses) {
        const __m256i cut = _mm256_set1_epi8(static_cast<char>(rule.thresholds[c]));
        above = _mm256_cmpge_epu8_mask(keys, cut);
    }
    const __mmask32 set = from_here & ~above;
    from_here = above;
    return set;
}

// Units of two bytes, 32 at a time: put in order and added to those of the base.
template <uint32_t kClasses, bool kFloat>
PACKHORSE_AVX512_VBMI2 inline std::size_t merge_units_vbmi2(const uint16_t** from,
                                                            const uint8_t* keys, std::size_t n,
                                                            const DeltaRule& rule,
                                                            const uint8_t* base, uint8_t* dst) {
    const __m512i top = _mm512_set1_epi16(static_cast<short>(0x8000));
    const __m512i ones = _mm512_set1_epi16(-1);
    const uint16_t* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = from[c];
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
        __mmask32 from_here = ~__mmask32{0};
        __m512i units = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const __mmask32 set = next_set_vbmi2<kClasses>(key, c, rule, from_here);
            units = _mm512_mask_expand_epi16(units, set, _mm512_loadu_si512(next[c]));
            next[c] += __builtin_popcount(set);
        }
        const __m512i before = _mm512_loadu_si512(base + 2 * i);
        if constexpr (kFloat) {
            const __mmask32 negative = _mm512_movepi16_mask(before);
            const __m512i ordered = _mm512_add_epi16(
                units, _mm512_xor_si512(before, _mm512_mask_mov_epi16(top, negative, ones)));
            const __mmask32 upper = _mm512_movepi16_mask(ordered);
            units = _mm512_xor_si512(ordered, _mm512_mask_mov_epi16(ones, upper, top));
        } else {
            units = _mm512_add_epi16(units, before);
        }
        _mm512_storeu_si512(dst + 2 * i, units);
    }
    for (uint32_t c = 0; c < kClasses; ++c) from[c] = next[c];
    return i;
}

template <uint32_t kClasses>
PACKHORSE_AVX512_VBMI2 inline std::size_t sort_units_vbmi2(const uint16_t* src, const uint8_t* keys,
                                                           std::size_t n, const DeltaRule& rule,
                                                           uint16_t** to) {
    uint16_t* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = to[c];
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
        const __m512i units = _mm512_loadu_si512(src + i);
        __mmask32 from_here = ~__mmask32{0};
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const __mmask32 set = next_set_vbmi2<kClasses>(key, c, rule, from_here);
            _mm512_storeu_si512(next[c], _mm512_maskz_compress_epi16(set, units));
            next[c] += __builtin_popcount(set);
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) to[c] = next[c];
    return i;
}

template <class Unit, uint32_t kClasses>
inline std::size_t sort_blocks(const Unit* src, const uint8_t* keys, std::size_t n,
                               const DeltaRule& rule, Unit** to, Isa isa) {
    if constexpr (sizeof(Unit) == 2)
        if (isa >= Isa::kAvx512Vbmi2) return sort_units_vbmi2<kClasses>(src, keys, n, rule, to);
    return isa >= Isa::kAvx512 ? sort_units_avx512<Unit, kClasses>(src, keys, n, rule, to) : 0;
}

#endif

// Calls work.template operator()<n_classes>(), so that all that is kept of each class can be in
// registers.
template <class Work>
inline auto with_classes(uint32_t n_classes, const Work& work) {
    switch (n_classes) {
        case 1:
            return work.template operator()<1>();
        case 2:
            return work.template operator()<2>();
        case 3:
            return work.template operator()<3>();
        case 4:
            return work.template operator()<4>();
        case 5:
            return work.template operator()<5>();
        case 6:
            return work.template operator()<6>();
        case 7:
            return work.template operator()<7>();
        default:
            return work.template operator()<8>();
    }
}

inline DeltaStarts count_delta_classes(const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                                       Isa isa) {
    std::size_t above[kMaxDeltaClasses] = {};
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) {
        with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            count_cuts_avx512<kClasses>(keys, n / 64, rule, above);
        });
        done = n / 64 * 64;
    }
#endif
    (void)isa;
    DeltaStarts starts;
    for (uint32_t c = 1; c <= kMaxDeltaClasses; ++c)
        starts.at[c] =
            c < rule.n_classes
                ? n - above[c - 1] - count_above(keys + done, n - done, rule.thresholds[c - 1])
                : n;
    return starts;
}

// At most kDeltaBlockUnits units in the order of units; `from` points at the next of each class and
// is moved on. kDeltaSlackNbytes behind each class may be read.
template <class Unit>
inline void unsort_units(const Unit** from, const uint8_t* keys, std::size_t n,
                         const DeltaRule& rule, Unit* dst, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_units_avx512<Unit, kClasses>(from, keys, n, rule, dst);
        });
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
    done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
        return sort_blocks<Unit, kClasses>(src, keys, n, rule, to, isa);
    });
#endif
    uint8_t classes[kDeltaBlockUnits];
    fill_classes(keys + done, n - done, rule, classes, isa);
    for (std::size_t i = done; i < n; ++i) *to[classes[i - done]]++ = src[i];
}

}  // namespace packhorse
