// The parts of a chunk in mode matches, before they are coded.
#pragma once

#include "matches/stream.hpp"

namespace packhorse {

// Where the parts go.
struct MatchParts {
    uint8_t* literals;  // kMatchSlack behind
    uint32_t* distances;
    uint8_t* runs;
    uint8_t* lengths;
    MatchCounts counts;
};

// Writes the parts, match by match.
template <class Number>
class PartsWriter {
  public:
    PartsWriter(const Number* numbers, MatchParts& parts) : numbers_(numbers), parts_(parts) {
        parts.counts = {};
    }

    // The distance of the match before.
    uint32_t last() const { return last_; }
    // Where the match before ended.
    std::size_t from() const { return from_; }

    void put(std::size_t at, std::size_t length, uint32_t distance) {
        copy_literals(at);
        MatchCounts& counts = parts_.counts;
        put_run(parts_.runs, counts.n_run_bytes, at - from_);
        put_run(parts_.lengths, counts.n_length_bytes, length - 1);
        parts_.distances[counts.n_matches++] = distance == last_ ? 0 : distance;
        last_ = distance;
        from_ = at + length;
    }

    // What follows the last match are literals.
    void end(std::size_t n) { copy_literals(n); }

  private:
    void copy_literals(std::size_t to) {
        std::memcpy(parts_.literals + parts_.counts.n_literals * sizeof(Number), numbers_ + from_,
                    (to - from_) * sizeof(Number));
        parts_.counts.n_literals += to - from_;
    }

    static void put_run(uint8_t* bytes, std::size_t& n_bytes, std::size_t run) {
        for (; run >= kRunByteMax; run -= kRunByteMax) bytes[n_bytes++] = kRunByteMax;
        bytes[n_bytes++] = static_cast<uint8_t>(run);
    }

    const Number* numbers_;
    MatchParts& parts_;
    std::size_t from_ = 0;
    uint32_t last_ = 1;
};

}  // namespace packhorse
