// A first look at a tensor that looks like noise plane by plane. If hardly anything in a few pieces
// of it occurs twice, and differences of neighbours look no better, then neither matches nor
// Zstandard save what planes do not, and their trials are spared.
#pragma once

#include <algorithm>
#include <bit>

#include "matches/numbers.hpp"

namespace packhorse {

constexpr std::size_t kGlancePieces = 6;
// A piece is a 48th of the tensor, within limits; the longest ones are as long as those of trials.
constexpr std::size_t kGlancePiecePart = 48;
constexpr std::size_t kMinGlancePieceNbytes = std::size_t{1} << 15;
constexpr std::size_t kMaxGlancePieceNbytes = std::size_t{1} << 17;
constexpr std::size_t kGlanceBlock = 1024;
constexpr uint32_t kGlanceTableLog = 13;
// The content says which places are looked at, one in so many. So of two copies of the same bytes,
// both are looked at, or neither is.
constexpr uint32_t kGlanceOne = 64;
constexpr std::size_t kFewGlances = 32;  // too few to judge by
constexpr std::size_t kRareRepeats =
    64;  // matches that save 1 in 25 bytes need more than 1 in this

// Marks the places of a block that are looked at. The byte behind the block is read, too.
inline void mark_places(const uint8_t* src, uint8_t* marks, Isa isa) {
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < kGlanceBlock; ++i) {
            const auto sum = static_cast<uint8_t>(src[i] + src[i + 1]);
            marks[i] = sum % kGlanceOne == 0 ? 1 : 0;
        }
    });
}

// Counts places, and those whose four bytes were seen before.
struct Glances {
    uint32_t table[1u << kGlanceTableLog] = {};
    std::size_t n_places = 0;
    std::size_t n_repeats = 0;

    void look(const uint8_t* at) {
        const auto bytes = load<uint32_t>(at);
        uint32_t& last = table[bytes * 0x9E3779B1u >> (32 - kGlanceTableLog)];
        ++n_places;
        n_repeats += last == bytes ? 1 : 0;
        last = bytes;
    }

    void look_at_block(const uint8_t* src, Isa isa) {
        uint8_t marks[kGlanceBlock];
        mark_places(src, marks, isa);
        for (std::size_t i = 0; i < kGlanceBlock; i += 8)
            for (auto rest = load<uint64_t>(marks + i); rest != 0; rest &= rest - 1)
                look(src + i + static_cast<std::size_t>(std::countr_zero(rest)) / 8);
    }
};

// Whether more than one in kRareRepeats places of a few pieces repeats an earlier one, or too few
// places were found.
inline bool may_repeat(const uint8_t* src, std::size_t nbytes, Isa isa) {
    Glances glances;
    const std::size_t piece_nbytes =
        std::clamp(nbytes / kGlancePiecePart, kMinGlancePieceNbytes, kMaxGlancePieceNbytes);
    const std::size_t n_pieces = std::clamp<std::size_t>(nbytes / piece_nbytes, 1, kGlancePieces);
    const std::size_t part = nbytes / n_pieces;
    for (std::size_t p = 0; p < n_pieces; ++p) {
        const uint8_t* const piece = src + p * part;
        const std::size_t end = std::min(part, piece_nbytes);
        for (std::size_t at = 0; at + kGlanceBlock + sizeof(uint32_t) <= end; at += kGlanceBlock)
            glances.look_at_block(piece + at, isa);
    }
    return glances.n_places < kFewGlances || glances.n_repeats * kRareRepeats > glances.n_places;
}

// Whether differences of neighbours take a sixteenth less than the units, as choose_numbers() wants
// it, in a few runs. `src` need not be aligned.
template <class Unit>
inline bool may_rise(const uint8_t* src, std::size_t n) {
    constexpr std::size_t kRun = 256;
    if (sizeof(Unit) == 1 || n < kRun) return false;
    Unit units[kMaxNumberSampleRuns * kRun];
    const std::size_t n_runs = std::min(kMaxNumberSampleRuns, n / kRun);
    for (std::size_t r = 0; r < n_runs; ++r)
        std::memcpy(units + r * kRun, src + r * (n / n_runs) * sizeof(Unit), kRun * sizeof(Unit));
    const NumberRule plain{sizeof(Unit), false, 0, 0}, steps{sizeof(Unit), true, 0, 0};
    const uint64_t cost = number_cost(units, n_runs * kRun, plain, kRun);
    return number_cost(units, n_runs * kRun, steps, kRun) < cost - cost / 16;
}

// Whether trials of matches and Zstandard are worth their time for `n` units that look like noise.
inline bool glance_for_matches(const uint8_t* src, std::size_t n, uint32_t unit_nbytes, Isa isa) {
    return may_repeat(src, n * unit_nbytes, isa) ||
           with_integer(unit_nbytes, [&](auto zero) { return may_rise<decltype(zero)>(src, n); });
}

}  // namespace packhorse
