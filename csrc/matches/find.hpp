// Finds runs of numbers that occurred before in the chunk.
//
// A table remembers the last places of each hash, newest first. At each number the longest run from
// these places, and from the distance of the match before, is compared with what its numbers would
// cost as literals. If there is none, a second table shows a place where a shorter run occurred.
// Above level fast, a match waits for one that begins a number later and saves more. The longer
// nothing is found, the more numbers are skipped, up to 16; a match halves that again. All
// arithmetic is in integers.
#pragma once

#include <bit>

#include "chunk/choose.hpp"
#include "matches/stream.hpp"

namespace packhorse {

constexpr std::size_t kMatchSlack = 64;  // bytes behind numbers, which may be read

// What parts cost, in 2^-kPriceBits bits.
constexpr uint32_t kPriceBits = 4;
struct MatchPrices {
    uint32_t literal;
    uint32_t match;   // run, length and distance, beside the digits of the distance
    uint32_t repeat;  // the same if the distance is that of the match before
};

// Matches of differences are rare, and so they are long and far from each other.
constexpr MatchPrices match_prices(uint32_t literal, bool differences) {
    literal = std::max(literal, 1u);
    return differences ? MatchPrices{literal, 12u << kPriceBits, 9u << kPriceBits}
                       : MatchPrices{literal, 5u << kPriceBits, 3u << kPriceBits};
}

// Where the parts of a chunk go.
struct MatchParts {
    uint8_t* literals;  // kMatchSlack behind
    uint32_t* distances;
    uint8_t* runs;
    uint8_t* lengths;
    MatchCounts counts;
};

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
    bool is_lazy;
    bool has_short;
    uint32_t skip_log;  // after so many failures (log2), only every second number is looked up

    constexpr std::size_t n_places() const { return std::size_t{n_ways} << hash_log; }
};

constexpr uint32_t kShortHashLog = 14;
constexpr MatchSearch kFastSearch{1, 15, false, false, 4};
constexpr MatchSearch kDefaultSearch{2, 15, true, true, 4};
constexpr MatchSearch kMaxSearch{16, 14, true, true, 8};

// Places of both tables.
constexpr std::size_t table_places(const MatchSearch& search) {
    return search.n_places() + (search.has_short ? std::size_t{1} << kShortHashLog : 0);
}
constexpr MatchSearch search_of(Level level) {
    return level == Level::kFast      ? kFastSearch
           : level == Level::kDefault ? kDefaultSearch
                                      : kMaxSearch;
}

template <class Number, MatchSearch kSearch>
class MatchFinder {
  public:
    // `places` has room for table_places(kSearch), and `numbers` kMatchSlack bytes behind.
    MatchFinder(const Number* numbers, std::size_t n, const MatchPrices& prices, uint32_t* places)
        : numbers_(numbers),
          n_(n),
          prices_(prices),
          places_(places),
          short_places_(places + kSearch.n_places()) {
        std::fill_n(places, table_places(kSearch), 0);
    }

    void find(MatchParts& parts) {
        // At most, so that repetition behind a long piece without any is soon found.
        constexpr std::size_t kMostSkipped = 16;
        std::size_t at = 0, from = 0, missed = 0;
        uint32_t last = 1;
        const std::size_t stop = n_ > kHashed ? n_ - kHashed : 0;
        while (at < stop) {
            Match match = best_at(at, last);
            if (match.gain <= 0) {
                at += 1 + (missed >> kSearch.skip_log);
                missed = std::min(missed + 1, kMostSkipped << kSearch.skip_log);
                continue;
            }
            // A match of one number loses nothing: the next one may follow it.
            while (kSearch.is_lazy && match.length > 1 && at + 1 < stop) {
                const Match later = best_at(at + 1, last);
                if (later.gain <= match.gain + prices_.literal) break;
                match = later;
                ++at;
            }
            missed /= 2;
            put(parts, from, at, match, last);
            last = match.distance;
            from = at + match.length;
            const std::size_t end = std::min(from, stop);
            if (match.length > kLongMatch && end > kLongMatch) at = std::max(at, end - kLongMatch);
            for (++at; at < end; ++at) remember(at);
            at = from;
        }
        copy_literals(parts, from, n_);
    }

  private:
    static constexpr std::size_t kHashed = hashed_numbers(sizeof(Number));
    static constexpr bool kHasShort = kSearch.has_short && kHashed > 1;
    // Of a longer match, only the last places are remembered.
    static constexpr std::size_t kLongMatch = sizeof(Number) == 1 ? 8 : 64;

