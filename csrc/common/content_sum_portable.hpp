// The content sum of a tensor (docs/format.md, section 7): for each word of four bytes, the word
// times a key that follows from its place. A change of a few bytes changes the sum by what these
// bytes contribute, so the sum of a tensor is known without reading the rest of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

// Two sums modulo 2^64, of products with the low and the high half of each key. The difference of
// two sums is one, too.
struct ContentSum {
    uint64_t low = 0;
    uint64_t high = 0;

    PACKHORSE_INLINE void add(const ContentSum& other) {
        low += other.low;
        high += other.high;
    }
    PACKHORSE_INLINE void add(uint64_t key, uint64_t word) {
        low += (key & 0xFFFFFFFF) * word;
        high += (key >> 32) * word;
    }
};

// How a content sum changes where bytes are replaced, and what the low sum had of them before.
struct SumChange {
    ContentSum sum;
    uint64_t before = 0;

    void add(const SumChange& other) {
        sum.add(other.sum);
        before += other.before;
    }
    PACKHORSE_INLINE void add(uint64_t key, uint64_t word, uint64_t word_before) {
        sum.add(key, word - word_before);
        before += (key & 0xFFFFFFFF) * word_before;
    }
};

constexpr uint64_t kKeyStep = 0x9E3779B97F4A7C15;
constexpr uint64_t kKeyFactors[2] = {0xBF58476D1CE4E5B9, 0x94D049BB133111EB};

// The key of a word: output number `word` of SplitMix64 from state 0.
PACKHORSE_INLINE uint64_t content_key(uint64_t word) {
    uint64_t z = (word + 1) * kKeyStep;
    z = (z ^ z >> 30) * kKeyFactors[0];
    z = (z ^ z >> 27) * kKeyFactors[1];
    return z ^ z >> 31;
}

// Adds the words of `nbytes` bytes, which begin at word `first` of the tensor. They replace those
// at `before`, or zeros.
template <bool kReplaces>
PACKHORSE_INLINE SumChange sum_words(const uint8_t* bytes, const uint8_t* before,
                                     std::size_t nbytes, uint64_t first) {
    SumChange change;
    const std::size_t n = nbytes / sizeof(uint32_t);
    for (std::size_t i = 0; i < n; ++i) {
        const uint64_t word = load<uint32_t>(bytes + i * sizeof(uint32_t));
        change.add(content_key(first + i), word,
                   kReplaces ? load<uint32_t>(before + i * sizeof(uint32_t)) : 0);
    }
    if (const std::size_t rest = nbytes % sizeof(uint32_t); rest != 0) {
        uint32_t word = 0, word_before = 0;
        std::memcpy(&word, bytes + n * sizeof(uint32_t), rest);
        if constexpr (kReplaces) std::memcpy(&word_before, before + n * sizeof(uint32_t), rest);
        change.add(content_key(first + n), word, word_before);
    }
    return change;
}

// Adds units that replace those of `before`. The places count units of a part of the tensor that
// begins at byte `first_byte`, a multiple of 8.
template <class Unit>
PACKHORSE_INLINE SumChange sum_units(const uint32_t* places, const Unit* units, const Unit* before,
                                     std::size_t n, uint64_t first_byte) {
    SumChange change;
    for (std::size_t i = 0; i < n; ++i) {
        const uint64_t at = first_byte + uint64_t{places[i]} * sizeof(Unit);
        if constexpr (sizeof(Unit) == 8) {
            constexpr uint64_t kLow = 0xFFFFFFFF;
            change.add(content_key(at / 4), units[i] & kLow, before[i] & kLow);
            change.add(content_key(at / 4 + 1), units[i] >> 32, before[i] >> 32);
        } else {
            const uint64_t shift = 8 * (at % 4);
            change.add(content_key(at / 4), uint64_t{units[i]} << shift,
                       uint64_t{before[i]} << shift);
        }
    }
    return change;
}

}  // namespace packhorse
