// Encoding a chunk in mode matches.
#pragma once

#include <new>

#include "chunk/encode.hpp"
#include "common/scratch.hpp"
#include "matches/cheapest.hpp"
#include "matches/numbers.hpp"

namespace packhorse {

// Memory for one chunk of `n` units: the units, numbers, parts, tables, and what nested chunks need
// while they are encoded.
class MatchMemory {
  public:
    MatchMemory(std::size_t n, uint32_t number_nbytes, Level level)
        : n_(n), number_nbytes_(number_nbytes), level_(level) {
        memory_ = Scratch(place(nullptr));
        place(memory_.get());
    }

    uint8_t* numbers;
    uint32_t* places;
    Arrival* arrivals;  // for level max
    MatchParts parts;
    EncodeScratch nested;
    uint8_t* output;  // of all nested chunks

  private:
    // Returns the bytes that are needed. With null, only counts them.
    std::size_t place(uint8_t* memory) {
        std::size_t used = 0;
        const auto take = [&](std::size_t nbytes) {
            uint8_t* const at = memory == nullptr ? nullptr : memory + used;
            used += round_up(nbytes, 64);
            return at;
        };
        const std::size_t number = number_nbytes_;
        const std::size_t n_matches = n_ / least_match(number) + 1;
        const std::size_t run_bytes = max_run_bytes(n_matches, n_) + kPlaneSlack;
        // The units of a nested chunk: literals, distances, or bytes of runs or lengths.
        const std::size_t units = round_up(std::max(n_, run_bytes), 64) + kPlaneSlack;
        numbers = take(n_ * number + kMatchSlack);
        places = reinterpret_cast<uint32_t*>(take(search_of(level_).n_all() * sizeof *places));
        arrivals = reinterpret_cast<Arrival*>(
            take(level_ == Level::kMax ? kArrivals * sizeof *arrivals : 0));
        parts.literals = take(n_ * number + kMatchSlack);
        parts.distances = reinterpret_cast<uint32_t*>(take(n_matches * sizeof *parts.distances));
        parts.runs = take(run_bytes);
        parts.lengths = take(run_bytes);
        nested.tables = reinterpret_cast<RansEncodeMemory*>(take(sizeof *nested.tables));
        nested.escapes = take(units);
        nested.words = take(2 * units + kPlaneSlack);
        nested.units = take(units);
        const std::size_t distances = round_up(n_matches, 64) + kPlaneSlack;
        for (uint32_t p = 0; p < kMaxPlanes; ++p)
            nested.planes[p] = p < number            ? take(units)
                               : p < kDistanceNbytes ? take(distances)
                                                     : nullptr;
        nested.classes = level_ == Level::kMax ? take(units) : nullptr;
        nested.yielded = level_ == Level::kMax ? take(units) : nullptr;
        nested.sorted[0] = level_ == Level::kMax ? take(units) : nullptr;
        nested.sorted[1] = level_ == Level::kMax ? take(units) : nullptr;
        output = take(n_ * number + n_matches * kDistanceNbytes + 2 * run_bytes +
                      kNestedChunks * kFrameAlignment);
        return used;
    }

