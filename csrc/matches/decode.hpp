// Decoding a chunk in mode matches.
#pragma once

#include <memory>
#include <new>

#include "chunk/decode.hpp"
#include "common/scratch.hpp"
#include "matches/numbers.hpp"

namespace packhorse {

// Memory behind all copies that move whole registers.
constexpr std::size_t kCopySlack = 64;
constexpr std::size_t kCopyNbytes = 32;
constexpr std::size_t kLongCopyNbytes = 256;     // from here on, the library copies faster
constexpr std::size_t kLongRepeatNbytes = 4096;  // copies of what repeats become no longer

// Copies at least `nbytes` bytes that do not overlap their destination. What lies behind them may.
PACKHORSE_INLINE void copy_far(const uint8_t* from, uint8_t* to, std::size_t nbytes) {
    for (std::size_t i = 0; i < nbytes; i += kCopyNbytes) {
        uint8_t block[kCopyNbytes];
        std::memcpy(block, from + i, kCopyNbytes);
        std::memcpy(to + i, block, kCopyNbytes);
    }
}

// Copies `nbytes` bytes from `distance` bytes before, where fewer lie. What is there repeats, so
// each copy can be twice as long as the one before. (A register loaded across two that were just
// stored would wait for both.)
inline void repeat_bytes(uint8_t* to, std::size_t distance, std::size_t nbytes) {
    const uint8_t* const from = to - distance;
    std::size_t step = distance;
    for (std::size_t done = 0; done < nbytes;) {
        const std::size_t now = std::min(step, nbytes - done);
        std::memcpy(to + done, from, now);
        done += now;
        if (step < kLongRepeatNbytes) step *= 2;
    }
}

// Copies `n` numbers from `distance` >= 1 numbers before.
template <class Number>
PACKHORSE_INLINE void copy_match(Number* to, std::size_t distance, std::size_t n) {
    const Number* const from = to - distance;
    const std::size_t nbytes = n * sizeof(Number);
    if (distance >= n) {
        if (nbytes >= kLongCopyNbytes)
            std::memcpy(to, from, nbytes);
        else
            copy_far(reinterpret_cast<const uint8_t*>(from), reinterpret_cast<uint8_t*>(to),
                     nbytes);
    } else if (distance == 1) {
        const Number number = *from;
        std::fill_n(to, n, number);
    } else if (nbytes >= kLongCopyNbytes) {
        repeat_bytes(reinterpret_cast<uint8_t*>(to), distance * sizeof(Number), nbytes);
    } else {
        for (std::size_t i = 0; i < n; ++i) to[i] = from[i];
    }
}

// Reads runs or lengths.
struct RunReader {
    const uint8_t* at;
    const uint8_t* end;

    // Returns false if the bytes end before the run does.
    PACKHORSE_INLINE bool next(std::size_t& run) {
        run = 0;
        for (; at < end; run += kRunByteMax)
            if (*at++ != kRunByteMax) {
                run += at[-1];
                return true;
            }
        return false;
    }
};

// The nested chunks, decoded. Literals have kCopySlack bytes behind.
struct DecodedParts {
    const uint8_t* literals;
    const uint8_t* distances;
    const uint8_t* runs;
    const uint8_t* lengths;
};

// Puts `n` numbers together. `numbers` has `slack` bytes behind, which may be written.
template <class Number>
inline Status join_matches(const DecodedParts& parts, const MatchCounts& counts, std::size_t n,
                           Number* numbers, std::size_t slack) {
    const auto* literals = reinterpret_cast<const Number*>(parts.literals);
    const Number* const literals_end = literals + counts.n_literals;
    RunReader runs{parts.runs, parts.runs + counts.n_run_bytes};
    RunReader lengths{parts.lengths, parts.lengths + counts.n_length_bytes};
    Number* to = numbers;
    Number* const end = numbers + n;
    // Copies that end this far before the end may move whole registers.
    const std::size_t margin = (kCopyNbytes - std::min(slack, kCopyNbytes)) / sizeof(Number);
    const auto has_room = [&](std::size_t count) {
        return count + margin <= static_cast<std::size_t>(end - to);
    };
    std::size_t distance = 1;
    for (std::size_t m = 0; m < counts.n_matches; ++m) {
        std::size_t run, length;
        if (!runs.next(run) || !lengths.next(length)) return Status::kStreamLength;
        ++length;
        if (run > static_cast<std::size_t>(literals_end - literals) ||
            run > static_cast<std::size_t>(end - to))
            return Status::kBadField;
        if (has_room(run))
            copy_far(reinterpret_cast<const uint8_t*>(literals), reinterpret_cast<uint8_t*>(to),
                     run * sizeof(Number));
        else
            std::memcpy(to, literals, run * sizeof(Number));
        literals += run;
        to += run;
        const auto given = load<uint32_t>(parts.distances + 4 * m);
        distance = given == 0 ? distance : given;
        if (distance > static_cast<std::size_t>(to - numbers) ||
            length > static_cast<std::size_t>(end - to))
            return Status::kBadField;
        std::size_t copied = length;
        if (!has_room(length)) copied -= std::min(length, margin);
        copy_match(to, distance, copied);
        for (; copied < length; ++copied) to[copied] = *(to + copied - distance);
        to += length;
    }
    if (runs.at != runs.end || lengths.at != lengths.end || literals_end - literals != end - to)
        return Status::kStreamLength;
    std::memcpy(to, literals, static_cast<std::size_t>(end - to) * sizeof(Number));
    return Status::kOk;
}

// Memory for decoding one chunk.
class MatchDecodeMemory {
  public:
    // `n`: numbers that need memory of their own.
    MatchDecodeMemory(const NumberRule& rule, const MatchCounts& counts, std::size_t n,
                      const uint32_t* descriptors) {
        const uint32_t n_planes = std::max(rule.nbytes, kDistanceNbytes);
        const bool classes = is_classed(descriptors, rule.nbytes + kDistanceNbytes);
        const std::size_t sizes[] = {
            counts.n_literals * rule.nbytes,
            counts.n_matches * kDistanceNbytes,
            counts.n_run_bytes,
            counts.n_length_bytes,
            n * rule.nbytes,
            n_planes * sizeof(PlaneDecoder),
            classes
                ? classed_scratch_nbytes(std::max(counts.n_literals, counts.n_matches), n_planes)
                : 0};
        std::size_t total = 0;
        for (const std::size_t size : sizes) total += round_up(size, 64) + kCopySlack;
        memory_ = Scratch(total);
        uint8_t* at = memory_.get();
        uint8_t** const to[] = {&parts_[0], &parts_[1], &parts_[2], &parts_[3],
                                &numbers,   &planes_,   &whole_};
        for (std::size_t i = 0; i < std::size(sizes); ++i) {
            *to[i] = at;
            at += round_up(sizes[i], 64) + kCopySlack;
        }
        for (uint32_t p = 0; p < n_planes; ++p)
            new (planes_ + p * sizeof(PlaneDecoder)) PlaneDecoder;
    }

