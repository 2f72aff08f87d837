// Sets of units as bits, without AVX-512; also has the code that all paths share. Units are
// compared into bytes, in loops that compilers vectorise, and the bytes are packed.
#pragma once

#include <algorithm>
#include <bit>

#include "common/dispatch.hpp"
#include "delta/delta.hpp"

namespace packhorse {

constexpr uint32_t kSetUnits = 64;

// Fetches 64 units that come 4 KiB later. Where two streams are read in turn, piece by piece, the
// hardware prefetcher loses track at the end of every page.
template <class Unit>
PACKHORSE_INLINE void fetch_units_ahead(const uint8_t* units) {
    constexpr std::size_t kAheadNbytes = 4096;
    for (std::size_t at = 0; at < kSetUnits * sizeof(Unit); at += 64)
        __builtin_prefetch(units + kAheadNbytes + at, 0, 3);
}

// a(b) of section 6.7: what the cuts of classes are compared with.
template <class Unit, bool kFloat>
PACKHORSE_INLINE Unit size_of_base(Unit b) {
    if constexpr (kFloat)
        return static_cast<Unit>(b & static_cast<Unit>(~(Unit{1} << (kUnitBits<Unit> - 1))));
    else
        return static_cast<Unit>(b ^ spread_sign(b));
}

#if PACKHORSE_X86
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
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon) return marks_neon(flags, 1);
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

}  // namespace packhorse
