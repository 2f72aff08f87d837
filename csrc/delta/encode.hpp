// Encoding a chunk as differences from a base (docs/format.md, 6.6). A sample gives the classes,
// the shift of each and the size of the stream. Then the differences are sorted by class and cut
// into tokens, raw bits and extra bits, and rANS codes the tokens.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>
#include <vector>

#include "chunk/choose.hpp"
#include "chunk/intake.hpp"
#include "delta/differences.hpp"
#include "delta/order.hpp"
#include "delta/sparse.hpp"
#include "rans/encode.hpp"

namespace packhorse {

// The sample for choosing classes and shifts: the units of a run, and of all runs.
constexpr std::size_t kDeltaSampleRun = 64;
constexpr std::size_t kDeltaSampleUnits = 8192;
constexpr std::size_t kLeastDeltaSample = 2048;
constexpr std::size_t kShiftSample = 1024;  // units of the sample for choosing shifts
// Keys are joined to at most this number of groups before they are cut into classes.
constexpr uint32_t kMaxDeltaGroups = 24;
constexpr uint32_t kLengthBins = 65;  // bits of the size of a difference of up to 64 bits
// Sizes below this number are counted one by one, larger ones by their lengths.
constexpr uint32_t kSmallSizes = 16;
constexpr uint32_t kSizeBins = kSmallSizes + kLengthBins - 5;

// The differences of a sample, with the keys of their bases.
struct DeltaSample {
    std::size_t n = 0;
    uint8_t keys[kDeltaSampleUnits];
    uint64_t differences[kDeltaSampleUnits];  // sign extended
    uint64_t by_class[2 * kShiftSample];      // some of them, class after class
};

template <class Unit, bool kFloat>
PACKHORSE_INLINE uint64_t difference_of(const uint8_t* unit, const uint8_t* base) {
    const auto d = static_cast<Unit>(to_ordered<Unit, kFloat>(load<Unit>(unit)) -
                                     to_ordered<Unit, kFloat>(load<Unit>(base)));
    return static_cast<uint64_t>(static_cast<int64_t>(static_cast<std::make_signed_t<Unit>>(d)));
}

// Takes at most `n_units` units, in runs that are spread evenly.
template <class Unit, bool kFloat>
inline void take_delta_sample(const uint8_t* src, const uint8_t* base, std::size_t n,
                              DeltaSample& sample) {
    const std::size_t wanted = std::clamp(n / 32, kLeastDeltaSample, kDeltaSampleUnits);
    const std::size_t n_runs = std::max<std::size_t>(1, std::min(wanted, n) / kDeltaSampleRun);
    const std::size_t run = std::min(n, kDeltaSampleRun);
    const std::size_t gap = n_runs > 1 ? (n - run) / (n_runs - 1) : 0;
    sample.n = 0;
    for (std::size_t r = 0; r < n_runs; ++r) {
        const std::size_t first = r * gap;
        // The runs are far apart, so the hardware does not prefetch them.
        __builtin_prefetch(src + (first + 4 * gap) * sizeof(Unit));
        __builtin_prefetch(base + (first + 4 * gap) * sizeof(Unit));
        for (std::size_t i = first; i < first + run; ++i, ++sample.n) {
            const std::size_t at = i * sizeof(Unit);
            sample.keys[sample.n] = key_of<Unit, kFloat>(load<Unit>(base + at));
            sample.differences[sample.n] = difference_of<Unit, kFloat>(src + at, base + at);
        }
    }
}

PACKHORSE_INLINE uint32_t length_of(uint64_t difference) {
    const uint64_t sign = spread_sign(difference);
    const uint64_t size = (difference ^ sign) - sign;
    // Without a branch for zero, which no predictor could guess.
    return static_cast<uint32_t>(std::bit_width(size | 1)) - (size == 0 ? 1 : 0);
}

// The bin that a difference is counted in. Large ones of a length are about equally frequent
// in any class. Small ones need not be: all steps of an exponent may have the same size.
PACKHORSE_INLINE uint32_t size_bin(uint64_t difference) {
    const uint64_t sign = spread_sign(difference);
    const uint64_t size = (difference ^ sign) - sign;
    return size < kSmallSizes ? static_cast<uint32_t>(size)
                              : static_cast<uint32_t>(std::bit_width(size)) + kSmallSizes - 5;
}

// Groups of neighbouring keys, and how often sizes of each bin occur in them, as running sums from
// the first group on.
struct DeltaGroups {
    uint32_t n = 0;
    uint32_t n_bins = 0;             // bins that can occur
    uint8_t first[kMaxDeltaGroups];  // smallest key of a group
    uint32_t sums[kMaxDeltaGroups + 1][kSizeBins] = {};
};

inline void group_keys(const DeltaSample& sample, DeltaGroups& groups) {
    uint32_t counts[256] = {};
    for (std::size_t i = 0; i < sample.n; ++i) ++counts[sample.keys[i]];
    uint8_t group_of[256];
    std::size_t in_group = 0;
    for (uint32_t key = 0; key < 256; ++key) {
        // Exponents are kept apart if they can be: each has its own size of steps.
        const bool opens = groups.n == 0 || (in_group >= sample.n / 128 && counts[key] > 0 &&
                                             groups.n < kMaxDeltaGroups);
        if (opens) {
            groups.first[groups.n++] = static_cast<uint8_t>(key);
            in_group = 0;
        }
        in_group += counts[key];
        group_of[key] = static_cast<uint8_t>(groups.n - 1);
    }
    for (std::size_t i = 0; i < sample.n; ++i)
        ++groups.sums[group_of[sample.keys[i]] + 1][size_bin(sample.differences[i])];
    for (uint32_t g = 0; g < groups.n; ++g)
        for (uint32_t b = 0; b < groups.n_bins; ++b) groups.sums[g + 1][b] += groups.sums[g][b];
}

// x log2 x in 2^-16 bits, for counts of a sample. (log2_fixed takes numbers up to 2^31.)
constexpr std::array<uint64_t, kDeltaSampleUnits + 1> make_count_costs() {
    std::array<uint64_t, kDeltaSampleUnits + 1> table{};
    for (uint32_t x = 1; x <= kDeltaSampleUnits; ++x) table[x] = uint64_t{x} * log2_fixed(x);
    return table;
}

inline constexpr std::array<uint64_t, kDeltaSampleUnits + 1> kCountCosts = make_count_costs();

// Computes what the counts of a sample cost at their entropy, in 2^-16 bits.
inline uint64_t cost_of_counts(const uint32_t* counts, uint32_t n_counts) {
    uint32_t total = 0;
    uint64_t saved = 0;
    for (uint32_t i = 0; i < n_counts; ++i) {
        total += counts[i];
        saved += kCountCosts[counts[i]];
    }
    return kCountCosts[total] - saved;
}

// Computes the cost of the groups [begin, end) as one class, without the signs and without the bits
// below the top bit of large differences, which cost the same in every class.
inline uint64_t groups_cost(const DeltaGroups& groups, uint32_t begin, uint32_t end) {
    uint32_t counts[kSizeBins];
    for (uint32_t b = 0; b < groups.n_bins; ++b)
        counts[b] = groups.sums[end][b] - groups.sums[begin][b];
    return cost_of_counts(counts, groups.n_bins);
}

// Computes about what a sample costs as one class, in 2^-16 bits.
inline uint64_t sample_cost(const DeltaGroups& groups) {
    const uint32_t* const counts = groups.sums[groups.n];
    uint64_t bits = 0;
    for (uint32_t b = 1; b < groups.n_bins; ++b)  // signs, and the bits below the top bit
        bits += uint64_t{counts[b]} * (b < kSmallSizes ? 1 : b - kSmallSizes + 5);
    return groups_cost(groups, 0, groups.n) + (bits << kCostBits);
}

// Finds the thresholds that cut the keys into classes of least cost, by dynamic programming over
// the groups. `class_cost` is the cost of one more class.
inline void choose_delta_thresholds(const DeltaGroups& groups, uint64_t class_cost,
                                    DeltaRule& rule) {
    constexpr uint64_t kNever = ~uint64_t{0};
    const uint32_t n = groups.n;
    uint64_t best[kMaxDeltaClasses + 1][kMaxDeltaGroups + 1];
    uint32_t cut[kMaxDeltaClasses + 1][kMaxDeltaGroups + 1] = {};
    for (auto& row : best) std::fill(std::begin(row), std::end(row), kNever);
    best[0][0] = 0;
    for (uint32_t begin = 0; begin < n; ++begin)
        for (uint32_t end = begin + 1; end <= n; ++end) {
            const uint64_t cost = groups_cost(groups, begin, end) + class_cost;
            for (uint32_t k = 1; k <= kMaxDeltaClasses; ++k) {
                if (best[k - 1][begin] == kNever || best[k - 1][begin] + cost >= best[k][end])
                    continue;
                best[k][end] = best[k - 1][begin] + cost;
                cut[k][end] = begin;
            }
        }
    rule.n_classes = 1;
    for (uint32_t k = 2; k <= kMaxDeltaClasses; ++k)
        if (best[k][n] < best[rule.n_classes][n]) rule.n_classes = k;
    uint32_t end = n;
    for (uint32_t k = rule.n_classes; k > 1; --k) {
        end = cut[k][end];
        rule.thresholds[k - 2] = groups.first[end];
    }
}

PACKHORSE_INLINE uint32_t token_of(int64_t t) {
    if (t >= -kTokenBias && t < kTokenBias) return static_cast<uint32_t>(t + kTokenBias);
    const uint64_t m = static_cast<uint64_t>(t) ^ spread_sign(static_cast<uint64_t>(t));
    const auto length = static_cast<uint32_t>(std::bit_width(m));
    return std::min(length + kTokenLengthBias, kDeltaFullToken);
}

// Computes the cost of a class of a sample under a shift, in 2^-16 bits.
inline uint64_t shift_cost(const uint64_t* differences, std::size_t n, uint32_t shift) {
    uint32_t counts[kDeltaTokens] = {};
    for (std::size_t i = 0; i < n; ++i)
        ++counts[token_of(static_cast<int64_t>(differences[i]) >> shift)];
    uint64_t bits = uint64_t{shift} * n;
    for (uint32_t token = kDeltaDirectTokens; token < kDeltaTokens; ++token)
        bits += uint64_t{counts[token]} * extra_bits_of(token);
    return cost_of_counts(counts, kDeltaTokens) + (bits << kCostBits);
}

// Finds a good shift of a class, near the shift that makes nine in ten differences direct. Returns
// its cost. A difference that is not direct takes four times as long as another one, and each bit
// more of shift halves their number. So the largest shift is taken that costs little more than the
// best.
inline uint64_t choose_shift(const uint64_t* differences, std::size_t n, uint32_t unit_bits,
                             Level level, uint8_t& shift) {
    shift = 0;
    if (n == 0) return 0;
    uint32_t lengths[kLengthBins] = {};
    for (std::size_t i = 0; i < n; ++i) ++lengths[length_of(differences[i])];
    std::size_t below = 0;
    uint32_t length = 0;
    for (; length < kLengthBins && 10 * (below += lengths[length]) < 9 * n; ++length) {
    }
    const uint32_t middle = length > 4 ? length - 4 : 0;
    const uint32_t first = middle > 2 ? middle - 2 : 0;
    const uint32_t slack_log = level_spec(level).shift_slack_log;
    uint64_t best = ~uint64_t{0} >> 1, chosen = best;
    for (uint32_t s = first; s <= middle + 2 && s < unit_bits; ++s) {
        const uint64_t cost = shift_cost(differences, n, s);
        if (cost >= best + (best >> slack_log)) continue;
        best = std::min(best, cost);
        chosen = cost;
        shift = static_cast<uint8_t>(s);
    }
    return chosen;
}

// Collects some of the differences, class after class. `starts` receives the places where each
// class begins and where the last one ends.
inline void sort_sample(const DeltaRule& rule, DeltaSample& sample, std::size_t* starts) {
    uint8_t class_of[256] = {};
    for (uint32_t key = 0; key < 256; ++key)
        for (uint32_t t = 0; t + 1 < rule.n_classes; ++t)
            class_of[key] = static_cast<uint8_t>(class_of[key] + (key >= rule.thresholds[t]));
    std::size_t next[kMaxDeltaClasses + 1] = {};
    const std::size_t step = std::max<std::size_t>(1, sample.n / kShiftSample);
    for (std::size_t i = 0; i < sample.n; i += step) ++next[class_of[sample.keys[i]] + 1];
    for (uint32_t c = 0; c < kMaxDeltaClasses; ++c) next[c + 1] += next[c];
    std::copy(std::begin(next), std::end(next), starts);
    for (std::size_t i = 0; i < sample.n; i += step)
        sample.by_class[next[class_of[sample.keys[i]]]++] = sample.differences[i];
}

// Computes what one more class must save of a sample that costs `cost`, in 2^-16 bits. A class
// takes time: without it, coding is 2 to 5 % faster. So it must save one part of the bytes in 256,
// or, if differences take more than 9/16 of the units and so gain little, one in 2048.
inline uint64_t class_price(uint64_t cost, const DeltaSample& sample, uint32_t unit_bits,
                            Level level) {
    const bool gains_little = 16 * cost > uint64_t{9} * unit_bits * sample.n << kCostBits;
    const uint32_t log = level_spec(level).shift_slack_log + (gains_little ? 6 : 3);
    return log < 32 ? cost >> log : 0;
}

// Chooses the rule for a sample. Returns the estimated bytes of a stream for `n` units.
inline std::size_t choose_delta_rule(DeltaSample& sample, std::size_t n, uint32_t unit_bits,
                                     Level level, DeltaRule& rule) {
    constexpr uint64_t kClassBits = 8 * 40;  // a model, and a round that is not full
    DeltaGroups groups;
    groups.n_bins = kSmallSizes + unit_bits - 4;
    group_keys(sample, groups);
    const uint64_t price = class_price(sample_cost(groups), sample, unit_bits, level);
    choose_delta_thresholds(groups, (kClassBits << kCostBits) * sample.n / n + price, rule);
    std::size_t starts[kMaxDeltaClasses + 1];
    sort_sample(rule, sample, starts);
    uint64_t cost = 0;
    for (uint32_t c = 0; c < rule.n_classes; ++c)
        cost += choose_shift(sample.by_class + starts[c], starts[c + 1] - starts[c], unit_bits,
                             level, rule.shifts[c]);
    return kDeltaModelsOffset + rule.n_classes * kClassBits / 8 +
           (std::size_t{4} << choose_lanes_log(n)) +
           scale_cost(cost, static_cast<uint32_t>(starts[kMaxDeltaClasses]), n);
}

// Writes fields of up to 64 bits, from bit 0 on, into memory that grows.
class BitWriter {
  public:
    // Makes room for this many fields.
    void reserve(std::size_t n_fields) {
        const std::size_t needed = used_ + 8 * n_fields + 16;
        if (bytes_.size() < needed) bytes_.resize(needed + bytes_.size());
    }

