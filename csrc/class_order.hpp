// The order by class and back (docs/format.md, 6.5). A unit's class is the number of cuts that are
// at most its key, a byte that is at hand before the unit is.
//
// Every path works on blocks of units. Both directions move the next units of each class between
// places side by side, in the order by class, and the places that a set of bits names:
// - AVX-512 with VBMI2 has instructions for that, 64 units at a time;
// - AVX2 computes the rank of each unit in its class for one direction, 32 units at a time; for the
//   other it looks up byte shuffles, for each of the 256 sets of eight places;
// - the baseline moves unit by unit.
#pragma once

#include <algorithm>

#include "dispatch.hpp"
#include "layout.hpp"

namespace packhorse {

struct ClassCuts {
    uint8_t at[kMaxClasses - 1] = {};
    uint64_t used[kMaxClasses - 1] = {};  // all ones, or zero for a cut that is not there

    uint32_t count() const {
        uint32_t n = 0;
        while (n < kMaxClasses - 1 && used[n] != 0) ++n;
        return n;
    }
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

// Rounds in which no byte of a register overflows that counts one a round.
constexpr std::size_t kCountRounds = 255;

// Adds the keys of `n_blocks` blocks of 64 that are at or above each cut.
template <uint32_t kCuts>
PACKHORSE_AVX512 inline void count_cuts_avx512(const uint8_t* keys, std::size_t n_blocks,
                                               const uint8_t* cuts, std::size_t* above) {
    while (n_blocks > 0) {
        const std::size_t run = std::min(n_blocks, kCountRounds);
        __m512i few[kCuts] = {};
        for (std::size_t b = 0; b < run; ++b, keys += 64) {
            const __m512i key = _mm512_loadu_si512(keys);
#pragma GCC unroll 8
            for (uint32_t t = 0; t < kCuts; ++t) {
                const __m512i cut = _mm512_set1_epi8(static_cast<char>(cuts[t]));
                const __mmask64 mine = _mm512_cmpge_epu8_mask(key, cut);
                few[t] = _mm512_mask_sub_epi8(few[t], mine, few[t], _mm512_set1_epi8(-1));
            }
        }
        for (uint32_t t = 0; t < kCuts; ++t)
            above[t] += static_cast<std::size_t>(
                _mm512_reduce_add_epi64(_mm512_sad_epu8(few[t], _mm512_setzero_si512())));
        n_blocks -= run;
    }
}

// The same for blocks of 32.
template <uint32_t kCuts>
PACKHORSE_AVX2 inline void count_cuts_avx2(const uint8_t* keys, std::size_t n_blocks,
                                           const uint8_t* cuts, std::size_t* above) {
    while (n_blocks > 0) {
        const std::size_t run = std::min(n_blocks, kCountRounds);
        __m256i few[kCuts] = {};
        for (std::size_t b = 0; b < run; ++b, keys += 32) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
#pragma GCC unroll 8
            for (uint32_t t = 0; t < kCuts; ++t) {
                const __m256i cut = _mm256_set1_epi8(static_cast<char>(cuts[t]));
                few[t] = _mm256_sub_epi8(few[t], _mm256_cmpeq_epi8(_mm256_max_epu8(key, cut), key));
            }
        }
        for (uint32_t t = 0; t < kCuts; ++t) {
            alignas(32) uint64_t sums[4];
            _mm256_store_si256(reinterpret_cast<__m256i*>(sums),
                               _mm256_sad_epu8(few[t], _mm256_setzero_si256()));
            above[t] += sums[0] + sums[1] + sums[2] + sums[3];
        }
        n_blocks -= run;
    }
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

// For each of the 256 sets of eight places, a byte shuffle that moves the bytes at the places side
// by side.
struct alignas(64) PlaceShuffles {
    uint8_t compress[256][8];
};

constexpr PlaceShuffles make_place_shuffles() {
    PlaceShuffles shuffles{};
    for (uint32_t set = 0; set < 256; ++set) {
        uint32_t n = 0;
        for (uint8_t place = 0; place < 8; ++place)
            if (set >> place & 1) shuffles.compress[set][n++] = place;
    }
    return shuffles;
}

inline constexpr PlaceShuffles kPlaceShuffles = make_place_shuffles();

// The cuts in registers.
struct CutsAvx2 {
    __m256i at[kMaxClasses - 1];
    __m256i used[kMaxClasses - 1];

