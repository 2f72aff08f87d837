// Copying with checksums: a stored chunk is hashed, checked and copied in one pass.
//
// One block of XXH3 at a time: it is in L1 for all that is done with it, and in the same loop the
// memory behind it is fetched. A large output is written past the cache: it would not stay there,
// and lines that are written whole need not be read before. docs/decisions.md, section 6, has the
// figures.
#pragma once

#include "checksum.hpp"

namespace packhorse {

// An output of so many bytes is written past the cache. A constant, since a virtual machine need
// not tell the size of its cache.
constexpr std::size_t kPastCacheMinNbytes = 12 << 20;

constexpr std::size_t kCopyAheadNbytes = 3072;

// Fetches what will be read, and what will be written unless that goes past the cache.
template <bool kPastCache>
PACKHORSE_INLINE void fetch_line_ahead(const uint8_t* src, const uint8_t* dst) {
    __builtin_prefetch(src + kCopyAheadNbytes, 0, 3);
    if constexpr (!kPastCache) __builtin_prefetch(dst + kCopyAheadNbytes, 1, 3);
}

inline void copy_block_portable(const uint8_t* src, uint8_t* dst) {
    std::memcpy(dst, src, kXxh3BlockNbytes);
}

#if PACKHORSE_X86

// Past the cache, `dst` is a multiple of 64.
template <bool kPastCache>
PACKHORSE_AVX2 inline void copy_block_avx2(const uint8_t* src, uint8_t* dst) {
    for (std::size_t at = 0; at < kXxh3BlockNbytes; at += 64) {
        for (std::size_t h = at; h < at + 64; h += 32) {
            const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + h));
            __m256i* const to = reinterpret_cast<__m256i*>(dst + h);
            kPastCache ? _mm256_stream_si256(to, half) : _mm256_storeu_si256(to, half);
        }
        fetch_line_ahead<kPastCache>(src + at, dst + at);
    }
}

template <bool kPastCache>
PACKHORSE_AVX512 PACKHORSE_INLINE void copy_line_avx512(const uint8_t* src, uint8_t* dst) {
    const __m512i line = _mm512_loadu_si512(src);
    kPastCache ? _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), line)
               : _mm512_storeu_si512(dst, line);
    fetch_line_ahead<kPastCache>(src, dst);
}

template <bool kPastCache>
PACKHORSE_AVX512 inline void copy_block_avx512(const uint8_t* src, uint8_t* dst) {
    for (std::size_t at = 0; at < kXxh3BlockNbytes; at += 64)
        copy_line_avx512<kPastCache>(src + at, dst + at);
}

#endif

template <bool kPastCache>
inline void copy_block(const uint8_t* src, uint8_t* dst, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return copy_block_avx512<kPastCache>(src, dst);
    if (isa >= Isa::kAvx2) return copy_block_avx2<kPastCache>(src, dst);
#endif
    (void)isa;
    copy_block_portable(src, dst);
}

// What is done with blocks: copied by `shift` bytes further on than they are hashed and checked,
// so that addresses written past the cache are multiples of 64.
struct BlockCopy {
    const uint8_t* src;
    uint8_t* dst;
    std::size_t n_blocks;
    std::size_t shift;
    Xxh3Accumulator* acc;  // null for no hash
};

template <bool kPastCache>
inline void copy_blocks_each(const BlockCopy& copy, uint32_t& crc, Isa isa) {
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const std::size_t at = block * kXxh3BlockNbytes;
        copy_block<kPastCache>(copy.src + copy.shift + at, copy.dst + copy.shift + at, isa);
        if (copy.acc != nullptr) {
            xxh3_stripes(*copy.acc, copy.src + at, kXxh3StripesPerBlock, isa);
            xxh3_scramble(*copy.acc);
        }
        crc = crc32c_continue(crc, copy.src + at, kXxh3BlockNbytes, isa);
    }
}

#if PACKHORSE_X86

