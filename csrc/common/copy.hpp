// Copying with checksums: a stored chunk is hashed, checked and copied in one pass.
// The loops take one block of XXH3 at a time: the block stays in L1 for all steps, and the same
// loop prefetches the memory behind it. A large output is written past the cache, because
// it would not stay there, and because lines that are written whole need not be read first.
// docs/decisions.md, section 6, has the figures.
// Other threads may write to the source meanwhile. So it is read once, a line into a register or a
// block into private memory, and hash, CRC and copy are all made from that.
#pragma once

#include "common/advice.hpp"
#include "common/checksum.hpp"
#include "common/copy_avx2.hpp"
#include "common/copy_avx512.hpp"
#include "common/copy_portable.hpp"

namespace packhorse {

// An output of at least this number of bytes is written past the cache, if its memory was used
// before. This is a constant because a virtual machine may not report the size of its cache.
constexpr std::size_t kPastCacheMinNbytes = 12 << 20;

// Whether the output of a tensor, one of `all_nbytes` bytes, is written past the cache. New memory
// is not: it is in the cache, because the system clears it when it is first used.
inline bool writes_past_cache(const uint8_t* dst, std::size_t nbytes, std::size_t all_nbytes,
                              std::size_t past_cache_nbytes = kPastCacheMinNbytes) {
    constexpr std::size_t kShortNbytes = 64 << 10;  // not worth the question
    if (past_cache_nbytes == 0) return true;
    return nbytes >= kShortNbytes && all_nbytes >= past_cache_nbytes && is_used(dst, nbytes);
}

template <bool kPastCache>
inline void copy_block(const uint8_t* src, uint8_t* dst, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return copy_block_avx512<kPastCache>(src, dst);
    if (isa >= Isa::kAvx2) return copy_block_avx2<kPastCache>(src, dst);
#endif
    (void)isa;
    copy_block_portable(src, dst);
}

template <bool kPastCache>
inline void copy_blocks_each(const BlockCopy& copy, uint32_t& crc, Isa isa) {
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const std::size_t at = block * kXxh3BlockNbytes;
        copy_block<kPastCache>(copy.src + copy.shift + at, copy.dst + copy.shift + at, isa);
        crc = crc32c_continue(crc, copy.src + at, kXxh3BlockNbytes, isa);
    }
}

template <bool kPastCache>
inline void copy_blocks(const BlockCopy& copy, uint32_t& crc, Isa isa) {
    if (copy.n_blocks == 0) return;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && has_vpclmulqdq()) return copy_blocks_folding<kPastCache>(copy, crc);
#endif
    copy_blocks_each<kPastCache>(copy, crc, isa);
}

// Copies bytes and continues a CRC register.
inline void copy_with_crc(const uint8_t* src, std::size_t nbytes, uint8_t* dst, uint32_t& crc,
                          bool past_cache, Isa isa) {
    const std::size_t n_blocks = nbytes / kXxh3BlockNbytes;
    std::size_t done = 0;
#if PACKHORSE_X86
    if (past_cache && isa >= Isa::kAvx2 && n_blocks > 1) {
        // The last block is left out, because with the shift its copy would go beyond the end of
        // the output.
        const std::size_t shift = -reinterpret_cast<uintptr_t>(dst) % 64;
        done = n_blocks - 1;
        std::memcpy(dst, src, shift);
        copy_blocks<true>({src, dst, done, shift}, crc, isa);
        _mm_sfence();  // so that other threads see the output
    }
#else
    (void)past_cache;
#endif
    const std::size_t at = done * kXxh3BlockNbytes, end = n_blocks * kXxh3BlockNbytes;
    copy_blocks<false>({src + at, dst + at, n_blocks - done, 0}, crc, isa);
    std::memcpy(dst + end, src + end, nbytes - end);
    crc = crc32c_continue(crc, src + end, nbytes - end, isa);
}

template <bool kPastCache>
inline void hashed_copy_each(const HashedCopy& copy, uint32_t& crc, Isa isa) {
    // The end of the previous block, and then a block.
    alignas(64) uint8_t tile[kXxh3StripeNbytes + kXxh3BlockNbytes];
    std::memset(tile + kXxh3BlockNbytes, 0, kXxh3StripeNbytes);
    if (kPastCache)
        std::memcpy(tile + kXxh3BlockNbytes, copy.dst - kXxh3StripeNbytes, kXxh3StripeNbytes);
    for (std::size_t i = 0; i < copy.n_blocks; ++i) {
        const uint8_t* const src = copy.src + i * kXxh3BlockNbytes;
        uint8_t* const dst = copy.dst + i * kXxh3BlockNbytes;
        uint8_t* const block = kPastCache ? tile + kXxh3StripeNbytes : dst;
        for (std::size_t at = 0; at < kXxh3BlockNbytes; at += 64)
            __builtin_prefetch(src + kCopyAheadNbytes + at, 0, 3);
        if (kPastCache) std::memcpy(tile, tile + kXxh3BlockNbytes, kXxh3StripeNbytes);
        std::memcpy(block, src, kXxh3BlockNbytes);
        seal(block);
        xxh3_blocks(copy.acc, block, 1, isa);
        crc = crc32c_continue(crc, block, kXxh3BlockNbytes, isa);
        if (kPastCache) copy_block<true>(block - copy.back, dst - copy.back, isa);
    }
    if (kPastCache)
        std::memcpy(copy.dst + copy.n_blocks * kXxh3BlockNbytes - copy.back,
                    tile + sizeof tile - copy.back, copy.back);
}

template <bool kPastCache>
inline void hashed_copy(const HashedCopy& copy, uint32_t& crc, Isa isa) {
    if (copy.n_blocks == 0) return;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && has_vpclmulqdq()) return hashed_copy_folding<kPastCache>(copy, crc);
#endif
    hashed_copy_each<kPastCache>(copy, crc, isa);
}

// Does what copy_with_crc() does, for at least kXxh3LongMinNbytes bytes that may change meanwhile.
// `digest` receives the XXH3-128 of the copy.
inline void copy_with_digest(const uint8_t* src, std::size_t nbytes, uint8_t* dst, uint8_t* digest,
                             uint32_t& crc, bool past_cache, Isa isa) {
    Xxh3Accumulator acc;
    const std::size_t n_blocks = xxh3_n_blocks(nbytes), end = n_blocks * kXxh3BlockNbytes;
    std::size_t done = 0;
#if PACKHORSE_X86
    const std::size_t back = reinterpret_cast<uintptr_t>(dst) % 64;
    if (past_cache && isa >= Isa::kAvx2 && n_blocks > 1 && back % 4 == 0) {
        // The first block is written without a shift back, because the memory in front of it is not
        // part of the output.
        constexpr std::size_t first = kXxh3BlockNbytes;
        hashed_copy<false>({src, dst, 1, 0, acc}, crc, isa);
        hashed_copy<true>({src + first, dst + first, n_blocks - 1, back, acc}, crc, isa);
        _mm_sfence();
        done = n_blocks;
    }
#else
    (void)past_cache;
#endif
    const std::size_t at = done * kXxh3BlockNbytes;
    hashed_copy<false>({src + at, dst + at, n_blocks - done, 0, acc}, crc, isa);
    std::memcpy(dst + end, src + end, nbytes - end);
    seal(dst);
    crc = crc32c_continue(crc, dst + end, nbytes - end, isa);
    xxh3_finish(acc, dst + nbytes, nbytes, digest, isa);
}

}  // namespace packhorse
