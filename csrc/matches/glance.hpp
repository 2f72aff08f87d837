// A first look at a tensor, before the trials of matches and Zstandard. If hardly anything in a few
// pieces of it occurs twice, and differences of neighbours look no better, then neither saves what
// planes do not, and the trials are spared.
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
// both are looked at, or neither is. Of a short tensor more are looked at, some kGlancePlaces.
constexpr std::size_t kGlanceOne = 64;
constexpr std::size_t kShortGlanceOne = 4;
constexpr std::size_t kGlancePlaces = 128;
constexpr std::size_t kFewGlances = 32;  // too few to judge by
constexpr std::size_t kRareRepeats =
    64;  // matches that save 1 in 25 bytes need more than 1 in this

// Bytes that say whether a place is looked at: few of noise, and more where few values are
// frequent.
constexpr std::size_t kNoiseMarkNbytes = 2;
constexpr std::size_t kMarkNbytes = 8;

// Marks those of `n` places that are looked at, one in `one_in`. Bytes behind them are read, too.
template <std::size_t kNbytes>
inline void mark_places(const uint8_t* src, std::size_t n, std::size_t one_in, uint8_t* marks,
                        Isa isa) {
    const auto below = static_cast<uint8_t>(256 / one_in);
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i) {
            uint8_t mixed = 0;
            for (std::size_t k = 0; k < kNbytes; ++k)
                mixed = static_cast<uint8_t>(3 * mixed + src[i + k]);
            marks[i] = mixed < below ? 1 : 0;
        }
    });
}

constexpr std::size_t kMinSeenNbytes = 4;
constexpr std::size_t kMaxSeenNbytes = 128;
constexpr std::size_t kFewValues = 4;  // bytes that planes make so many times shorter

// Counts places, and those whose next `n_seen` bytes were seen before.
struct Glances {
    std::size_t n_seen = kMinSeenNbytes;
    std::size_t one_in = kGlanceOne;  // a power of two
    uint32_t table[1u << kGlanceTableLog] = {};
    std::size_t n_places = 0;
    std::size_t n_repeats = 0;

    void look(const uint8_t* at) {
        auto bytes = load<uint32_t>(at);
        if (n_seen > kMinSeenNbytes) {
            auto mixed = load<uint64_t>(at);
            for (std::size_t i = 8; i < n_seen; i += 8)
                mixed = (std::rotl(mixed, 29) + load<uint64_t>(at + i)) * 0x9E3779B185EBCA87u;
            bytes = static_cast<uint32_t>((mixed * 0x9E3779B185EBCA87u) >> 32);
        }
        uint32_t& last = table[bytes * 0x9E3779B1u >> (32 - kGlanceTableLog)];
        ++n_places;
        n_repeats += last == bytes ? 1 : 0;
        last = bytes;
    }

    // Looks at `n` <= kGlanceBlock places. max(n_seen, kMarkNbytes) bytes are behind them.
    void look_at_block(const uint8_t* src, std::size_t n, Isa isa) {
        uint8_t marks[kGlanceBlock];
        if (n_seen == kMinSeenNbytes)
            mark_places<kNoiseMarkNbytes>(src, n, one_in, marks, isa);
        else
            mark_places<kMarkNbytes>(src, n, one_in, marks, isa);
        std::fill(marks + n, marks + round_up(n, 8), uint8_t{0});
        for (std::size_t i = 0; i < n; i += 8)
            for (auto rest = load<uint64_t>(marks + i); rest != 0; rest &= rest - 1)
                look(src + i + static_cast<std::size_t>(std::countr_zero(rest)) / 8);
    }
};

// Whether more than one in kRareRepeats places of a few pieces repeats an earlier one, or too few
// places were found. A place is `n_seen` bytes, four or a multiple of eight: so many that chance
// repeats few of them.
inline bool may_repeat(const uint8_t* src, std::size_t nbytes, std::size_t n_seen, Isa isa) {
    Glances glances;
    glances.n_seen = n_seen;
    glances.one_in =
        std::clamp(std::bit_floor(nbytes / kGlancePlaces), kShortGlanceOne, kGlanceOne);
    const std::size_t behind = std::max(n_seen, kMarkNbytes);
    const std::size_t piece_nbytes =
        std::clamp(nbytes / kGlancePiecePart, kMinGlancePieceNbytes, kMaxGlancePieceNbytes);
    const std::size_t n_pieces = std::clamp<std::size_t>(nbytes / piece_nbytes, 1, kGlancePieces);
    const std::size_t part = nbytes / n_pieces;
    for (std::size_t p = 0; p < n_pieces; ++p) {
        const uint8_t* const piece = src + p * part;
        const std::size_t end = std::min(part, piece_nbytes);
        for (std::size_t at = 0; at + behind < end; at += kGlanceBlock)
            glances.look_at_block(piece + at, std::min(kGlanceBlock, end - behind - at), isa);
    }
    return glances.n_places < kFewGlances || glances.n_repeats * kRareRepeats > glances.n_places;
}

// Whether differences of neighbours take a sixteenth less than the units, as choose_numbers() wants
// it, in a few runs. `src` need not be aligned.
template <class Unit>
inline bool may_rise(const uint8_t* src, std::size_t n) {
    constexpr std::size_t kRun = 256, kLeast = 16;
    if (sizeof(Unit) == 1 || n < kLeast) return false;
    Unit units[kMaxNumberSampleRuns * kRun];
    const std::size_t run = std::min(n, kRun);
    const std::size_t n_runs = std::min(kMaxNumberSampleRuns, n / run);
    for (std::size_t r = 0; r < n_runs; ++r)
        std::memcpy(units + r * run, src + r * (n / n_runs) * sizeof(Unit), run * sizeof(Unit));
    const NumberRule plain{sizeof(Unit), false, 0, 0}, steps{sizeof(Unit), true, 0, 0};
    const uint64_t cost = number_cost(units, n_runs * run, plain, run);
    return number_cost(units, n_runs * run, steps, run) < cost - cost / 16;
}

// Whether trials of matches and Zstandard are worth their time for `n` units that take
// `planes_nbytes` bytes by planes. Two equal places tell of more than chance if they take 32 bits
// there. Where few values are frequent, they must take 64: what a shorter match takes itself is
// most of what it saves.
inline bool glance_for_matches(const uint8_t* src, std::size_t n, uint32_t unit_nbytes,
                               std::size_t planes_nbytes, Isa isa) {
    const std::size_t nbytes = n * unit_nbytes;
    const std::size_t planes = std::max<std::size_t>(planes_nbytes, 1);
    const std::size_t shorter = std::max<std::size_t>((nbytes + planes / 2) / planes, 1);
    std::size_t n_seen = kMinSeenNbytes * shorter * (shorter < kFewValues ? 1 : 2);
    if (n_seen > kMinSeenNbytes) n_seen = round_up(n_seen, 8);
    if (n_seen > kMaxSeenNbytes) return true;
    return may_repeat(src, nbytes, n_seen, isa) ||
           with_integer(unit_nbytes, [&](auto zero) { return may_rise<decltype(zero)>(src, n); });
}

}  // namespace packhorse
