// The model of an rANS stream: which symbols have codes, their frequencies, and which code owns
// each slot (docs/format.md, 6.2).
//
// A RansModel serves both directions. The encoder chooses it from a histogram; the decoder parses
// and checks it. Two forms are made from it:
// - AliasTables: 32 or 64 buckets, small enough for registers (at most as many codes);
// - a decode table of 4096 entries, for either layout, for decoders that look up entries in memory.
// An entry is freq (bits 0-11), bias = rank - slot mod 4096 (12-23), byte value (24-31): one step
// of decoding is
//     x = freq * (x >> 12) + ((x + bias) & 4095).
// The byte value is the symbol shifted to its place, with raw bits of zero. The entry of the escape
// has a byte value that no symbol has, so that the units to patch can be found.
#pragma once

#include <algorithm>
#include <bit>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/histogram.hpp"
#include "planes/symbols.hpp"

namespace packhorse {

struct RansModel {
    uint32_t raw_bits;     // of the stream
    uint32_t n_symbols;    // symbols with a code of their own
    uint32_t n_codes;      // n_symbols, plus one if the escape has a code
    uint8_t symbols[256];  // by code, ascending
    uint16_t freqs[257];   // by code; the escape is last
    // Of decoders: what stands for the escape, and the bits by which units are rotated to the
    // right.
    uint8_t escape_byte;
    uint32_t turn;

    bool has_escape() const { return n_codes > n_symbols; }
    // A unit without its raw bits, as it is decoded.
    uint8_t unit_of(uint32_t symbol) const {
        return std::rotr(static_cast<uint8_t>(symbol << raw_bits), static_cast<int>(turn));
    }
    // Buckets of the alias layout; 0 for the plain layout.
    uint32_t n_buckets() const {
        return n_codes <= kNarrowBuckets ? kNarrowBuckets
               : n_codes <= kWideBuckets ? kWideBuckets
                                         : 0;
    }
    uint32_t n_in_range() const { return symbols[n_symbols - 1] - symbols[0] + 1u; }
};

constexpr std::size_t model_nbytes(std::size_t n_in_range) {
    return 2 + (3 * (n_in_range + 1) + 1) / 2;
}

inline void set_escape_byte(RansModel& model) {
    model.turn = 0;
    uint32_t free_value = 0;
    while (free_value < model.n_symbols && model.symbols[free_value] == free_value) ++free_value;
    model.escape_byte = static_cast<uint8_t>(model.raw_bits > 0 ? 1 : free_value);
}

// The counts of a model's codes, scaled to slots. Rare codes get one slot each, and the others
// share the rest.
struct CodeScale {
    SlotScale all;
    SlotScale others;

    bool is_rare(uint32_t count) const { return all.nearest(count) <= 1; }
};

inline CodeScale scale_codes(const uint32_t* counts, uint32_t n_codes) {
    uint64_t total = 0, rest = 0;
    for (uint32_t c = 0; c < n_codes; ++c) total += counts[c];
    const SlotScale all(total);
    uint32_t n_rare = 0;
    for (uint32_t c = 0; c < n_codes; ++c) {
        const bool rare = all.nearest(counts[c]) <= 1;
        n_rare += rare ? 1 : 0;
        rest += rare ? 0 : counts[c];
    }
    return {all, SlotScale(rest, kProbSum - n_rare)};
}

// Scales `counts` of the model's codes to frequencies of at least 1 whose sum is 4096, for an
// estimate. Each code that is not rare gets the slots between two rounded sums, the counts before
// it and those with it, so nothing is left over. By its count it has at least 1.4 slots.
inline void share_slots(const uint32_t* counts, RansModel& model) {
    const CodeScale scale = scale_codes(counts, model.n_codes);
    uint32_t sum = 0, start = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const bool rare = scale.is_rare(counts[c]);
        sum += rare ? 0 : counts[c];
        const uint32_t end = scale.others.nearest(sum);
        model.freqs[c] = static_cast<uint16_t>(rare ? 1 : end - start);
        start = end;
    }
}

