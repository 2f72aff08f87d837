// One slice of a row of packed weights to BF16 elements, holes as the packed elements 0 that they
// are. Slices begin at multiples of 16 columns and are padded to such, so whole vectors of 16 may
// be read wherever one element may.
#pragma once

#include "rows/weights_slices_avx2.hpp"
#include "rows/weights_slices_avx512.hpp"
#include "rows/weights_slices_portable.hpp"

namespace packhorse {

template <class Format, uint32_t kSlice>
inline void unpack_slice(const WeightSlice& slice, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return unpack_slice_avx512<Format, kSlice>(slice);
    if (isa >= Isa::kAvx2) return unpack_slice_avx2<Format, kSlice>(slice);
#endif
    (void)isa;
    unpack_slice_portable<Format, kSlice>(slice);
}

}  // namespace packhorse