    void put(uint64_t value, uint32_t n) {
        if (n > 32) {
            put(value & 0xFFFFFFFF, 32);
            return put(value >> 32, n - 32);
        }
        // Without a branch that depends on the number of bits.
        pending_ |= (value & ((uint64_t{1} << n) - 1)) << n_pending_;
        n_pending_ += n;
        store(bytes_.data() + used_, pending_);
        used_ += n_pending_ / 8;
        pending_ >>= n_pending_ / 8 * 8;
        n_pending_ %= 8;
    }

    // Returns all bytes, after the last field.
    const std::vector<uint8_t>& finish() {
        used_ += (n_pending_ + 7) / 8;
        bytes_.resize(used_);
        return bytes_;
    }

  private:
    std::vector<uint8_t> bytes_;
    std::size_t used_ = 0;
    uint64_t pending_ = 0;
    uint32_t n_pending_ = 0;  // below 8 between calls
};

// Writes the extra bits of differences whose tokens are not direct.
template <class Unit>
inline void put_long_tokens(const Unit* ts, std::size_t n, BitWriter& extra) {
    extra.reserve(n);
    for (std::size_t i = 0; i < n; ++i) {
        const int64_t t{static_cast<std::make_signed_t<Unit>>(ts[i])};
        const auto bits = static_cast<uint64_t>(t);
        const uint32_t token = token_of(t);
        const uint64_t sign = spread_sign(bits);
        if (token == kDeltaFullToken)
            extra.put(bits, kFullTokenBits);
        else
            extra.put((bits ^ sign) << 1 | (sign & 1), token - kTokenLengthBias);
    }
}

// One worker's memory. Every row has kDeltaSlackNbytes more than it needs.
struct DeltaScratch {
    uint8_t* keys;  // chunk units
    // Chunk units each, in the order by class, with slack behind each class: tokens, and bytes with
    // raw bits. There is one more row than a unit has bytes.
    uint8_t* rows[kMaxDeltaRows];
    uint8_t* differences;  // chunk units: those whose tokens are not direct, class after class
    uint8_t* source;       // chunk units, copied from the source
    uint8_t* base;         // the units of the base, cast
    DeltaSample* sample;
    RansModel models[kMaxDeltaClasses];
};

constexpr std::size_t differences_nbytes(std::size_t n, uint32_t unit_nbytes) {
    return std::max(n * unit_nbytes, 4 * sparse_row_nbytes(n, unit_nbytes));
}

// Bytes that the rows and the sample take.
constexpr std::size_t delta_encode_nbytes(std::size_t n, uint32_t unit_nbytes) {
    const auto row = [](std::size_t nbytes) { return round_up(nbytes, 64) + kDeltaSlackNbytes; };
    const std::size_t slack = kMaxDeltaClasses * kDeltaSlackNbytes;
    return (2 + unit_nbytes) * row(n + slack) + row(differences_nbytes(n, unit_nbytes)) +
           2 * row(n * unit_nbytes) + round_up(sizeof(DeltaSample), 64);
}

inline DeltaScratch place_delta_scratch(uint8_t* at, std::size_t n, uint32_t unit_nbytes) {
    const auto take = [&](std::size_t nbytes) {
        uint8_t* const row = at;
        at += round_up(nbytes, 64) + kDeltaSlackNbytes;
        return row;
    };
    constexpr std::size_t slack = kMaxDeltaClasses * kDeltaSlackNbytes;
    DeltaScratch scratch;
    scratch.keys = take(n + slack);
    for (uint32_t p = 0; p < 1 + unit_nbytes; ++p) scratch.rows[p] = take(n + slack);
    scratch.differences = take(differences_nbytes(n, unit_nbytes));
    scratch.source = take(n * unit_nbytes);
    scratch.base = take(n * unit_nbytes);
    scratch.sample = reinterpret_cast<DeltaSample*>(at);
    return scratch;
}

// A chunk that is being encoded as differences.
template <class Unit, bool kFloat>
class DeltaChunkEncoder {
  public:
    DeltaChunkEncoder(DeltaScratch& scratch, const DeltaRule& rule, std::size_t n, Isa isa)
        : scratch_(scratch),
          n_(n),
          isa_(isa),
          counts_(rule),
          classes_(rule),
          differences_(reinterpret_cast<Unit*>(scratch.differences)) {
        header_.rule = rule;
        header_.lanes_log = choose_lanes_log(n);
    }

