// Looks for places where the numbers at hand occurred before in the chunk.
//
// A table remembers the last places of each hash, newest first. A second one shows a place where
// a shorter run occurred. A hash only says where to look.
#pragma once

#include <bit>

#include "chunk/choose.hpp"
#include "matches/stream.hpp"

namespace packhorse {

constexpr std::size_t kMatchSlack = 64;  // bytes behind numbers, which may be read

// The numbers that are hashed together: the least length of matches, but for those in reach of the
// second table, which is for shorter ones.
constexpr std::size_t hashed_numbers(std::size_t number_nbytes) {
    return number_nbytes == 1 ? 5 : number_nbytes == 2 ? 3 : number_nbytes == 4 ? 2 : 1;
}
constexpr std::size_t hashed_numbers_short(std::size_t number_nbytes) {
    return number_nbytes == 1 ? 3 : number_nbytes == 2 ? 2 : 1;
}

// The least length of a match.
constexpr std::size_t least_match(std::size_t number_nbytes) {
    return number_nbytes <= 4 ? 2 : 1;
}

// How a level searches.
struct MatchSearch {
    uint32_t n_ways;  // places remembered for a hash
    uint32_t hash_log;
    uint32_t short_log;  // of the table for shorter runs; 0 for none
    bool is_lazy;
    uint32_t skip_log;  // after so many failures (log2), only every second number is looked up

    // Many places are told apart by more bits of their hashes, so that few of them are read.
    constexpr bool has_tags() const { return n_ways > 2; }
    constexpr std::size_t n_places() const { return std::size_t{n_ways} << hash_log; }
    // Places of both tables.
    constexpr std::size_t n_all() const {
        return n_places() + (short_log > 0 ? std::size_t{1} << short_log : 0);
    }
};

constexpr MatchSearch kFastSearch{1, 15, 0, false, 4};
constexpr MatchSearch kDefaultSearch{2, 15, 14, true, 4};
constexpr MatchSearch kMaxSearch{32, 14, 16, true, 8};

constexpr MatchSearch search_of(Level level) {
    return level == Level::kFast      ? kFastSearch
           : level == Level::kDefault ? kDefaultSearch
                                      : kMaxSearch;
}

template <class Number, MatchSearch kSearch>
class MatchTables {
  public:
    // `places` has room for kSearch.n_all(), and `numbers` kMatchSlack bytes behind.
    MatchTables(const Number* numbers, std::size_t n, uint32_t* places)
        : numbers_(numbers), n_(n), places_(places), short_places_(places + kSearch.n_places()) {
        std::fill_n(places, kSearch.n_all(), 0);
    }

    // The first place where there are too few numbers left to look them up.
    std::size_t stop() const { return n_ > kHashed ? n_ - kHashed : 0; }

    void remember(std::size_t at) const {
        const uint64_t here = head<kHashed>(at);
        insert(places_of(here), at, tag_of(here));
        if constexpr (kHasShort) short_place_of(at) = static_cast<uint32_t>(at);
    }

    // Remembers the places of a match, but for its first, and of a long one only the last.
    void remember_match(std::size_t at, std::size_t length) const {
        constexpr std::size_t kLong = sizeof(Number) == 1 ? 8 : 64;
        const std::size_t end = std::min(at + length, stop());
        if (length > kLong && end > kLong) at = std::max(at, end - kLong);
        for (++at; at < end; ++at) remember(at);
    }

    // Fetches what look_up(at) reads of the first table.
    void fetch(std::size_t at) const {
        const uint32_t* const places = places_of(head<kHashed>(at));
        for (uint32_t w = 0; w < kSearch.n_ways; w += 16) __builtin_prefetch(places + w, 1);
    }

