// The loops of bounded codes with AVX-512.
#pragma once

#include "bounded/numbers.hpp"

#if PACKHORSE_X86

#define PACKHORSE_LOOP PACKHORSE_AVX512 PACKHORSE_INLINE
#define PACKHORSE_LOOP_ENTRY PACKHORSE_AVX512 inline

namespace packhorse::bounded_avx512 {

constexpr std::size_t kVectorNbytes = 64;

// Which of the 16 codes are 0, as bits.
PACKHORSE_LOOP uint32_t escapes_among(const uint32_t* codes) {
    const __m512i all = _mm512_load_si512(codes);
    return _mm512_testn_epi32_mask(all, all);
}

#include "bounded/loops.hpp"

}  // namespace packhorse::bounded_avx512

#undef PACKHORSE_LOOP
#undef PACKHORSE_LOOP_ENTRY

#endif