    // Writes the stream, of fewer than `capacity` bytes. Returns 0 if it would be longer. `words`
    // has room for two bytes for each unit, `escapes` for one.
    std::size_t encode(const uint8_t* src, const uint8_t* base, Level level, uint8_t* words_end,
                       uint8_t* escapes_end, RansEncodeMemory& tables, uint8_t* dst,
                       std::size_t capacity) {
        sort(src, base);
        const std::size_t raw_at = choose_models(level);
        std::size_t raw_nbytes = 0;
        for (uint32_t c = 0; c < header_.rule.n_classes; ++c)
            raw_nbytes += delta_raw_nbytes(starts_.count(c), header_.rule.shifts[c]);
        const std::vector<uint8_t>& extra = extra_.finish();
        header_.extra_nbytes = extra.size();
        if (raw_at + raw_nbytes + header_.extra_nbytes >= capacity) return 0;
        const RansEncoded encoded = encode_tokens(words_end, escapes_end, tables);
        header_.n_escapes = static_cast<std::size_t>(escapes_end - encoded.escapes);
        const auto words_nbytes = static_cast<std::size_t>(words_end - encoded.words);
        const std::size_t nbytes =
            raw_at + raw_nbytes + header_.extra_nbytes + header_.n_escapes + words_nbytes;
        if (nbytes >= capacity) return 0;
        uint8_t* at = write_front(encoded, dst);
        at = std::copy(extra.begin(), extra.end(), at);
        std::memcpy(at, encoded.escapes, header_.n_escapes);
        std::memcpy(at + header_.n_escapes, encoded.words, words_nbytes);
        return nbytes;
    }

