// Symbols and raw bits (docs/format.md, 6.1). A coder codes the upper bits of a plane's bytes. If
// the lower bits are noise, they are stored in bit planes as they are.
//
// Coders work on bytes whose raw bits are cleared. So a symbol stays shifted to its place, and its
// raw bits are simply added when it is decoded.
#pragma once

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/symbols_avx2.hpp"
#include "planes/symbols_avx512.hpp"
#include "planes/symbols_neon.hpp"
#include "planes/symbols_portable.hpp"

namespace packhorse {

constexpr std::size_t raw_nbytes(const RawBits& raw, std::size_t n) {
    return static_cast<std::size_t>(__builtin_popcount(raw.mask)) * bit_plane_nbytes(n);
}

// Finds the bits of `mask` that are set anywhere in a plane. Usually the first block has them all.
inline uint32_t used_bits(const uint8_t* plane, std::size_t n, uint32_t mask) {
    constexpr std::size_t kBlock = 1024;
    uint32_t used = 0;
    for (std::size_t at = 0; at < n && used != mask; at += kBlock) {
        uint8_t any = 0;
        const std::size_t end = std::min(n, at + kBlock);
        for (std::size_t i = at; i < end; ++i) any |= plane[i];
        used |= any & mask;
    }
    return used;
}

inline std::size_t write_raw_blocks(const uint8_t* plane, std::size_t n_blocks, uint32_t j,
                                    uint8_t* dst, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) return write_raw_blocks_avx2(plane, n_blocks, j, dst);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon) return write_raw_blocks_neon(plane, n_blocks, j, dst);
#endif
    (void)isa;
    return write_raw_blocks_portable(plane, n_blocks, j, dst);
}

inline RawPlanes find_raw_planes(const RawBits& raw, const uint8_t* planes, std::size_t n) {
    RawPlanes found;
    found.planes = planes;
    found.stride = bit_plane_nbytes(n);
    for (uint32_t j = 0; j < raw.n_bits; ++j)
        if (raw.mask >> j & 1) found.bits[found.n++] = static_cast<uint8_t>(j);
    return found;
}

// Writes the raw bit planes of `n` bytes. Returns their end.
inline uint8_t* write_raw_bits(const uint8_t* plane, std::size_t n, const RawBits& raw,
                               uint8_t* dst, Isa isa) {
    const std::size_t all_blocks = n / 64;
    bool has_blocks = false;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) {
        const RawPlanes planes = find_raw_planes(raw, dst, n);
        write_raw_blocks_avx512(plane, all_blocks, planes.bits, planes.n, planes.stride, dst);
        has_blocks = true;
    }
#endif
    for (uint32_t j = 0; j < raw.n_bits; ++j) {
        if ((raw.mask >> j & 1) == 0) continue;
        const std::size_t done =
            has_blocks ? all_blocks : write_raw_blocks(plane, all_blocks, j, dst, isa);
        if (n % 64 != 0) store(dst + 8 * done, raw_word_portable(plane + 64 * done, n % 64, j));
        dst += bit_plane_nbytes(n);
    }
    return dst;
}

// Checks the two fields of a header. `limit` is the most raw bits that the mode allows.
inline Status parse_raw_bits(uint8_t n_bits, uint8_t mask, uint32_t limit, RawBits& raw) {
    if (n_bits > limit) return Status::kBadField;
    if (mask >> n_bits != 0) return Status::kReserved;
    raw.n_bits = n_bits;
    raw.mask = mask;
    return Status::kOk;
}

// Whether the listed symbols are small enough to leave room for the raw bits.
inline bool symbols_fit(const uint8_t* symbols, std::size_t n, const RawBits& raw) {
    if (raw.n_bits == 0) return true;
    for (std::size_t i = 0; i < n; ++i)
        if (symbols[i] >> (8 - raw.n_bits) != 0) return false;
    return true;
}

// Adds the raw bits of `n` units from `first` on to their decoded symbols. `first` is a multiple of
// 64.
inline void add_raw_bits(const RawPlanes& raw, std::size_t first, std::size_t n, uint8_t* dst,
                         Isa isa) {
    if (raw.n == 0) return;
    const std::size_t n_blocks = n / 64;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        add_raw_blocks_avx512(raw, first, n_blocks, dst);
    else if (isa >= Isa::kAvx2)
        add_raw_blocks_avx2(raw, first, n_blocks, dst);
    else
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        add_raw_blocks_neon(raw, first, n_blocks, dst);
    else
#endif
        add_raw_blocks_portable(raw, first, n_blocks, dst);
    (void)isa;
    const std::size_t rest = n % 64;
    if (rest == 0) return;
    uint8_t block[64] = {};
    std::memcpy(block, dst + 64 * n_blocks, rest);
    add_raw_blocks_portable(raw, first + 64 * n_blocks, 1, block);
    std::memcpy(dst + 64 * n_blocks, block, rest);
}

}  // namespace packhorse
