// Finds the cheapest way to write a chunk as literals and matches, for level max.
//
// The prices are those of the bytes that a quick search writes. From each number on, the cheapest
// way to it is extended by a literal, and by every length of every match; that is done for
// a segment of the chunk at a time. All arithmetic is in integers.
#pragma once

#include "matches/find.hpp"

namespace packhorse {

// A number for each byte of parts: what it costs, in 2^-8 bits, or how often it occurs.
struct PartTable {
    static constexpr uint32_t kBits = 8;
    uint32_t literal[8][256];
    uint32_t distance[kDistanceNbytes][256];
    uint32_t run[256];
    uint32_t length[256];
};

// log2(x) * 2^-8 bits, for x >= 1.
inline uint32_t log2_price(uint32_t x) {
    const auto width = static_cast<uint32_t>(std::bit_width(x));
    const uint32_t beyond = width > 12 ? width - 12 : 0;
    return (log2_fixed(x >> beyond) >> (kCostBits - PartTable::kBits)) +
           (beyond << PartTable::kBits);
}

// How often bytes of parts occur.
struct PartCounts {
    PartTable bytes;
    std::size_t n_literals;
    std::size_t n_matches;
};

inline void count_bytes_of(const uint8_t* bytes, std::size_t n, std::size_t step,
                           uint32_t (&counts)[256]) {
    for (std::size_t i = 0; i < n; ++i) ++counts[bytes[i * step]];
}

// Adds the parts of some numbers.
inline void count_parts(const MatchParts& parts, std::size_t number_nbytes, PartCounts& sum) {
    const MatchCounts& counts = parts.counts;
    for (std::size_t b = 0; b < number_nbytes; ++b)
        count_bytes_of(parts.literals + b, counts.n_literals, number_nbytes, sum.bytes.literal[b]);
    const auto* const distances = reinterpret_cast<const uint8_t*>(parts.distances);
    for (std::size_t b = 0; b < kDistanceNbytes; ++b)
        count_bytes_of(distances + b, counts.n_matches, kDistanceNbytes, sum.bytes.distance[b]);
    count_bytes_of(parts.runs, counts.n_run_bytes, 1, sum.bytes.run);
    count_bytes_of(parts.lengths, counts.n_length_bytes, 1, sum.bytes.length);
    sum.n_literals += counts.n_literals;
    sum.n_matches += counts.n_matches;
}

inline void price_bytes(const uint32_t (&counts)[256], uint32_t (&prices)[256]) {
    constexpr uint32_t kUnseen = 14 << PartTable::kBits, kMost = 12 << PartTable::kBits;
    uint32_t n = 1;
    for (const uint32_t count : counts) n += count;
    const uint32_t all = log2_price(n);
    for (uint32_t v = 0; v < 256; ++v)
        prices[v] = counts[v] == 0 ? kUnseen : std::min(all - log2_price(counts[v]), kMost);
}

inline void price_parts(const PartCounts& counts, std::size_t number_nbytes, PartTable& prices) {
    for (std::size_t b = 0; b < number_nbytes; ++b)
        price_bytes(counts.bytes.literal[b], prices.literal[b]);
    for (std::size_t b = 0; b < kDistanceNbytes; ++b)
        price_bytes(counts.bytes.distance[b], prices.distance[b]);
    price_bytes(counts.bytes.run, prices.run);
    price_bytes(counts.bytes.length, prices.length);
}

// The cheapest way to a number of a segment, and its last step.
struct Arrival {
    uint32_t cost;      // including that of the literals before it as a run
    uint32_t length;    // of the match that ends here; 0 for a literal
    uint32_t distance;  // of the last match on the way
    uint32_t run;       // of literals behind that
};

constexpr std::size_t kSegmentNumbers = 8192;
constexpr std::size_t kLongestTried = 128;  // a match of this length or more is taken as it is
constexpr std::size_t kArrivals = kSegmentNumbers + 1;
// If the cheapest way to the next number costs at most so much more than that to this one, no match
// is looked for here.
constexpr uint32_t kSmallStep = 1 << PartTable::kBits;

template <class Number>
class CheapestParse : MatchTables<Number, kMaxSearch> {
    using Tables = MatchTables<Number, kMaxSearch>;
    using Tables::n_;
    using Tables::numbers_;

  public:
    CheapestParse(const Number* numbers, std::size_t n, const PartTable& prices, uint32_t* places,
                  Arrival* arrivals)
        : Tables(numbers, n, places), prices_(prices), arrivals_(arrivals) {}