// Does the same with more care: scales each code by itself, then moves single slots where that
// costs least.
inline void normalise(const uint32_t* counts, RansModel& model) {
    const CodeScale scale = scale_codes(counts, model.n_codes);
    int32_t excess = -static_cast<int32_t>(kProbSum);
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t scaled = scale.is_rare(counts[c]) ? 1 : scale.others.nearest(counts[c]);
        model.freqs[c] = static_cast<uint16_t>(std::clamp(scaled, 1u, kProbSum - 1));
        excess += model.freqs[c];
    }
    while (excess != 0) {
        const int32_t step = excess > 0 ? -1 : 1;
        // Taking a slot from f costs about count / (f - 1/2), giving one saves count / (f + 1/2).
        // Both are compared as products.
        uint32_t best = kProbSum;
        for (uint32_t c = 0; c < model.n_codes; ++c) {
            if (step < 0 ? model.freqs[c] == 1 : model.freqs[c] == kProbSum - 1) continue;
            if (best == kProbSum) best = c;
            const uint64_t mine =
                uint64_t{counts[c]} * static_cast<uint32_t>(2 * model.freqs[best] + step);
            const uint64_t theirs =
                uint64_t{counts[best]} * static_cast<uint32_t>(2 * model.freqs[c] + step);
            if (step < 0 ? mine < theirs : mine > theirs) best = c;
        }
        model.freqs[best] = static_cast<uint16_t>(model.freqs[best] + step);
        excess += step;
    }
}

// If the symbols lie within `limit` of each other, adds the gaps between them: consecutive symbols
// map to codes by a subtraction, and an unseen one costs a single slot.
inline void fill_gaps(SymbolCounts& symbols, uint32_t limit) {
    if (symbols.n == 0) return;
    const uint32_t lowest = symbols.symbols[0];
    const uint32_t span = symbols.symbols[symbols.n - 1] - lowest + 1;
    if (span > limit || span == symbols.n) return;
    for (uint32_t place = span, i = symbols.n; place-- > 0;) {
        const bool is_there = symbols.symbols[i - 1] == lowest + place;
        symbols.counts[place] = is_there ? symbols.counts[i - 1] : 0;
        symbols.symbols[place] = static_cast<uint8_t>(lowest + place);
        i -= is_there ? 1 : 0;
    }
    symbols.n = span;
}

// Gives codes to the `limit` most common symbols. Other symbols, and symbols that a sample missed,
// become escapes. The frequencies are only good for an estimate; settle_model() makes better ones.
// Returns the cost of all in 2^-16 bits, or 0 if there is nothing to model (fewer than two codes).
inline uint64_t choose_codes(const SymbolCounts& all, uint32_t limit, uint32_t raw_bits,
                             RansModel& model) {
    const uint32_t n_possible = 256u >> raw_bits;
    uint32_t escaped = all.sampled && all.n < n_possible ? 1 : 0;
    SymbolCounts coded;
    if (all.n > limit)
        escaped += drop_rare(all, limit, coded);
    else
        copy_symbols(all, coded);
    if (limit <= kWideBuckets) fill_gaps(coded, limit);
    if (coded.n == n_possible) escaped = 0;
    model.raw_bits = raw_bits;
    model.n_symbols = coded.n;
    model.n_codes = coded.n + (escaped > 0 ? 1 : 0);
    if (model.n_codes < 2) return 0;
    std::copy_n(coded.symbols, coded.n, model.symbols);
    uint32_t* const counts = coded.counts;
    if (escaped > 0) counts[coded.n] = escaped;
    share_slots(counts, model);
    uint64_t cost = uint64_t{escaped} << (kCostBits + 3);
    for (uint32_t c = 0; c < model.n_codes; ++c)
        cost += uint64_t{counts[c]} * kSymbolCost[model.freqs[c]];
    return cost;
}

