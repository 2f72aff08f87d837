// Whole units, and tokens of a byte, in the order by class and back, for up to eight classes
// (docs/format.md, 6.6). A unit's class is the number of cuts that are at most its key.
//
// AVX-512 with VBMI2 compresses and expands 64 tokens at a time, or 32 units of two bytes; all else
// goes 16 at a time as elements of 32 bits (8 of 64), which is all that AVX-512 itself has. AVX2
// moves tokens as class_order.hpp does, and the baseline one by one; units, of which few are left
// then, both one by one.
#pragma once

#include <algorithm>

#include "class_order.hpp"
#include "delta.hpp"

namespace packhorse {

constexpr std::size_t kDeltaBlockUnits = 2048;  // their tokens and differences stay in L1
constexpr std::size_t kDeltaSlackNbytes = 64;   // that may be read or written behind a class

// Where each class begins in the order by class.
struct DeltaStarts {
    std::size_t at[kMaxDeltaClasses + 1] = {};

    std::size_t count(uint32_t c) const { return at[c + 1] - at[c]; }
};

// The class of each key.
struct ClassOfKey {
    uint8_t of[256];

    explicit ClassOfKey(const DeltaRule& rule) {
        std::fill(std::begin(of), std::end(of), uint8_t{0});
        for (uint32_t t = 0; t + 1 < rule.n_classes; ++t)
            std::fill(of + rule.thresholds[t], std::end(of), static_cast<uint8_t>(t + 1));
    }
};

// Classes side by side: first, first + 1, ..., last - 1.
struct ClassRange {
    uint32_t first, last;
};

// Classes without raw bits that no class with raw bits follows. Their tokens are their differences,
// but for the long ones, so that bytes are moved and not units. The other classes are wide.
inline uint32_t first_narrow_class(const DeltaRule& rule) {
    uint32_t first = rule.n_classes;
    while (first > 0 && rule.shifts[first - 1] == 0) --first;
    return first;
}

// How the units of a chunk are moved: bytes for the classes of `bytes`, for which a mark stands
// where a difference does not fit one; whole units for those of `units`, and one by one those that
// are marked.
struct DeltaMoves {
    ClassRange bytes, units;

    // Where units are moved one by one anyway, those of wide classes are marked, too.
    DeltaMoves(const DeltaRule& rule, Isa isa)
        : bytes{isa >= Isa::kAvx512 ? first_narrow_class(rule) : 0, rule.n_classes},
          units{0, bytes.first} {}
};

#if PACKHORSE_X86

// A register of units, narrow ones as elements of 32 bits.
template <class Unit>
struct Units512 {
    static constexpr std::size_t kLanes = sizeof(Unit) == 8 ? 8 : 16;
    using Mask = std::conditional_t<sizeof(Unit) == 8, __mmask8, __mmask16>;
    using Keys = __m128i;

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) Keys
    load_keys(const uint8_t* keys) {
        return sizeof(Unit) == 8 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(keys))
                                 : _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys));
    }

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) Mask at_least(Keys keys,
                                                                                uint8_t cut) {
        return static_cast<Mask>(_mm_cmpge_epu8_mask(keys, _mm_set1_epi8(static_cast<char>(cut))));
    }

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

// The same for elements that only VBMI2 moves.
template <class Unit>
struct UnitsVbmi2;

template <>
struct UnitsVbmi2<uint8_t> {
    static constexpr std::size_t kLanes = 64;
    using Mask = __mmask64;
    using Keys = __m512i;

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) Keys
    load_keys(const uint8_t* keys) {
        return _mm512_loadu_si512(keys);
    }

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) Mask at_least(Keys keys,
                                                                                      uint8_t cut) {
        return _mm512_cmpge_epu8_mask(keys, _mm512_set1_epi8(static_cast<char>(cut)));
    }

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) __m512i
    expand(__m512i over, Mask set, __m512i units) {
        return _mm512_mask_expand_epi8(over, set, units);
    }

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) __m512i
    compress(Mask set, __m512i units) {
        return _mm512_maskz_compress_epi8(set, units);
    }
};

template <>
struct UnitsVbmi2<uint16_t> {
    static constexpr std::size_t kLanes = 32;
    using Mask = __mmask32;
    using Keys = __m256i;

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) Keys
    load_keys(const uint8_t* keys) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
    }

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) Mask at_least(Keys keys,
                                                                                      uint8_t cut) {
        return _mm256_cmpge_epu8_mask(keys, _mm256_set1_epi8(static_cast<char>(cut)));
    }

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) __m512i
    expand(__m512i over, Mask set, __m512i units) {
        return _mm512_mask_expand_epi16(over, set, units);
    }

    PACKHORSE_AVX512_VBMI2 static inline __attribute__((always_inline)) __m512i
    compress(Mask set, __m512i units) {
        return _mm512_maskz_compress_epi16(set, units);
    }
};

