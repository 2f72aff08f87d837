// Finds rows that repeat, and how long rows are.
#pragma once

#include <algorithm>

#include "repeats/tokens.hpp"

namespace packhorse {

// Slots for the rows seen last, in buckets of four. A slot is 0, or the upper half of a row's hash
// and the number of the row, counted from 1.
class RowTable {
  public:
    static constexpr std::size_t kBucket = 4;

    // `n_slots` is a power of two, at least kBucket.
    RowTable(uint64_t* slots, std::size_t n_slots) : slots_(slots), n_slots_(n_slots) {}

    void clear() { std::fill_n(slots_, n_slots_, 0); }
    void prefetch(uint64_t hash) const { __builtin_prefetch(bucket_of(hash)); }

    // Takes note of a row of `part`. Returns how many rows before it the same bytes are, or 0 if
    // the table knows of none from row `floor` on. Rows come in order.
    std::size_t find_or_add(const uint8_t* part, std::size_t row_nbytes, uint64_t hash,
                            std::size_t row, std::size_t floor) {
        uint64_t* const bucket = bucket_of(hash);
        uint64_t* oldest = bucket;
        const uint64_t tag = hash >> 32 << 32, found = tag | (row + 1);
        for (std::size_t k = 0; k < kBucket; ++k) {
            const uint64_t slot = bucket[k];
            const std::size_t number = static_cast<uint32_t>(slot);
            if (number < static_cast<uint32_t>(*oldest)) oldest = bucket + k;
            if ((slot ^ tag) >> 32 != 0 || number <= floor) continue;
            const std::size_t distance = row + 1 - number;
            if (distance > kMaxDistance) continue;
            const uint8_t* const here = part + row * row_nbytes;
            if (std::memcmp(here, here - distance * row_nbytes, row_nbytes) != 0) continue;
            bucket[k] = found;
            return distance;
        }
        *oldest = found;
        return 0;
    }

  private:
    uint64_t* bucket_of(uint64_t hash) const {
        return slots_ + (hash & (n_slots_ - 1) & ~uint64_t{kBucket - 1});
    }