// Completes a model that was chosen for some symbols.
inline void settle_model(const SymbolCounts& symbols, RansModel& model) {
    uint32_t counts[257];
    std::fill_n(counts, model.n_codes, 0);
    uint32_t escaped = symbols.total + 1;  // one more, in case that a sample missed some
    for (uint32_t i = 0, c = 0; i < symbols.n && c < model.n_symbols; ++i) {
        while (model.symbols[c] < symbols.symbols[i] && c + 1 < model.n_symbols) ++c;
        const bool coded = model.symbols[c] == symbols.symbols[i];
        counts[c] = coded ? symbols.counts[i] : counts[c];
        escaped -= coded ? symbols.counts[i] : 0;
    }
    if (model.has_escape()) counts[model.n_symbols] = escaped - (symbols.sampled ? 0 : 1);
    normalise(counts, model);
    set_escape_byte(model);
}

// The symbols of a plane with a given number of raw bits, and the bytes that no model can save.
struct FoldedPlane {
    SymbolCounts symbols;
    std::size_t raw_nbytes;
    std::size_t least_nbytes;  // of a stream without its model

    std::size_t least_with(uint32_t limit) const {
        return least_nbytes + model_nbytes(std::min(limit, symbols.n));
    }
};

inline FoldedPlane fold_plane(const SymbolCounts& bytes, std::size_t n, uint32_t raw_bits) {
    FoldedPlane folded;
    const uint32_t used = bits_in_use(bytes) & ((1u << raw_bits) - 1);
    folded.raw_nbytes = static_cast<uint32_t>(std::popcount(used)) * n / 8;
    fold(bytes, raw_bits, folded.symbols);
    folded.least_nbytes =
        folded.raw_nbytes + scale_cost(least_cost(folded.symbols), bytes.total, n);
    return folded;
}

// Estimates the bytes of the model, the words, the escapes and the raw bits of a plane of `n`
// units. Returns ~0 if there is nothing to model.
inline std::size_t try_codes(const SymbolCounts& symbols, std::size_t raw_nbytes, std::size_t n,
                             uint32_t limit, uint32_t raw_bits, RansModel& model) {
    const uint64_t cost = choose_codes(symbols, limit, raw_bits, model);
    if (model.n_codes < 2) return ~std::size_t{0};
    return model_nbytes(model.n_in_range()) + raw_nbytes + scale_cost(cost, symbols.total, n);
}

constexpr uint32_t kMostRawBitsTried = 4;

// Streams of at most 31 symbols and an escape code and decode fastest, and streams of at most 63
// come next. So a larger alphabet must save 1 in 512 bytes, or 1 in 256 if its tables do not fit
// registers at all.
constexpr std::size_t kWideSaves = 512;
constexpr std::size_t kPlainSaves = 256;

// Finds the model that choose_model() completes.
inline std::size_t find_model(const SymbolCounts& bytes, std::size_t n, RansModel& model) {
    std::size_t best = try_codes(bytes, 0, n, kNarrowBuckets - 1, 0, model);
    if (best == ~std::size_t{0} || !model.has_escape() || model.n_symbols < kNarrowBuckets - 1)
        return best;
    FoldedPlane folded[kMostRawBitsTried + 1];
    for (uint32_t raw_bits = 0; raw_bits <= kMostRawBitsTried; ++raw_bits)
        folded[raw_bits] = fold_plane(bytes, n, raw_bits);
    RansModel candidate;
    const auto try_model = [&](uint32_t limit, uint32_t raw_bits, std::size_t must_save) {
        const FoldedPlane& plane = folded[raw_bits];
        if (plane.least_with(limit) + must_save >= best) return false;
        const std::size_t nbytes =
            try_codes(plane.symbols, plane.raw_nbytes, n, limit, raw_bits, candidate);
        if (nbytes == ~std::size_t{0} || nbytes + must_save >= best) return false;
        best = nbytes;
        model = candidate;
        return true;
    };
    // In a short plane the model is much of the stream, so the smallest models come first, and most
    // others need not be tried.
    constexpr std::size_t kShort = 4096;
    for (uint32_t i = 1; i <= kMostRawBitsTried; ++i)
        try_model(kNarrowBuckets - 1, n < kShort ? kMostRawBitsTried + 1 - i : i, 0);
    std::size_t must_save = best / kWideSaves;
    for (uint32_t i = 1; i <= kMostRawBitsTried + 1; ++i) {
        const uint32_t raw_bits = i % (kMostRawBitsTried + 1);
        if (folded[raw_bits].symbols.n < kNarrowBuckets) continue;
        if (try_model(kWideBuckets - 1, raw_bits, must_save)) must_save = 0;
    }
    if (bytes.n < kWideBuckets) return best;
    // With so many codes, what least_with() says is too much: it rounds counts down.
    folded[0].least_nbytes = scale_cost(nearest_cost(bytes), bytes.total, n);
    try_model(256, 0, best / kPlainSaves);
    return best;
}

