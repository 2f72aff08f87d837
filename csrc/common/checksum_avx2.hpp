// CRC32C with the instruction for it, in three streams, and XXH3-128 with AVX2. The instruction
// came with SSE4.2, which every processor with AVX2 has.
#pragma once

#include "common/checksum_portable.hpp"
#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

#if PACKHORSE_X86

PACKHORSE_AVX2 inline uint32_t crc32c_three_streams(uint32_t crc, const uint8_t*& src,
                                                    std::size_t& nbytes, std::size_t run,
                                                    const CrcShift& shift) {
    while (nbytes >= 3 * run) {
        uint64_t a = crc, b = 0, c = 0;
        for (std::size_t i = 0; i < run; i += 8) {
            a = _mm_crc32_u64(a, load<uint64_t>(src + i));
            b = _mm_crc32_u64(b, load<uint64_t>(src + run + i));
            c = _mm_crc32_u64(c, load<uint64_t>(src + 2 * run + i));
        }
        crc = shift_crc(shift, static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
        crc = shift_crc(shift, crc) ^ static_cast<uint32_t>(c);
        src += 3 * run;
        nbytes -= 3 * run;
    }
    return crc;
}

PACKHORSE_AVX2 inline uint32_t crc32c_hardware(uint32_t crc, const uint8_t* src,
                                               std::size_t nbytes) {
    crc = crc32c_three_streams(crc, src, nbytes, kCrcLongNbytes, kCrcLongShift);
    crc = crc32c_three_streams(crc, src, nbytes, kCrcShortNbytes, kCrcShortShift);
    uint64_t wide = crc;
    for (; nbytes >= 8; src += 8, nbytes -= 8) wide = _mm_crc32_u64(wide, load<uint64_t>(src));
    crc = static_cast<uint32_t>(wide);
    for (; nbytes > 0; ++src, --nbytes) crc = _mm_crc32_u8(crc, *src);
    return crc;
}

PACKHORSE_AVX2 PACKHORSE_INLINE __m256i xxh3_half_stripe_avx2(__m256i lanes, __m256i value,
                                                              const uint8_t* secret) {
    const __m256i key =
        _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret)));
    const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    const __m256i swapped = _mm256_shuffle_epi32(value, 0x4E);
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

PACKHORSE_AVX2 inline void xxh3_stripes_avx2(Xxh3Accumulator& acc, const uint8_t* src,
                                             std::size_t n_stripes) {
    __m256i lanes[2];
    for (int h = 0; h < 2; ++h)
        lanes[h] = _mm256_load_si256(reinterpret_cast<const __m256i*>(acc.lanes) + h);
    for (std::size_t i = 0; i < n_stripes; ++i)
        for (int h = 0; h < 2; ++h) {
            const __m256i value = _mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(src + i * kXxh3StripeNbytes + 32 * h));
            lanes[h] = xxh3_half_stripe_avx2(lanes[h], value, kXxh3Secret + 8 * i + 32 * h);
        }
    for (int h = 0; h < 2; ++h)
        _mm256_store_si256(reinterpret_cast<__m256i*>(acc.lanes) + h, lanes[h]);
}

#endif

}  // namespace packhorse