    uint64_t* slots_;
    std::size_t n_slots_;
};

constexpr std::size_t kMaxTableRows = (std::size_t{1} << 32) - 2;

__extension__ typedef unsigned __int128 uint128_t;

inline uint64_t mix(uint64_t a, uint64_t b) {
    const uint128_t product = static_cast<uint128_t>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// The last bytes are read from the end, so they may count twice.
inline uint64_t hash_row(const uint8_t* row, std::size_t nbytes) {
    constexpr uint64_t kA = 0x9E3779B97F4A7C15, kB = 0xC2B2AE3D27D4EB4F;
    const auto pair = [row](std::size_t at, uint64_t seed) {
        return mix(load<uint64_t>(row + at) ^ kA, load<uint64_t>(row + at + 8) ^ seed);
    };
    uint64_t a = kB ^ nbytes, b = kA;
    std::size_t at = 0;
    for (; at + 32 <= nbytes; at += 32) {
        a = pair(at, a);
        b = pair(at + 16, b);
    }
    if (at + 16 <= nbytes) a = pair(at, a);
    if (nbytes % 16 != 0) b = pair(nbytes - 16, b);
    return mix(a ^ kB, b ^ kA);
}

// What of the rows of a piece is left, in bytes; no tokens if too few repeat.
struct Repeats {
    std::size_t literals_nbytes = 0;
    std::size_t tokens_nbytes = 0;
};

// After a share of the rows, the search ends unless as many repeat. More will at the end.
constexpr std::size_t kTrialShare = 8, kTrialRepeats = 64, kMinTrialRows = 64;
// A piece of which fewer rows repeat is not worth tokens.
constexpr std::size_t kMinRepeats = 16;

// Writes the tokens of the rows in bytes [start, stop) of a part, and their literals: what lies
// before the first whole row, new rows, what lies after the last whole row. Rows begin at
// multiples of their length. `tokens` has room for `max_tokens_nbytes`, `literals` for all bytes.
// Repeats may lie before `start` if `has_past`. Pieces of a part come in order, the first of them
// with a `start` of 0, which clears the table.
inline Repeats find_repeats(const uint8_t* part, std::size_t start, std::size_t stop,
                            std::size_t row_nbytes, bool has_past, RowTable table, uint8_t* tokens,
                            uint8_t* literals) {
    constexpr std::size_t kBlock = 16;  // rows that are hashed before any is looked up
    if (start == 0) table.clear();
    const std::size_t first = (start + row_nbytes - 1) / row_nbytes, last = stop / row_nbytes;
    if (first >= last) return {};
    const std::size_t floor = has_past ? 0 : first, n_rows = last - first;
    std::size_t trial = std::max(n_rows / kTrialShare, kMinTrialRows), n_new = 0;
    uint8_t* literal = std::copy(part + start, part + first * row_nbytes, literals);
    TokenWriter writer(tokens);
    for (std::size_t done = 0; done < n_rows;) {
        const std::size_t n = std::min(kBlock, n_rows - done);
        const uint8_t* row = part + (first + done) * row_nbytes;
        uint64_t hashes[kBlock];
        for (std::size_t k = 0; k < n; ++k) {
            hashes[k] = hash_row(row + k * row_nbytes, row_nbytes);
            table.prefetch(hashes[k]);
        }
        for (std::size_t k = 0; k < n; ++k, row += row_nbytes) {
            const std::size_t distance =
                table.find_or_add(part, row_nbytes, hashes[k], first + done + k, floor);
            if (distance != 0) {
                writer.repeat(distance);
                continue;
            }
            writer.new_row();
            std::memcpy(literal, row, row_nbytes);
            literal += row_nbytes;
            ++n_new;
        }
        done += n;
        if (done < trial) continue;
        if ((done - n_new) * kTrialRepeats < done) return {};
        trial = n_rows;
    }
    if ((n_rows - n_new) * kMinRepeats < n_rows) return {};
    literal = std::copy(part + last * row_nbytes, part + stop, literal);
    return {static_cast<std::size_t>(literal - literals), writer.finish()};
}

// How many bytes of a sample of a part need not be sent if rows have a length.
class RowSample {
  public:
    explicit RowSample(const uint8_t* part, std::size_t nbytes) : part_(part), nbytes_(nbytes) {}

    // The bytes of repeats, less those of tokens; 0 if hardly any row repeats.
    std::size_t saving(std::size_t row_nbytes) {
        RowTable table(slots_, kSlots);
        table.clear();
        const std::size_t n_rows = nbytes_ / row_nbytes;
        const std::size_t span = std::max<std::size_t>(kNbytes / kSpans / row_nbytes, 1);
        const std::size_t step = std::max(n_rows / kSpans, span);
        std::size_t n = 0, n_repeats = 0;
        for (std::size_t first = 0; first < n_rows && n < kSpans * span; first += step) {
            const std::size_t last = std::min(first + span, n_rows);
            for (std::size_t row = first; row < last; ++row, ++n) {
                const uint64_t hash = hash_row(part_ + row * row_nbytes, row_nbytes);
                if (table.find_or_add(part_, row_nbytes, hash, row, 0) != 0) ++n_repeats;
            }
        }
        if (n_repeats * kMinShare < n) return 0;
        const std::size_t found = n_repeats * row_nbytes, tokens = n * kTokenNbytes;
        return found > tokens ? found - tokens : 0;
    }

  private:
    static constexpr std::size_t kNbytes = 1 << 17, kSpans = 4, kSlots = 1 << 12;
    static constexpr std::size_t kMinShare = 64, kTokenNbytes = 2;

    const uint8_t* part_;
    std::size_t nbytes_;
    uint64_t slots_[kSlots];
};

// Returns the length of rows that pays best, or 0 if none does: `hint`, or a power of two from 64
// on. Rows of multiples of 64 bytes, whose length nobody knows, repeat in such units, too.
inline std::size_t guess_row_nbytes(const uint8_t* part, std::size_t nbytes, std::size_t hint) {
    constexpr std::size_t kUnit = 64, kMinRows = 32;
    RowSample sample(part, nbytes);
    std::size_t best = 0, most = 0;
    if (is_row_length(hint) && nbytes / hint >= kMinRows) {
        most = sample.saving(hint);
        best = most == 0 ? 0 : hint;
    }
    for (std::size_t length = kUnit; length <= kMaxRowNbytes; length *= 2) {
        if (nbytes / length < kMinRows) break;
        const std::size_t saving = length == hint ? most : sample.saving(length);
        if (2 * saving <= most && length != best) break;
        if (saving > most) most = saving, best = length;
        if (most == 0) break;
    }
    return best;
}

}  // namespace packhorse
