// Symbols and raw bits (docs/format.md, 6.1): a coder sees the upper bits of a plane's bytes; the
// lower ones, if they are noise, go into bit planes as they are.
//
// Coders work on bytes whose raw bits are cleared, so a symbol is carried shifted to its place and
// the raw bits are simply added when it is decoded.
#pragma once

#include <algorithm>
#include <array>

#include "dispatch.hpp"
#include "layout.hpp"

namespace packhorse {

struct RawBits {
    uint32_t n_bits = 0;  // low bits of a byte that are not coded
    uint32_t mask = 0;    // those that are not zero throughout, and so have a bit plane

    uint8_t symbol_mask() const { return static_cast<uint8_t>(0xFFu << n_bits); }
    uint32_t n_symbols() const { return 256u >> n_bits; }
};

constexpr std::size_t bit_plane_nbytes(std::size_t n) {
    return 8 * ((n + 63) / 64);
}

constexpr std::size_t raw_nbytes(const RawBits& raw, std::size_t n) {
    return static_cast<std::size_t>(__builtin_popcount(raw.mask)) * bit_plane_nbytes(n);
}

// Which of the bits of `mask` are set anywhere in a plane. A block is mostly enough to tell.
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

// Bit j of eight bytes, side by side.
PACKHORSE_INLINE uint64_t collect_bit(uint64_t bytes, uint32_t j) {
    return ((bytes >> j & 0x0101010101010101) * 0x0102040810204080) >> 56;
}

inline uint64_t raw_word_portable(const uint8_t* src, std::size_t n, uint32_t j) {
    uint64_t word = 0;
    if (n == 64) {
        for (uint32_t k = 0; k < 8; ++k)
            word |= collect_bit(load<uint64_t>(src + 8 * k), j) << (8 * k);
        return word;
    }
    for (std::size_t i = 0; i < n; ++i) word |= uint64_t{src[i] >> j & 1u} << i;
    return word;
}

inline std::size_t write_raw_blocks_portable(const uint8_t* plane, std::size_t n_blocks, uint32_t j,
                                             uint8_t* dst) {
    for (std::size_t b = 0; b < n_blocks; ++b)
        store(dst + 8 * b, raw_word_portable(plane + 64 * b, 64, j));
    return n_blocks;
}

constexpr std::array<uint64_t, 256> make_spread_bits() {
    std::array<uint64_t, 256> table{};
    for (uint32_t byte = 0; byte < 256; ++byte)
        for (uint32_t bit = 0; bit < 8; ++bit)
            if (byte >> bit & 1) table[byte] |= uint64_t{1} << (8 * bit);
    return table;
}

inline constexpr std::array<uint64_t, 256> kSpreadBits = make_spread_bits();  // a byte for each bit

inline void add_raw_block_portable(const uint64_t* words, const uint8_t* bits, uint32_t n_words,
                                   uint8_t* dst) {
    for (uint32_t k = 0; k < 8; ++k) {
        auto bytes = load<uint64_t>(dst + 8 * k);
        for (uint32_t w = 0; w < n_words; ++w)
            bytes |= kSpreadBits[words[w] >> (8 * k) & 0xFF] << bits[w];
        store(dst + 8 * k, bytes);
    }
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline std::size_t write_raw_blocks_avx2(const uint8_t* plane, std::size_t n_blocks,
                                                        uint32_t j, uint8_t* dst) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(7 - j));
    for (std::size_t b = 0; b < n_blocks; ++b) {
        uint32_t halves[2];
        for (int h = 0; h < 2; ++h) {
            const __m256i bytes = _mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(plane + 64 * b + 32 * static_cast<uint32_t>(h)));
            halves[h] = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_sll_epi16(bytes, shift)));
        }
        store(dst + 8 * b, halves[0] | uint64_t{halves[1]} << 32);
    }
    return n_blocks;
}

PACKHORSE_AVX2 inline void add_raw_block_avx2(const uint64_t* words, const uint8_t* bits,
                                              uint32_t n_words, uint8_t* dst) {
    const __m256i byte_of_bit =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i place = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    for (uint32_t h = 0; h < 2; ++h) {
        auto* at = reinterpret_cast<__m256i*>(dst) + h;
        __m256i bytes = _mm256_loadu_si256(at);
        for (uint32_t w = 0; w < n_words; ++w) {
            const __m256i spread = _mm256_shuffle_epi8(
                _mm256_set1_epi32(static_cast<int>(words[w] >> (32 * h))), byte_of_bit);
            const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, place), place);
            bytes = _mm256_or_si256(
                bytes,
                _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(1u << bits[w]))));
        }
        _mm256_storeu_si256(at, bytes);
    }
}