// Copy, hash and CRC line by line: no step waits for another, and only memory is left to wait for.
template <bool kPastCache, bool kHash>
PACKHORSE_VPCLMULQDQ inline void copy_blocks_folding(const BlockCopy& copy, uint32_t& crc) {
    CrcFold fold = crc_fold_start(crc);
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const uint8_t* const src = copy.src + block * kXxh3BlockNbytes;
        uint8_t* const dst = copy.dst + block * kXxh3BlockNbytes + copy.shift;
        __m512i lanes = kHash ? _mm512_load_si512(copy.acc->lanes) : _mm512_setzero_si512();
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i) {
            const __m512i line = _mm512_loadu_si512(src + 64 * i);
            copy_line_avx512<kPastCache>(src + copy.shift + 64 * i, dst + 64 * i);
            fold.vectors[i % 4] = crc_fold_line(fold.vectors[i % 4],
                                                i == 0 ? _mm512_xor_si512(line, fold.seed) : line);
            if constexpr (kHash) lanes = xxh3_stripe_avx512(lanes, line, kXxh3Secret + 8 * i);
        }
        fold.seed = _mm512_setzero_si512();
        if constexpr (kHash) {
            _mm512_store_si512(copy.acc->lanes, lanes);
            xxh3_scramble(*copy.acc);
        }
    }
    crc = crc_fold_finish(fold);
}

#endif

template <bool kPastCache>
inline void copy_blocks_to(const BlockCopy& copy, uint32_t& crc, Isa isa) {
    if (copy.n_blocks == 0) return;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && has_vpclmulqdq())
        return copy.acc != nullptr ? copy_blocks_folding<kPastCache, true>(copy, crc)
                                   : copy_blocks_folding<kPastCache, false>(copy, crc);
#endif
    copy_blocks_each<kPastCache>(copy, crc, isa);
}

// Copies blocks, with their hash unless `acc` is null, and continues a CRC register.
inline void copy_blocks(const uint8_t* src, std::size_t n_blocks, uint8_t* dst,
                        Xxh3Accumulator* acc, uint32_t& crc, bool past_cache, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (past_cache && isa >= Isa::kAvx2 && n_blocks > 1) {
        // The last block is left: copied further on, it would end behind the others' end.
        const std::size_t shift = -reinterpret_cast<uintptr_t>(dst) % 64;
        std::memcpy(dst, src, shift);
        copy_blocks_to<true>({src, dst, n_blocks - 1, shift, acc}, crc, isa);
        _mm_sfence();  // so that threads that are told of the output see it
        done = n_blocks - 1;
    }
#else
    (void)past_cache;
#endif
    const std::size_t at = done * kXxh3BlockNbytes;
    copy_blocks_to<false>({src + at, dst + at, n_blocks - done, 0, acc}, crc, isa);
}

// Copies bytes and continues a CRC register.
inline void copy_with_crc(const uint8_t* src, std::size_t nbytes, uint8_t* dst, uint32_t& crc,
                          bool past_cache, Isa isa) {
    const std::size_t done = nbytes / kXxh3BlockNbytes * kXxh3BlockNbytes;
    copy_blocks(src, nbytes / kXxh3BlockNbytes, dst, nullptr, crc, past_cache, isa);
    std::memcpy(dst + done, src + done, nbytes - done);
    crc = crc32c_continue(crc, src + done, nbytes - done, isa);
}

// The same for at least kXxh3LongMinNbytes bytes, whose XXH3-128 goes to `digest`.
inline void copy_with_digest(const uint8_t* src, std::size_t nbytes, uint8_t* dst, uint8_t* digest,
                             uint32_t& crc, bool past_cache, Isa isa) {
    Xxh3Accumulator acc;
    const std::size_t n_blocks = xxh3_n_blocks(nbytes);
    copy_blocks(src, n_blocks, dst, &acc, crc, past_cache, isa);
    const std::size_t done = n_blocks * kXxh3BlockNbytes;
    std::memcpy(dst + done, src + done, nbytes - done);
    crc = crc32c_continue(crc, src + done, nbytes - done, isa);
    xxh3_finish(acc, src, nbytes, digest, isa);
}

}  // namespace packhorse