    struct Match {
        uint32_t distance = 0;
        std::size_t length = 0;
        int64_t gain = 0;
    };

    // The first numbers at a place, in the upper bits of a word.
    template <std::size_t kNumbers>
    uint64_t head(std::size_t at) const {
        return load<uint64_t>(numbers_ + at) << (64 - 8 * kNumbers * sizeof(Number));
    }
    static std::size_t hash(uint64_t head, uint32_t log) {
        return static_cast<std::size_t>((head * 0x9E3779B97F4A7C15u) >> (64 - log));
    }
    uint32_t* places_of(uint64_t head) const {
        return places_ + kSearch.n_ways * hash(head, kSearch.hash_log);
    }
    uint32_t& short_place_of(std::size_t at) const {
        constexpr std::size_t n = hashed_numbers_short(sizeof(Number));
        return short_places_[hash(head<n>(at), kShortHashLog)];
    }

    void remember(std::size_t at) const {
        insert(places_of(head<kHashed>(at)), at);
        if (kHasShort) short_place_of(at) = static_cast<uint32_t>(at);
    }

    static void insert(uint32_t* places, std::size_t at) {
        if (places[0] == at) return;  // a later match was looked for here
        for (uint32_t w = kSearch.n_ways - 1; w > 0; --w) places[w] = places[w - 1];
        places[0] = static_cast<uint32_t>(at);
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

    // Places are considered in ascending order of what their distance costs, so only a longer run
    // is better.
    void consider(std::size_t from, std::size_t at, uint32_t last, Match& best) const {
        if (numbers_[from + best.length] != numbers_[at + best.length]) return;
        const std::size_t length = length_of(from, at);
        if (length < least_match(sizeof(Number))) return;
        const auto distance = static_cast<uint32_t>(at - from);
        const uint32_t digits = static_cast<uint32_t>(std::bit_width(distance)) << kPriceBits;
        const int64_t price = distance == last ? prices_.repeat : prices_.match + digits;
        const int64_t gain = static_cast<int64_t>(length * prices_.literal) - price;
        if (gain > best.gain) best = {distance, length, gain};
    }

    // Finds the best match and remembers the place.
    Match best_at(std::size_t at, uint32_t last) const {
        Match best;
        if (last <= at && numbers_[at - last] == numbers_[at]) consider(at - last, at, last, best);
        const uint64_t here = head<kHashed>(at);
        uint32_t* const places = places_of(here);
        for (uint32_t w = 0; w < kSearch.n_ways && places[w] < at; ++w)
            if (head<kHashed>(places[w]) == here) consider(places[w], at, last, best);
        insert(places, at);
        if (!kHasShort) return best;
        uint32_t& place = short_place_of(at);
        if (best.gain == 0 && place < at && numbers_[place] == numbers_[at])
            consider(place, at, last, best);
        place = static_cast<uint32_t>(at);
        return best;
    }

    void copy_literals(MatchParts& parts, std::size_t from, std::size_t to) const {
        std::memcpy(parts.literals + parts.counts.n_literals * sizeof(Number), numbers_ + from,
                    (to - from) * sizeof(Number));
        parts.counts.n_literals += to - from;
    }

    static void put_run(uint8_t* bytes, std::size_t& n_bytes, std::size_t run) {
        for (; run >= kRunByteMax; run -= kRunByteMax) bytes[n_bytes++] = kRunByteMax;
        bytes[n_bytes++] = static_cast<uint8_t>(run);
    }

    void put(MatchParts& parts, std::size_t from, std::size_t at, const Match& match,
             uint32_t last) const {
        copy_literals(parts, from, at);
        put_run(parts.runs, parts.counts.n_run_bytes, at - from);
        put_run(parts.lengths, parts.counts.n_length_bytes, match.length - 1);
        parts.distances[parts.counts.n_matches++] = match.distance == last ? 0 : match.distance;
    }

    const Number* numbers_;
    std::size_t n_;
    MatchPrices prices_;
    uint32_t* places_;
    uint32_t* short_places_;
};

template <class Number>
inline void find_matches(const Number* numbers, std::size_t n, const MatchPrices& prices,
                         Level level, uint32_t* places, MatchParts& parts) {
    if (level == Level::kFast)
        MatchFinder<Number, kFastSearch>(numbers, n, prices, places).find(parts);
    else if (level == Level::kDefault)
        MatchFinder<Number, kDefaultSearch>(numbers, n, prices, places).find(parts);
    else
        MatchFinder<Number, kMaxSearch>(numbers, n, prices, places).find(parts);
}

}  // namespace packhorse
