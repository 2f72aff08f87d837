// Estimates the bytes that a tensor would take, from samples of it, for its plan (codecs/plan.py).
// Only the ratio depends on a plan, so it does no harm if the source changes meanwhile and the
// estimate is wrong.
// Weights are alike everywhere in a tensor, so a few samples show how many bytes they take. A
// tensor that seems to take far fewer bytes does not hold ordinary weights, and samples may have
// missed most of its content. So it is examined again, chunk by chunk.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tensor/tensor.hpp"

namespace packhorse {

struct PlaneEstimate {
    Mode mode;
    std::size_t nbytes;
};

// The runs of a sample. Their places are irregular, because regular places might miss parts of
// periodic data.
class SampleRuns {
  public:
    // `n_runs` >= 1 runs of `run` units in [0, n), which do not overlap.
    SampleRuns(std::size_t n, std::size_t run, std::size_t n_runs)
        : gap_(n / n_runs), room_(gap_ - run) {}

    // Returns where run `r` begins.
    std::size_t operator()(std::size_t r) const {
        const uint64_t mixed = (r + 1) * 0x9E3779B97F4A7C15;
        return r * gap_ + static_cast<std::size_t>((mixed >> 40) * (room_ + 1) >> 24);
    }

  private:
    std::size_t gap_;
    std::size_t room_;
};

constexpr std::size_t kPlaneSampleRun = 512;

// Splits units, or copies units that are not split. Planes are `stride` bytes apart.
inline void sample_planes(const uint8_t* from, std::size_t n, const Geometry& geometry,
                          uint8_t* rows, std::size_t stride, Isa isa) {
    uint8_t* planes[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p) planes[p] = rows + p * stride;
    if (geometry.spec.splits())
        split_planes(from, n, geometry.spec, planes, isa);
    else
        std::memcpy(planes[0], from, n);
}

// Estimates the mode and the bytes of each plane by encoding some whole chunks of the tensor, which
// are evenly spread. Differences from a base count as plane 0.
inline std::vector<PlaneEstimate> encode_some(const uint8_t* src, const Geometry& geometry,
                                              const Base& base, std::size_t plain_nbytes,
                                              Level level, Isa isa) {
    constexpr std::size_t kTrialNbytes = std::size_t{1} << 22;
    const uint32_t unit = geometry.spec.unit_nbytes;
    const std::size_t most = std::max<std::size_t>(1, kTrialNbytes / geometry.chunk_nbytes());
    const std::size_t n_trials = std::min(geometry.n_chunks(), most);
    Geometry part = geometry;
    part.n_units = std::min(geometry.n_units, n_trials * geometry.chunk_units);
    // Copies of source and base, which nobody changes, and after them output and hashes.
    const std::size_t row = round_up(part.nbytes(), kFrameAlignment) + kPlaneSlack;
    const std::size_t n_digests = 16 * (n_leaves(part.nbytes()) + 1);
    const Scratch memory(3 * row + n_digests + kXxh3LongMinNbytes);
    uint8_t* const units = memory.get();
    uint8_t* const bases = units + row;
    uint8_t* const digests = bases + 2 * row;
    part.n_units = 0;
    for (std::size_t trial = 0; trial < n_trials; ++trial) {
        const std::size_t chunk =
            n_trials > 1 ? trial * (geometry.n_chunks() - 1) / (n_trials - 1) : 0;
        const std::size_t first = chunk * geometry.chunk_units, n = geometry.units_of(chunk);
        uint8_t* const at = bases + part.n_units * unit;
        std::memcpy(units + part.n_units * unit, src + first * unit, n * unit);
        if (base.units != nullptr) {
            const uint8_t* const from = chunk_base(base, first, n, unit, at, isa);
            if (from != at) std::memcpy(at, from, n * unit);
        }
        part.n_units += n;
    }
    EncodeContext context{
        level, {}, base, scale_bytes(plain_nbytes, part.n_units, geometry.n_units)};
    if (base.units != nullptr) {
        context.base.units = bases;
        context.base.cast = Cast::kNone;
    }
    uint8_t* const tails = digests + n_digests;
    std::vector<uint32_t> table(part.n_chunks() * part.row_length());
    const EncodeOutput output{bases + row, table.data(), {digests, tails}};
    encode_tensor(units, part, context, output, 1, isa);
    std::vector<PlaneEstimate> estimates(part.spec.n_planes, {Mode::kConstant, 0});
    std::vector<std::size_t> largest(part.spec.n_planes);
    for (std::size_t chunk = 0; chunk < part.n_chunks(); ++chunk)
        for (uint32_t p = 0; p < part.spec.n_planes; ++p) {
            const uint32_t descriptor = table[chunk * part.row_length() + 1 + p];
            const std::size_t nbytes = descriptor_nbytes(descriptor);
            estimates[p].nbytes += nbytes;
            if (nbytes <= largest[p]) continue;
            largest[p] = nbytes;
            estimates[p].mode = descriptor_mode(descriptor);
        }
    for (PlaneEstimate& plane : estimates)
        plane.nbytes = scale_bytes(plane.nbytes, geometry.n_units, part.n_units);
    return estimates;
}

struct TensorEstimate {
    std::vector<PlaneEstimate> planes;
    bool is_odd;  // whether it was examined again
};

// Estimates the mode and the bytes of each plane of a tensor from at most `n_samples` >= 1 times
// 4096 units. The tensor has at least one unit, and items of one byte.
inline TensorEstimate estimate_tensor(const uint8_t* src, const Geometry& geometry, Level level,
                                      std::size_t n_samples, Isa isa) {
    const std::size_t run = std::min(geometry.n_units, kPlaneSampleRun);
    const std::size_t n_runs =
        std::min(n_samples * (kBlockUnits / kPlaneSampleRun), geometry.n_units / run);
    const std::size_t n = run * n_runs;
    const std::size_t stride = n + kPlaneSlack;
    const Scratch rows(geometry.spec.n_planes * stride);
    const SampleRuns runs(geometry.n_units, run, n_runs);
    for (std::size_t r = 0; r < n_runs; ++r)
        sample_planes(src + runs(r) * geometry.spec.unit_nbytes, run, geometry,
                      rows.get() + r * run, stride, isa);
    // Each chunk has headers of its own, so the estimate is for one chunk.
    const std::size_t chunk_units =
        std::min(geometry.n_units, kChunkNbytes / geometry.spec.unit_nbytes);
    const auto n_chunks = static_cast<double>(geometry.n_units) / static_cast<double>(chunk_units);
    std::vector<PlaneEstimate> estimates;
    std::size_t sum = 0;
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p) {
        PlaneChoice choice;
        const std::size_t nbytes = choose_mode(rows.get() + p * stride, n, std::max(n, chunk_units),
                                               geometry.spec.n_planes, level, choice);
        estimates.push_back(
            {choice.mode, static_cast<std::size_t>(n_chunks * static_cast<double>(nbytes))});
        sum += estimates.back().nbytes;
    }
    if (n == geometry.n_units || 2 * sum >= geometry.nbytes()) return {estimates, false};
    Geometry cut = geometry;
    cut.chunk_units =
        (level == Level::kMax ? kClassedChunkNbytes : kChunkNbytes) / geometry.spec.unit_nbytes;
    return {encode_some(src, cut, {}, 0, level, isa), true};
}

