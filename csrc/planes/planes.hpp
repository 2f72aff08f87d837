// Splits units into one-byte planes and merges them again (docs/format.md, section 4).
//
// The loops work on a block that fits in L1 or a chunk that fits in L2. They are plain C++ that
// compilers vectorise well, inlined into one function for each instruction set. Intrinsics are used
// only where plain loops were slower than copying: for 8-bit units with AVX-512, for 16-bit units
// with AVX-512 and AVX2 (merging), and for 32-bit units with every instruction set
// (planes/planes_avx512.hpp, planes/planes_avx2.hpp, planes/planes_sse2.hpp,
// planes/planes_neon.hpp).
#pragma once

#include "planes/planes_avx2.hpp"
#include "planes/planes_avx512.hpp"
#include "planes/planes_neon.hpp"
#include "planes/planes_portable.hpp"

namespace packhorse {

// Splits `n` units at `src` into `spec.n_planes` planes of `n` bytes, for a spec that splits.
inline void split_planes(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                         uint8_t* const* planes, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return split_avx512(src, n, spec, planes);
    if (isa >= Isa::kAvx2) return split_avx2(src, n, spec, planes);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon) return split_neon(src, n, spec, planes);
#endif
    (void)isa;
    split_portable(src, n, spec, planes);
}

inline void merge_planes(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                         uint8_t* dst, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return merge_avx512(planes, n, spec, dst);
    if (isa >= Isa::kAvx2) return merge_avx2(planes, n, spec, dst);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon) return merge_neon(planes, n, spec, dst);
#endif
    (void)isa;
    merge_portable(planes, n, spec, dst);
}

}  // namespace packhorse
