// CRC32C of encoded bytes, and XXH3-128 of logical bytes (docs/format.md, sections 1 and 7).
//
// CRC32C: the SSE4.2 instruction has a latency of three cycles and a throughput of one, so three
// streams run side by side and are joined by the linear operator "append L zero bytes", held as
// four tables of 256 (one for each byte of the register). Without the instruction two do. Where
// there are carry-less products of vectors, 256 bytes are folded into the next 256 instead, twice
// as fast. XXH3: only inputs above 240 bytes; the short forms are left to the caller (Python's
// xxhash), who meets at most one a tensor. Source: the XXH3 specification, doc/xxhash_spec.md of
// the xxHash project.
#pragma once

#include <array>

#include "dispatch.hpp"
#include "layout.hpp"

namespace packhorse {

constexpr uint32_t kCrc32cPolynomial = 0x82F63B78;  // reflected

using CrcTable = std::array<std::array<uint32_t, 256>, 8>;

constexpr CrcTable make_crc_table() {
    CrcTable table{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kCrc32cPolynomial : 0);
        table[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (uint32_t byte = 0; byte < 256; ++byte)
            table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 0xFF];
    return table;
}

inline constexpr CrcTable kCrcTable = make_crc_table();

using CrcShift = std::array<std::array<uint32_t, 256>, 4>;

// The operator that appends `nbytes` zero bytes to a CRC register, by repeated squaring of its 32 x
// 32 matrix over GF(2).
constexpr CrcShift make_crc_shift(std::size_t nbytes) {
    std::array<uint32_t, 32> square{};  // image of each basis vector under one zero bit
    square[0] = kCrc32cPolynomial;
    for (std::size_t bit = 1; bit < 32; ++bit) square[bit] = 1u << (bit - 1);
    std::array<uint32_t, 32> total{};
    for (std::size_t bit = 0; bit < 32; ++bit) total[bit] = 1u << bit;
    for (std::size_t n = nbytes * 8; n > 0; n >>= 1) {
        std::array<uint32_t, 32> next_total{};
        std::array<uint32_t, 32> next_square{};
        for (std::size_t column = 0; column < 32; ++column)
            for (std::size_t bit = 0; bit < 32; ++bit) {
                if (n & 1 && total[column] >> bit & 1) next_total[column] ^= square[bit];
                if (square[column] >> bit & 1) next_square[column] ^= square[bit];
            }
        if (n & 1) total = next_total;
        square = next_square;
    }
    CrcShift shift{};
    for (std::size_t k = 0; k < 4; ++k)
        for (uint32_t byte = 0; byte < 256; ++byte)
            for (std::size_t bit = 0; bit < 8; ++bit)
                if (byte >> bit & 1) shift[k][byte] ^= total[8 * k + bit];
    return shift;
}

constexpr std::size_t kCrcLongNbytes = 4096;
constexpr std::size_t kCrcShortNbytes = 336;  // three of them: all of 1 KiB but 16 bytes
inline constexpr CrcShift kCrcLongShift = make_crc_shift(kCrcLongNbytes);
inline constexpr CrcShift kCrcShortShift = make_crc_shift(kCrcShortNbytes);

inline uint32_t shift_crc(const CrcShift& shift, uint32_t crc) {
    return shift[0][crc & 0xFF] ^ shift[1][crc >> 8 & 0xFF] ^ shift[2][crc >> 16 & 0xFF] ^
           shift[3][crc >> 24];
}

// Slicing by eight: eight independent look-ups for each eight bytes.
PACKHORSE_INLINE uint32_t crc32c_eight(uint32_t crc, const uint8_t* src) {
    const uint32_t a = load<uint32_t>(src) ^ crc, b = load<uint32_t>(src + 4);
    return kCrcTable[7][a & 0xFF] ^ kCrcTable[6][a >> 8 & 0xFF] ^ kCrcTable[5][a >> 16 & 0xFF] ^
           kCrcTable[4][a >> 24] ^ kCrcTable[3][b & 0xFF] ^ kCrcTable[2][b >> 8 & 0xFF] ^
           kCrcTable[1][b >> 16 & 0xFF] ^ kCrcTable[0][b >> 24];
}

// Two streams: the look-ups of one wait for its register of before.
inline uint32_t crc32c_portable(uint32_t crc, const uint8_t* src, std::size_t nbytes) {
    constexpr std::size_t run = kCrcLongNbytes;
    for (; nbytes >= 2 * run; src += 2 * run, nbytes -= 2 * run) {
        uint32_t second = 0;
        for (std::size_t i = 0; i < run; i += 8) {
            crc = crc32c_eight(crc, src + i);
            second = crc32c_eight(second, src + run + i);
        }
        crc = shift_crc(kCrcLongShift, crc) ^ second;
    }
    for (; nbytes >= 8; src += 8, nbytes -= 8) crc = crc32c_eight(crc, src);
    for (; nbytes > 0; ++src, --nbytes) crc = crc >> 8 ^ kCrcTable[0][(crc ^ *src) & 0xFF];
    return crc;
}

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

// x^n modulo the polynomial, as a factor of a 64-bit carry-less product. The lowest bit is the
// highest power, so a product is one factor x too high: n is one less than the wanted power.
constexpr uint64_t crc_fold_factor(std::size_t n) {
    uint32_t power = 0x80000000;
    for (std::size_t i = 0; i < n; ++i) power = power >> 1 ^ (power & 1 ? kCrc32cPolynomial : 0);
    return uint64_t{power} << 32;
}

constexpr std::size_t kCrcFoldNbytes = 256;
constexpr std::size_t kCrcFoldMinNbytes = 4 * kCrcFoldNbytes;  // shorter: no gain
inline constexpr uint64_t kCrcFoldLow = crc_fold_factor(8 * kCrcFoldNbytes + 63);
inline constexpr uint64_t kCrcFoldHigh = crc_fold_factor(8 * kCrcFoldNbytes - 1);

// 256 bytes that, from a register of 0, give the CRC register of all bytes so far. Four vectors,
// each of every fourth line, so that four chains of products run side by side.
struct CrcFold {
    __m512i vectors[4];
    __m512i seed;  // the register before the next line, where it is not in the vectors yet
};

PACKHORSE_VPCLMULQDQ inline CrcFold crc_fold_start(uint32_t crc) {
    const __m512i zero = _mm512_setzero_si512();
    return {{zero, zero, zero, zero}, _mm512_maskz_set1_epi32(1, static_cast<int>(crc))};
}

// The lines of a vector, moved ahead by 256 bytes, and the line that is there.
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

#endif

// Continues a CRC register, which begins as ~0 and whose complement is the CRC.
inline uint32_t crc32c_continue(uint32_t crc, const uint8_t* src, std::size_t nbytes, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && nbytes >= kCrcFoldMinNbytes && has_vpclmulqdq())
        return crc32c_folding(crc, src, nbytes);
    if (isa >= Isa::kAvx2) return crc32c_hardware(crc, src, nbytes);
#endif
    (void)isa;
    return crc32c_portable(crc, src, nbytes);
}

