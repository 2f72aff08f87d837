// Copying with checksums: a stored chunk is hashed, checked and copied in one pass.
//
// One block of XXH3 at a time: it is in L1 for all that is done with it, and in the same loop the
// memory behind it is fetched. A large output is written past the cache: it would not stay there,
// and lines that are written whole need not be read before. docs/decisions.md, section 6, has the
// figures.
//
// What is hashed may be written to by others meanwhile. So it is read once: a line into a register,
// or a block into memory of our own, from which hash, CRC and copy are all made.
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

// Copies blocks `shift` bytes further on than they are checked, so that addresses written past the
// cache are multiples of 64.
struct BlockCopy {
    const uint8_t* src;
    uint8_t* dst;
    std::size_t n_blocks;
    std::size_t shift;
};

template <bool kPastCache>
inline void copy_blocks_each(const BlockCopy& copy, uint32_t& crc, Isa isa) {
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const std::size_t at = block * kXxh3BlockNbytes;
        copy_block<kPastCache>(copy.src + copy.shift + at, copy.dst + copy.shift + at, isa);
        crc = crc32c_continue(crc, copy.src + at, kXxh3BlockNbytes, isa);
    }
}

#if PACKHORSE_X86

// Copy and CRC line by line: no step waits for another, and only memory is left to wait for.
template <bool kPastCache>
PACKHORSE_VPCLMULQDQ inline void copy_blocks_folding(const BlockCopy& copy, uint32_t& crc) {
    CrcFold fold = crc_fold_start(crc);
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const uint8_t* const src = copy.src + block * kXxh3BlockNbytes;
        uint8_t* const dst = copy.dst + block * kXxh3BlockNbytes + copy.shift;
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i) {
            const __m512i line = _mm512_loadu_si512(src + 64 * i);
            copy_line_avx512<kPastCache>(src + copy.shift + 64 * i, dst + 64 * i);
            fold.vectors[i % 4] = crc_fold_line(fold.vectors[i % 4],
                                                i == 0 ? _mm512_xor_si512(line, fold.seed) : line);
        }
        fold.seed = _mm512_setzero_si512();
    }
    crc = crc_fold_finish(fold);
}

#endif

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
        // The last block is left: copied further on, it would end behind the others' end.
        const std::size_t shift = -reinterpret_cast<uintptr_t>(dst) % 64;
        done = n_blocks - 1;
        std::memcpy(dst, src, shift);
        copy_blocks<true>({src, dst, done, shift}, crc, isa);
        _mm_sfence();  // so that threads that are told of the output see it
    }
#else
    (void)past_cache;
#endif
    const std::size_t at = done * kXxh3BlockNbytes, end = n_blocks * kXxh3BlockNbytes;
    copy_blocks<false>({src + at, dst + at, n_blocks - done, 0}, crc, isa);
    std::memcpy(dst + end, src + end, nbytes - end);
    crc = crc32c_continue(crc, src + end, nbytes - end, isa);
}

// Keeps the compiler from reading the source of a copy once more in the place of the copy.
PACKHORSE_INLINE void seal(const uint8_t* copy) {
    asm volatile("" : : "r"(copy) : "memory");
}

// Copies blocks and hashes them. Past the cache, what is written are multiples of 64: `back` bytes
// before each line, a multiple of 4, where the end of the line before goes, too.
struct HashedCopy {
    const uint8_t* src;
    uint8_t* dst;
    std::size_t n_blocks;
    std::size_t back;
    Xxh3Accumulator& acc;
};

template <bool kPastCache>
inline void hashed_copy_each(const HashedCopy& copy, uint32_t& crc, Isa isa) {
    // A block, and before it the end of the block before.
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

#if PACKHORSE_X86

// Line by line, as copy_blocks_folding().
template <bool kPastCache>
PACKHORSE_VPCLMULQDQ inline void hashed_copy_folding(const HashedCopy& copy, uint32_t& crc) {
    CrcFold fold = crc_fold_start(crc);
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const auto n_kept = static_cast<int>(16 - copy.back / 4);  // numbers of the line before
    const __m512i order = _mm512_add_epi32(places, _mm512_set1_epi32(n_kept));
    __m512i before =
        kPastCache ? _mm512_loadu_si512(copy.dst - kXxh3StripeNbytes) : _mm512_setzero_si512();
    for (std::size_t block = 0; block < copy.n_blocks; ++block) {
        const uint8_t* const src = copy.src + block * kXxh3BlockNbytes;
        uint8_t* const dst = copy.dst + block * kXxh3BlockNbytes;
        __m512i lanes = _mm512_load_si512(copy.acc.lanes);
#pragma GCC unroll 16
        for (std::size_t i = 0; i < kXxh3StripesPerBlock; ++i) {
            __m512i line = _mm512_loadu_si512(src + 64 * i);
            asm("" : "+v"(line));  // the compiler may not read it again
            if constexpr (kPastCache) {
                _mm512_stream_si512(reinterpret_cast<__m512i*>(dst - copy.back + 64 * i),
                                    _mm512_permutex2var_epi32(before, order, line));
                before = line;
            } else {
                _mm512_storeu_si512(dst + 64 * i, line);
            }
            fetch_line_ahead<kPastCache>(src + 64 * i, dst + 64 * i);
            fold.vectors[i % 4] = crc_fold_line(fold.vectors[i % 4],
                                                i == 0 ? _mm512_xor_si512(line, fold.seed) : line);
            lanes = xxh3_stripe_avx512(lanes, line, kXxh3Secret + 8 * i);
        }
        fold.seed = _mm512_setzero_si512();
        _mm512_store_si512(copy.acc.lanes, lanes);
        xxh3_scramble(copy.acc);
    }
    crc = crc_fold_finish(fold);
    if constexpr (kPastCache) {
        alignas(64) uint8_t last[kXxh3StripeNbytes];
        _mm512_store_si512(last, before);
        std::memcpy(copy.dst + copy.n_blocks * kXxh3BlockNbytes - copy.back,
                    last + sizeof last - copy.back, copy.back);
    }
}

#endif

template <bool kPastCache>
inline void hashed_copy(const HashedCopy& copy, uint32_t& crc, Isa isa) {
    if (copy.n_blocks == 0) return;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && has_vpclmulqdq()) return hashed_copy_folding<kPastCache>(copy, crc);
#endif
    hashed_copy_each<kPastCache>(copy, crc, isa);
}

// As copy_with_crc(), for at least kXxh3LongMinNbytes bytes that may change meanwhile; the XXH3-128
// of the copy goes to `digest`.
inline void copy_with_digest(const uint8_t* src, std::size_t nbytes, uint8_t* dst, uint8_t* digest,
                             uint32_t& crc, bool past_cache, Isa isa) {
    Xxh3Accumulator acc;
    const std::size_t n_blocks = xxh3_n_blocks(nbytes), end = n_blocks * kXxh3BlockNbytes;
    std::size_t done = 0;
#if PACKHORSE_X86
    const std::size_t back = reinterpret_cast<uintptr_t>(dst) % 64;
    if (past_cache && isa >= Isa::kAvx2 && n_blocks > 1 && back % 4 == 0) {
        // The first block is written where it lies: before it is nothing of ours.
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
