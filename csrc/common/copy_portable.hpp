// Code shared by the loops that copy blocks of XXH3: how far ahead they fetch, what they copy, and
// the baseline's loop for one block.
#pragma once

#include "common/checksum.hpp"
#include "common/layout.hpp"

namespace packhorse {

constexpr std::size_t kCopyAheadNbytes = 3072;

// Fetches the memory that will be read, and the memory that will be written unless that goes past
// the cache.
template <bool kPastCache>
PACKHORSE_INLINE void fetch_line_ahead(const uint8_t* src, const uint8_t* dst) {
    __builtin_prefetch(src + kCopyAheadNbytes, 0, 3);
    if constexpr (!kPastCache) __builtin_prefetch(dst + kCopyAheadNbytes, 1, 3);
}

inline void copy_block_portable(const uint8_t* src, uint8_t* dst) {
    std::memcpy(dst, src, kXxh3BlockNbytes);
}

// The range that is copied lies `shift` bytes behind the range that is checked, so that addresses
// written past the cache are multiples of 64.
struct BlockCopy {
    const uint8_t* src;
    uint8_t* dst;
    std::size_t n_blocks;
    std::size_t shift;
};

// Keeps the compiler from reading the source of a copy again instead of the copy.
PACKHORSE_INLINE void seal(const uint8_t* copy) {
    asm volatile("" : : "r"(copy) : "memory");
}

// Copies blocks and hashes them. Past the cache, lines are written at multiples of 64: `back`
// bytes, a multiple of 4, before each line, together with the end of the previous line.
struct HashedCopy {
    const uint8_t* src;
    uint8_t* dst;
    std::size_t n_blocks;
    std::size_t back;
    Xxh3Accumulator& acc;
};

}  // namespace packhorse