  private:
    // The bytes of a class in a row. Between classes there is room for whole registers.
    uint8_t* row_of(uint32_t p, uint32_t c) const {
        return scratch_.rows[p] + starts_.at[c] + c * kDeltaSlackNbytes;
    }

    // Puts tokens and raw bytes in the order by class, and lists the differences whose tokens are
    // not direct.
    void sort(const uint8_t* src, const uint8_t* base) {
        const DeltaRule& rule = header_.rule;
        fill_keys<Unit, kFloat>(base, n_, scratch_.keys, isa_);
        starts_ = count_delta_classes(scratch_.keys, n_, rule, isa_);
        ClassRows<uint8_t> rows;
        for (uint32_t p = 0; p < counts_.most; ++p) rows.at[p] = scratch_.rows[p];
        for (uint32_t c = 0; c < kMaxDeltaClasses; ++c) {
            rows.next[c] = starts_.at[c] + c * kDeltaSlackNbytes;
            long_end_[c] = differences_ + starts_.at[c];
        }
        BlockRows block;
        for (std::size_t at = 0; at < n_; at += kDeltaBlockUnits) {
            const std::size_t n = std::min(kDeltaBlockUnits, n_ - at);
            const uint8_t* const units = src + at * sizeof(Unit);
            const uint8_t* const bases = base + at * sizeof(Unit);
            const uint8_t* const keys = scratch_.keys + at;
            cut_differences<Unit, kFloat>(units, bases, keys, n, rule, counts_.most, block, isa_);
            list_long_tokens(units, bases, keys, n, block.at[0]);
            sort_rows(block, keys, n, rule, counts_, rows, isa_);
        }
    }