    std::size_t n_;
    uint32_t number_nbytes_;
    Level level_;
    Scratch memory_;
};

template <class Number, MatchSearch kSearch>
inline void find_matches(const Number* numbers, std::size_t n, const MatchPrices& prices,
                         MatchMemory& memory) {
    MatchFinder<Number, kSearch>(numbers, n, prices, memory.places).find(memory.parts);
}

// For level max: a quick search in the first and the last quarter of the numbers gives prices. The
// cheapest way pays where there are many matches that are not long; with few, or long ones, waiting
// finds about the same.
template <class Number>
inline void find_cheapest(const Number* numbers, std::size_t n, const MatchPrices& prices,
                          MatchMemory& memory) {
    constexpr std::size_t kFew = std::size_t{1} << 17, kLong = 64;
    const std::size_t part = n > kFew ? n / 4 : n;
    PartCounts counts{};
    std::size_t n_priced = 0;
    for (std::size_t at = 0; at + part <= n; at += std::max(n - part, part)) {
        find_matches<Number, kDefaultSearch>(numbers + at, part, prices, memory);
        count_parts(memory.parts, sizeof(Number), counts);
        n_priced += part;
    }
    const std::size_t n_matched = n_priced - counts.n_literals;
    if (n_matched < n_priced / 16 || n_matched > kLong * counts.n_matches) {
        find_matches<Number, kMaxSearch>(numbers, n, prices, memory);
        return;
    }
    PartTable exact;
    price_parts(counts, sizeof(Number), exact);
    CheapestParse<Number>(numbers, n, exact, memory.places, memory.arrivals).find(memory.parts);
}

// Encodes the parts. Returns the length of all nested chunks, which are in `memory.output`.
inline std::size_t encode_parts(const NumberRule& rule, Level level, MatchMemory& memory,
                                uint32_t* descriptors, Isa isa) {
    const MatchParts& parts = memory.parts;
    const uint8_t* const sources[kNestedChunks] = {
        parts.literals, reinterpret_cast<const uint8_t*>(parts.distances), parts.runs,
        parts.lengths};
    std::size_t used = 0;
    const NestedChunks chunks(rule, parts.counts);
    for (uint32_t c = 0; c < kNestedChunks; ++c) {
        const NestedChunk& chunk = chunks.at[c];
        std::fill_n(descriptors + chunk.first, chunk.spec.n_planes, 0);
        if (chunk.n == 0) continue;
        memory.nested.others_stored = false;
        encode_chunk({sources[c], nullptr}, chunk.n, 0, chunk.spec, {}, level, memory.nested,
                     memory.output + used, descriptors + chunk.first, isa);
        for (uint32_t p = 0; p < chunk.spec.n_planes; ++p)
            used += descriptor_nbytes(descriptors[chunk.first + p]);
    }
    return used;
}

// Writes the stream of `n` >= 1 units, which nobody changes, if it takes less than `capacity`
// bytes. Returns its length, or 0 if it does not pay.
template <class Unit>
inline std::size_t write_matches(const Unit* units, std::size_t n, Level level, uint8_t* dst,
                                 std::size_t capacity, Isa isa) {
    uint64_t cost = 0;
    const NumberRule rule = choose_numbers(units, n, cost, isa);
    MatchMemory memory(n, rule.nbytes, level);
    const auto literal = static_cast<uint32_t>(cost >> (kCostBits - kPriceBits));
    const MatchPrices prices = match_prices(literal, rule.differences);
    with_integer(rule.nbytes, [&](auto zero) {
        using Number = decltype(zero);
        if constexpr (sizeof(Number) <= sizeof(Unit)) {
            auto* const numbers = reinterpret_cast<Number*>(memory.numbers);
            make_numbers(units, n, rule, numbers, isa);
            std::memset(numbers + n, 0, kMatchSlack);
            if (level == Level::kFast)
                find_matches<Number, kFastSearch>(numbers, n, prices, memory);
            else if (level == Level::kDefault)
                find_matches<Number, kDefaultSearch>(numbers, n, prices, memory);
            else
                find_cheapest(numbers, n, prices, memory);
        }
    });
    uint32_t descriptors[kMaxMatchDescriptors];
    // Level fast has no entropy coder, without which matches would not pay.
    const Level coder = level == Level::kFast ? Level::kDefault : level;
    const std::size_t used = encode_parts(rule, coder, memory, descriptors, isa);
    const std::size_t header = match_header_nbytes(rule);
    if (header + used >= capacity) return 0;
    write_match_header(rule, memory.parts.counts, descriptors, dst);
    std::memcpy(dst + header, memory.output, used);
    return header + used;
}

// Returns the bytes that `n` >= 1 units of `unit_nbytes` bytes take in mode matches, or at most as
// they are. The units are aligned to their length, and nobody changes them.
inline std::size_t matched_nbytes(const uint8_t* units, std::size_t n, uint32_t unit_nbytes,
                                  Level level, Isa isa) {
    const std::size_t most = n * unit_nbytes;
    const Scratch memory(most);
    return with_integer(unit_nbytes, [&](auto zero) {
        using Unit = decltype(zero);
        const std::size_t nbytes =
            write_matches(reinterpret_cast<const Unit*>(units), n, level, memory.get(), most, isa);
        return nbytes == 0 ? most : nbytes;
    });
}

// Encodes a chunk of whole units: in mode matches, or constant, or stored. `dst` has room for
// round_up(n * unit_nbytes, 64) bytes. Returns the padded length.
inline std::size_t encode_matched(const ChunkSource& source, std::size_t n, uint32_t unit_nbytes,
                                  Level level, uint8_t* dst, uint32_t* descriptors, Isa isa) {
    const std::size_t nbytes = n * unit_nbytes;
    const Scratch memory(nbytes + 1);
    uint8_t* const units = memory.get();
    source.copy_to(units, nbytes, isa);
    std::size_t used = 0;
    if (is_constant(units, n, unit_nbytes)) {
        used = unit_nbytes;
        descriptors[0] = make_descriptor(Mode::kConstant, used);
        std::memcpy(dst, units, used);
    } else {
        used = with_integer(unit_nbytes, [&](auto zero) {
            using Unit = decltype(zero);
            return write_matches(reinterpret_cast<const Unit*>(units), n, level, dst, nbytes, isa);
        });
        descriptors[0] = make_descriptor(Mode::kMatches, used);
        if (used == 0) {
            used = nbytes;
            descriptors[0] = make_descriptor(Mode::kStored, used);
            std::memcpy(dst, units, used);
        }
    }
    const std::size_t padded = round_up(used, kFrameAlignment);
    std::memset(dst + used, 0, padded - used);
    return padded;
}

}  // namespace packhorse
