// How a tensor is cut, and whether it is packed as most tensors are: floats whose last plane is
// noise, at a level below `max`, plane by plane. That takes a glance at a few samples. All other
// tensors need a plan (src/packhorse/codecs/plan.py).
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

// Calls visit(n_rows, n_columns) for each view: the first dimension makes the rows, or all but the
// last do.
template <class Visit>
inline void for_each_side_view(const std::vector<uint64_t>& shape, std::size_t n_units,
                               const Visit& visit) {
    constexpr SideLimits limits;
    if (shape.size() < 2 || n_units < limits.min_units) return;
    const auto try_view = [&](std::size_t n_rows) {
        const std::size_t n_columns = n_units / n_rows;
        const std::size_t n_side = n_rows + n_columns;
        if (std::min(n_rows, n_columns) >= limits.min_side && n_side <= kMaxSideNbytes &&
            n_side * limits.units_per_byte <= n_units)
            visit(n_rows, n_columns);
    };
    std::size_t n_rows = shape[0];
    try_view(n_rows);
    for (std::size_t d = 1; d + 1 < shape.size(); ++d) n_rows *= shape[d];
    if (shape.size() > 2) try_view(n_rows);
}

// Below `max`, prediction must save one part of plane 0 in kSideMustSave, because it makes decoding
// slower.
constexpr std::size_t kSideMustSave = 8;
constexpr std::size_t kSideSampleRows = 32, kSideSampleColumns = 512;

// Whether side data would save enough.
inline bool gains_from_side(const uint8_t* src, const std::vector<uint64_t>& shape,
                            const Geometry& geometry, Isa isa) {
    bool gains = false;
    for_each_side_view(shape, geometry.n_units, [&](std::size_t n_rows, std::size_t n_columns) {
        if (gains) return;
        const SideEstimate found = estimate_side(src, n_rows, n_columns, geometry.spec,
                                                 kSideSampleRows, kSideSampleColumns, isa);
        gains = found.predicted_nbytes < found.plain_nbytes &&
                found.plain_nbytes - found.predicted_nbytes > found.plain_nbytes / kSideMustSave;
    });
    return gains;
}

// Estimates the bytes of a sampled plane from the entropy of some of its units.
inline std::size_t glance_at_plane(const uint8_t* plane, std::size_t n) {
    constexpr uint32_t kGlanceUnits = 1024;
    if (is_constant(plane, n, 1)) return 0;
    Histogram histogram;
    count_bytes(plane, n, sample_log_for(n, kGlanceUnits), histogram);
    return std::min(n, scale_cost(entropy_cost(histogram), histogram.total, n));
}

// Whether the planes of a sample look like those of weights: the last one is noise, and all
// together save something, but not so much that a sample may mislead.
inline bool looks_like_weights(const uint8_t* src, const Geometry& geometry, Isa isa) {
    const std::size_t run = std::min(geometry.n_units, kPlaneSampleRun);
    const std::size_t n_runs = std::min(kBlockUnits / kPlaneSampleRun, geometry.n_units / run);
    const std::size_t n = run * n_runs, stride = n + kPlaneSlack;
    const Scratch rows(geometry.spec.n_planes * stride);
    const SampleRuns runs(geometry.n_units, run, n_runs);
    for (std::size_t r = 0; r < n_runs; ++r)
        sample_planes(src + runs(r) * geometry.spec.unit_nbytes, run, geometry,
                      rows.get() + r * run, stride, isa);
    std::size_t sum = 0, last = 0;
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p) {
        last = glance_at_plane(rows.get() + p * stride, n);
        sum += last;
    }
    // A tensor of one plane has its exponents there, so less of it is noise. The few units of a
    // short tensor seem to be less noisy than they are.
    const bool is_short = geometry.n_units < kBlockUnits;
    const std::size_t sixteenths = geometry.spec.n_planes == 1 ? 7 : is_short ? 10 : 14;
    if (16 * last <= sixteenths * n) return false;
    const std::size_t total = n * geometry.spec.n_planes;
    const bool is_whole = n == geometry.n_units;
    return (is_whole || 100 * sum >= 55 * total) && 128 * sum <= 127 * total;
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