// Chooses the model for a plane. Returns the estimated bytes of a stream without its states, or ~0
// if there is nothing to model.
inline std::size_t choose_model(const SymbolCounts& bytes, std::size_t n, RansModel& model) {
    const std::size_t nbytes = find_model(bytes, n, model);
    if (nbytes == ~std::size_t{0}) return nbytes;
    SymbolCounts folded;
    if (model.raw_bits > 0) fold(bytes, model.raw_bits, folded);
    settle_model(model.raw_bits > 0 ? folded : bytes, model);
    return nbytes;
}

// Writes a model. Returns its end.
inline uint8_t* write_model(const RansModel& model, uint8_t* dst) {
    const uint32_t n_in_range = model.n_in_range();
    const std::size_t nbytes = model_nbytes(n_in_range);
    std::memset(dst, 0, nbytes);
    dst[0] = model.symbols[0];
    dst[1] = static_cast<uint8_t>(n_in_range - 1);
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t place =
            c < model.n_symbols ? model.symbols[c] - uint32_t{model.symbols[0]} : n_in_range;
        uint8_t* at = dst + 2 + place / 2 * 3;
        if (place % 2 == 0) {
            at[0] = static_cast<uint8_t>(model.freqs[c]);
            at[1] = static_cast<uint8_t>(at[1] | model.freqs[c] >> 8);
        } else {
            at[1] = static_cast<uint8_t>(at[1] | model.freqs[c] << 4);
            at[2] = static_cast<uint8_t>(model.freqs[c] >> 4);
        }
    }
    return dst + nbytes;
}

// Parses a model from the `nbytes` at `src`, and sets `used` to its length.
inline Status read_model(const uint8_t* src, std::size_t nbytes, uint32_t raw_bits,
                         RansModel& model, std::size_t& used) {
    if (nbytes < 2) return Status::kStreamLength;
    const uint32_t first = src[0];
    const uint32_t n_in_range = src[1] + 1u;
    used = model_nbytes(n_in_range);
    if (nbytes < used) return Status::kStreamLength;
    if (first + n_in_range > 256u >> raw_bits) return Status::kBadField;
    model.raw_bits = raw_bits;
    model.n_symbols = 0;
    model.n_codes = 0;
    uint32_t sum = 0;
    for (uint32_t i = 0; i <= n_in_range; ++i) {
        const uint8_t* at = src + 2 + i / 2 * 3;
        const uint32_t freq = i % 2 == 0 ? at[0] | (at[1] & 0x0Fu) << 8 : at[1] >> 4 | at[2] << 4;
        if (freq == 0) continue;
        sum += freq;
        model.freqs[model.n_codes++] = static_cast<uint16_t>(freq);
        if (i < n_in_range) model.symbols[model.n_symbols++] = static_cast<uint8_t>(first + i);
    }
    if (n_in_range % 2 == 0 && src[used - 1] >> 4 != 0) return Status::kReserved;
    if (sum != kProbSum || (model.n_symbols == 256u >> raw_bits && model.has_escape()))
        return Status::kFrequencies;
    set_escape_byte(model);
    return Status::kOk;
}

// Each bucket has two parts: where the second begins, and which codes own the parts.
struct AliasTables {
    uint32_t threshold[kWideBuckets];  // first slot (0..4096) of the second part
    uint8_t first[kWideBuckets];
    uint8_t second[kWideBuckets];
};