    // Replaces the marks of a block by tokens.
    void list_long_tokens(const uint8_t* units, const uint8_t* bases, const uint8_t* keys,
                          std::size_t n, uint8_t* tokens) {
        for_each_scattered(tokens, n, kLongMark, isa_, [&](std::size_t i) PACKHORSE_VECTORISED {
            const std::size_t at = i * sizeof(Unit);
            const uint32_t c = classes_.of[keys[i]];
            const auto d =
                static_cast<int64_t>(difference_of<Unit, kFloat>(units + at, bases + at));
            const int64_t t = d >> header_.rule.shifts[c];
            tokens[i] = static_cast<uint8_t>(token_of(t));
            *long_end_[c]++ = static_cast<Unit>(t);
        });
    }

    // Makes extra bits and models. Returns the bytes before the raw bits.
    std::size_t choose_models(Level level) {
        std::size_t at = kDeltaModelsOffset + (std::size_t{4} << header_.lanes_log);
        for (uint32_t c = 0; c < header_.rule.n_classes; ++c) {
            const Unit* const first = differences_ + starts_.at[c];
            put_long_tokens(first, static_cast<std::size_t>(long_end_[c] - first), extra_);
            RansModel& model = scratch_.models[c];
            choose_class_model(row_of(0, c), starts_.count(c), level_spec(level).sample_units / 4,
                               0, kDeltaTokens, model);
            at += model_nbytes(model.n_in_range());
        }
        return at;
    }