    void find(MatchParts& parts) {
        PartsWriter<Number> out(numbers_, parts);
        const std::size_t stop = Tables::stop();
        for (std::size_t at = 0; at < stop;) {
            const Segment segment = search(at, std::min(kSegmentNumbers, stop - at), out);
            write(at, segment.n, out);
            at += segment.n;
            if (segment.length == 0) continue;
            out.put(at, segment.length, segment.distance);
            Tables::remember_match(at, segment.length);
            at += segment.length;
        }
        out.end(n_);
    }

  private:
    static constexpr std::size_t kAhead = 8;  // how soon places are fetched

    struct Segment {
        std::size_t n;
        std::size_t length;  // of the long match that follows; 0 for none
        uint32_t distance;
    };

    uint32_t run_price(std::size_t run) const {
        return static_cast<uint32_t>(run / kRunByteMax) * prices_.run[kRunByteMax] +
               prices_.run[run % kRunByteMax];
    }
    uint32_t literal_price(std::size_t at) const {
        uint32_t sum = 0;
        for (std::size_t b = 0; b < sizeof(Number); ++b)
            sum += prices_.literal[b][uint64_t{numbers_[at]} >> (8 * b) & 0xFF];
        return sum;
    }
    uint32_t distance_price(uint32_t distance) const {
        uint32_t sum = 0;
        for (uint32_t b = 0; b < kDistanceNbytes; ++b)
            sum += prices_.distance[b][distance >> (8 * b) & 0xFF];
        return sum;
    }

    // Finds the cheapest ways through up to `n` numbers from `first` on. Ends before a long match.
    Segment search(std::size_t first, std::size_t n, const PartsWriter<Number>& out) const {
        const std::size_t run = first - out.from();
        arrivals_[0] = {run_price(run), 0, out.last(), static_cast<uint32_t>(run)};
        std::size_t reached = 0;
        for (std::size_t i = 0; i < n; ++i) {
            const std::size_t at = first + i;
            const Arrival here = arrivals_[i];
            Tables::fetch(std::min(at + kAhead, first + n - 1));
            while (reached < std::min(i + kLongestTried, n)) arrivals_[++reached].cost = ~0u;
            const uint32_t literal =
                here.cost + literal_price(at) + run_price(here.run + 1) - run_price(here.run);
            if (literal < arrivals_[i + 1].cost)
                arrivals_[i + 1] = {literal, 0, here.distance, here.run + 1};
            if (arrivals_[i + 1].cost <= here.cost + kSmallStep) {
                Tables::remember(at);
                continue;
            }
            std::size_t longest = least_match(sizeof(Number)) - 1;
            uint32_t distance = 0;
            const std::size_t most = n - i;
            const auto consider = [&](std::size_t from) {
                if (longest < most && numbers_[from + longest] != numbers_[at + longest]) return;
                const std::size_t length = Tables::length_of(from, at);
                if (length <= longest) return;
                distance = static_cast<uint32_t>(at - from);
                const uint32_t cost = here.cost + prices_.run[0] +
                                      distance_price(distance == here.distance ? 0 : distance);
                const std::size_t last = std::min({length, kLongestTried, most});
                for (std::size_t l = longest + 1; l <= last; ++l) {
                    Arrival& there = arrivals_[i + l];
                    const uint32_t price = cost + prices_.length[l - 1];
                    if (price < there.cost) there = {price, static_cast<uint32_t>(l), distance, 0};
                }
                longest = length;
            };
            if (here.distance <= at) consider(at - here.distance);
            Tables::look_up(at, consider, [] { return true; });
            if (longest >= kLongestTried) return {i, longest, distance};
        }
        return {n, 0, 0};
    }

    // Writes the cheapest way through `n` numbers from `first` on.
    void write(std::size_t first, std::size_t n, PartsWriter<Number>& out) const {
        // From the end, each step notes at its beginning where it ends.
        for (std::size_t i = n; i > 0;) {
            const std::size_t before = i - std::max(arrivals_[i].length, 1u);
            arrivals_[before].cost = static_cast<uint32_t>(i);
            i = before;
        }
        for (std::size_t i = 0; i < n;) {
            const std::size_t next = arrivals_[i].cost;
            if (arrivals_[next].length > 0)
                out.put(first + i, arrivals_[next].length, arrivals_[next].distance);
            i = next;
        }
    }

    const PartTable& prices_;
    Arrival* arrivals_;
};

}  // namespace packhorse
