// CRC32C by carry-less products of whole vectors, and XXH3-128 with AVX-512: 64 bytes to a
// register.
#pragma once

#include "common/checksum_avx2.hpp"
#include "common/checksum_portable.hpp"
#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_X86

constexpr std::size_t kCrcFoldNbytes = 256;
constexpr std::size_t kCrcFoldMinNbytes = 4 * kCrcFoldNbytes;  // below this, folding does not pay
inline constexpr uint64_t kCrcFoldLow = crc_fold_factor(8 * kCrcFoldNbytes + 63);
inline constexpr uint64_t kCrcFoldHigh = crc_fold_factor(8 * kCrcFoldNbytes - 1);

// 256 bytes that give the same CRC register, started at 0, as all bytes so far. Each of the four
// vectors takes every fourth line, so that four chains of products run side by side.
struct CrcFold {
    __m512i vectors[4];
    __m512i seed;  // the register to add to the next line, until the vectors contain it
};

PACKHORSE_VPCLMULQDQ inline CrcFold crc_fold_start(uint32_t crc) {
    const __m512i zero = _mm512_setzero_si512();
    return {{zero, zero, zero, zero}, _mm512_maskz_set1_epi32(1, static_cast<int>(crc))};
}

// Moves a vector ahead by 256 bytes and adds the line at that place.
PACKHORSE_VPCLMULQDQ PACKHORSE_INLINE __m512i crc_fold_line(__m512i vector, __m512i line) {
    const __m512i factors = _mm512_broadcast_i64x2(_mm_set_epi64x(kCrcFoldHigh, kCrcFoldLow));
    const __m512i low = _mm512_clmulepi64_epi128(vector, factors, 0x00);
    const __m512i high = _mm512_clmulepi64_epi128(vector, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, line, 0x96);
}

PACKHORSE_VPCLMULQDQ inline uint32_t crc_fold_finish(const CrcFold& fold) {
    alignas(64) uint8_t bytes[kCrcFoldNbytes];
    for (int i = 0; i < 4; ++i) _mm512_store_si512(bytes + 64 * i, fold.vectors[i]);
    return crc32c_hardware(0, bytes, sizeof bytes);
}

PACKHORSE_VPCLMULQDQ inline uint32_t crc32c_folding(uint32_t crc, const uint8_t* src,
                                                    std::size_t nbytes) {
    CrcFold fold = crc_fold_start(crc);
    for (; nbytes >= kCrcFoldNbytes; src += kCrcFoldNbytes, nbytes -= kCrcFoldNbytes) {
        for (int i = 0; i < 4; ++i) {
            const __m512i line = _mm512_loadu_si512(src + 64 * i);
            fold.vectors[i] =
                crc_fold_line(fold.vectors[i], i == 0 ? _mm512_xor_si512(line, fold.seed) : line);
        }
        fold.seed = _mm512_setzero_si512();
    }
    return crc32c_hardware(crc_fold_finish(fold), src, nbytes);
}

PACKHORSE_AVX512 PACKHORSE_INLINE __m512i xxh3_stripe_avx512(__m512i lanes, __m512i value,
                                                             const uint8_t* secret) {
    const __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
    const __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
    return _mm512_add_epi64(lanes, _mm512_add_epi64(product, swapped));
}

PACKHORSE_AVX512 inline void xxh3_stripes_avx512(Xxh3Accumulator& acc, const uint8_t* src,
                                                 std::size_t n_stripes) {
    __m512i lanes = _mm512_load_si512(acc.lanes);
    for (std::size_t i = 0; i < n_stripes; ++i)
        lanes = xxh3_stripe_avx512(lanes, _mm512_loadu_si512(src + i * kXxh3StripeNbytes),
                                   kXxh3Secret + 8 * i);
    _mm512_store_si512(acc.lanes, lanes);
}

#endif

}  // namespace packhorse
