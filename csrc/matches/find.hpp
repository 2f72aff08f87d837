// Finds runs of numbers that occurred before in the chunk, by looking one number ahead at most.
//
// At each number the longest run from the places of the tables, and from the distance of the match
// before, is compared with what its numbers would cost as literals. Above level fast, a match waits
// for one that begins a number later and saves more. The longer nothing is found, the more numbers
// are skipped, up to 16; a match halves that again. All arithmetic is in integers.
#pragma once

#include "matches/parts.hpp"
#include "matches/search.hpp"

namespace packhorse {

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

template <class Number, MatchSearch kSearch>
class MatchFinder : MatchTables<Number, kSearch> {
    using Tables = MatchTables<Number, kSearch>;
    using Tables::n_;
    using Tables::numbers_;

  public:
    MatchFinder(const Number* numbers, std::size_t n, const MatchPrices& prices, uint32_t* places)
        : Tables(numbers, n, places), prices_(prices) {}

    void find(MatchParts& parts) {
        // At most, so that repetition behind a long piece without any is soon found.
        constexpr std::size_t kMostSkipped = 16;
        PartsWriter<Number> out(numbers_, parts);
        const std::size_t stop = Tables::stop();
        std::size_t at = 0, missed = 0;
        while (at < stop) {
            Match match = best_at(at, out.last());
            if (match.gain <= 0) {
                at += 1 + (missed >> kSearch.skip_log);
                missed = std::min(missed + 1, kMostSkipped << kSearch.skip_log);
                continue;
            }
            // A match of one number loses nothing: the next one may follow it.
            while (kSearch.is_lazy && match.length > 1 && at + 1 < stop) {
                const Match later = best_at(at + 1, out.last());
                if (later.gain <= match.gain + prices_.literal) break;
                match = later;
                ++at;
            }
            missed /= 2;
            out.put(at, match.length, match.distance);
            Tables::remember_match(at, match.length);
            at += match.length;
        }
        out.end(n_);
    }

  private:
    struct Match {
        uint32_t distance = 0;
        std::size_t length = 0;
        int64_t gain = 0;
    };

    // Places are considered in ascending order of what their distance costs, so only a longer run
    // is better.
    void consider(std::size_t from, std::size_t at, uint32_t last, Match& best) const {
        if (numbers_[from + best.length] != numbers_[at + best.length]) return;
        const std::size_t length = Tables::length_of(from, at);
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
        Tables::look_up(
            at, [&](std::size_t from) { consider(from, at, last, best); },
            [&] { return best.gain == 0; });
        return best;
    }

    MatchPrices prices_;
};

}  // namespace packhorse
