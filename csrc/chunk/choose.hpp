// Chooses the mode of each plane of a chunk by its cost, which is estimated from samples within the
// limits of the level. All arithmetic is in integers, so that every machine makes the same choices.
#pragma once

#include <algorithm>

#include "chunk/chunk.hpp"
#include "planes/classed.hpp"
#include "planes/histogram.hpp"
#include "planes/palette.hpp"
#include "rans/model.hpp"

namespace packhorse {

enum class Level : int { kFast = 1, kDefault = 2, kMax = 3 };

struct LevelSpec {
    bool entropy;                // rANS allowed
    uint32_t sample_units;       // units that a model is made from
    uint32_t min_saving_log;     // a plane is coded if that saves more than 1 part in 2^this
    uint32_t alone_saving_log;   // the same for units that are one plane
    uint32_t lead_saving_log;    // the same for letting plane 0 lead plane 1
    uint32_t lead_sample_units;  // units that the classes of a led plane are made from
    uint32_t palette_raw_bits;   // raw bits tried for palettes
    uint32_t shift_slack_log;  // differences may take 1 part in 2^this more than at the best shift
};

constexpr LevelSpec level_spec(Level level) {
    switch (level) {
        case Level::kFast:
            return {false, 4096, 5, 5, 0, 0, 6, 5};
        case Level::kDefault:
            return {true, 16384, 5, 6, 7, 65536, 0, 5};
        default:
            return {true, ~0u, 10, 10, 16, ~0u, 0, 63};
    }
}

// More lanes decode faster; fewer lanes cost less in a small plane (about a byte for each).
constexpr uint32_t choose_lanes_log(std::size_t n) {
    return n >= 8192 ? kMaxLanesLog : n >= 1024 ? kShortLanesLog : kMinLanesLog;
}

// The same for the only plane of a chunk. Other planes carry what states take, and here they add to
// the stream, of about `nbytes` bytes: at most 1/16 of it.
constexpr uint32_t choose_lanes_log_alone(std::size_t n, std::size_t nbytes) {
    const auto fits = [=](uint32_t lanes_log) { return std::size_t{64} << lanes_log <= nbytes; };
    const uint32_t most = fits(kMaxLanesLog)     ? kMaxLanesLog
                          : fits(kShortLanesLog) ? kShortLanesLog
                                                 : kMinLanesLog;
    return std::min(choose_lanes_log(n), most);
}

struct PlaneChoice {
    Mode mode = Mode::kStored;
    uint32_t lanes_log = kMaxLanesLog;  // modes rANS and classed rANS
    std::size_t look_nbytes = 0;  // what a first look at the plane estimated; not at level max
    PaletteModel palette;
    ClassRule rule;                 // mode classed rANS
    RansModel models[kMaxClasses];  // the first for mode rANS
};

inline uint32_t sample_log_for(std::size_t n, uint32_t sample_units) {
    uint32_t log = 0;
    while (log < 8 && (n >> (log + 1)) >= sample_units) ++log;
    return log;
}

// Estimates the bytes of a palette for `n` units. `all_bits` returns the bits that are set in any
// of them.
template <class AllBits>
inline std::size_t palette_estimate(const SymbolCounts& symbols, std::size_t n,
                                    uint32_t most_raw_bits, const AllBits& all_bits,
                                    PaletteModel& model) {
    const uint64_t bits = choose_palette(symbols, most_raw_bits, all_bits, model);
    return kPaletteHeaderNbytes + 8 + bits * n / symbols.total / 8;
}

// Estimates the bytes of an rANS stream. Returns `limit` if the stream cannot be shorter than that.
inline std::size_t rans_estimate(const SymbolCounts& symbols, std::size_t n, uint32_t n_planes,
                                 std::size_t limit, PlaneChoice& choice) {
    // No model can beat this.
    if (scale_cost(entropy_cost(symbols), symbols.total, n) >= limit) return limit;
    const std::size_t nbytes = choose_model(symbols, n, choice.models[0]);
    if (nbytes >= limit) return limit;
    choice.lanes_log = n_planes == 1 ? choose_lanes_log_alone(n, nbytes) : choose_lanes_log(n);
    return kModelOffset + (std::size_t{3} << choice.lanes_log) + nbytes;
}

// Mantissas are most of the data and do not compress: a small sample is enough to see that.
constexpr std::size_t kGlanceUnits = 1024;

// No stream of rANS or of a palette that is not constant is shorter than this and its entropy.
constexpr std::size_t kLeastStreamNbytes = std::min(
    kModelOffset + (std::size_t{3} << kMinLanesLog) + model_nbytes(2), kPaletteHeaderNbytes + 8);

// Chooses a palette, rANS or to store the plane, by what was counted. Returns the estimated bytes,
// or `n` if storing is best: a coder must take less than `worth`.
template <class AllBits>
inline std::size_t choose_coder(const SymbolCounts& symbols, std::size_t n, uint32_t n_planes,
                                std::size_t worth, const LevelSpec& spec, const AllBits& all_bits,
                                PlaneChoice& choice) {
    choice.mode = Mode::kStored;
    std::size_t best = worth;
    const std::size_t palette_nbytes =
        palette_estimate(symbols, n, spec.palette_raw_bits, all_bits, choice.palette);
    if (palette_nbytes < best) {
        best = palette_nbytes;
        choice.mode = Mode::kPalette;
    }
    if (spec.entropy) {
        // A palette decodes several times faster, so it is preferred at about the same size.
        const std::size_t margin = choice.mode == Mode::kPalette ? best / 64 : 0;
        const std::size_t rans_nbytes = rans_estimate(symbols, n, n_planes, best, choice);
        if (rans_nbytes + margin < best) {
            best = rans_nbytes;
            choice.mode = Mode::kRans;
        }
    }
    return choice.mode == Mode::kStored ? n : best;
}

// Takes a first look at `n_there` units of a plane. Returns the estimated bytes of `n` units.
inline std::size_t look_at_plane(const uint8_t* plane, std::size_t n_there, std::size_t n,
                                 Histogram& histogram) {
    count_bytes(plane, n_there, sample_log_for(n_there, kGlanceUnits), histogram);
    return std::min(n, scale_cost(entropy_cost(histogram), histogram.total, n));
}

// Chooses a mode for a plane of `n` units, one of `n_planes`. The caller gives `n_there` units:
// all, or a sample. Returns the estimated bytes, or `n` if storing the plane is best.
inline std::size_t choose_mode(const uint8_t* plane, std::size_t n_there, std::size_t n,
                               uint32_t n_planes, Level level, PlaneChoice& choice) {
    choice.mode = Mode::kConstant;
    choice.look_nbytes = 0;
    if (is_constant(plane, n_there, 1)) return 1;
    choice.mode = Mode::kStored;
    const LevelSpec spec = level_spec(level);
    const std::size_t worth =
        n - (n >> (n_planes == 1 ? spec.alone_saving_log : spec.min_saving_log));
    Histogram histogram;
    const uint32_t sample_log = sample_log_for(n_there, spec.sample_units);
    uint32_t counted_log = ~0u;
    if (level != Level::kMax) {
        counted_log = sample_log_for(n_there, kGlanceUnits);
        choice.look_nbytes = look_at_plane(plane, n_there, n, histogram);
        if (choice.look_nbytes >= worth) return n;
        if (n_there == n && !histogram.sampled &&
            scale_cost(least_cost(histogram), histogram.total, n) + kLeastStreamNbytes >= worth)
            return n;
    }
    if (counted_log != sample_log) count_bytes(plane, n_there, sample_log, histogram);
    histogram.sampled |= n_there < n;
    SymbolCounts symbols;
    list_symbols(histogram, symbols);
    // A palette that only drops bits needs those of all units, and to read them takes up to a
    // twentieth of a call. The bits of a sample are at most these. So if rANS beats a palette of
    // those, all units need not be read.
    const std::size_t best = choose_coder(
        symbols, n, n_planes, worth, spec, [&] { return bits_in_use(symbols); }, choice);
    if (choice.mode != Mode::kPalette || choice.palette.code_bits > 0 || !symbols.sampled)
        return best;
    return choose_coder(
        symbols, n, n_planes, worth, spec, [&] { return used_bits(plane, n_there, 0xFF); }, choice);
}

// Chooses the model of one class: narrow, or with as many codes as fit registers. A class without
// units, or with a single symbol, gets a model that costs next to nothing. Symbols are below
// `n_symbols`. Returns the estimated bytes.
inline std::size_t choose_class_model(const uint8_t* units, std::size_t n, uint32_t sample_units,
                                      uint32_t raw_bits, uint32_t n_symbols, RansModel& model) {
    Histogram histogram;
    count_bytes(units, n, sample_log_for(n, sample_units), histogram);
    if (n > 0) {
        SymbolCounts bytes;
        list_symbols(histogram, bytes);
        const FoldedPlane folded = fold_plane(bytes, n, raw_bits);
        const auto try_limit = [&](uint32_t limit, RansModel& tried) {
            return try_codes(folded.symbols, folded.raw_nbytes, n, limit, raw_bits, tried);
        };
        std::size_t best = try_limit(kNarrowBuckets - 1, model);
        if (best != ~std::size_t{0}) {
            RansModel wide;
            const bool is_full = model.has_escape() && model.n_symbols == kNarrowBuckets - 1;
            const std::size_t nbytes = is_full ? try_limit(kWideBuckets - 1, wide) : best;
            if (nbytes + nbytes / 256 < best) {
                model = wide;
                best = nbytes;
            }
            settle_model(folded.symbols, model);
            return best;
        }
    }
    const auto symbol = static_cast<uint8_t>(n > 0 ? units[0] >> raw_bits : 0);
    const auto last = static_cast<uint8_t>(n_symbols - 1);
    model.raw_bits = raw_bits;
    model.n_symbols = model.n_codes = 2;
    model.symbols[0] = std::min(symbol, static_cast<uint8_t>(last - 1));
    model.symbols[1] = static_cast<uint8_t>(model.symbols[0] + 1);
    model.freqs[0] = model.symbols[0] == symbol ? kProbSum - 1 : 1;
    model.freqs[1] = static_cast<uint16_t>(kProbSum - model.freqs[0]);
    set_escape_byte(model);
    return model_nbytes(2) + n * raw_bits / 8;
}

// Chooses the models of all classes of a sorted plane. Returns the estimated bytes of the stream.
inline std::size_t choose_class_models(const uint8_t* sorted, const ClassStarts& starts,
                                       uint32_t sample_units, uint32_t raw_bits,
                                       PlaneChoice& choice) {
    const std::size_t n = starts.at[kMaxClasses];
    choice.lanes_log = choose_lanes_log(n);
    std::size_t nbytes = kClassedModelsOffset + (std::size_t{3} << choice.lanes_log);
    for (uint32_t c = 0; c < choice.rule.n_classes; ++c)
        nbytes +=
            choose_class_model(sorted + starts.at[c], starts.count(c), sample_units / kMaxClasses,
                               raw_bits, 256u >> raw_bits, choice.models[c]);
    return nbytes;
}

// If another plane leads a plane, its symbols consist of its upper bits; the bits below are noise.
constexpr uint32_t kLedRawBits = 4;
constexpr uint32_t kLedSymbols = 256u >> kLedRawBits;
constexpr uint32_t kMaxLeadGroups = 48;

// How often each symbol of a plane occurs with each group of neighbouring values of the lead.
struct JointHistogram {
    uint32_t total = 0;  // units
    uint32_t n_groups = 0;
    uint8_t first[kMaxLeadGroups];  // smallest value of the lead in a group
    uint32_t counts[kMaxLeadGroups][kLedSymbols];
};

// Counts a sample, as count_bytes() does. Every group but the last has at least 1/512 of it. Two
// tables take turns, so that equal neighbours do not wait for each other's store.
inline void count_jointly(const uint8_t* lead, const uint8_t* plane, std::size_t n,
                          uint32_t sample_log, JointHistogram& joint) {
    uint32_t counts[256][kLedSymbols] = {}, odd_counts[256][kLedSymbols] = {};
    const std::size_t step = kSampleRun << sample_log;
    std::size_t seen = 0;
    for (std::size_t at = 0; at < n; at += step) {
        const std::size_t end = std::min(at + kSampleRun, n);
        seen += end - at;
        for (std::size_t i = at; i + 2 <= end; i += 2) {
            ++counts[lead[i]][plane[i] >> kLedRawBits];
            ++odd_counts[lead[i + 1]][plane[i + 1] >> kLedRawBits];
        }
        if ((end - at) % 2 != 0) ++counts[lead[end - 1]][plane[end - 1] >> kLedRawBits];
    }
    for (uint32_t v = 0; v < 256; ++v)
        for (uint32_t s = 0; s < kLedSymbols; ++s) counts[v][s] += odd_counts[v][s];
    joint.total = static_cast<uint32_t>(seen);
    joint.n_groups = 0;
    std::size_t in_group = 0;
    for (uint32_t v = 0; v < 256; ++v) {
        std::size_t of_value = 0;
        for (uint32_t count : counts[v]) of_value += count;
        if (of_value == 0) continue;
        const bool opens =
            joint.n_groups == 0 || (in_group >= seen / 512 && joint.n_groups < kMaxLeadGroups);
        if (opens) {
            joint.first[joint.n_groups] = static_cast<uint8_t>(v);
            std::memset(joint.counts[joint.n_groups++], 0, sizeof joint.counts[0]);
            in_group = 0;
        }
        in_group += of_value;
        for (uint32_t s = 0; s < kLedSymbols; ++s)
            joint.counts[joint.n_groups - 1][s] += counts[v][s];
    }
}

// Computes the cost of the groups [begin, end) as one class, in 2^-16 bits.
inline uint64_t joint_cost(const JointHistogram& joint, uint32_t begin, uint32_t end) {
    uint64_t total = 0, cost = 0;
    uint32_t sums[kLedSymbols] = {};
    for (uint32_t g = begin; g < end; ++g)
        for (uint32_t s = 0; s < kLedSymbols; ++s) sums[s] += joint.counts[g][s];
    for (uint32_t sum : sums) total += sum;
    const SlotScale slots(total);
    for (uint32_t sum : sums) cost += uint64_t{sum} * kSymbolCost[std::max(slots.below(sum), 1u)];
    return cost;
}

// Finds the thresholds that cut the lead's values into at most four classes of least cost, by
// dynamic programming over the groups. Returns that cost, in 2^-16 bits.
inline uint64_t choose_thresholds(const JointHistogram& joint, ClassRule& rule) {
    const uint32_t n = joint.n_groups;
    rule.source = ClassSource::kLead;
    rule.n_classes = std::min(n, kMaxClasses);
    uint64_t best[kMaxClasses + 1][kMaxLeadGroups + 1];
    uint32_t cut[kMaxClasses + 1][kMaxLeadGroups + 1];
    for (uint32_t end = 1; end <= n; ++end) best[1][end] = joint_cost(joint, 0, end);
    for (uint32_t k = 2; k <= rule.n_classes; ++k)
        for (uint32_t end = k; end <= n; ++end) best[k][end] = ~uint64_t{0};
    for (uint32_t begin = 1; begin < n && rule.n_classes > 1; ++begin)
        for (uint32_t end = begin + 1; end <= n; ++end) {
            const uint64_t cost = joint_cost(joint, begin, end);
            for (uint32_t k = 2; k <= rule.n_classes && k <= begin + 1; ++k) {
                if (best[k - 1][begin] + cost >= best[k][end]) continue;
                best[k][end] = best[k - 1][begin] + cost;
                cut[k][end] = begin;
            }
        }
    uint32_t end = n;
    for (uint32_t k = rule.n_classes; k > 1; --k) {
        end = cut[k][end];
        rule.thresholds[k - 2] = joint.first[end];
    }
    return best[rule.n_classes][n];
}

}  // namespace packhorse