// Follows section 6.2 step by step.
inline void build_alias(const RansModel& model, AliasTables& tables) {
    const uint32_t n_buckets = model.n_buckets();
    const uint32_t n_slots = kProbSum / n_buckets;
    uint32_t rest[kWideBuckets], own[kWideBuckets];
    uint8_t alias[kWideBuckets], low[kWideBuckets], high[kWideBuckets];
    uint32_t n_low = 0, n_high = 0;
    for (uint32_t c = 0; c < n_buckets; ++c) {
        rest[c] = c < model.n_codes ? model.freqs[c] : 0;
        own[c] = n_slots;
        alias[c] = static_cast<uint8_t>(c);
        if (rest[c] < n_slots) low[n_low++] = static_cast<uint8_t>(c);
        if (rest[c] > n_slots) high[n_high++] = static_cast<uint8_t>(c);
    }
    while (n_low > 0) {
        const uint8_t s = low[--n_low];
        const uint8_t h = high[n_high - 1];
        own[s] = rest[s];
        alias[s] = h;
        rest[h] -= n_slots - rest[s];
        if (rest[h] <= n_slots) --n_high;
        if (rest[h] < n_slots) low[n_low++] = h;
    }
    for (uint32_t b = 0; b < n_buckets; ++b) {
        const bool mirrored = b % 2 == 1;
        const auto code = static_cast<uint8_t>(b);
        tables.threshold[b] = b * n_slots + (mirrored ? n_slots - own[b] : own[b]);
        tables.first[b] = mirrored ? alias[b] : code;
        tables.second[b] = mirrored ? code : alias[b];
    }
}

// Calls visit(code, first_slot, n_slots, first_rank) for every run of slots of one code, in the
// order of slots. In the alias layout each bucket has two runs, either of which may be empty.
template <class Visit>
PACKHORSE_INLINE void for_each_run(const RansModel& model, const AliasTables& tables, Visit visit) {
    uint32_t n_before[257] = {};
    const auto step = [&](uint32_t code, uint32_t first, uint32_t n) {
        visit(code, first, n, n_before[code]);
        n_before[code] += n;
    };
    const uint32_t n_buckets = model.n_buckets();
    if (n_buckets > 0) {
        const uint32_t n_slots = kProbSum / n_buckets;
        for (uint32_t b = 0; b < n_buckets; ++b) {
            step(tables.first[b], b * n_slots, tables.threshold[b] - b * n_slots);
            step(tables.second[b], tables.threshold[b], (b + 1) * n_slots - tables.threshold[b]);
        }
    } else {
        uint32_t first = 0;
        for (uint32_t c = 0; c < model.n_codes; ++c) {
            step(c, first, model.freqs[c]);
            first += model.freqs[c];
        }
    }
}

inline uint32_t pack_entry(const RansModel& model, uint32_t code, uint32_t first_slot,
                           uint32_t first_rank) {
    if (code >= model.n_codes) return 0;  // an empty part of a bucket
    const uint32_t value =
        code < model.n_symbols ? model.unit_of(model.symbols[code]) : uint32_t{model.escape_byte};
    const uint32_t bias = (first_rank - first_slot) & (kProbSum - 1);
    return model.freqs[code] | bias << kProbBits | value << 24;
}

struct BucketEntries {
    uint32_t first[kWideBuckets];
    uint32_t second[kWideBuckets];
};

inline void fill_bucket_entries(const RansModel& model, const AliasTables& tables,
                                BucketEntries& entries) {
    uint32_t part = 0;
    for_each_run(model, tables, [&](uint32_t code, uint32_t first, uint32_t, uint32_t rank) {
        uint32_t* const column = part % 2 == 0 ? &entries.first[0] : &entries.second[0];
        column[part / 2] = pack_entry(model, code, first, rank);
        ++part;
    });
}

// For both parts of each bucket, the largest state after which a lane needs a word.
struct BucketBounds {
    uint32_t first[kWideBuckets];
    uint32_t second[kWideBuckets];
};