// Units of the classes from `first` on, kClasses of them: put in order over `dst`, whose other
// units stay.
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

// 32 tokens, each from its class's next ones: by its rank, how many of the class are before it in
// its half of the block (see unsort_block_avx2()). Two classes share a byte of ranks.
template <uint32_t kClasses>
PACKHORSE_AVX2 inline std::size_t unsort_tokens_avx2(const uint8_t** from, const uint8_t* keys,
                                                     std::size_t n, const DeltaRule& rule,
                                                     uint8_t* dst) {
    const __m256i one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(0x0F);
    const uint8_t* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = from[c];
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys + i));
        // Those of class c and above; of a class behind the last, none.
        __m256i from_class[kClasses + 2];
        uint32_t half[kClasses + 1], all[kClasses + 1];
#pragma GCC unroll 10
        for (uint32_t c = 0; c < kClasses + 2; ++c) {
            from_class[c] = c < kClasses ? _mm256_set1_epi8(-1) : _mm256_setzero_si256();
            if (c > 0 && c < kClasses) {
                const __m256i cut = _mm256_set1_epi8(static_cast<char>(rule.thresholds[c - 1]));
                from_class[c] = _mm256_cmpeq_epi8(_mm256_max_epu8(key, cut), key);
            }
            if (c > kClasses) continue;
            const auto set = static_cast<uint32_t>(_mm256_movemask_epi8(from_class[c]));
            half[c] = static_cast<uint32_t>(__builtin_popcount(set & 0xFFFF));
            all[c] = static_cast<uint32_t>(__builtin_popcount(set));
        }
        __m256i units = _mm256_setzero_si256(), ranks = units;
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            if (c % 2 == 0) {
                // 1 for this class, 16 for the next.
                const __m256i mine = _mm256_andnot_si256(from_class[c + 2], from_class[c]);
                const __m256i upper = _mm256_set1_epi8(16);
                const __m256i kind = _mm256_blendv_epi8(one, upper, from_class[c + 1]);
                ranks = sums_before_avx2(_mm256_and_si256(mine, kind));
            }
            const __m256i rank =
                _mm256_and_si256(c % 2 == 0 ? ranks : _mm256_srli_epi16(ranks, 4), low);
            const uint8_t* const second = next[c] + (half[c] - half[c + 1]);
            const __m256i fresh =
                _mm256_setr_m128i(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next[c])),
                                  _mm_loadu_si128(reinterpret_cast<const __m128i*>(second)));
            units = _mm256_blendv_epi8(units, _mm256_shuffle_epi8(fresh, rank), from_class[c]);
            next[c] += all[c] - all[c + 1];
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + i), units);
    }
    for (uint32_t c = 0; c < kClasses; ++c) from[c] = next[c];
    return i;
}

// Eight tokens at a time, by a look-up of the places of those of a class.
template <uint32_t kClasses>
PACKHORSE_AVX2 inline std::size_t sort_tokens_avx2(const uint8_t* src, const uint8_t* keys,
                                                   std::size_t n, const DeltaRule& rule,
                                                   uint8_t** to) {
    uint8_t* next[kClasses];
    for (uint32_t c = 0; c < kClasses; ++c) next[c] = to[c];
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t sets[kClasses];
        uint64_t from_here = ~uint64_t{0};
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const uint64_t above = c + 1 < kClasses ? above_avx2(keys + i, rule.thresholds[c]) : 0;
            sets[c] = from_here & ~above;
            from_here = above;
        }
        for (std::size_t k = 0; k < 64; k += 8) {
            const __m128i tokens = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(src + i + k));
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c) {
                const auto set = static_cast<uint32_t>(sets[c] >> k & 0xFF);
                const __m128i places =
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaceShuffles.compress[set]));
                _mm_storel_epi64(reinterpret_cast<__m128i*>(next[c]),
                                 _mm_shuffle_epi8(tokens, places));
                next[c] += __builtin_popcount(set);
            }
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) to[c] = next[c];
    return i;
}