    RansEncoded encode_tokens(uint8_t* words_end, uint8_t* escapes_end, RansEncodeMemory& tables) {
        RansEncoded encoded;
        encoded.words = words_end;
        encoded.escapes = escapes_end;
        std::fill(std::begin(encoded.states), std::end(encoded.states), kStateLowerBound);
        Ahead nothing;
        for (uint32_t c = header_.rule.n_classes; c-- > 0;) {
            const RansModel& model = scratch_.models[c];
            const std::size_t n = starts_.count(c);
            fill_encode_tables(model, n, header_.lanes_log, isa_, tables);
            rans_encode(row_of(0, c), n, model, tables, header_.lanes_log, encoded, nothing, isa_);
        }
        return encoded;
    }

    // Writes everything before the extra bits. Returns the end.
    uint8_t* write_front(const RansEncoded& encoded, uint8_t* dst) {
        write_delta_header(header_, dst);
        dst += kDeltaModelsOffset;
        for (uint32_t c = 0; c < header_.rule.n_classes; ++c)
            dst = write_model(scratch_.models[c], dst);
        std::memcpy(dst, encoded.states, std::size_t{4} << header_.lanes_log);
        dst += std::size_t{4} << header_.lanes_log;
        for (uint32_t c = 0; c < header_.rule.n_classes; ++c) dst = write_class_raw(c, dst);
        return dst;
    }