    PACKHORSE_AVX2 explicit CutsAvx2(const ClassCuts& cuts) {
        for (uint32_t t = 0; t + 1 < kMaxClasses; ++t) {
            at[t] = _mm256_set1_epi8(static_cast<char>(cuts.at[t]));
            used[t] = _mm256_set1_epi64x(static_cast<long long>(cuts.used[t]));
        }
    }

    // The keys at or above a cut.
    PACKHORSE_AVX2 inline __attribute__((always_inline)) __m256i above(__m256i keys,
                                                                       uint32_t t) const {
        return _mm256_and_si256(used[t], _mm256_cmpeq_epi8(_mm256_max_epu8(keys, at[t]), keys));
    }
};

// For each byte, the sum of those before it, in each half.
PACKHORSE_AVX2 inline __attribute__((always_inline)) __m256i sums_before_avx2(__m256i bytes) {
    __m256i sums = _mm256_slli_si256(bytes, 1);
    sums = _mm256_add_epi8(sums, _mm256_slli_si256(sums, 1));
    sums = _mm256_add_epi8(sums, _mm256_slli_si256(sums, 2));
    sums = _mm256_add_epi8(sums, _mm256_slli_si256(sums, 4));
    return _mm256_add_epi8(sums, _mm256_slli_si256(sums, 8));
}

// How many units of a block of 32 are at or above each cut: in the first half, and in all.
struct CountsAbove {
    std::size_t half[kMaxClasses - 1];
    std::size_t all[kMaxClasses - 1];

    PACKHORSE_AVX2 inline
        __attribute__((always_inline)) explicit CountsAbove(const __m256i* above) {
        for (uint32_t t = 0; t + 1 < kMaxClasses; ++t) {
            const auto set = static_cast<uint32_t>(_mm256_movemask_epi8(above[t]));
            half[t] = static_cast<std::size_t>(__builtin_popcount(set & 0xFFFF));
            all[t] = static_cast<std::size_t>(__builtin_popcount(set));
        }
    }

    // Units of a class, of the `n` that were counted.
    static PACKHORSE_INLINE std::size_t of(const std::size_t* counts, std::size_t n, uint32_t c) {
        return (c == 0 ? n : counts[c - 1]) - (c + 1 == kMaxClasses ? 0 : counts[c]);
    }
};

// 32 units, each from its class's next ones: by its rank, how many of the class are before it in
// its half of the block. Ranks are below 16, so one byte counts for two classes.
PACKHORSE_AVX2 inline __attribute__((always_inline)) void unsort_block_avx2(const uint8_t** next,
                                                                            const uint8_t* keys,
                                                                            const CutsAvx2& cuts,
                                                                            uint8_t* dst) {
    const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys));
    const __m256i above[3] = {cuts.above(key, 0), cuts.above(key, 1), cuts.above(key, 2)};
    const __m256i one = _mm256_set1_epi8(1), low = _mm256_set1_epi8(0x0F);
    // 1 for the lower class of a pair, 16 for the upper.
    const __m256i lower = _mm256_add_epi8(one, _mm256_and_si256(above[0], low));
    const __m256i upper = _mm256_add_epi8(one, _mm256_and_si256(above[2], low));
    const __m256i ranks[2] = {sums_before_avx2(_mm256_andnot_si256(above[1], lower)),
                              sums_before_avx2(_mm256_and_si256(above[1], upper))};
    const CountsAbove counts(above);
    __m256i units[kMaxClasses];
#pragma GCC unroll 4
    for (uint32_t c = 0; c < kMaxClasses; ++c) {
        const __m256i both = ranks[c / 2];
        const __m256i rank = _mm256_and_si256(c % 2 == 0 ? both : _mm256_srli_epi16(both, 4), low);
        const uint8_t* half = next[c] + CountsAbove::of(counts.half, 16, c);
        const __m128i fresh[2] = {_mm_loadu_si128(reinterpret_cast<const __m128i*>(next[c])),
                                  _mm_loadu_si128(reinterpret_cast<const __m128i*>(half))};
        units[c] = _mm256_shuffle_epi8(_mm256_setr_m128i(fresh[0], fresh[1]), rank);
        next[c] += CountsAbove::of(counts.all, 32, c);
    }
    const __m256i pairs[2] = {_mm256_blendv_epi8(units[0], units[1], above[0]),
                              _mm256_blendv_epi8(units[2], units[3], above[2])};
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst),
                        _mm256_blendv_epi8(pairs[0], pairs[1], above[1]));
}