constexpr std::size_t kNibbleSampleNbytes = 16384;

// Adds the values of every `step`-th byte.
inline void count_every(const uint8_t* bytes, std::size_t n, std::size_t step, Histogram& out) {
    for (std::size_t i = 0; i < n; i += step, ++out.total) ++out.counts[bytes[i]];
}

// Estimates the bytes of a stream of `n` units by one model of the values in a sample. The units
// that a model was made from cost less by it than others: about (values - 1) / (2 ln 2) bits in
// all, and other units as much more. That is so for this sample, and again for the one of the
// encoder.
inline std::size_t cost_by_model(const Histogram& sample, std::size_t n, Level level) {
    SymbolCounts symbols;
    list_symbols(sample, symbols);
    const std::size_t counted = std::min<std::size_t>(n, level_spec(level).sample_units);
    const uint64_t again = counted < n ? uint64_t{kBiasCost} * sample.total / counted : 0;
    const uint64_t cost = nearest_cost(symbols) + (symbols.n - 1) * (kBiasCost + again);
    const std::size_t nbytes = model_nbytes(symbols.n) + scale_cost(cost, symbols.total, n);
    return kModelOffset + (std::size_t{4} << choose_lanes_log_alone(n, nbytes)) + nbytes;
}

struct NibbleEstimate {
    std::size_t nbytes;         // in mode nibbles
    std::size_t planes_nbytes;  // if each byte of a unit had a model of its own
};

