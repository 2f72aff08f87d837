// Sets of units as bits: which of 64 units differ from a base, and which are at or above a cut.
// AVX-512 compares straight into sets. Everything else compares into bytes, in loops that compilers
// vectorise, and packs these.
#pragma once

#include <algorithm>
#include <bit>

#include "common/dispatch.hpp"
#include "delta/delta.hpp"

namespace packhorse {

constexpr uint32_t kSetUnits = 64;

// a(b) of section 6.7: what the cuts of classes are compared with.
template <class Unit, bool kFloat>
PACKHORSE_INLINE Unit size_of_base(Unit b) {
    if constexpr (kFloat)
        return static_cast<Unit>(b & static_cast<Unit>(~(Unit{1} << (kUnitBits<Unit> - 1))));
    else
        return static_cast<Unit>(b ^ spread_sign(b));
}

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

// Computes the sets of the units that are at or above each of kCuts cuts.
template <class Unit, bool kFloat, uint32_t kCuts>
PACKHORSE_AVX512 PACKHORSE_INLINE void sets_above_avx512(const uint8_t* base, const Unit* cuts,
                                                         uint64_t* above) {
    using Lanes = SetLanes512<Unit>;
    __m512i sizes[Lanes::kRegisters];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < Lanes::kRegisters; ++r)
        sizes[r] = Lanes::template size<kFloat>(_mm512_loadu_si512(base + 64 * r));
#pragma GCC unroll 8
    for (uint32_t t = 0; t < kCuts; ++t) {
        const __m512i cut = Lanes::fill(cuts[t]);
        uint64_t set = 0;
#pragma GCC unroll 8
        for (std::size_t r = 0; r < Lanes::kRegisters; ++r)
            set |= Lanes::at_least(sizes[r], cut) << r * Lanes::kLanes;
        above[t] = set;
    }
}

PACKHORSE_AVX2 inline uint64_t pack_flags_avx2(const uint8_t* flags) {
    uint64_t set = 0;
    for (int h = 0; h < 2; ++h) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags) + h);
        const auto half = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(x, 7)));
        set |= uint64_t{half} << (32 * h);
    }
    return set;
}

#endif

// Packs 64 bytes that are 0 or 1.
inline uint64_t pack_flags(const uint8_t* flags, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) return pack_flags_avx2(flags);
#endif
    (void)isa;
    uint64_t set = 0;
    for (uint32_t i = 0; i < 8; ++i)
        set |= (load<uint64_t>(flags + 8 * i) * 0x0102040810204080 >> 56) << (8 * i);
    return set;
}

template <class Unit>
inline uint64_t differing_plain(const uint8_t* a, const uint8_t* b, Isa isa) {
    alignas(64) uint8_t flags[kSetUnits];
    uint8_t* const out = flags;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < kSetUnits; ++i)
            out[i] = load<Unit>(a + i * sizeof(Unit)) != load<Unit>(b + i * sizeof(Unit));
    });
    return pack_flags(flags, isa);
}

template <class Unit, bool kFloat>
inline void sets_above_plain(const uint8_t* base, const Unit* cuts, uint32_t n_cuts,
                             uint64_t* above, Isa isa) {
    alignas(64) uint8_t flags[kSetUnits];
    uint8_t* const out = flags;
    for (uint32_t t = 0; t < n_cuts; ++t) {
        const Unit cut = cuts[t];
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < kSetUnits; ++i)
                out[i] = size_of_base<Unit, kFloat>(load<Unit>(base + i * sizeof(Unit))) >= cut;
        });
        above[t] = pack_flags(flags, isa);
    }
}

// Returns the place of the bit of `set` that has `rank` bits of it below. With kFast, the processor
// has BMI2. (Written so because the caller is compiled for more instructions than this function.)
template <bool kFast>
PACKHORSE_INLINE uint32_t place_of_rank(uint64_t set, uint32_t rank) {
#if PACKHORSE_X86
    if constexpr (kFast) {
        uint64_t bit = uint64_t{1} << rank;
        asm("pdep %1, %0, %0" : "+r"(bit) : "r"(set));
        return static_cast<uint32_t>(std::countr_zero(bit));
    }
#endif
    for (; rank > 0; --rank) set &= set - 1;
    return static_cast<uint32_t>(std::countr_zero(set)) % kSetUnits;
}

// 64 units, of which the first `n` exist, with the sets of those that are at or above each cut.
struct SetBlock {
    std::size_t first;
    uint64_t exist;
    const uint64_t* above;

    // The units of a class, of kCuts + 1 classes.
    template <uint32_t kCuts>
    PACKHORSE_INLINE uint64_t of_class(uint32_t c) const {
        const uint64_t from = c == 0 ? exist : above[c - 1];
        return c == kCuts ? from : from & ~above[c];
    }
};

constexpr uint64_t first_bits(std::size_t n) {
    return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

#if PACKHORSE_X86
template <class Unit, bool kFloat, uint32_t kCuts, class Visit>
PACKHORSE_AVX512 inline void visit_sets_avx512(const uint8_t* base, std::size_t n, const Unit* cuts,
                                               const Visit& visit) {
    uint8_t padded[kSetUnits * sizeof(Unit)];
    for (std::size_t at = 0; at < n; at += kSetUnits) {
        const uint8_t* units = base + at * sizeof(Unit);
        uint64_t exist = ~uint64_t{0};
        if (n - at < kSetUnits) [[unlikely]] {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, units, (n - at) * sizeof(Unit));
            units = padded;
            exist = first_bits(n - at);
        }
        uint64_t above[kCuts];
        sets_above_avx512<Unit, kFloat, kCuts>(units, cuts, above);
        if (exist != ~uint64_t{0})
            for (uint32_t t = 0; t < kCuts; ++t) above[t] &= exist;
        visit(SetBlock{at, exist, above});
    }
}
#endif

// Calls visit(block) for all units of a base. `visit` is marked PACKHORSE_VECTORISED. With kWide,
// AVX-512 is allowed.
template <class Unit, bool kFloat, uint32_t kCuts, bool kWide, class Visit>
inline void visit_sets(const uint8_t* base, std::size_t n, const Unit* cuts, Isa isa,
                       const Visit& visit) {
#if PACKHORSE_X86
    if constexpr (kWide) return visit_sets_avx512<Unit, kFloat, kCuts>(base, n, cuts, visit);
#endif
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