    DecodeScratch scratch() const { return {reinterpret_cast<PlaneDecoder*>(planes_), whole_}; }
    uint8_t* part(uint32_t c) const { return parts_[c]; }
    DecodedParts parts() const { return {parts_[0], parts_[1], parts_[2], parts_[3]}; }

    uint8_t* numbers;

  private:
    uint8_t* parts_[kNestedChunks];
    uint8_t* planes_;
    uint8_t* whole_;
    Scratch memory_;
};

// Whether numbers are the units themselves, and `dst` is aligned to them.
inline bool are_units(const NumberRule& rule, uint32_t unit_nbytes, const uint8_t* dst) {
    return rule.nbytes == unit_nbytes && !rule.differences && rule.base == 0 &&
           reinterpret_cast<uintptr_t>(dst) % unit_nbytes == 0;
}

// Decodes a chunk of `n` >= 1 units from a stream of `nbytes` bytes.
inline Status decode_matches(const uint8_t* src, std::size_t nbytes, std::size_t n,
                             uint32_t unit_nbytes, uint8_t* dst, Isa isa) {
    NumberRule rule;
    MatchCounts counts;
    uint32_t descriptors[kMaxMatchDescriptors];
    Status status = read_match_header(src, nbytes, n, unit_nbytes, rule, counts, descriptors);
    if (status != Status::kOk) return status;
    const bool direct = are_units(rule, unit_nbytes, dst);
    const MatchDecodeMemory memory(rule, counts, direct ? 0 : n, descriptors);
    DecodeScratch scratch = memory.scratch();
    src += match_header_nbytes(rule);
    const NestedChunks chunks(rule, counts);
    for (uint32_t c = 0; c < kNestedChunks && status == Status::kOk; ++c) {
        const NestedChunk& chunk = chunks.at[c];
        if (chunk.n == 0) continue;
        status = decode_chunk(src, descriptors + chunk.first, chunk.n, 0, chunk.spec, {}, scratch,
                              memory.part(c), isa);
        for (uint32_t p = 0; p < chunk.spec.n_planes; ++p)
            src += descriptor_nbytes(descriptors[chunk.first + p]);
    }
    if (status != Status::kOk) return status;
    return with_integer(rule.nbytes, [&](auto number) {
        using Number = decltype(number);
        auto* const numbers = reinterpret_cast<Number*>(direct ? dst : memory.numbers);
        const std::size_t slack = direct ? 0 : kCopySlack;
        const Status joined = join_matches(memory.parts(), counts, n, numbers, slack);
        if (direct || joined != Status::kOk) return joined;
        with_integer(unit_nbytes, [&](auto unit) {
            if constexpr (sizeof(Number) <= sizeof(unit))
                restore_units<decltype(unit)>(numbers, n, rule, dst, isa);
        });
        return Status::kOk;
    });
}

}  // namespace packhorse
