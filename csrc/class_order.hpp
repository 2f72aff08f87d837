// The order by class and back (docs/format.md, 6.5). A unit's class is the number of cuts that are
// at most its key, a byte that is at hand before the unit is.
//
// Every path works on blocks of units. Both directions move the next units of each class between
// places side by side, in the order by class, and the places that a set of bits names:
// - AVX-512 with VBMI2 has instructions for that, 64 units at a time;
// - AVX2 does it by byte shuffles that are looked up, for eight units and each of the 256 sets;
// - the baseline moves unit by unit. The next unit of a class waits until the one before has moved
//   its pointer on, so the quarters of a block go side by side, each with pointers of its own.
#pragma once

#include <algorithm>

#include "dispatch.hpp"
#include "layout.hpp"

namespace packhorse {

struct ClassCuts {
    uint8_t at[kMaxClasses - 1] = {};
    uint64_t used[kMaxClasses - 1] = {};  // all ones, or zero for a cut that is not there
};

// Keys that are the classes.
inline constexpr ClassCuts kCutsOfClasses{{1, 2, 3}, {~0ull, ~0ull, ~0ull}};

// Where each class begins in the order by class; at[kMaxClasses] is the end.
struct ClassStarts {
    std::size_t at[kMaxClasses + 1];

    std::size_t count(uint32_t c) const { return at[c + 1] - at[c]; }
};

constexpr std::size_t kClassSlack = 64;  // bytes that unsorting may read past the end
constexpr std::size_t kSortUnits = 2048;

// The bytes of each class in a block, or of a block, as sets of bits.
struct ClassSets {
    uint64_t of[kMaxClasses];
};

// From the units that are at or above each cut.
PACKHORSE_INLINE ClassSets class_sets(const uint64_t* above) {
    return {{~above[0], above[0] & ~above[1], above[1] & ~above[2], above[2]}};
}

// Classes of `n` units, as bytes.
inline void fill_classes(const uint8_t* keys, std::size_t n, const ClassCuts& cuts,
                         uint8_t* __restrict classes, Isa isa) {
    std::memset(classes, 0, n);
    for (uint32_t t = 0; t + 1 < kMaxClasses; ++t) {
        const uint8_t cut = cuts.at[t];
        if (cuts.used[t] == 0) break;
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                classes[i] = static_cast<uint8_t>(classes[i] + (keys[i] >= cut ? 1 : 0));
        });
    }
}

// How many keys are at or above a cut.
PACKHORSE_INLINE std::size_t count_above(const uint8_t* keys, std::size_t n, uint8_t cut) {
    std::size_t count = 0;
    for (std::size_t at = 0; at < n; at += 128) {
        const std::size_t end = std::min(n, at + 128);
        uint8_t few = 0;  // no more than fits a byte, so that a register counts in all of its bytes
        for (std::size_t i = at; i < end; ++i)
            few = static_cast<uint8_t>(few + (keys[i] >= cut ? 1 : 0));
        count += few;
    }
    return count;
}

#if PACKHORSE_X86

PACKHORSE_AVX512 inline std::size_t count_above_avx512(const uint8_t* keys, std::size_t n_blocks,
                                                       uint8_t cut) {
    std::size_t count = 0;
    const __m512i least = _mm512_set1_epi8(static_cast<char>(cut));
    for (std::size_t b = 0; b < n_blocks; ++b)
        count += static_cast<std::size_t>(
            __builtin_popcountll(_mm512_cmpge_epu8_mask(_mm512_loadu_si512(keys + 64 * b), least)));
    return count;
}

// Units at or above each cut, of 64.
PACKHORSE_AVX512 inline __attribute__((always_inline)) ClassSets
class_sets_avx512(const uint8_t* keys, const ClassCuts& cuts) {
    const __m512i key = _mm512_loadu_si512(keys);
    uint64_t above[kMaxClasses - 1];
    for (uint32_t t = 0; t + 1 < kMaxClasses; ++t)
        above[t] = _mm512_mask_cmpge_epu8_mask(cuts.used[t], key,
                                               _mm512_set1_epi8(static_cast<char>(cuts.at[t])));
    return class_sets(above);
}

PACKHORSE_AVX2 inline __attribute__((always_inline)) uint64_t above_avx2(const uint8_t* keys,
                                                                         uint8_t cut) {
    uint32_t halves[2];
    for (int h = 0; h < 2; ++h) {
        const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys) + h);
        const __m256i larger = _mm256_max_epu8(key, _mm256_set1_epi8(static_cast<char>(cut)));
        halves[h] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(larger, key)));
    }
    return halves[0] | uint64_t{halves[1]} << 32;
}

PACKHORSE_AVX2 inline __attribute__((always_inline)) ClassSets
class_sets_avx2(const uint8_t* keys, const ClassCuts& cuts) {
    uint64_t above[kMaxClasses - 1];
    for (uint32_t t = 0; t + 1 < kMaxClasses; ++t)
        above[t] = above_avx2(keys, cuts.at[t]) & cuts.used[t];
    return class_sets(above);
}