    // Writes the raw bits of a class. Returns their end.
    uint8_t* write_class_raw(uint32_t c, uint8_t* dst) {
        const uint32_t n_bytes = header_.rule.shifts[c] / 8u, n_bits = header_.rule.shifts[c] % 8u;
        const std::size_t n = starts_.count(c);
        for (uint32_t p = 1; p <= n_bytes; ++p, dst += n) std::memcpy(dst, row_of(p, c), n);
        if (n_bits == 0) return dst;
        return write_raw_bits(row_of(1 + n_bytes, c), n, {n_bits, (1u << n_bits) - 1}, dst, isa_);
    }

    DeltaScratch& scratch_;
    std::size_t n_;
    Isa isa_;
    DeltaRowCounts counts_;
    ClassOfKey classes_;
    Unit* differences_;
    Unit* long_end_[kMaxDeltaClasses];  // where the next difference of each class goes
    DeltaHeader header_ = {};
    DeltaStarts starts_;
    BitWriter extra_;
};

// Estimates the bytes of a delta stream of `n` >= 1 units from a sample. `rule` receives the rule
// for encoding it.
inline std::size_t estimate_delta(const uint8_t* src, const uint8_t* base, std::size_t n,
                                  uint32_t unit_nbytes, bool is_float, Level level,
                                  DeltaSample& sample, DeltaRule& rule) {
    with_units(unit_nbytes, is_float, [&]<class Unit, bool kFloat>() {
        take_delta_sample<Unit, kFloat>(src, base, n, sample);
    });
    return choose_delta_rule(sample, n, 8 * unit_nbytes, level, rule);
}

// Reads the base's units for a chunk, and casts them.
inline void take_in_base(const Base& base, std::size_t first, std::size_t n, uint32_t unit_nbytes,
                         uint8_t* dst, const ContentLeaves& leaves, Isa isa) {
    const uint8_t* const from = base.at(first, unit_nbytes);
    if (base.cast == Cast::kNone) return take_in(from, n * unit_nbytes, dst, leaves, isa);
    visit_source(from, 4 * n, leaves, isa,
                 [&](const uint8_t* piece, std::size_t at, std::size_t nbytes) {
                     cast_units(piece, nbytes / 4, base.cast,
                                reinterpret_cast<uint16_t*>(dst + at / 2), isa);
                 });
}

// Encodes a chunk of `n` >= 1 units as differences from as many units of a base, if that takes less
// than about `plain_nbytes`. Returns whether it did; `nbytes` is then the length of the stream.
// `words` has room for two bytes for each unit and kPlaneSlack, `escapes` for one byte for each
// unit.
inline bool encode_delta(const uint8_t* src, const uint8_t* base, std::size_t n,
                         uint32_t unit_nbytes, bool is_float, std::size_t plain_nbytes, Level level,
                         DeltaScratch& scratch, uint8_t* words, uint8_t* escapes,
                         RansEncodeMemory& tables, uint8_t* dst, std::size_t& nbytes, Isa isa) {
    nbytes = 0;
    DeltaRule rule;
    const std::size_t estimate =
        estimate_delta(src, base, n, unit_nbytes, is_float, level, *scratch.sample, rule);
    if (estimate + estimate / 64 >= plain_nbytes) return false;
    nbytes = with_units(unit_nbytes, is_float, [&]<class Unit, bool kFloat>() {
        return DeltaChunkEncoder<Unit, kFloat>(scratch, rule, n, isa)
            .encode(src, base, level, words + 2 * n + kPlaneSlack, escapes + n, tables, dst,
                    n * unit_nbytes);
    });
    return nbytes > 0;
}

}  // namespace packhorse
