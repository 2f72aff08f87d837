// Moves raw bits out of planes and back, block by block, with AVX2: 32 bytes to a register.
#pragma once

#include "common/dispatch.hpp"
#include "planes/symbols_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX2 inline std::size_t write_raw_blocks_avx2(const uint8_t* plane, std::size_t n_blocks,
                                                        uint32_t j, uint8_t* dst) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(7 - j));
    for (std::size_t b = 0; b < n_blocks; ++b) {
        uint32_t halves[2];
        for (int h = 0; h < 2; ++h) {
            const __m256i bytes = _mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(plane + 64 * b + 32 * static_cast<uint32_t>(h)));
            halves[h] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_sll_epi16(bytes, shift)));
        }
        store(dst + 8 * b, halves[0] | uint64_t{halves[1]} << 32);
    }
    return n_blocks;
}

// Widens 32 bits to bytes: all ones for each bit that is set.
PACKHORSE_AVX2 PACKHORSE_INLINE __m256i bytes_of_bits_avx2(uint32_t bits) {
    const __m256i byte_of_bit =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i place = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    const __m256i spread =
        _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), byte_of_bit);
    return _mm256_cmpeq_epi8(_mm256_and_si256(spread, place), place);
}

// `kPlanes` raw bit planes from `from` on, in a block of units that begins with unit `first`.
template <uint32_t kPlanes>
struct RawBlockAvx2 {
    const uint8_t* planes[kPlanes + 1];  // one more, because an array may not be empty
    __m256i bits[kPlanes + 1];

    PACKHORSE_AVX2 RawBlockAvx2(const RawPlanes& raw, uint32_t from, std::size_t first) {
        for (uint32_t p = 0; p < kPlanes; ++p) {
            planes[p] = raw.planes + (from + p) * raw.stride + first / 8;
            bits[p] = _mm256_set1_epi8(static_cast<char>(1u << raw.bits[from + p]));
        }
    }

    // Adds the raw bits of 32 units from unit `at` of the block on.
    PACKHORSE_AVX2 PACKHORSE_INLINE __m256i add(__m256i bytes, std::size_t at) const {
        for (uint32_t p = 0; p < kPlanes; ++p)
            bytes = _mm256_or_si256(
                bytes,
                _mm256_and_si256(bytes_of_bits_avx2(load<uint32_t>(planes[p] + at / 8)), bits[p]));
        return bytes;
    }
};

template <uint32_t kPlanes>
PACKHORSE_AVX2 inline void add_raw_planes_avx2(const RawPlanes& raw, uint32_t from,
                                               std::size_t first, std::size_t n_blocks,
                                               uint8_t* dst) {
    const RawBlockAvx2<kPlanes> block(raw, from, first);
    for (std::size_t at = 0; at < 64 * n_blocks; at += 32) {
        auto* const to = reinterpret_cast<__m256i*>(dst + at);
        _mm256_storeu_si256(to, block.add(_mm256_loadu_si256(to), at));
    }
}

PACKHORSE_AVX2 inline void add_raw_blocks_avx2(const RawPlanes& raw, std::size_t first,
                                               std::size_t n_blocks, uint8_t* dst) {
    uint32_t p = 0;
    for (; p + 2 <= raw.n; p += 2) add_raw_planes_avx2<2>(raw, p, first, n_blocks, dst);
    if (p < raw.n) add_raw_planes_avx2<1>(raw, p, first, n_blocks, dst);
}

#endif

}  // namespace packhorse
