// The order by class and back (docs/format.md, 6.5). A unit's class is the number of cuts that are
// at most its key. The key is a byte that is known before the unit is decoded.
// Every path works on blocks of units. The next units of each class are adjacent in the order by
// class, and a set of bits gives their places in the order of units. Both directions move units
// between these two:
// - AVX-512 with VBMI2 has instructions for that, 64 units at a time;
// - AVX2 computes the rank of each unit in its class for one direction, 32 units at a time; for the
// other it looks up a byte shuffle for each of the 256 sets of eight places;
// - NEON looks up such shuffles for both directions;
// - the baseline moves unit by unit.
#pragma once

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/class_order_avx2.hpp"
#include "planes/class_order_avx512.hpp"
#include "planes/class_order_neon.hpp"
#include "planes/class_order_portable.hpp"

namespace packhorse {

// Keys that are the classes.
inline constexpr ClassCuts kCutsOfClasses{{1, 2, 3}, {~0ull, ~0ull, ~0ull}};

// Counts how many of `n` keys are in each class.
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

// At most kSortUnits units; each class has room for kClassSlack more.
inline void sort_block(const uint8_t* plane, const uint8_t* keys, std::size_t n,
                       const ClassCuts& cuts, uint8_t** to, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2)
        done = sort_blocks_vbmi2(plane, keys, n, cuts, to);
    else if (isa >= Isa::kAvx2)
        done = sort_blocks_avx2(plane, keys, n, cuts, to);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        done = with_cuts_neon(cuts, [&]<uint32_t kClasses>() {
            return sort_bytes_neon<kClasses>(plane, keys, n, cuts.at, to);
        });
#endif
    if (done == n) return;
    uint8_t steps[kSortUnits];
    fill_steps(keys + done, n - done, cuts.at, cuts.count(), kClassStep, steps, isa);
    sort_few(plane + done, steps, n - done, to);
}

// Puts units in the order by class. Blocks are sorted in other memory, where whole registers can be
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

// Puts the next `n` units back in the order of units. `from` points at the next unit of each class
// and is moved on. Up to kClassSlack bytes behind the last unit may be read.
inline void unsort_by_class(const uint8_t** from, const uint8_t* keys, std::size_t n,
                            const ClassCuts& cuts, uint8_t* dst, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2)
        done = unsort_blocks_vbmi2(from, keys, n, cuts, dst);
    else if (isa >= Isa::kAvx2)
        done = unsort_blocks_avx2(from, keys, n, cuts, dst);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        done = with_cuts_neon(cuts, [&]<uint32_t kClasses>() {
            return unsort_bytes_neon<kClasses>(from, keys, n, cuts.at, dst);
        });
#endif
    for (; done < n; done += std::min(kSortUnits, n - done)) {
        const std::size_t run = std::min(kSortUnits, n - done);
        uint8_t steps[kSortUnits];
        fill_steps(keys + done, run, cuts.at, cuts.count(), kClassStep, steps, isa);
        unsort_few(from, steps, run, dst + done);
    }
}

}  // namespace packhorse
