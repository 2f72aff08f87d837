// Unpacks one slice of a row to BF16 elements by a plain loop; also has the code that all such
// loops share.
#pragma once

#include "rows/weights.hpp"

namespace packhorse {

// The parts of a slice.
struct WeightSlice {
    const uint8_t* low_bytes;  // of the slice
    const uint8_t* high_bits;  // of the row
    std::size_t n_steps;
    std::size_t n;  // columns, padding left out
    uint8_t first;
    uint8_t* dst;
};

// The bits above the low byte of slice kSlice's column `j`.
template <class Format, uint32_t kSlice>
PACKHORSE_INLINE uint8_t take_high_bits(const uint8_t* bits, std::size_t n_steps, std::size_t j) {
    if constexpr (Format::kBits == 12) {
        (void)n_steps;
        return static_cast<uint8_t>(bits[j] >> (4 * kSlice) & 15);
    } else {
        const uint8_t below = bits[(1 + kSlice % 2) * n_steps + j];
        return static_cast<uint8_t>((bits[j] >> kSlice & 1) << 2 | (below >> (kSlice / 2 * 2) & 3));
    }
}

template <class Format, uint32_t kSlice>
inline void unpack_slice_portable(const WeightSlice& slice) {
    constexpr uint32_t kMagnitude = (1u << (Format::kBits - 1)) - 1;
    const uint8_t* __restrict const low = slice.low_bytes;
    const uint8_t* __restrict const bits = slice.high_bits;
    uint8_t* __restrict const to = slice.dst;
    const std::size_t n_steps = slice.n_steps, n = slice.n;
    const auto base = static_cast<uint16_t>(slice.first << 7);
    for (std::size_t j = 0; j < n; ++j) {
        const uint16_t high = take_high_bits<Format, kSlice>(bits, n_steps, j);
        const auto packed = static_cast<uint16_t>(high << 8 | low[j]);
        const auto magnitude = static_cast<uint16_t>(packed & kMagnitude);
        const bool coded = Format::kFirstCode == 0 || magnitude >= 0x80;
        const auto moved = static_cast<uint16_t>(magnitude + (coded ? base : uint16_t{0}));
        const auto sign = static_cast<uint16_t>((packed & ~kMagnitude) << (16 - Format::kBits));
        store(to + 2 * j, static_cast<uint16_t>(sign | moved));
    }
}

#if PACKHORSE_X86

constexpr std::size_t kWeightsAheadNbytes = 4096;

// Prefetches the bytes of 64 columns that will be read and written. Several slices read the same
// byte of high bits, but only one of them prefetches it.
template <class Format, uint32_t kSlice>
PACKHORSE_INLINE void fetch_weights_ahead(const WeightSlice& slice, std::size_t j) {
    __builtin_prefetch(slice.low_bytes + j + kWeightsAheadNbytes, 0, 2);
    __builtin_prefetch(slice.dst + 2 * j + kWeightsAheadNbytes, 1, 2);
    __builtin_prefetch(slice.dst + 2 * j + kWeightsAheadNbytes + 64, 1, 2);
    if constexpr (kSlice < (Format::kBits - 8) * Format::kSlices / 8)
        __builtin_prefetch(slice.high_bits + kSlice * slice.n_steps + j + kWeightsAheadNbytes / 2,
                           0, 2);
}

#endif

}  // namespace packhorse
