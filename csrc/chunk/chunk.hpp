// Functions that encoding and decoding of a chunk share (docs/format.md, section 5).
#pragma once

#include "common/layout.hpp"
#include "planes/planes.hpp"

namespace packhorse {

constexpr std::size_t kPlaneSlack = 64;

// The planes of a chunk with this unit and this split.
inline PlaneSpec plane_spec(uint32_t unit_nbytes, Split split) {
    const uint32_t n_planes = split == Split::kWhole ? 1 : unit_nbytes;
    return {unit_nbytes, n_planes, rotation_of(unit_nbytes, split)};
}

// Bytes of one item of a plane: 1, or the whole unit under split 0.
inline std::size_t item_nbytes(const PlaneSpec& spec) {
    return spec.n_planes == 1 ? spec.unit_nbytes : 1;
}

constexpr uint32_t make_descriptor(Mode mode, std::size_t nbytes) {
    return static_cast<uint32_t>(mode) << kStreamNbytesBits | static_cast<uint32_t>(nbytes);
}
constexpr Mode descriptor_mode(uint32_t descriptor) {
    return static_cast<Mode>(descriptor >> kStreamNbytesBits);
}
constexpr std::size_t descriptor_nbytes(uint32_t descriptor) {
    return descriptor & kStreamNbytesMask;
}

inline bool is_constant(const uint8_t* src, std::size_t n_items, std::size_t item) {
    return std::memcmp(src, src + item, (n_items - 1) * item) == 0;
}

inline bool is_rans(Mode mode) {
    return mode == Mode::kRans || mode == Mode::kClassedRans;
}

// Whether a chunk whose plane 0 has this mode holds differences from a base.
inline bool is_from_base(Mode mode) {
    return mode == Mode::kDelta || mode == Mode::kSparseDelta;
}

}  // namespace packhorse