// Estimates the bytes of `n` >= 1 units from at most `n_samples` >= 1 samples. Both numbers come
// from the same sample, so their difference is more exact than they are.
inline NibbleEstimate estimate_nibble_tensor(const uint8_t* src, std::size_t n,
                                             uint32_t unit_nbytes, Level level,
                                             std::size_t n_samples) {
    const std::size_t run = std::min(n, kPlaneSampleRun / unit_nbytes);
    const std::size_t n_runs =
        std::min(n_samples * (kNibbleSampleNbytes / kPlaneSampleRun), n / run);
    const std::size_t nbytes = n * unit_nbytes;
    const std::size_t chunk = std::min(nbytes, kNibbleChunkNbytes);
    const std::size_t plane = std::min(nbytes, kChunkNbytes) / unit_nbytes;
    const SampleRuns runs(n, run, n_runs);
    Histogram bytes = {};
    std::size_t planes = 0;
    for (uint32_t p = 0; p < unit_nbytes; ++p) {
        Histogram values = {};
        for (std::size_t r = 0; r < n_runs; ++r)
            count_every(src + runs(r) * unit_nbytes + p, run * unit_nbytes - p, unit_nbytes,
                        values);
        for (uint32_t v = 0; v < 256; ++v) bytes.counts[v] += values.counts[v];
        bytes.total += values.total;
        planes += cost_by_model(values, plane, level);
    }
    const std::size_t packed = cost_by_model(count_halves(bytes), 2 * chunk, level);
    return {scale_bytes(packed, nbytes, chunk), scale_bytes(planes, n, plane)};
}

// Joins pieces of a tensor of differences, which are spread evenly, to one chunk, and encodes it.
// Returns the estimated bytes of the tensor. Reading the whole tensor would take as long as
// encoding it. A few chunks would show as much only if all chunks were alike, which updates of
// embeddings are not.
inline std::size_t encode_pieces(const uint8_t* src, const Geometry& geometry, const Base& base,
                                 std::size_t plain_nbytes, Level level, Isa isa) {
    constexpr std::size_t kPieceUnits = 4096;
    const uint32_t unit = geometry.spec.unit_nbytes;
    Geometry part = geometry;
    part.n_units = part.chunk_units = geometry.chunk_units;
    const std::size_t n_pieces = part.n_units / kPieceUnits;
    const Scratch memory(2 * part.nbytes() + 2 * kFrameAlignment);
    uint8_t* const units = memory.get();
    uint8_t* const bases = units + round_up(part.nbytes(), kFrameAlignment);
    const SampleRuns runs(geometry.n_units, kPieceUnits, n_pieces);
    for (std::size_t p = 0; p < n_pieces; ++p) {
        const std::size_t first = runs(p);
        uint8_t* const at = bases + p * kPieceUnits * unit;
        std::memcpy(units + p * kPieceUnits * unit, src + first * unit, kPieceUnits * unit);
        const uint8_t* const from = chunk_base(base, first, kPieceUnits, unit, at, isa);
        if (from != at) std::memcpy(at, from, kPieceUnits * unit);
    }
    Base copy = base;
    copy.units = bases;
    copy.cast = Cast::kNone;
    std::size_t sum = 0;
    for (const PlaneEstimate& plane : encode_some(units, part, copy, plain_nbytes, level, isa))
        sum += plane.nbytes;
    return scale_bytes(sum, geometry.n_units, part.n_units);
}

