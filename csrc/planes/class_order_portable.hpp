// Moves units to the order by class and back, one by one; also has the code that all paths share.
#pragma once

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

struct ClassCuts {
    uint8_t at[kMaxClasses - 1] = {};
    uint64_t used[kMaxClasses - 1] = {};  // all ones, or zero if there is no such cut

    uint32_t count() const {
        uint32_t n = 0;
        while (n < kMaxClasses - 1 && used[n] != 0) ++n;
        return n;
    }
};

// Where each class begins in the order by class; at[kMaxClasses] is the end.
struct ClassStarts {
    std::size_t at[kMaxClasses + 1];

    std::size_t count(uint32_t c) const { return at[c + 1] - at[c]; }
};

constexpr std::size_t kClassSlack = 64;  // bytes that unsorting may read past the end
constexpr std::size_t kSortUnits = 2048;

// The bytes of each class in a block, as sets of bits.
struct ClassSets {
    uint64_t of[kMaxClasses];
};

// Made from the units that are at or above each cut.
PACKHORSE_INLINE ClassSets class_sets(const uint64_t* above) {
    return {{~above[0], above[0] & ~above[1], above[1] & ~above[2], above[2]}};
}

// Counts the keys that are at or above a cut.
PACKHORSE_INLINE std::size_t count_above(const uint8_t* keys, std::size_t n, uint8_t cut) {
    std::size_t count = 0;
    for (std::size_t at = 0; at < n; at += 128) {
        const std::size_t end = std::min(n, at + 128);
        uint8_t few = 0;  // a byte, so that each byte of a register is a counter
        for (std::size_t i = at; i < end; ++i)
            few = static_cast<uint8_t>(few + (keys[i] >= cut ? 1 : 0));
        count += few;
    }
    return count;
}

// The most rounds that a byte counter, which adds up to one a round, takes without overflow.
constexpr std::size_t kCountRounds = 255;

// Finds the next unit of each of kClasses classes while units move one by one. One number holds,
// side by side, the counts of moved units of all classes: with counters in memory, each unit would
// wait for the unit before. Entries of the tables are kStep apart, so that one number serves as an
// index and as a shift.
template <class Unit, uint32_t kClasses>
struct Moving {
    static constexpr uint32_t kStep = 64 / kClasses;
    static constexpr std::size_t kMaxUnits =
        (std::size_t{1} << kStep) - 1;  // the most that may move

    Unit* first[64];
    uint64_t one[64];
    uint64_t moved = 0;

    explicit Moving(Unit** begin) {
        for (uint32_t c = 0; c < kClasses; ++c) {
            first[kStep * c] = begin[c];
            one[kStep * c] = uint64_t{1} << (kStep * c);
        }
    }

    // Returns the place of the next unit of a class; `step` is kStep times its number.
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

// Writes the classes of `n` units, times `step`. A class is the number of cuts that are at most the
// unit's key.
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

}  // namespace packhorse
