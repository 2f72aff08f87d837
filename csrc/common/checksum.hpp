// CRC32C of encoded bytes, and XXH3-128 of logical bytes (docs/format.md, sections 1 and 7).
//
// CRC32C: the instructions of SSE4.2 and of ARM have a latency of two or three cycles and a
// throughput of one, so three streams run side by side and are joined by the linear operator
// "append L zero bytes", held as four tables of 256 (one for each byte of the register). Without
// the instruction, two streams run side by side. Processors with carry-less products of vectors
// fold 256 bytes into the next 256 instead (with AVX2, 128), which is twice as fast with AVX-512.
// XXH3: inputs above 240 bytes; common/xxh3_short.hpp has the shorter ones. Source: the XXH3
// specification, doc/xxhash_spec.md of the xxHash project.
//
// The loops are in common/checksum_avx512.hpp, common/checksum_avx2.hpp,
// common/checksum_neon.hpp and common/checksum_portable.hpp.
#pragma once

#include "common/checksum_avx2.hpp"
#include "common/checksum_avx512.hpp"
#include "common/checksum_neon.hpp"
#include "common/checksum_portable.hpp"
#include "common/dispatch.hpp"

namespace packhorse {

// Continues a CRC register. It begins as ~0, and its complement is the CRC.
inline uint32_t crc32c_continue(uint32_t crc, const uint8_t* src, std::size_t nbytes, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && nbytes >= kCrcFoldMinNbytes && has_vpclmulqdq())
        return crc32c_folding(crc, src, nbytes);
    if (isa >= Isa::kAvx2 && nbytes >= kCrcBlocksMinNbytes && has_vpclmulqdq())
        return crc32c_blocks_avx2(crc, src, nbytes);
    if (isa >= Isa::kAvx2) return crc32c_hardware(crc, src, nbytes);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon && has_crc32()) return crc32c_neon(crc, src, nbytes);
#endif
    (void)isa;
    return crc32c_portable(crc, src, nbytes);
}

inline uint32_t crc32c(const uint8_t* src, std::size_t nbytes, Isa isa) {
    return ~crc32c_continue(~0u, src, nbytes, isa);
}

inline void xxh3_stripes(Xxh3Accumulator& acc, const uint8_t* src, std::size_t n_stripes, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return xxh3_stripes_avx512(acc, src, n_stripes);
    if (isa >= Isa::kAvx2) return xxh3_stripes_avx2(acc, src, n_stripes);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon) return xxh3_stripes_neon(acc, src, n_stripes);
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

// Hashes full blocks. The last block of an input never counts as full.
inline void xxh3_blocks(Xxh3Accumulator& acc, const uint8_t* src, std::size_t n_blocks, Isa isa) {
    for (std::size_t block = 0; block < n_blocks; ++block) {
        xxh3_stripes(acc, src + block * kXxh3BlockNbytes, kXxh3StripesPerBlock, isa);
        xxh3_scramble(acc);
    }
}

constexpr std::size_t xxh3_n_blocks(std::size_t nbytes) {
    return (nbytes - 1) / kXxh3BlockNbytes;
}

// Finishes the hash of `nbytes` bytes that end at `end`, after all full blocks are hashed. Writes
// its 16 canonical bytes. Reads only the bytes behind the full blocks and the last 64 bytes.
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

// Computes XXH3-128 of `nbytes` >= kXxh3LongMinNbytes bytes, as its 16 canonical bytes.
inline void xxh3_128_long(const uint8_t* src, std::size_t nbytes, uint8_t* dst, Isa isa) {
    Xxh3Accumulator acc;
    xxh3_blocks(acc, src, xxh3_n_blocks(nbytes), isa);
    xxh3_finish(acc, src + nbytes, nbytes, dst, isa);
}

}  // namespace packhorse