template <class Unit>
constexpr bool kVbmi2Moves = sizeof(Unit) <= 2;

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
    if (isa >= Isa::kAvx2 && rule.n_classes > 1) {
        with_classes(rule.n_classes - 1, [&]<uint32_t kCuts>() {
            if (isa >= Isa::kAvx512)
                count_cuts_avx512<kCuts>(keys, n / 64, rule.thresholds, above);
            else
                count_cuts_avx2<kCuts>(keys, n / 64 * 2, rule.thresholds, above);
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

// At most kDeltaBlockUnits units of some classes in the order of units, over `dst`, whose other
// units stay or are undefined; `from` points at the next of each class and is moved on.
// kDeltaSlackNbytes behind each class may be read.
template <class Unit>
inline void unsort_units(const Unit** from, const uint8_t* keys, std::size_t n,
                         const DeltaRule& rule, ClassRange range, const ClassOfKey& classes,
                         Unit* dst, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        done = with_classes(range.last - range.first, [&]<uint32_t kClasses>() {
            if constexpr (kVbmi2Moves<Unit>)
                if (isa >= Isa::kAvx512Vbmi2)
                    return unsort_units_vbmi2<Unit, kClasses>(from, keys, n, rule, range.first,
                                                              dst);
            return unsort_units_avx512<Unit, kClasses>(from, keys, n, rule, range.first, dst);
        });
#endif
    (void)isa;
    for (std::size_t i = done; i < n; ++i) {
        const uint32_t c = classes.of[keys[i]];
        if (c >= range.first && c < range.last) dst[i] = *from[c]++;
    }
}

// At most kDeltaBlockUnits units of some classes to the places that `to` points at, which is moved
// on; kDeltaSlackNbytes behind each class may be written.
template <class Unit>
inline void sort_units(const Unit* src, const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                       ClassRange range, const ClassOfKey& classes, Unit** to, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        done = with_classes(range.last - range.first, [&]<uint32_t kClasses>() {
            if constexpr (kVbmi2Moves<Unit>)
                if (isa >= Isa::kAvx512Vbmi2)
                    return sort_units_vbmi2<Unit, kClasses>(src, keys, n, rule, range.first, to);
            return sort_units_avx512<Unit, kClasses>(src, keys, n, rule, range.first, to);
        });
#endif
    (void)isa;
    for (std::size_t i = done; i < n; ++i) {
        const uint32_t c = classes.of[keys[i]];
        if (c >= range.first && c < range.last) *to[c]++ = src[i];
    }
}

// Calls move(place, i) for each of at most kDeltaBlockUnits units, one by one; `at` points
// at the next unit of each of kMaxDeltaClasses classes and is moved on.
template <class Unit, class Move>
inline void move_one_by_one(Unit** at, const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                            Isa isa, Move move) {
    using Few = Moving<Unit, kMaxDeltaClasses>;
    uint8_t steps[kDeltaBlockUnits];
    fill_steps(keys, n, rule.thresholds, rule.n_classes - 1, Few::kStep, steps, isa);
    for (std::size_t first = 0; first < n; first += Few::kMaxUnits) {
        const std::size_t end = std::min(n, first + Few::kMaxUnits);
        Few moving(at);
        for (std::size_t i = first; i < end; ++i) move(moving.next(steps[i]), i);
        moving.finish(at);
    }
}

// As unsort_units(), for tokens; the order of units of all classes where they move one by one.
inline void unsort_tokens(const uint8_t** from, const uint8_t* keys, std::size_t n,
                          const DeltaRule& rule, ClassRange range, const ClassOfKey& classes,
                          uint8_t* __restrict dst, Isa isa) {
    // Ranks move 32 tokens in less time than two registers of 16 are expanded.
    const bool by_ranks = isa < Isa::kAvx512Vbmi2 && range.first == 0;
    if (isa >= Isa::kAvx512 && !by_ranks)
        return unsort_units(from, keys, n, rule, range, classes, dst, isa);
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_tokens_avx2<kClasses>(from, keys, n, rule, dst);
        });
#endif
    move_one_by_one(from, keys + done, n - done, rule, isa,
                    [=](const uint8_t& token, std::size_t i) { dst[done + i] = token; });
}

// As sort_units(), for tokens; those of all classes where they move one by one.
inline void sort_tokens(const uint8_t* __restrict src, const uint8_t* keys, std::size_t n,
                        const DeltaRule& rule, ClassRange range, const ClassOfKey& classes,
                        uint8_t** to, Isa isa) {
    if (isa >= Isa::kAvx512) return sort_units(src, keys, n, rule, range, classes, to, isa);
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return sort_tokens_avx2<kClasses>(src, keys, n, rule, to);
        });
#endif
    move_one_by_one(to, keys + done, n - done, rule, isa,
                    [=](uint8_t& token, std::size_t i) { token = src[done + i]; });
}

}  // namespace packhorse