PACKHORSE_AVX2 inline std::size_t unsort_blocks_avx2(const uint8_t** from, const uint8_t* keys,
                                                     std::size_t n, const ClassCuts& cuts,
                                                     uint8_t* dst) {
    const uint8_t* next[kMaxClasses] = {from[0], from[1], from[2], from[3]};
    const CutsAvx2 registers(cuts);
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) unsort_block_avx2(next, keys + i, registers, dst + i);
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
    std::size_t above[kMaxClasses - 1] = {};
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        count_cuts_avx512<kMaxClasses - 1>(keys, n / 64, cuts.at, above);
    else if (isa >= Isa::kAvx2)
        count_cuts_avx2<kMaxClasses - 1>(keys, n / 64 * 2, cuts.at, above);
    if (isa >= Isa::kAvx2) done = n / 64 * 64;
#endif
    (void)isa;
    ClassStarts starts{{0, n, n, n, n}};
    for (uint32_t t = 0; t < cuts.count(); ++t)
        starts.at[t + 1] = n - above[t] - count_above(keys + done, n - done, cuts.at[t]);
    return starts;
}

// Where the next unit of each of kClasses classes is, while units move one by one. How many of each
// class have moved is kept side by side in one number: with counters in memory each unit would wait
// for the one before. Entries of the tables are kStep apart, so that the same number is an index
// and a shift.
template <class Unit, uint32_t kClasses>
struct Moving {
    static constexpr uint32_t kStep = 64 / kClasses;
    static constexpr std::size_t kMaxUnits = (std::size_t{1} << kStep) - 1;  // that may move

    Unit* first[64];
    uint64_t one[64];
    uint64_t moved = 0;

    explicit Moving(Unit** begin) {
        for (uint32_t c = 0; c < kClasses; ++c) {
            first[kStep * c] = begin[c];
            one[kStep * c] = uint64_t{1} << (kStep * c);
        }
    }

    // The place of the next unit of the class that `step` is kStep times.
    PACKHORSE_INLINE Unit& next(uint32_t step) {
        Unit& place = first[step][moved >> step & kMaxUnits];
        moved += one[step];
        return place;
    }

    void finish(Unit** end) const {
        for (uint32_t c = 0; c < kClasses; ++c) end[c] += moved >> (kStep * c) & kMaxUnits;
    }
};

constexpr uint32_t kClassStep = Moving<uint8_t, kMaxClasses>::kStep;

// Classes of `n` units, each the number of cuts that are at most its key, times `step`.
inline void fill_steps(const uint8_t* keys, std::size_t n, const uint8_t* cuts, uint32_t n_cuts,
                       uint32_t step, uint8_t* __restrict steps, Isa isa) {
    std::memset(steps, 0, n);
    for (uint32_t t = 0; t < n_cuts; ++t) {
        const uint8_t cut = cuts[t];
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                steps[i] = static_cast<uint8_t>(steps[i] + (keys[i] >= cut ? step : 0));
        });
    }
}

// At most kSortUnits units; `steps` are their classes times kClassStep.
inline void sort_few(const uint8_t* plane, const uint8_t* steps, std::size_t n, uint8_t** to) {
    Moving<uint8_t, kMaxClasses> moving(to);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < n; ++i) moving.next(steps[i]) = plane[i];
    moving.finish(to);
}

inline void unsort_few(const uint8_t** from, const uint8_t* steps, std::size_t n,
                       uint8_t* __restrict dst) {
    Moving<const uint8_t, kMaxClasses> moving(from);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < n; ++i) dst[i] = moving.next(steps[i]);
    moving.finish(from);
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
    uint8_t steps[kSortUnits];
    fill_steps(keys + done, n - done, cuts.at, cuts.count(), kClassStep, steps, isa);
    sort_few(plane + done, steps, n - done, to);
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
        uint8_t steps[kSortUnits];
        fill_steps(keys + done, run, cuts.at, cuts.count(), kClassStep, steps, isa);
        unsort_few(from, steps, run, dst + done);
    }
}

}  // namespace packhorse