constexpr std::size_t kDeltaSections = 4;
// In a training step, more than one in kFewDiffer bf16 weights changes. If fewer change, a sample
// may contain any number of them.
constexpr std::size_t kFewDiffer = 16;

// Estimates the bytes of units [first, first + n) of a tensor as differences from a base, in
// chunks.
inline std::size_t estimate_delta_section(const uint8_t* src, const Geometry& geometry,
                                          const Base& base, std::size_t first, std::size_t n,
                                          Level level, DeltaSample& sample, Isa isa) {
    const uint32_t unit = geometry.spec.unit_nbytes;
    const std::size_t run = std::min(n, kDeltaSampleRun);
    const std::size_t n_runs =
        std::max<std::size_t>(1, std::min(kLeastDeltaSample, n) / kDeltaSampleRun);
    const std::size_t n_there = run * n_runs;
    const Scratch memory(2 * n_there * unit + 2 * run);
    uint8_t* const units = memory.get();
    uint8_t* const bases = units + n_there * unit;
    const SampleRuns runs(n, run, n_runs);
    for (std::size_t r = 0; r < n_runs; ++r) {
        const std::size_t at = first + runs(r);
        std::memcpy(units + r * run * unit, src + at * unit, run * unit);
        const uint8_t* const from = chunk_base(base, at, run, unit, bases + n_there * unit, isa);
        std::memcpy(bases + r * run * unit, from, run * unit);
    }
    with_units(unit, base.is_float, [&]<class Unit, bool kFloat>() {
        take_delta_sample<Unit, kFloat>(units, bases, n_there, sample);
    });
    DeltaRule rule;
    const std::size_t chunk_units = std::min(n, geometry.chunk_units);
    const std::size_t nbytes = choose_delta_rule(sample, chunk_units, 8 * unit, level, rule);
    return scale_bytes(nbytes, n, chunk_units);
}

// Estimates the bytes of a tensor of at least one unit if each chunk may be differences from a
// base. Without the base, the tensor takes `plain_nbytes`. Returns 0 if it equals the base.
inline std::size_t estimate_delta_tensor(const uint8_t* src, const Geometry& geometry,
                                         const Base& base, std::size_t plain_nbytes, Level level,
                                         Isa isa) {
    if (base.cast == Cast::kNone && std::memcmp(src, base.units, geometry.nbytes()) == 0) return 0;
    const auto sample = std::make_unique<DeltaSample>();
    const std::size_t n_sections = std::min(kDeltaSections, geometry.n_chunks());
    std::size_t sum = 0, n_seen = 0, n_equal = 0;
    for (std::size_t s = 0; s < n_sections; ++s) {
        const std::size_t first = s * geometry.n_units / n_sections;
        const std::size_t n = (s + 1) * geometry.n_units / n_sections - first;
        sum += std::min(estimate_delta_section(src, geometry, base, first, n, level, *sample, isa),
                        scale_bytes(plain_nbytes, n, geometry.n_units));
        n_seen += sample->n;
        n_equal += static_cast<std::size_t>(
            std::count(sample->differences, sample->differences + sample->n, uint64_t{0}));
    }
    // If the plain tensor takes very few bytes, its sections may have very different shares of
    // them.
    if (kFewDiffer * (n_seen - n_equal) >= n_seen && 2 * plain_nbytes >= geometry.nbytes())
        return sum;
    if (geometry.n_chunks() > 4)
        return encode_pieces(src, geometry, base,
                             scale_bytes(plain_nbytes, geometry.chunk_units, geometry.n_units),
                             level, isa);
    sum = 0;
    for (const PlaneEstimate& plane : encode_some(src, geometry, base, plain_nbytes, level, isa))
        sum += plane.nbytes;
    return sum;
}

}  // namespace packhorse