PACKHORSE_AVX512 inline std::size_t write_raw_blocks_avx512(const uint8_t* plane,
                                                            std::size_t n_blocks, uint32_t j,
                                                            uint8_t* dst) {
    const __m512i bit = _mm512_set1_epi8(static_cast<char>(1u << j));
    for (std::size_t b = 0; b < n_blocks; ++b)
        store(dst + 8 * b, _mm512_test_epi8_mask(_mm512_loadu_si512(plane + 64 * b), bit));
    return n_blocks;
}

PACKHORSE_AVX512 inline void add_raw_block_avx512(const uint64_t* words, const uint8_t* bits,
                                                  uint32_t n_words, uint8_t* dst) {
    __m512i bytes = _mm512_loadu_si512(dst);
    for (uint32_t w = 0; w < n_words; ++w)
        bytes = _mm512_mask_add_epi8(bytes, words[w], bytes,
                                     _mm512_set1_epi8(static_cast<char>(1u << bits[w])));
    _mm512_storeu_si512(dst, bytes);
}

#endif

inline std::size_t write_raw_blocks(const uint8_t* plane, std::size_t n_blocks, uint32_t j,
                                    uint8_t* dst, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return write_raw_blocks_avx512(plane, n_blocks, j, dst);
    if (isa >= Isa::kAvx2) return write_raw_blocks_avx2(plane, n_blocks, j, dst);
#endif
    (void)isa;
    return write_raw_blocks_portable(plane, n_blocks, j, dst);
}

// Writes the raw bit planes of `n` bytes; returns the end.
inline uint8_t* write_raw_bits(const uint8_t* plane, std::size_t n, const RawBits& raw,
                               uint8_t* dst, Isa isa) {
    for (uint32_t j = 0; j < raw.n_bits; ++j) {
        if ((raw.mask >> j & 1) == 0) continue;
        const std::size_t done = write_raw_blocks(plane, n / 64, j, dst, isa);
        if (n % 64 != 0) store(dst + 8 * done, raw_word_portable(plane + 64 * done, n % 64, j));
        dst += bit_plane_nbytes(n);
    }
    return dst;
}

// Where a stream keeps its raw bit planes.
struct RawPlanes {
    uint32_t n = 0;
    uint8_t bits[8];                  // which bit each holds
    const uint8_t* planes = nullptr;  // the first
    std::size_t stride = 0;
};

// Checks the two fields of a header. `limit` is the most raw bits that the mode allows.
inline Status parse_raw_bits(uint8_t n_bits, uint8_t mask, uint32_t limit, RawBits& raw) {
    if (n_bits > limit) return Status::kBadField;
    if (mask >> n_bits != 0) return Status::kReserved;
    raw.n_bits = n_bits;
    raw.mask = mask;
    return Status::kOk;
}

// Whether listed symbols are as small as the raw bits demand.
inline bool symbols_fit(const uint8_t* symbols, std::size_t n, const RawBits& raw) {
    if (raw.n_bits == 0) return true;
    for (std::size_t i = 0; i < n; ++i)
        if (symbols[i] >> (8 - raw.n_bits) != 0) return false;
    return true;
}

inline RawPlanes find_raw_planes(const RawBits& raw, const uint8_t* planes, std::size_t n) {
    RawPlanes found;
    found.planes = planes;
    found.stride = bit_plane_nbytes(n);
    for (uint32_t j = 0; j < raw.n_bits; ++j)
        if (raw.mask >> j & 1) found.bits[found.n++] = static_cast<uint8_t>(j);
    return found;
}

PACKHORSE_INLINE void load_raw_words(const RawPlanes& raw, std::size_t at, uint64_t* words) {
    for (uint32_t w = 0; w < raw.n; ++w)
        words[w] = load<uint64_t>(raw.planes + w * raw.stride + at / 8);
}

inline void add_raw_blocks_portable(const RawPlanes& raw, std::size_t first, std::size_t n_blocks,
                                    uint8_t* dst) {
    uint64_t words[8];
    for (std::size_t b = 0; b < n_blocks; ++b) {
        load_raw_words(raw, first + 64 * b, words);
        add_raw_block_portable(words, raw.bits, raw.n, dst + 64 * b);
    }
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline void add_raw_blocks_avx2(const RawPlanes& raw, std::size_t first,
                                               std::size_t n_blocks, uint8_t* dst) {
    uint64_t words[8];
    for (std::size_t b = 0; b < n_blocks; ++b) {
        load_raw_words(raw, first + 64 * b, words);
        add_raw_block_avx2(words, raw.bits, raw.n, dst + 64 * b);
    }
}

PACKHORSE_AVX512 inline void add_raw_blocks_avx512(const RawPlanes& raw, std::size_t first,
                                                   std::size_t n_blocks, uint8_t* dst) {
    uint64_t words[8];
    for (std::size_t b = 0; b < n_blocks; ++b) {
        load_raw_words(raw, first + 64 * b, words);
        add_raw_block_avx512(words, raw.bits, raw.n, dst + 64 * b);
    }
}

#endif

// Adds the raw bits of `n` units from `first` on, a multiple of 64, to their decoded symbols.
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
