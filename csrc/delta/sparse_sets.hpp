// Sets of units as bits: which of 64 units differ from a base, and which are at or above a cut.
#pragma once

#include <algorithm>

#include "delta/sparse_sets_avx512.hpp"
#include "delta/sparse_sets_plain.hpp"

namespace packhorse {

// Calls a copy of `given` with each block of a base. It is marked PACKHORSE_VECTORISED. With kWide,
// AVX-512 is allowed.
template <class Unit, bool kFloat, uint32_t kCuts, bool kWide, class Visit>
inline void visit_sets(const uint8_t* base, std::size_t n, const Unit* cuts, Isa isa,
                       const Visit& given) {
#if PACKHORSE_X86
    if constexpr (kWide) return visit_sets_avx512<Unit, kFloat, kCuts>(base, n, cuts, given);
#endif
    Visit visit = given;
    for (std::size_t at = 0; at < n; at += kSetUnits) {
        uint8_t padded[kSetUnits * sizeof(Unit)];
        const std::size_t here = std::min<std::size_t>(kSetUnits, n - at);
        const uint8_t* units = base + at * sizeof(Unit);
        if (here < kSetUnits) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, units, here * sizeof(Unit));
            units = padded;
        }
        uint64_t above[kCuts];
        sets_above_plain<Unit, kFloat>(units, cuts, kCuts, above, isa);
        for (uint32_t t = 0; t < kCuts; ++t) above[t] &= first_bits(here);
        visit(SetBlock{at, first_bits(here), above});
    }
}

}  // namespace packhorse
