// XXH3-128 of inputs of any length (docs/format.md, section 7): the short forms, for at most 240
// bytes, and the choice of a form. The seed is 0 and the secret is the default one. Source: the
// XXH3 specification, doc/xxhash_spec.md of the xxHash project.
#pragma once

#include <utility>

#include "common/checksum.hpp"

namespace packhorse {

constexpr std::size_t kXxh3Nbytes = 16;  // of a hash
constexpr uint64_t kXxhPrimeMix1 = 0x165667919E3779F9, kXxhPrimeMix2 = 0x9FB21C651E98DF25;

// Two halves of 64 bits.
struct Xxh3Halves {
    uint64_t low;
    uint64_t high;
};

PACKHORSE_INLINE uint64_t xxh3_secret(std::size_t at) {
    return load<uint64_t>(kXxh3Secret + at);
}

PACKHORSE_INLINE Xxh3Halves multiply_wide(uint64_t a, uint64_t b) {
    const auto product = static_cast<unsigned __int128>(a) * b;
    return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

PACKHORSE_INLINE uint64_t xxh3_avalanche(uint64_t h) {
    h = (h ^ h >> 37) * kXxhPrimeMix1;
    return h ^ h >> 32;
}

PACKHORSE_INLINE uint64_t xxh64_avalanche(uint64_t h) {
    h = (h ^ h >> 33) * kXxhPrime64_2;
    h = (h ^ h >> 29) * kXxhPrime64_3;
    return h ^ h >> 32;
}

inline Xxh3Halves xxh3_up_to_3(const uint8_t* src, std::size_t n) {
    const uint32_t low = uint32_t{src[0]} << 16 | uint32_t{src[n >> 1]} << 24 |
                         uint32_t{src[n - 1]} | static_cast<uint32_t>(n) << 8;
    const uint32_t swapped = __builtin_bswap32(low);
    const uint32_t high = swapped << 13 | swapped >> 19;
    const auto secret = [](std::size_t at) { return load<uint32_t>(kXxh3Secret + at); };
    return {xxh64_avalanche(low ^ uint64_t{secret(0) ^ secret(4)}),
            xxh64_avalanche(high ^ uint64_t{secret(8) ^ secret(12)})};
}

inline Xxh3Halves xxh3_up_to_8(const uint8_t* src, std::size_t n) {
    const uint64_t value = load<uint32_t>(src) + (uint64_t{load<uint32_t>(src + n - 4)} << 32);
    Xxh3Halves h =
        multiply_wide(value ^ xxh3_secret(16) ^ xxh3_secret(24), kXxhPrime64_1 + (n << 2));
    h.high += h.low << 1;
    h.low ^= h.high >> 3;
    h.low = (h.low ^ h.low >> 35) * kXxhPrimeMix2;
    return {h.low ^ h.low >> 28, xxh3_avalanche(h.high)};
}

inline Xxh3Halves xxh3_up_to_16(const uint8_t* src, std::size_t n) {
    const uint64_t first = load<uint64_t>(src);
    uint64_t last = load<uint64_t>(src + n - 8);
    Xxh3Halves h = multiply_wide(first ^ last ^ xxh3_secret(32) ^ xxh3_secret(40), kXxhPrime64_1);
    h.low += (n - 1) << 54;
    last ^= xxh3_secret(48) ^ xxh3_secret(56);
    h.high += last + (last & 0xFFFFFFFF) * (kXxhPrime32_2 - 1);
    h.low ^= __builtin_bswap64(h.high);
    Xxh3Halves mixed = multiply_wide(h.low, kXxhPrime64_2);
    mixed.high += h.high * kXxhPrime64_2;
    return {xxh3_avalanche(mixed.low), xxh3_avalanche(mixed.high)};
}

PACKHORSE_INLINE uint64_t xxh3_mix_16(const uint8_t* src, std::size_t secret) {
    const Xxh3Halves product = multiply_wide(load<uint64_t>(src) ^ xxh3_secret(secret),
                                             load<uint64_t>(src + 8) ^ xxh3_secret(secret + 8));
    return product.low ^ product.high;
}

PACKHORSE_INLINE void xxh3_mix_32(Xxh3Halves& h, const uint8_t* a, const uint8_t* b,
                                  std::size_t secret) {
    h.low += xxh3_mix_16(a, secret);
    h.low ^= load<uint64_t>(b) + load<uint64_t>(b + 8);
    h.high += xxh3_mix_16(b, secret + 16);
    h.high ^= load<uint64_t>(a) + load<uint64_t>(a + 8);
}

inline Xxh3Halves xxh3_finish_mixed(const Xxh3Halves& h, std::size_t n) {
    const uint64_t low = h.low + h.high;
    const uint64_t high = h.low * kXxhPrime64_1 + h.high * kXxhPrime64_4 + n * kXxhPrime64_2;
    return {xxh3_avalanche(low), uint64_t{0} - xxh3_avalanche(high)};
}

inline Xxh3Halves xxh3_up_to_128(const uint8_t* src, std::size_t n) {
    Xxh3Halves h{n * kXxhPrime64_1, 0};
    for (std::size_t i = (n - 1) / 32 + 1; i-- > 0;)
        xxh3_mix_32(h, src + 16 * i, src + n - 16 * (i + 1), 32 * i);
    return xxh3_finish_mixed(h, n);
}

inline Xxh3Halves xxh3_up_to_240(const uint8_t* src, std::size_t n) {
    constexpr std::size_t kFirstPairs = 4, kLaterSecret = 3, kLastSecret = 136 - 17 - 16;
    Xxh3Halves h{n * kXxhPrime64_1, 0};
    std::size_t i = 0;
    for (; i < kFirstPairs; ++i) xxh3_mix_32(h, src + 32 * i, src + 32 * i + 16, 32 * i);
    h = {xxh3_avalanche(h.low), xxh3_avalanche(h.high)};
    for (; i < n / 32; ++i)
        xxh3_mix_32(h, src + 32 * i, src + 32 * i + 16, kLaterSecret + 32 * (i - kFirstPairs));
    xxh3_mix_32(h, src + n - 16, src + n - 32, kLastSecret);
    return xxh3_finish_mixed(h, n);
}

inline Xxh3Halves xxh3_short(const uint8_t* src, std::size_t n) {
    if (n > 128) return xxh3_up_to_240(src, n);
    if (n > 16) return xxh3_up_to_128(src, n);
    if (n > 8) return xxh3_up_to_16(src, n);
    if (n > 3) return xxh3_up_to_8(src, n);
    if (n > 0) return xxh3_up_to_3(src, n);
    return {xxh64_avalanche(xxh3_secret(64) ^ xxh3_secret(72)),
            xxh64_avalanche(xxh3_secret(80) ^ xxh3_secret(88))};
}

// Computes XXH3-128, as its 16 canonical bytes.
inline void xxh3_128(const uint8_t* src, std::size_t nbytes, uint8_t* dst, Isa isa) {
    if (nbytes >= kXxh3LongMinNbytes) return xxh3_128_long(src, nbytes, dst, isa);
    const Xxh3Halves h = xxh3_short(src, nbytes);
    store(dst, __builtin_bswap64(h.high));
    store(dst + 8, __builtin_bswap64(h.low));
}

}  // namespace packhorse
