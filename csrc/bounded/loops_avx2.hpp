// The loops of bounded codes with AVX2.
#pragma once

#include "bounded/numbers.hpp"

#if PACKHORSE_X86

#define PACKHORSE_LOOP PACKHORSE_AVX2 PACKHORSE_INLINE
#define PACKHORSE_LOOP_ENTRY PACKHORSE_AVX2 inline

namespace packhorse::bounded_avx2 {

constexpr std::size_t kVectorNbytes = 32;

// Which of the 16 codes are 0, as bits.
PACKHORSE_LOOP uint32_t escapes_among(const uint32_t* codes) {
    uint32_t escapes = 0;
    for (uint32_t i = 0; i < kBoundedLanes; i += 8) {
        const __m256i eight = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + i));
        const __m256i zero = _mm256_cmpeq_epi32(eight, _mm256_setzero_si256());
        escapes |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(zero))) << i;
    }
    return escapes;
}

#include "bounded/loops.hpp"

}  // namespace packhorse::bounded_avx2

#undef PACKHORSE_LOOP
#undef PACKHORSE_LOOP_ENTRY

#endif