// A step makes freq * (x >> 12) + rank of state x, and x + rank - slot is 2^12 * (x >> 12) + rank.
// The greatest such sum that makes a state below 2^16 has the quotient and the remainder of
// (2^16 - 1) / freq in these two places.
inline uint32_t largest_that_needs(uint32_t entry) {
    const uint32_t freq = entry & (kProbSum - 1), bias = entry >> kProbBits & (kProbSum - 1);
    if (freq == 0) return 0;  // an empty part
    const uint32_t most = kStateLowerBound - 1;
    const uint32_t slot_minus_rank = bias > 0 ? kProbSum - bias : 0;
    return (most / freq << kProbBits | most % freq) + slot_minus_rank;
}

inline void fill_bucket_bounds(uint32_t n_buckets, const BucketEntries& entries,
                               BucketBounds& bounds) {
    for (uint32_t b = 0; b < n_buckets; ++b) {
        bounds.first[b] = largest_that_needs(entries.first[b]);
        bounds.second[b] = largest_that_needs(entries.second[b]);
    }
}

// The tables of 64 buckets, with their numbers cut into halves of 16 bits.
struct BucketHalves {
    alignas(64) uint16_t threshold[kWideBuckets];
    alignas(64) uint16_t first_lower[kWideBuckets];
    alignas(64) uint16_t first_upper[kWideBuckets];
    alignas(64) uint16_t second_lower[kWideBuckets];
    alignas(64) uint16_t second_upper[kWideBuckets];
};

inline void fill_bucket_halves(const AliasTables& tables, const BucketEntries& entries,
                               BucketHalves& halves) {
    for (uint32_t b = 0; b < kWideBuckets; ++b) {
        halves.threshold[b] = static_cast<uint16_t>(tables.threshold[b]);
        halves.first_lower[b] = static_cast<uint16_t>(entries.first[b]);
        halves.first_upper[b] = static_cast<uint16_t>(entries.first[b] >> 16);
        halves.second_lower[b] = static_cast<uint16_t>(entries.second[b]);
        halves.second_upper[b] = static_cast<uint16_t>(entries.second[b] >> 16);
    }
}

// The tables of 32 buckets, with their numbers cut into bytes.
struct alignas(64) BucketBytes {
    uint8_t threshold[kNarrowBuckets];  // counted from the first slot of the bucket
    uint8_t code[2 * kNarrowBuckets];   // of the first parts, then of the second
    uint8_t bias_low[2 * kNarrowBuckets];
    uint8_t bias_high[2 * kNarrowBuckets];
    // By code. The frequencies are times 16.
    uint8_t f16_low[kNarrowBuckets];
    uint8_t f16_high[kNarrowBuckets];
    uint8_t value[kNarrowBuckets];
};

inline void fill_bucket_bytes(const RansModel& model, const AliasTables& tables,
                              const BucketEntries& entries, BucketBytes& bytes) {
    for (uint32_t b = 0; b < kNarrowBuckets; ++b) {
        bytes.threshold[b] =
            static_cast<uint8_t>(tables.threshold[b] - b * (kProbSum / kNarrowBuckets));
        const uint32_t parts[2] = {entries.first[b], entries.second[b]};
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t at = b + h * kNarrowBuckets;
            bytes.code[at] = h == 0 ? tables.first[b] : tables.second[b];
            bytes.bias_low[at] = static_cast<uint8_t>(parts[h] >> kProbBits);
            bytes.bias_high[at] = static_cast<uint8_t>(parts[h] >> (kProbBits + 8) & 0x0F);
        }
        const uint32_t entry = pack_entry(model, b, 0, 0);
        bytes.f16_low[b] = static_cast<uint8_t>(entry << 4);
        bytes.f16_high[b] = static_cast<uint8_t>(entry >> 4);
        bytes.value[b] = static_cast<uint8_t>(entry >> 24);
    }
}

// The parts of all buckets by number: 2b and 2b + 1 are those of bucket b, whose first slot is
// s * b. The number of a slot's part is (slot + lift[b]) / s.
struct BucketParts {
    alignas(64) uint16_t lift[kWideBuckets];
    alignas(64) uint16_t f16[2 * kWideBuckets];   // 16 * freq
    alignas(64) uint16_t bias[2 * kWideBuckets];  // rank - slot, modulo 2^16
    alignas(64) uint8_t unit[2 * kWideBuckets];
};

