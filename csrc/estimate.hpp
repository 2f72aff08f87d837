// What a tensor would take, from samples of it: for the plan (codecs/plan.py), which nothing but
// the ratio hangs on. A source that changes meanwhile gives another estimate and no harm.
#pragma once

#include "tensor.hpp"

namespace packhorse {

struct PlaneEstimate {
    Mode mode;
    std::size_t nbytes;
};

// Splits `n_samples` runs of `run` units, spread over the tensor; rows of planes are `stride` bytes
// apart.
inline void sample_planes(const uint8_t* src, const Geometry& geometry, std::size_t run,
                          std::size_t n_samples, uint8_t* rows, std::size_t stride, Isa isa) {
    const std::size_t gap = n_samples > 1 ? (geometry.n_units - run) / (n_samples - 1) : 0;
    for (std::size_t s = 0; s < n_samples; ++s) {
        const uint8_t* from = src + s * gap * geometry.spec.unit_nbytes;
        uint8_t* planes[kMaxPlanes];
        for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
            planes[p] = rows + p * stride + s * run;
        if (geometry.spec.splits())
            split_planes(from, run, geometry.spec, planes, isa);
        else
            std::memcpy(planes[0], from, run);
    }
}

// What each plane of a tensor of at least one unit, with items of one byte, would be and take, from
// at most `n_samples` >= 1 runs of 4096 units.
inline std::vector<PlaneEstimate> estimate_tensor(const uint8_t* src, const Geometry& geometry,
                                                  Level level, std::size_t n_samples, Isa isa) {
    const std::size_t run = std::min(geometry.n_units, kBlockUnits);
    n_samples = std::min(n_samples, geometry.n_units / run);
    const std::size_t n = run * n_samples;
    const std::size_t stride = n + kPlaneSlack;
    const Scratch rows(geometry.spec.n_planes * stride);
    sample_planes(src, geometry, run, n_samples, rows.get(), stride, isa);
    // Headers count once a chunk, so the estimate is for a chunk.
    const std::size_t chunk_units =
        std::min(geometry.n_units, kChunkNbytes / geometry.spec.unit_nbytes);
    const auto n_chunks = static_cast<double>(geometry.n_units) / static_cast<double>(chunk_units);
    std::vector<PlaneEstimate> estimates;
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p) {
        PlaneChoice choice;
        const std::size_t nbytes =
            choose_mode(rows.get() + p * stride, n, std::max(n, chunk_units), level, choice);
        estimates.push_back(
            {choice.mode, static_cast<std::size_t>(n_chunks * static_cast<double>(nbytes))});
    }
    return estimates;
}

constexpr std::size_t kDeltaSections = 4;

// What units [first, first + n) of a tensor would take as differences from a base, in chunks.
inline std::size_t estimate_delta_section(const uint8_t* src, const Geometry& geometry,
                                          const Base& base, std::size_t first, std::size_t n,
                                          DeltaSample& sample, Isa isa) {
    const uint32_t unit = geometry.spec.unit_nbytes;
    const std::size_t run = std::min(n, kDeltaSampleRun);
    const std::size_t n_runs =
        std::max<std::size_t>(1, std::min(kLeastDeltaSample, n) / kDeltaSampleRun);
    const std::size_t gap = n_runs > 1 ? (n - run) / (n_runs - 1) : 0;
    const std::size_t n_there = run * n_runs;
    const Scratch memory(2 * n_there * unit + 2 * run);
    uint8_t* const units = memory.get();
    uint8_t* const bases = units + n_there * unit;
    for (std::size_t r = 0; r < n_runs; ++r) {
        const std::size_t at = first + r * gap;
        std::memcpy(units + r * run * unit, src + at * unit, run * unit);
        const uint8_t* const from = chunk_base(base, at, run, unit, bases + n_there * unit, isa);
        std::memcpy(bases + r * run * unit, from, run * unit);
    }
    with_units(unit, base.is_float, [&]<class Unit, bool kFloat>() {
        take_delta_sample<Unit, kFloat>(units, bases, n_there, sample);
    });
    DeltaRule rule;
    const std::size_t chunk_units = std::min(n, geometry.chunk_units);
    return scale_bytes(choose_delta_rule(sample, chunk_units, 8 * unit, rule), n, chunk_units);
}

// What a tensor of at least one unit would take if chunks chose between differences from a base and
// `plain_nbytes` for all of them; 0 if it equals the base.
inline std::size_t estimate_delta_tensor(const uint8_t* src, const Geometry& geometry,
                                         const Base& base, std::size_t plain_nbytes, Isa isa) {
    if (base.cast == Cast::kNone && std::memcmp(src, base.units, geometry.nbytes()) == 0) return 0;
    const auto sample = std::make_unique<DeltaSample>();
    const std::size_t n_sections = std::min(kDeltaSections, geometry.n_chunks());
    std::size_t sum = 0;
    for (std::size_t s = 0; s < n_sections; ++s) {
        const std::size_t first = s * geometry.n_units / n_sections;
        const std::size_t n = (s + 1) * geometry.n_units / n_sections - first;
        sum += std::min(estimate_delta_section(src, geometry, base, first, n, *sample, isa),
                        scale_bytes(plain_nbytes, n, geometry.n_units));
    }
    return sum;
}

}  // namespace packhorse
