// CRC32C with the instruction for it, in three streams, or by carry-less products of vectors, and
// XXH3-128 with AVX2. The instruction came with SSE4.2, which every processor with AVX2 has.
//
// On Zen 4 the products are hardly faster, but they read one stream, which arrives sooner from
// memory and from L3.
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

// x^n modulo the polynomial, as a factor of a 64-bit carry-less product. The lowest bit stands for
// the highest power, so a product has one factor x too many. Therefore n is one less than the
// wanted power.
constexpr uint64_t crc_fold_factor(std::size_t n) {
    uint32_t power = 0x80000000;
    for (std::size_t i = 0; i < n; ++i) power = power >> 1 ^ (power & 1 ? kCrc32cPolynomial : 0);
    return uint64_t{power} << 32;
}

constexpr std::size_t kCrcFoldAvx2Nbytes = 128;
constexpr std::size_t kCrcFoldAvx2MinNbytes = 4096;  // below, folding does not pay
inline constexpr uint64_t kCrcFoldAvx2Low = crc_fold_factor(8 * kCrcFoldAvx2Nbytes + 63);
inline constexpr uint64_t kCrcFoldAvx2High = crc_fold_factor(8 * kCrcFoldAvx2Nbytes - 1);

// Moves a vector ahead by 128 bytes and adds the bytes at that place.
PACKHORSE_AVX2_VPCLMULQDQ PACKHORSE_INLINE __m256i crc_fold_avx2(__m256i vector, __m256i bytes) {
    const __m256i factors =
        _mm256_set_epi64x(kCrcFoldAvx2High, kCrcFoldAvx2Low, kCrcFoldAvx2High, kCrcFoldAvx2Low);
    const __m256i low = _mm256_clmulepi64_epi128(vector, factors, 0x00);
    const __m256i high = _mm256_clmulepi64_epi128(vector, factors, 0x11);
    return _mm256_xor_si256(_mm256_xor_si256(low, high), bytes);
}

// Four vectors take every fourth piece of 32 bytes, so that four chains of products run side by
// side. In the end they are 128 bytes that give the same register, started at 0, as all bytes.
PACKHORSE_AVX2_VPCLMULQDQ inline uint32_t crc32c_folding_avx2(uint32_t crc, const uint8_t* src,
                                                              std::size_t nbytes) {
    __m256i vectors[4];
    for (__m256i& vector : vectors) vector = _mm256_setzero_si256();
    __m256i seed = _mm256_setr_epi32(static_cast<int>(crc), 0, 0, 0, 0, 0, 0, 0);
    for (; nbytes >= kCrcFoldAvx2Nbytes; src += kCrcFoldAvx2Nbytes, nbytes -= kCrcFoldAvx2Nbytes) {
        for (int i = 0; i < 4; ++i) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src) + i);
            vectors[i] = crc_fold_avx2(vectors[i], i == 0 ? _mm256_xor_si256(bytes, seed) : bytes);
        }
        seed = _mm256_setzero_si256();
    }
    alignas(32) uint8_t rest[kCrcFoldAvx2Nbytes];
    for (int i = 0; i < 4; ++i)
        _mm256_store_si256(reinterpret_cast<__m256i*>(rest) + i, vectors[i]);
    return crc32c_hardware(crc32c_hardware(0, rest, sizeof rest), src, nbytes);
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
