// How a tensor is cut, and whether it is packed as most tensors are: floats whose last plane is
// noise, at a level below `max`, plane by plane. That takes a glance at a few samples; a short
// tensor is looked at while it is encoded. All others need a plan (src/packhorse/codecs/plan.py).
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "chunk/side_data.hpp"
#include "frame/dtypes.hpp"
#include "tensor/estimate.hpp"

namespace packhorse {

constexpr std::size_t kMinChunkNbytes = 1024;

// Cuts a tensor into chunks of about `chunk_nbytes`. A tensor of at most one and a half chunks is a
// single chunk, so that no short chunk is left over.
inline Geometry cut_tensor(uint32_t unit_nbytes, Split split, std::size_t nbytes,
                           std::size_t chunk_nbytes) {
    const std::size_t n_units = nbytes / unit_nbytes;
    auto log = static_cast<uint32_t>(std::bit_width(chunk_nbytes / unit_nbytes) - 1);
    if (chunk_nbytes < kMaxChunkNbytes && n_units > std::size_t{1} << log &&
        n_units <= std::size_t{3} << (log - 1))
        ++log;
    return Geometry(unit_nbytes, static_cast<int>(split), log, nbytes);
}

// The views of a tensor as a matrix that side data are tried for.
struct SideLimits {
    std::size_t min_units = std::size_t{1} << 15;
    std::size_t min_side = 16;        // rows, and columns: fewer predict too little
    std::size_t units_per_byte = 32;  // with fewer units, the side data cost too much
};

// Calls visit(n_row_dims, n_rows, n_columns) for each view: the first dimension makes the rows, or
// all but the last do.
template <class Visit>
inline void for_each_side_view(const std::vector<uint64_t>& shape, std::size_t n_units,
                               const Visit& visit) {
    constexpr SideLimits limits;
    if (shape.size() < 2 || n_units < limits.min_units) return;
    const auto try_view = [&](std::size_t n_row_dims, std::size_t n_rows) {
        const std::size_t n_columns = n_units / n_rows;
        const std::size_t n_side = n_rows + n_columns;
        if (std::min(n_rows, n_columns) >= limits.min_side && n_side <= kMaxSideNbytes &&
            n_side * limits.units_per_byte <= n_units)
            visit(n_row_dims, n_rows, n_columns);
    };
    std::size_t n_rows = shape[0];
    try_view(1, n_rows);
    for (std::size_t d = 1; d + 1 < shape.size(); ++d) n_rows *= shape[d];
    if (shape.size() > 2) try_view(shape.size() - 1, n_rows);
}

// What a sample must show. Below `max`, prediction must save more, because it makes decoding
// slower.
struct SideRule {
    std::size_t must_save;      // one part of plane 0 in this many
    std::size_t rows, columns;  // of the sample
};

constexpr SideRule side_rule(Level level) {
    return level == Level::kMax ? SideRule{128, 128, 4096} : SideRule{8, 32, 512};
}

// Whether side data would save enough at level `default`. A quarter of the sample shows half of
// what must be saved, or the rest is not looked at: with fewer rows, predictions seem better than
// they are, not worse.
inline bool gains_from_side(const uint8_t* src, const std::vector<uint64_t>& shape,
                            const Geometry& geometry, Isa isa) {
    constexpr SideRule rule = side_rule(Level::kDefault);
    bool gains = false;
    const auto try_view = [&](std::size_t, std::size_t n_rows, std::size_t n_columns) {
        const auto saves = [&](std::size_t rows, std::size_t columns, std::size_t must_save) {
            const SideEstimate found =
                estimate_side(src, n_rows, n_columns, geometry.spec, rows, columns, isa);
            return found.predicted_nbytes < found.plain_nbytes &&
                   found.plain_nbytes - found.predicted_nbytes > found.plain_nbytes / must_save;
        };
        gains = gains || (saves(rule.rows / 2, rule.columns / 2, 2 * rule.must_save) &&
                          saves(rule.rows, rule.columns, rule.must_save));
    };
    for_each_side_view(shape, geometry.n_units, try_view);
    return gains;
}

// Whether planes look like those of weights: the last one is noise, and all together save
// something, but not so much that a sample may mislead. Planes that are known to be constant need
// no plan either. `looks` are the estimated bytes of `n` units of each plane of a tensor.
inline bool look_like_weights(const std::size_t* looks, std::size_t n, const Geometry& geometry) {
    const uint32_t n_planes = geometry.spec.n_planes;
    std::size_t sum = 0;
    for (uint32_t p = 0; p < n_planes; ++p) sum += looks[p];
    const bool is_whole = n == geometry.n_units;
    if (is_whole && sum == 0) return true;
    // A tensor of one plane has its exponents there, so less of it is noise. The few units of a
    // short tensor seem to be less noisy than they are.
    const std::size_t n_units = geometry.n_units;
    const std::size_t sixteenths = n_planes == 1            ? 7
                                   : n_units < kGlanceUnits ? 8
                                   : n_units < kBlockUnits  ? 10
                                                            : 14;
    if (16 * looks[n_planes - 1] <= sixteenths * n) return false;
    const std::size_t total = n * n_planes;
    return (is_whole || 100 * sum >= 55 * total) && 128 * sum <= 127 * total;
}

// Looks at samples of a tensor, or at all of it if it is short.
inline bool looks_like_weights(const uint8_t* src, const Geometry& geometry, Isa isa) {
    const std::size_t run = geometry.n_units <= kBlockUnits ? geometry.n_units : kPlaneSampleRun;
    const std::size_t n_runs = std::min(kBlockUnits / run, geometry.n_units / run);
    const std::size_t n = run * n_runs, stride = n + kPlaneSlack;
    const Scratch rows(geometry.spec.n_planes * stride);
    const SampleRuns runs(geometry.n_units, run, n_runs);
    for (std::size_t r = 0; r < n_runs; ++r)
        sample_planes(src + runs(r) * geometry.spec.unit_nbytes, run, geometry,
                      rows.get() + r * run, stride, isa);
    std::size_t looks[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p) {
        const uint8_t* const plane = rows.get() + p * stride;
        Histogram histogram;
        looks[p] = is_constant(plane, n, 1) ? 0 : look_at_plane(plane, n, n, histogram);
    }
    return look_like_weights(looks, n, geometry);
}

// Whether the encoder itself looks at all of a tensor before it codes it, as looks_like_weights()
// would. It has no side data.
inline bool is_looked_at_whole(const Geometry& geometry) {
    return geometry.n_units > 0 && geometry.n_units <= kBlockUnits;
}

// Whether a tensor is packed plane by plane without a plan. `geometry` is cut_tensor() of it by its
// last split.
inline bool is_plain(const uint8_t* src, const DTypeRow& dtype, const std::vector<uint64_t>& shape,
                     const Geometry& geometry, Level level, Isa isa) {
    if (!dtype.is_float() || level == Level::kMax || geometry.n_units == 0) return false;
    return looks_like_weights(src, geometry, isa) &&
           (level == Level::kFast || !gains_from_side(src, shape, geometry, isa));
}

}  // namespace packhorse
