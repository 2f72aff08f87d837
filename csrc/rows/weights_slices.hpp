// Unpacks one slice of a row to BF16 elements. Holes are unpacked like any other element. Slices
// begin at multiples of 16 columns and are padded to such multiples. So wherever one element may be
// read, a whole vector of 16 may be read.
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