inline void fill_bucket_parts(const RansModel& model, const AliasTables& tables,
                              const BucketEntries& entries, BucketParts& parts) {
    const uint32_t n_slots = kProbSum / model.n_buckets();
    for (uint32_t b = 0; b < model.n_buckets(); ++b) {
        parts.lift[b] = static_cast<uint16_t>((2 * b + 1) * n_slots - tables.threshold[b]);
        const uint32_t both[2] = {entries.first[b], entries.second[b]};
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t bias = both[i] >> kProbBits & (kProbSum - 1);
            parts.f16[2 * b + i] = static_cast<uint16_t>(both[i] << 4);
            parts.bias[2 * b + i] = static_cast<uint16_t>(bias > 0 ? bias - kProbSum : 0);
            parts.unit[2 * b + i] = static_cast<uint8_t>(both[i] >> 24);
        }
    }
}

// The parts of 32 buckets for look-ups of bytes. Two neighbouring buckets are a pair of 256 slots
// and four parts. A part ends at the lower byte of its last slot, read as a signed number.
struct PairTables {
    alignas(16) uint8_t last_of_first[kNarrowBuckets / 2];
    alignas(16) uint8_t last_of_third[kNarrowBuckets / 2];
    // By byte and part: the low bits of 16 * freq with the high bits of bias, the high bits of
    // 16 * freq, the low bits of bias, the unit.
    alignas(16) uint8_t byte[4][4][kNarrowBuckets / 2];
};

inline void fill_pair_tables(const AliasTables& tables, const BucketEntries& entries,
                             PairTables& pairs) {
    for (uint32_t k = 0; k < kNarrowBuckets / 2; ++k) {
        const uint32_t b = 2 * k;
        // The byte before the third part belongs to the other bucket, so a third part without slots
        // becomes like the fourth instead.
        const bool has_third = tables.threshold[b + 1] % 256 != 128;
        const uint32_t part[4] = {entries.first[b], entries.second[b],
                                  has_third ? entries.first[b + 1] : entries.second[b + 1],
                                  entries.second[b + 1]};
        pairs.last_of_first[k] = static_cast<uint8_t>(tables.threshold[b] - 1);
        pairs.last_of_third[k] = static_cast<uint8_t>(tables.threshold[b + 1] - 1);
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t freq = part[i] & (kProbSum - 1);
            const uint32_t bias = part[i] >> kProbBits & (kProbSum - 1);
            pairs.byte[0][i][k] = static_cast<uint8_t>(freq << 4 | bias >> 8);
            pairs.byte[1][i][k] = static_cast<uint8_t>(freq >> 4);
            pairs.byte[2][i][k] = static_cast<uint8_t>(bias);
            pairs.byte[3][i][k] = static_cast<uint8_t>(part[i] >> 24);
        }
    }
}

inline void fill_decode_table(const RansModel& model, const AliasTables& tables, uint32_t* table) {
    for_each_run(model, tables, [&](uint32_t code, uint32_t first, uint32_t n, uint32_t rank) {
        std::fill_n(table + first, n, pack_entry(model, code, first, rank));
    });
}

// Fills the encoder's table from position to slot, slots[start[code] + rank]. `start` is the sum of
// the frequencies of smaller codes.
PACKHORSE_INLINE void fill_slot_table(const RansModel& model, const AliasTables& tables,
                                      uint16_t* slots) {
    uint32_t start[257];
    for (uint32_t c = 0, sum = 0; c < model.n_codes; sum += model.freqs[c], ++c) start[c] = sum;
    for_each_run(model, tables, [&](uint32_t code, uint32_t first, uint32_t n, uint32_t rank) {
        if (n == 0) return;
        uint16_t* dst = slots + start[code] + rank;
        for (uint32_t i = 0; i < n; ++i) dst[i] = static_cast<uint16_t>(first + i);
    });
}

}  // namespace packhorse
