// Compares units straight into sets with AVX-512.
#pragma once

#include "delta/sparse_sets_plain.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Operations on a register of units, and the number of registers that hold 64 units.
template <class Unit>
struct SetLanes512 {
    static constexpr std::size_t kLanes = 64 / sizeof(Unit);
    static constexpr std::size_t kRegisters = sizeof(Unit);

    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i fill(Unit x) {
        if constexpr (sizeof(Unit) == 1) return _mm512_set1_epi8(static_cast<char>(x));
        if constexpr (sizeof(Unit) == 2) return _mm512_set1_epi16(static_cast<short>(x));
        if constexpr (sizeof(Unit) == 4) return _mm512_set1_epi32(static_cast<int>(x));
        return _mm512_set1_epi64(static_cast<long long>(x));
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE uint64_t differ(__m512i a, __m512i b) {
        if constexpr (sizeof(Unit) == 1) return _mm512_cmpneq_epu8_mask(a, b);
        if constexpr (sizeof(Unit) == 2) return _mm512_cmpneq_epu16_mask(a, b);
        if constexpr (sizeof(Unit) == 4) return _mm512_cmpneq_epu32_mask(a, b);
        return _mm512_cmpneq_epu64_mask(a, b);
    }

    PACKHORSE_AVX512 static PACKHORSE_INLINE uint64_t at_least(__m512i a, __m512i b) {
        if constexpr (sizeof(Unit) == 1) return _mm512_cmpge_epu8_mask(a, b);
        if constexpr (sizeof(Unit) == 2) return _mm512_cmpge_epu16_mask(a, b);
        if constexpr (sizeof(Unit) == 4) return _mm512_cmpge_epu32_mask(a, b);
        return _mm512_cmpge_epu64_mask(a, b);
    }

    // size_of_base() of each unit.
    template <bool kFloat>
    PACKHORSE_AVX512 static PACKHORSE_INLINE __m512i size(__m512i b) {
        if constexpr (kFloat)
            return _mm512_and_si512(b,
                                    fill(static_cast<Unit>(~(Unit{1} << (8 * sizeof(Unit) - 1)))));
        if constexpr (sizeof(Unit) == 1)
            return _mm512_xor_si512(b, _mm512_movm_epi8(_mm512_movepi8_mask(b)));
        if constexpr (sizeof(Unit) == 2) return _mm512_xor_si512(b, _mm512_srai_epi16(b, 15));
        if constexpr (sizeof(Unit) == 4) return _mm512_xor_si512(b, _mm512_srai_epi32(b, 31));
        return _mm512_xor_si512(b, _mm512_srai_epi64(b, 63));
    }
};

template <class Unit>
PACKHORSE_AVX512 PACKHORSE_INLINE uint64_t differing_avx512(const uint8_t* a, const uint8_t* b) {
    using Lanes = SetLanes512<Unit>;
    uint64_t set = 0;
#pragma GCC unroll 8
    for (std::size_t r = 0; r < Lanes::kRegisters; ++r)
        set |= Lanes::differ(_mm512_loadu_si512(a + 64 * r), _mm512_loadu_si512(b + 64 * r))
               << r * Lanes::kLanes;
    return set;
}

// Computes the set of the units that are at or above a cut.
template <class Unit>
PACKHORSE_AVX512 PACKHORSE_INLINE uint64_t set_above_avx512(const __m512i* sizes, __m512i cut) {
    using Lanes = SetLanes512<Unit>;
    if constexpr (Lanes::kRegisters == 2) {
        const __mmask64 low = Lanes::at_least(sizes[0], cut), high = Lanes::at_least(sizes[1], cut);
        return _mm512_kunpackd(high, low);
    }
    uint64_t set = 0;
#pragma GCC unroll 8
    for (std::size_t r = 0; r < Lanes::kRegisters; ++r)
        set |= Lanes::at_least(sizes[r], cut) << r * Lanes::kLanes;
    return set;
}

template <class Unit, bool kFloat, uint32_t kCuts, class Visit>
PACKHORSE_AVX512 inline void visit_sets_avx512(const uint8_t* base, std::size_t n, const Unit* cuts,
                                               const Visit& given) {
    using Lanes = SetLanes512<Unit>;
    Visit visit = given;  // a copy, so that its state can stay in registers
    __m512i cut[kCuts];
    for (uint32_t t = 0; t < kCuts; ++t) cut[t] = Lanes::fill(cuts[t]);
    uint8_t padded[kSetUnits * sizeof(Unit)];
    for (std::size_t at = 0; at < n; at += kSetUnits) {
        const uint8_t* units = base + at * sizeof(Unit);
        fetch_units_ahead<Unit>(units);
        uint64_t exist = ~uint64_t{0};
        if (n - at < kSetUnits) [[unlikely]] {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, units, (n - at) * sizeof(Unit));
            units = padded;
            exist = first_bits(n - at);
        }
        __m512i sizes[Lanes::kRegisters];
#pragma GCC unroll 8
        for (std::size_t r = 0; r < Lanes::kRegisters; ++r)
            sizes[r] = Lanes::template size<kFloat>(_mm512_loadu_si512(units + 64 * r));
        uint64_t above[kCuts];
#pragma GCC unroll 8
        for (uint32_t t = 0; t < kCuts; ++t)
            above[t] = set_above_avx512<Unit>(sizes, cut[t]) & exist;
        visit(SetBlock{at, exist, above});
    }
}

#endif

}  // namespace packhorse
