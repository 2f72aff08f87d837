// The fields of a stream of mode matches (docs/format.md, section 6.8), and the four nested chunks
// that follow them: literals, distances, runs and lengths.
#pragma once

#include <algorithm>

#include "chunk/chunk.hpp"

namespace packhorse {

// How units become numbers.
struct NumberRule {
    uint32_t nbytes = 1;       // bytes of a number: 1, 2, 4 or 8
    bool differences = false;  // whether numbers are differences of neighbours
    uint64_t base = 0;         // what is taken from each
    uint64_t before = 0;       // the unit in front of the first one, for differences
};

// How many items each nested chunk has.
struct MatchCounts {
    std::size_t n_literals = 0;
    std::size_t n_matches = 0;
    std::size_t n_run_bytes = 0;
    std::size_t n_length_bytes = 0;
};

constexpr uint32_t kDistanceNbytes = 4;
constexpr uint32_t kMaxMatchDescriptors = kMaxPlanes + kDistanceNbytes + 2;

// One nested chunk.
struct NestedChunk {
    PlaneSpec spec;
    std::size_t n;   // units
    uint32_t first;  // its first descriptor
    std::size_t nbytes() const { return n * spec.unit_nbytes; }
};

constexpr uint32_t kNestedChunks = 4;

// Units of several bytes are split into bytes.
inline PlaneSpec nested_spec(uint32_t unit_nbytes) {
    return plane_spec(unit_nbytes, unit_nbytes == 1 ? Split::kWhole : Split::kBytes);
}

struct NestedChunks {
    NestedChunk at[kNestedChunks];

    NestedChunks(const NumberRule& rule, const MatchCounts& counts)
        : at{{nested_spec(rule.nbytes), counts.n_literals, 0},
             {nested_spec(kDistanceNbytes), counts.n_matches, rule.nbytes},
             {nested_spec(1), counts.n_run_bytes, rule.nbytes + kDistanceNbytes},
             {nested_spec(1), counts.n_length_bytes, rule.nbytes + kDistanceNbytes + 1}} {}
};

inline std::size_t match_header_nbytes(const NumberRule& rule) {
    return kMatchDescriptorsOffset + 4 * (rule.nbytes + kDistanceNbytes + 2);
}

inline void write_match_header(const NumberRule& rule, const MatchCounts& counts,
                               const uint32_t* descriptors, uint8_t* dst) {
    std::memset(dst, 0, kMatchDescriptorsOffset);
    dst[0] = static_cast<uint8_t>(rule.nbytes);
    dst[1] = rule.differences ? 1 : 0;
    store(dst + 4, static_cast<uint32_t>(counts.n_literals));
    store(dst + 8, static_cast<uint32_t>(counts.n_matches));
    store(dst + 12, static_cast<uint32_t>(counts.n_run_bytes));
    store(dst + 16, static_cast<uint32_t>(counts.n_length_bytes));
    store(dst + 24, rule.base);
    store(dst + 32, rule.before);
    std::memcpy(dst + kMatchDescriptorsOffset, descriptors,
                match_header_nbytes(rule) - kMatchDescriptorsOffset);
}

// The most bytes that `n` runs or lengths take whose sum is at most `sum`.
constexpr std::size_t max_run_bytes(std::size_t n, std::size_t sum) {
    return n + sum / kRunByteMax;
}

inline bool is_nested_mode(Mode mode, bool splits) {
    return mode == Mode::kStored || mode == Mode::kConstant || mode == Mode::kPalette ||
           mode == Mode::kRans || (mode == Mode::kClassedRans && splits);
}

// Reads and checks the fields of a stream whose chunk has `n` units. `descriptors` has room for
// kMaxMatchDescriptors.
inline Status read_match_header(const uint8_t* src, std::size_t nbytes, std::size_t n,
                                uint32_t unit_nbytes, NumberRule& rule, MatchCounts& counts,
                                uint32_t* descriptors) {
    if (nbytes < kMatchDescriptorsOffset) return Status::kStreamLength;
    rule.nbytes = src[0];
    if (rule.nbytes == 0 || rule.nbytes > unit_nbytes || (rule.nbytes & (rule.nbytes - 1)) != 0)
        return Status::kBadField;
    if (src[1] > 1) return Status::kBadField;
    rule.differences = src[1] == 1;
    if (load<uint16_t>(src + 2) != 0 || load<uint32_t>(src + 20) != 0) return Status::kReserved;
    counts = {load<uint32_t>(src + 4), load<uint32_t>(src + 8), load<uint32_t>(src + 12),
              load<uint32_t>(src + 16)};
    rule.base = load<uint64_t>(src + 24);
    rule.before = load<uint64_t>(src + 32);
    const uint64_t most = ~uint64_t{0} >> (64 - 8 * unit_nbytes);
    if (rule.base > most || rule.before > most) return Status::kBadField;
    if (!rule.differences && rule.before != 0) return Status::kReserved;
    if (counts.n_literals > n || counts.n_matches > n - counts.n_literals) return Status::kBadField;
    for (const std::size_t n_bytes : {counts.n_run_bytes, counts.n_length_bytes})
        if (n_bytes < counts.n_matches || n_bytes > max_run_bytes(counts.n_matches, n))
            return Status::kBadField;
    const std::size_t header = match_header_nbytes(rule);
    if (nbytes < header) return Status::kStreamLength;
    std::memcpy(descriptors, src + kMatchDescriptorsOffset, header - kMatchDescriptorsOffset);
    std::size_t sum = header;
    for (const NestedChunk& nested : NestedChunks(rule, counts).at)
        for (uint32_t p = 0; p < nested.spec.n_planes; ++p) {
            const uint32_t descriptor = descriptors[nested.first + p];
            if (nested.n == 0 && descriptor != 0) return Status::kReserved;
            if (!is_nested_mode(descriptor_mode(descriptor), nested.spec.splits()))
                return Status::kBadField;
            sum += descriptor_nbytes(descriptor);
        }
    return sum == nbytes ? Status::kOk : Status::kStreamLength;
}

}  // namespace packhorse
