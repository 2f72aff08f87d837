// CRC32C with the instruction for it, in three streams, or with the instruction and carry-less
// products of vectors side by side, and XXH3-128 with AVX2. The instruction came with SSE4.2, which
// every processor with AVX2 has.
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

// Each way takes half of the bytes, because they use different units of a processor. A block has a
// part for products, three vectors in each step, and three parts for the instruction. Blocks are
// small, so that memory is read like one stream, which arrives sooner than streams far apart.
constexpr std::size_t kCrcStepNbytes = 96;
constexpr std::size_t kCrcPartNbytes = 128;
constexpr std::size_t kCrcHalfNbytes = 3 * kCrcPartNbytes;
constexpr std::size_t kCrcBlockNbytes = 2 * kCrcHalfNbytes;
constexpr std::size_t kCrcBlocksMinNbytes = 4 * kCrcBlockNbytes;  // below, blocks do not pay

// The factors that move the lower and the upper half of 128 bits ahead by `nbytes`.
struct CrcFactors {
    uint64_t low, high;
};

constexpr CrcFactors crc_fold_factors(std::size_t nbytes) {
    return {crc_fold_factor(8 * nbytes + 63), crc_fold_factor(8 * nbytes - 1)};
}

inline constexpr CrcFactors kCrcNextStep = crc_fold_factors(kCrcStepNbytes);
inline constexpr CrcFactors kCrcNextBlock = crc_fold_factors(kCrcStepNbytes + kCrcHalfNbytes);

// The factor that moves a register ahead by `nbytes`. The instruction that reduces the product
// moves by another 32 bits than the product has.
constexpr uint64_t crc_shift_factor(std::size_t nbytes) {
    return crc_fold_factor(8 * nbytes - 33) >> 32;
}

inline constexpr uint64_t kCrcShiftPart = crc_shift_factor(kCrcPartNbytes);
inline constexpr uint64_t kCrcShiftTwoParts = crc_shift_factor(2 * kCrcPartNbytes);
inline constexpr uint64_t kCrcShiftHalf = crc_shift_factor(kCrcHalfNbytes);
inline constexpr uint64_t kCrcShiftBlock = crc_shift_factor(kCrcBlockNbytes);

PACKHORSE_AVX2_VPCLMULQDQ PACKHORSE_INLINE __m128i crc_product(uint64_t crc, uint64_t factor) {
    return _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                _mm_cvtsi64_si128(static_cast<long long>(factor)), 0x00);
}

PACKHORSE_AVX2_VPCLMULQDQ PACKHORSE_INLINE uint64_t crc_reduce(__m128i product) {
    return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

// Moves a vector ahead and adds the bytes at that place.
PACKHORSE_AVX2_VPCLMULQDQ PACKHORSE_INLINE __m256i crc_fold_avx2(__m256i vector, __m256i factors,
                                                                 const uint8_t* src) {
    const __m256i low = _mm256_clmulepi64_epi128(vector, factors, 0x00);
    const __m256i high = _mm256_clmulepi64_epi128(vector, factors, 0x11);
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    return _mm256_xor_si256(_mm256_xor_si256(low, high), bytes);
}

PACKHORSE_AVX2 PACKHORSE_INLINE __m256i repeat_factors(const CrcFactors& factors) {
    const auto low = static_cast<long long>(factors.low);
    const auto high = static_cast<long long>(factors.high);
    return _mm256_set_epi64x(high, low, high, low);
}

PACKHORSE_AVX2 PACKHORSE_INLINE uint64_t crc_next_32(uint64_t crc, const uint8_t* src) {
    for (int i = 0; i < 4; ++i) crc = _mm_crc32_u64(crc, load<uint64_t>(src + 8 * i));
    return crc;
}

// The registers of both ways are computed as if the other way's bytes were zero, and are added in
// the end. `nbytes` is at least a block.
PACKHORSE_AVX2_VPCLMULQDQ inline uint32_t crc32c_blocks_avx2(uint32_t crc, const uint8_t* src,
                                                             std::size_t nbytes) {
    const __m256i next_step = repeat_factors(kCrcNextStep);
    const __m256i next_block = repeat_factors(kCrcNextBlock);
    __m256i vectors[3] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i seed = _mm256_setr_epi32(static_cast<int>(crc), 0, 0, 0, 0, 0, 0, 0);
    uint64_t sum = 0;
    for (; nbytes >= kCrcBlockNbytes; src += kCrcBlockNbytes, nbytes -= kCrcBlockNbytes) {
        const uint8_t* const parts = src + kCrcHalfNbytes;
        uint64_t a = 0, b = 0, c = 0;
        for (std::size_t step = 0; step < kCrcPartNbytes / 32; ++step) {
            const __m256i factors = step == 0 ? next_block : next_step;
            for (std::size_t i = 0; i < 3; ++i)
                vectors[i] =
                    crc_fold_avx2(vectors[i], factors, src + kCrcStepNbytes * step + 32 * i);
            if (step == 0) vectors[0] = _mm256_xor_si256(vectors[0], seed);
            a = crc_next_32(a, parts + 32 * step);
            b = crc_next_32(b, parts + kCrcPartNbytes + 32 * step);
            c = crc_next_32(c, parts + 2 * kCrcPartNbytes + 32 * step);
        }
        seed = _mm256_setzero_si256();
        const __m128i ahead =
            _mm_xor_si128(crc_product(a, kCrcShiftTwoParts), crc_product(b, kCrcShiftPart));
        sum = c ^ crc_reduce(_mm_xor_si128(crc_product(sum, kCrcShiftBlock), ahead));
    }
    // These bytes give the same register, started at 0, as all bytes that the products took.
    alignas(32) uint8_t folded[kCrcStepNbytes];
    for (std::size_t i = 0; i < 3; ++i)
        _mm256_store_si256(reinterpret_cast<__m256i*>(folded) + i, vectors[i]);
    sum ^= crc_reduce(crc_product(crc32c_hardware(0, folded, sizeof folded), kCrcShiftHalf));
    return crc32c_hardware(static_cast<uint32_t>(sum), src, nbytes);
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
