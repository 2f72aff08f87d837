// Moves whole units, and tokens of a byte, to the order by class and back, for up to eight classes
// (docs/format.md, 6.6). A unit's class is the number of cuts that are at most its key.
// AVX-512 with VBMI2 compresses and expands 64 tokens at a time, or 32 units of two bytes.
// Everything else is moved 16 at a time as elements of 32 bits (or 8 at a time as elements of 64
// bits), for which AVX-512 without VBMI2 is enough. AVX2 moves tokens as planes/class_order.hpp
// does, and the baseline moves them one by one. Both move units one by one, because then only few
// units are moved. The loops are in delta/order_avx512.hpp
// and delta/order_avx2.hpp.
#pragma once

#include <algorithm>

#include "delta/delta.hpp"
#include "delta/order_avx2.hpp"
#include "delta/order_avx512.hpp"
#include "planes/class_order.hpp"

namespace packhorse {

constexpr std::size_t kDeltaBlockUnits = 2048;  // their tokens and differences stay in L1
constexpr std::size_t kDeltaSlackNbytes = 64;   // may be read or written behind a class

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

// Consecutive classes: first, first + 1, ..., last - 1.
struct ClassRange {
    uint32_t first, last;
};

// Narrow classes have no raw bits, and no class with raw bits follows them. Except for long
// differences, their differences are their tokens, so bytes are moved instead of units. The other
// classes are wide.
inline uint32_t first_narrow_class(const DeltaRule& rule) {
    uint32_t first = rule.n_classes;
    while (first > 0 && rule.shifts[first - 1] == 0) --first;
    return first;
}

// How the units of a chunk are moved. For the classes of `bytes`, bytes are moved, with a mark
// where a difference does not fit a byte. For the classes of `units`, whole units are moved. Marked
// units are moved one by one.
struct DeltaMoves {
    ClassRange bytes, units;

    // If units are moved one by one anyway, those of wide classes are marked, too.
    DeltaMoves(const DeltaRule& rule, Isa isa)
        : bytes{isa >= Isa::kAvx512 ? first_narrow_class(rule) : 0, rule.n_classes},
          units{0, bytes.first} {}
};

// Calls work.template operator()<n_classes>(), so that the state of each class can stay in
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

// Puts at most kDeltaBlockUnits units of some classes in the order of units, into `dst`. The other
// units of `dst` stay or become undefined. `from` points at the next unit of each class and is
// moved on. Up to kDeltaSlackNbytes behind each class may be read.
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
    (void)rule;
    for (std::size_t i = done; i < n; ++i) {
        const uint32_t c = classes.of[keys[i]];
        if (c >= range.first && c < range.last) dst[i] = *from[c]++;
    }
}

// Moves at most kDeltaBlockUnits units of some classes to the places that `to` points at. `to` is
// moved on. Up to kDeltaSlackNbytes behind each class may be written.
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
    (void)rule;
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

// Does what unsort_units() does, for tokens. If tokens move one by one, moves those of all classes.
inline void unsort_tokens(const uint8_t** from, const uint8_t* keys, std::size_t n,
                          const DeltaRule& rule, ClassRange range, const ClassOfKey& classes,
                          uint8_t* __restrict dst, Isa isa) {
    // Moving 32 tokens by their ranks is faster than expanding two registers of 16.
    const bool by_ranks = isa < Isa::kAvx512Vbmi2 && range.first == 0;
    if (isa >= Isa::kAvx512 && !by_ranks)
        return unsort_units(from, keys, n, rule, range, classes, dst, isa);
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_tokens_avx2<kClasses>(from, keys, n, rule, dst);
        });
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_bytes_neon<kClasses>(from, keys, n, rule.thresholds, dst);
        });
#endif
    move_one_by_one(from, keys + done, n - done, rule, isa,
                    [=](const uint8_t& token, std::size_t i) { dst[done + i] = token; });
}

// Does what sort_units() does, for tokens. If tokens move one by one, moves those of all classes.
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
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return sort_bytes_neon<kClasses>(src, keys, n, rule.thresholds, to);
        });
#endif
    move_one_by_one(to, keys + done, n - done, rule, isa,
                    [=](uint8_t& token, std::size_t i) { token = src[done + i]; });
}

}  // namespace packhorse