// For each of the 256 sets of eight places, byte shuffles: `expand` moves the next bytes to the
// places and clears the others, `compress` moves the bytes at the places side by side.
struct alignas(64) PlaceShuffles {
    uint8_t expand[256][8];
    uint8_t compress[256][8];
    uint8_t slack[8];  // registers are loaded whole
};

constexpr PlaceShuffles make_place_shuffles() {
    PlaceShuffles shuffles{};
    for (uint32_t set = 0; set < 256; ++set) {
        uint8_t next = 0;
        for (uint8_t place = 0; place < 8; ++place) {
            const bool is_in = set >> place & 1;
            shuffles.expand[set][place] = is_in ? next : uint8_t{0x80};
            if (is_in) shuffles.compress[set][next++] = place;
        }
    }
    return shuffles;
}

inline constexpr PlaceShuffles kPlaceShuffles = make_place_shuffles();

PACKHORSE_AVX2 inline std::size_t unsort_blocks_avx2(const uint8_t** from, const uint8_t* keys,
                                                     std::size_t n, const ClassCuts& cuts,
                                                     uint8_t* dst) {
    const uint8_t* next[kMaxClasses] = {from[0], from[1], from[2], from[3]};
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        ClassSets sets = class_sets_avx2(keys + i, cuts);
        for (std::size_t k = 0; k < 64; k += 8) {
            __m128i units = _mm_setzero_si128();
#pragma GCC unroll 4
            for (uint32_t c = 0; c < kMaxClasses; ++c) {
                const auto set = static_cast<uint32_t>(sets.of[c] >> k & 0xFF);
                const __m128i places =
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(kPlaceShuffles.expand[set]));
                const __m128i fresh = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next[c]));
                units = _mm_or_si128(units, _mm_shuffle_epi8(fresh, places));
                next[c] += __builtin_popcount(set);
            }
            _mm_storel_epi64(reinterpret_cast<__m128i*>(dst + i + k), units);
        }
    }
    for (uint32_t c = 0; c < kMaxClasses; ++c) from[c] = next[c];
    return i;
}

PACKHORSE_AVX2 inline std::size_t sort_blocks_avx2(const uint8_t* plane, const uint8_t* keys,
                                                   std::size_t n, const ClassCuts& cuts,
                                                   uint8_t** to) {
    uint8_t* next[kMaxClasses] = {to[0], to[1], to[2], to[3]};
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const ClassSets sets = class_sets_avx2(keys + i, cuts);
        for (std::size_t k = 0; k < 64; k += 8) {
            const __m128i units = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(plane + i + k));
#pragma GCC unroll 4
            for (uint32_t c = 0; c < kMaxClasses; ++c) {
                const auto set = static_cast<uint32_t>(sets.of[c] >> k & 0xFF);
                const __m128i places =
                    _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaceShuffles.compress[set]));
                _mm_storel_epi64(reinterpret_cast<__m128i*>(next[c]),
                                 _mm_shuffle_epi8(units, places));
                next[c] += __builtin_popcount(set);
            }
        }
    }
    for (uint32_t c = 0; c < kMaxClasses; ++c) to[c] = next[c];
    return i;
}

PACKHORSE_AVX512_VBMI2 inline std::size_t unsort_blocks_vbmi2(const uint8_t** from,
                                                              const uint8_t* keys, std::size_t n,
                                                              const ClassCuts& cuts, uint8_t* dst) {
    const uint8_t* next[kMaxClasses] = {from[0], from[1], from[2], from[3]};
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const ClassSets sets = class_sets_avx512(keys + i, cuts);
        __m512i units = _mm512_setzero_si512();
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            units = _mm512_mask_expand_epi8(units, sets.of[c], _mm512_loadu_si512(next[c]));
            next[c] += __builtin_popcountll(sets.of[c]);
        }
        _mm512_storeu_si512(dst + i, units);
    }
    for (uint32_t c = 0; c < kMaxClasses; ++c) from[c] = next[c];
    return i;
}

PACKHORSE_AVX512_VBMI2 inline std::size_t sort_blocks_vbmi2(const uint8_t* plane,
                                                            const uint8_t* keys, std::size_t n,
                                                            const ClassCuts& cuts, uint8_t** to) {
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const ClassSets sets = class_sets_avx512(keys + i, cuts);
        const __m512i units = _mm512_loadu_si512(plane + i);
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            _mm512_storeu_si512(to[c], _mm512_maskz_compress_epi8(sets.of[c], units));
            to[c] += __builtin_popcountll(sets.of[c]);
        }
    }
    return i;
}

#endif

