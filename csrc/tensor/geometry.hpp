// How a tensor is cut: the tensor into units, units into planes, and runs of units into chunks.
// Every operation on a tensor takes a Geometry, which the caller makes once.
#pragma once

#include <algorithm>
#include <bit>

#include "chunk/chunk.hpp"
#include "planes/classed.hpp"

namespace packhorse {

// Returns why a Geometry cannot be made from these numbers, or null if it can.
inline const char* geometry_fault(uint32_t unit_nbytes, int split, uint32_t chunk_log,
                                  std::size_t nbytes) {
    if (unit_nbytes != 1 && unit_nbytes != 2 && unit_nbytes != 4 && unit_nbytes != 8)
        return "unit_nbytes must be 1, 2, 4 or 8";
    if (split < 0 || split > 2) return "split must be 0, 1 or 2";
    if (split == 1 && unit_nbytes == 1) return "one-byte units are not split into bytes";
    if (chunk_log < kMinChunkLog || chunk_log > kMaxChunkLog) return "chunk_log is out of range";
    if (nbytes % unit_nbytes != 0) return "the length must be a multiple of unit_nbytes";
    if ((std::size_t{unit_nbytes} << chunk_log) > kMaxChunkNbytes)
        return "chunks must not be above 2 MiB";
    return nullptr;
}

// Make it only from numbers for which geometry_fault() returns null.
struct Geometry {
    PlaneSpec spec;
    Split split;
    std::size_t chunk_units;  // a power of two
    std::size_t n_units;

    Geometry(uint32_t unit_nbytes, int split, uint32_t chunk_log, std::size_t nbytes)
        : spec(plane_spec(unit_nbytes, static_cast<Split>(split))),
          split(static_cast<Split>(split)),
          chunk_units(std::size_t{1} << chunk_log),
          n_units(nbytes / unit_nbytes) {}

    bool operator==(const Geometry& other) const {
        return spec.unit_nbytes == other.spec.unit_nbytes && split == other.split &&
               chunk_units == other.chunk_units && n_units == other.n_units;
    }

    uint32_t chunk_log() const { return static_cast<uint32_t>(std::countr_zero(chunk_units)); }
    std::size_t n_chunks() const { return (n_units + chunk_units - 1) / chunk_units; }
    std::size_t units_of(std::size_t chunk) const {
        return std::min(chunk_units, n_units - chunk * chunk_units);
    }
    std::size_t chunk_nbytes() const { return chunk_units * spec.unit_nbytes; }
    std::size_t largest_units() const { return std::min(chunk_units, n_units); }
    std::size_t nbytes() const { return n_units * spec.unit_nbytes; }
    // A row of the table: a chunk's CRC32C, then a descriptor for each plane.
    std::size_t row_length() const { return spec.n_planes + 1; }
};

// Returns why a tensor cannot have side data of this length, or null if it can. `nbytes` is 0 if
// there are no side data.
inline const char* side_fault(const Geometry& geometry, std::size_t nbytes, std::size_t n_rows) {
    if (nbytes == 0) return nullptr;
    if (geometry.spec.rotation == 0) return "side data need split 2";
    if (nbytes > kMaxSideNbytes) return "side data have at most 2 Mi bytes";
    if (n_rows == 0 || n_rows >= nbytes || geometry.n_units % n_rows != 0 ||
        geometry.n_units / n_rows != nbytes - n_rows)
        return "side data must have a byte for each row and each column";
    return nullptr;
}

inline SideData view_side(const uint8_t* side, std::size_t nbytes, std::size_t n_rows) {
    return nbytes == 0 ? SideData{} : SideData{side, side + n_rows, nbytes - n_rows};
}

}  // namespace packhorse
