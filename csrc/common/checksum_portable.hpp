// CRC32C and XXH3-128 with the baseline's instructions, and the tables and numbers that all paths
// use.
#pragma once

#include <array>

#include "common/dispatch.hpp"
#include "common/layout.hpp"

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
constexpr std::size_t kCrcShortNbytes = 336;  // three of them are 1 KiB less 16 bytes
inline constexpr CrcShift kCrcLongShift = make_crc_shift(kCrcLongNbytes);
inline constexpr CrcShift kCrcShortShift = make_crc_shift(kCrcShortNbytes);

inline uint32_t shift_crc(const CrcShift& shift, uint32_t crc) {
    return shift[0][crc & 0xFF] ^ shift[1][crc >> 8 & 0xFF] ^ shift[2][crc >> 16 & 0xFF] ^
           shift[3][crc >> 24];
}

// Slicing by eight: eight independent look-ups for every eight bytes.
PACKHORSE_INLINE uint32_t crc32c_eight(uint32_t crc, const uint8_t* src) {
    const uint32_t a = load<uint32_t>(src) ^ crc, b = load<uint32_t>(src + 4);
    return kCrcTable[7][a & 0xFF] ^ kCrcTable[6][a >> 8 & 0xFF] ^ kCrcTable[5][a >> 16 & 0xFF] ^
           kCrcTable[4][a >> 24] ^ kCrcTable[3][b & 0xFF] ^ kCrcTable[2][b >> 8 & 0xFF] ^
           kCrcTable[1][b >> 16 & 0xFF] ^ kCrcTable[0][b >> 24];
}

// Two streams, because the look-ups of one stream wait for its previous register.
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

}  // namespace packhorse
