// The raw bits of a stream, and functions that move them out of planes and back with the baseline's
// instructions.
#pragma once

#include <array>

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

struct RawBits {
    uint32_t n_bits = 0;  // low bits of a byte that are not coded
    uint32_t mask = 0;    // those low bits that are not always zero; each has a bit plane

    uint8_t symbol_mask() const { return static_cast<uint8_t>(0xFFu << n_bits); }
    uint32_t n_symbols() const { return 256u >> n_bits; }
};

constexpr std::size_t bit_plane_nbytes(std::size_t n) {
    return 8 * ((n + 63) / 64);
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

// The raw bit planes of a stream.
struct RawPlanes {
    uint32_t n = 0;
    uint8_t bits[8];                  // the bit that each one holds
    const uint8_t* planes = nullptr;  // the first one
    std::size_t stride = 0;
};

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

}  // namespace packhorse