inline uint32_t crc32c(const uint8_t* src, std::size_t nbytes, Isa isa) {
    return ~crc32c_continue(~0u, src, nbytes, isa);
}

constexpr std::size_t kXxh3LongMinNbytes = 241;
constexpr std::size_t kXxh3StripeNbytes = 64;
constexpr std::size_t kXxh3StripesPerBlock = 16;
constexpr std::size_t kXxh3BlockNbytes = kXxh3StripeNbytes * kXxh3StripesPerBlock;
constexpr std::size_t kXxh3SecretNbytes = 192;

alignas(64) inline constexpr uint8_t kXxh3Secret[kXxh3SecretNbytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

constexpr uint32_t kXxhPrime32_1 = 0x9E3779B1, kXxhPrime32_2 = 0x85EBCA77,
                   kXxhPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kXxhPrime64_1 = 0x9E3779B185EBCA87, kXxhPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kXxhPrime64_3 = 0x165667B19E3779F9, kXxhPrime64_4 = 0x85EBCA77C2B2AE63,
                   kXxhPrime64_5 = 0x27D4EB2F165667C5;

struct alignas(64) Xxh3Accumulator {
    uint64_t lanes[8] = {kXxhPrime32_3, kXxhPrime64_1, kXxhPrime64_2, kXxhPrime64_3,
                         kXxhPrime64_4, kXxhPrime32_2, kXxhPrime64_5, kXxhPrime32_1};
};

inline void xxh3_stripe_portable(Xxh3Accumulator& acc, const uint8_t* src, const uint8_t* secret) {
    for (std::size_t i = 0; i < 8; ++i) {
        const uint64_t value = load<uint64_t>(src + 8 * i);
        const uint64_t key = value ^ load<uint64_t>(secret + 8 * i);
        acc.lanes[i ^ 1] += value;
        acc.lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
    }
}

inline void xxh3_scramble(Xxh3Accumulator& acc) {
    for (std::size_t i = 0; i < 8; ++i) {
        uint64_t lane = acc.lanes[i];
        lane ^= lane >> 47;
        lane ^= load<uint64_t>(kXxh3Secret + kXxh3SecretNbytes - kXxh3StripeNbytes + 8 * i);
        acc.lanes[i] = lane * kXxhPrime32_1;
    }
}

inline void xxh3_stripes_portable(Xxh3Accumulator& acc, const uint8_t* src, std::size_t n_stripes) {
    for (std::size_t i = 0; i < n_stripes; ++i)
        xxh3_stripe_portable(acc, src + i * kXxh3StripeNbytes, kXxh3Secret + 8 * i);
}

#if PACKHORSE_X86

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

inline void xxh3_stripes(Xxh3Accumulator& acc, const uint8_t* src, std::size_t n_stripes, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return xxh3_stripes_avx512(acc, src, n_stripes);
    if (isa >= Isa::kAvx2) return xxh3_stripes_avx2(acc, src, n_stripes);
#endif
    (void)isa;
    xxh3_stripes_portable(acc, src, n_stripes);
}

inline uint64_t xxh3_merge(const Xxh3Accumulator& acc, const uint8_t* secret, uint64_t start) {
    uint64_t sum = start;
    for (std::size_t i = 0; i < 4; ++i) {
        const auto product =
            static_cast<unsigned __int128>(acc.lanes[2 * i] ^ load<uint64_t>(secret + 16 * i)) *
            (acc.lanes[2 * i + 1] ^ load<uint64_t>(secret + 16 * i + 8));
        sum += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9;
    return sum ^ sum >> 32;
}

// Full blocks; the last block of an input is never one of them.
inline void xxh3_blocks(Xxh3Accumulator& acc, const uint8_t* src, std::size_t n_blocks, Isa isa) {
    for (std::size_t block = 0; block < n_blocks; ++block) {
        xxh3_stripes(acc, src + block * kXxh3BlockNbytes, kXxh3StripesPerBlock, isa);
        xxh3_scramble(acc);
    }
}

constexpr std::size_t xxh3_n_blocks(std::size_t nbytes) {
    return (nbytes - 1) / kXxh3BlockNbytes;
}

// The 16 canonical bytes of `nbytes` bytes that end at `end`, after all full blocks of them; only
// what is behind those, and the last 64 bytes, are looked at.
inline void xxh3_finish(Xxh3Accumulator& acc, const uint8_t* end, std::size_t nbytes, uint8_t* dst,
                        Isa isa) {
    const std::size_t rest = nbytes - xxh3_n_blocks(nbytes) * kXxh3BlockNbytes;
    xxh3_stripes(acc, end - rest, (rest - 1) / kXxh3StripeNbytes, isa);
    xxh3_stripe_portable(acc, end - kXxh3StripeNbytes,
                         kXxh3Secret + kXxh3SecretNbytes - kXxh3StripeNbytes - 7);
    const uint64_t low = xxh3_merge(acc, kXxh3Secret + 11, nbytes * kXxhPrime64_1);
    const uint64_t high = xxh3_merge(acc, kXxh3Secret + kXxh3SecretNbytes - kXxh3StripeNbytes - 11,
                                     ~(nbytes * kXxhPrime64_2));
    store(dst, __builtin_bswap64(high));
    store(dst + 8, __builtin_bswap64(low));
}

// XXH3-128 of `nbytes` >= kXxh3LongMinNbytes bytes, as its 16 canonical bytes.
inline void xxh3_128_long(const uint8_t* src, std::size_t nbytes, uint8_t* dst, Isa isa) {
    Xxh3Accumulator acc;
    xxh3_blocks(acc, src, xxh3_n_blocks(nbytes), isa);
    xxh3_finish(acc, src + nbytes, nbytes, dst, isa);
}

}  // namespace packhorse