    std::size_t length_of(std::size_t from, std::size_t at) const {
        const auto* a = reinterpret_cast<const uint8_t*>(numbers_ + from);
        const auto* b = reinterpret_cast<const uint8_t*>(numbers_ + at);
        const std::size_t most = (n_ - at) * sizeof(Number);
        std::size_t i = 0;
        for (; i + 32 <= most; i += 32) {
            uint64_t differ = 0;
            for (std::size_t j = i; j < i + 32; j += 8)
                differ |= load<uint64_t>(a + j) ^ load<uint64_t>(b + j);
            if (differ != 0) break;
        }
        for (; i < most; i += 8) {
            const uint64_t differ = load<uint64_t>(a + i) ^ load<uint64_t>(b + i);
            if (differ == 0) continue;
            const auto same = i + static_cast<std::size_t>(std::countr_zero(differ)) / 8;
            return std::min(same, most) / sizeof(Number);
        }
        return n_ - at;
    }

    // Calls consider(from) for each place of the first table where the numbers that are hashed
    // together may be those at `at`, the nearest first; then, if is_short_wanted(), for that of the
    // second. Remembers `at`.
    template <class Consider, class IsShortWanted>
    PACKHORSE_INLINE void look_up(std::size_t at, Consider consider,
                                  IsShortWanted is_short_wanted) const {
        const uint64_t here = head<kHashed>(at);
        uint32_t* const places = places_of(here);
        const uint32_t tag = tag_of(here);
        if constexpr (kSearch.has_tags()) {
            uint32_t found[kSearch.n_ways];
            std::size_t n = 0;
            for (uint32_t w = 0; w < kSearch.n_ways; ++w) {
                found[n] = places[w] & kPlaceMask;
                n += (places[w] ^ tag) <= kPlaceMask ? 1 : 0;
            }
            for (std::size_t i = 0; i < n; ++i)
                if (found[i] < at) consider(found[i]);
        } else {
            for (uint32_t w = 0; w < kSearch.n_ways && places[w] < at; ++w)
                if (head<kHashed>(places[w]) == here) consider(places[w]);
        }
        insert(places, at, tag);
        if constexpr (kHasShort) {
            uint32_t& place = short_place_of(at);
            if (place < at && is_short_wanted()) consider(place);
            place = static_cast<uint32_t>(at);
        }
    }

  protected:
    const Number* numbers_;
    std::size_t n_;

  private:
    static constexpr std::size_t kHashed = hashed_numbers(sizeof(Number));
    static constexpr bool kHasShort = kSearch.short_log > 0 && kHashed > 1;
    // The lower bits are a place, since a chunk has at most 2^21 units, and the upper ones a tag.
    static constexpr uint32_t kPlaceMask = (1u << 21) - 1;

    // The first numbers at a place, in the upper bits of a word.
    template <std::size_t kNumbers>
    uint64_t head(std::size_t at) const {
        return load<uint64_t>(numbers_ + at) << (64 - 8 * kNumbers * sizeof(Number));
    }
    // Its first bits say where to look, and the next are the tag.
    static uint64_t hash(uint64_t head) { return head * 0x9E3779B97F4A7C15u; }
    static uint32_t tag_of(uint64_t head) {
        if (!kSearch.has_tags()) return 0;
        return static_cast<uint32_t>(hash(head) << kSearch.hash_log >> 32) & ~kPlaceMask;
    }
    uint32_t* places_of(uint64_t head) const {
        return places_ + kSearch.n_ways * (hash(head) >> (64 - kSearch.hash_log));
    }
    uint32_t& short_place_of(std::size_t at) const {
        constexpr std::size_t n = hashed_numbers_short(sizeof(Number));
        return short_places_[hash(head<n>(at)) >> (64 - kSearch.short_log)];
    }

    static void insert(uint32_t* places, std::size_t at, uint32_t tag) {
        const uint32_t place = static_cast<uint32_t>(at) | tag;
        if (places[0] == place) return;  // a later match was looked for here
        std::memmove(places + 1, places, (kSearch.n_ways - 1) * sizeof *places);
        places[0] = place;
    }

    uint32_t* places_;
    uint32_t* short_places_;
};

}  // namespace packhorse