// `n` keys, how many of them are in each class.
inline ClassStarts count_classes(const uint8_t* keys, std::size_t n, const ClassCuts& cuts,
                                 Isa isa) {
    ClassStarts starts{{0, n, n, n, n}};
    for (uint32_t t = 0; t + 1 < kMaxClasses && cuts.used[t] != 0; ++t) {
        std::size_t done = 0, above = 0;
#if PACKHORSE_X86
        if (isa >= Isa::kAvx512) {
            done = n / 64 * 64;
            above = count_above_avx512(keys, n / 64, cuts.at[t]);
        }
#endif
        std::size_t rest = 0;
        const uint8_t cut = cuts.at[t];
        vectorised(isa, [=, to = &rest]() PACKHORSE_VECTORISED {
            *to = count_above(keys + done, n - done, cut);
        });
        starts.at[t + 1] = n - above - rest;
    }
    return starts;
}

// The pointers of each quarter of a block, and how many units a quarter has.
template <class Byte>
struct QuarterPointers {
    Byte* next[4][kMaxClasses];
    std::size_t n;

    // `classes` are of `n_units` units; `first` are the pointers of the first, and are moved on
    // behind the last.
    QuarterPointers(Byte** first, const uint8_t* classes, std::size_t n_units) : n(n_units / 4) {
        for (std::size_t q = 0; q < 4; ++q) {
            const ClassStarts starts =
                count_classes(classes + q * n, n, kCutsOfClasses, Isa::kPortable);
            for (uint32_t c = 0; c < kMaxClasses; ++c) {
                next[q][c] = first[c];
                first[c] += starts.count(c);
            }
        }
    }
};

inline void sort_few(const uint8_t* plane, const uint8_t* classes, std::size_t n, uint8_t** to) {
    QuarterPointers<uint8_t> quarters(to, classes, n);
    for (std::size_t i = 0; i < quarters.n; ++i)
        for (std::size_t q = 0; q < 4; ++q)
            *quarters.next[q][classes[q * quarters.n + i]]++ = plane[q * quarters.n + i];
    for (std::size_t i = 4 * quarters.n; i < n; ++i) *to[classes[i]]++ = plane[i];
}

inline void unsort_few(const uint8_t** from, const uint8_t* classes, std::size_t n, uint8_t* dst) {
    QuarterPointers<const uint8_t> quarters(from, classes, n);
    for (std::size_t i = 0; i < quarters.n; ++i)
        for (std::size_t q = 0; q < 4; ++q)
            dst[q * quarters.n + i] = *quarters.next[q][classes[q * quarters.n + i]]++;
    for (std::size_t i = 4 * quarters.n; i < n; ++i) dst[i] = *from[classes[i]]++;
}

// At most kSortUnits units; each class has room for kClassSlack more.
inline void sort_block(const uint8_t* plane, const uint8_t* keys, std::size_t n,
                       const ClassCuts& cuts, uint8_t** to, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2)
        done = sort_blocks_vbmi2(plane, keys, n, cuts, to);
    else if (isa >= Isa::kAvx2)
        done = sort_blocks_avx2(plane, keys, n, cuts, to);
#endif
    if (done == n) return;
    uint8_t classes[kSortUnits];
    fill_classes(keys + done, n - done, cuts, classes, isa);
    sort_few(plane + done, classes, n - done, to);
}

// The units in the order by class. A block at a time is sorted aside, where whole registers can be
// stored.
inline void sort_by_class(const uint8_t* plane, const uint8_t* keys, std::size_t n,
                          const ClassCuts& cuts, const ClassStarts& starts, uint8_t* sorted,
                          Isa isa) {
    alignas(64) uint8_t aside[kMaxClasses][kSortUnits + kClassSlack];
    uint8_t* to[kMaxClasses];
    for (uint32_t c = 0; c < kMaxClasses; ++c) to[c] = sorted + starts.at[c];
    for (std::size_t at = 0; at < n; at += kSortUnits) {
        uint8_t* end[kMaxClasses] = {aside[0], aside[1], aside[2], aside[3]};
        sort_block(plane + at, keys + at, std::min(kSortUnits, n - at), cuts, end, isa);
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            const auto count = static_cast<std::size_t>(end[c] - aside[c]);
            std::memcpy(to[c], aside[c], count);
            to[c] += count;
        }
    }
}

// The next `n` units in the order of units; `from` points at the next of each class and is moved
// on. What is behind the last unit can be read for kClassSlack bytes.
inline void unsort_by_class(const uint8_t** from, const uint8_t* keys, std::size_t n,
                            const ClassCuts& cuts, uint8_t* dst, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2)
        done = unsort_blocks_vbmi2(from, keys, n, cuts, dst);
    else if (isa >= Isa::kAvx2)
        done = unsort_blocks_avx2(from, keys, n, cuts, dst);
#endif
    for (; done < n; done += std::min(kSortUnits, n - done)) {
        const std::size_t run = std::min(kSortUnits, n - done);
        uint8_t classes[kSortUnits];
        fill_classes(keys + done, run, cuts, classes, isa);
        unsort_few(from, classes, run, dst + done);
    }
}

}  // namespace packhorse
