// Chooses the loops of an instruction set for blocks of 512 elements (docs/format.md, section 13).
#pragma once

#include "bounded/loops_avx2.hpp"
#include "bounded/loops_avx512.hpp"
#include "bounded/loops_portable.hpp"
#include "bounded/quantiser.hpp"

namespace packhorse {

// Returns the number of escapes.
template <class Element, Rounding kRounding>
inline std::size_t encode_blocks(const BlocksToEncode& blocks,
                                 const Quantiser<typename Element::Real>& by, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return bounded_avx512::encode_blocks<Element, kRounding>(blocks, by);
    if (isa >= Isa::kAvx2) return bounded_avx2::encode_blocks<Element, kRounding>(blocks, by);
#endif
    (void)isa;
    return bounded_portable::encode_blocks<Element, kRounding>(blocks, by);
}

// Returns false if counts do not agree with codes.
template <class Element>
inline bool decode_blocks(const BlocksToDecode& blocks, const Quantiser<typename Element::Real>& by,
                          Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return bounded_avx512::decode_blocks<Element>(blocks, by);
    if (isa >= Isa::kAvx2) return bounded_avx2::decode_blocks<Element>(blocks, by);
#endif
    (void)isa;
    return bounded_portable::decode_blocks<Element>(blocks, by);
}

}  // namespace packhorse
