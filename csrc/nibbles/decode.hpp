// Decoding a chunk in mode nibbles, in blocks whose halves stay in L1.
#pragma once

#include <algorithm>

#include "chunk/decode.hpp"
#include "nibbles/halves.hpp"

namespace packhorse {

// While halves are decoded, fetches the next chunk's bytes and the memory of this one.
inline Ahead nibbles_ahead(const uint8_t* next_encoded, std::size_t nbytes, std::size_t n,
                           uint8_t* dst) {
    Ahead ahead;
    if (next_encoded != nullptr) {
        ahead.read = reinterpret_cast<uintptr_t>(next_encoded);
        ahead.read_step = kMaxLanes / 2 * nbytes / n;
    }
    ahead.write = reinterpret_cast<uintptr_t>(dst + kBlockUnits);
    ahead.write_step = kMaxLanes / 2;
    return ahead;
}

// Decodes a chunk of `n` >= 1 bytes from a stream of `nbytes` bytes.
inline Status decode_nibbles(const uint8_t* src, std::size_t nbytes, std::size_t n,
                             const DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    PlaneDecoder& plane = scratch.planes[0];
    Status status = rans_open(src, nbytes, 2 * n, 0, isa, plane.rans);
    if (status == Status::kOk && (plane.rans.model.raw_bits != kNibbleBits || plane.rans.raw.n > 0))
        status = Status::kBadField;
    Ahead ahead = nibbles_ahead(scratch.next_encoded, nbytes, n, dst);
    for (std::size_t at = 0; at < n && status == Status::kOk; at += kBlockUnits / 2) {
        const std::size_t run = std::min(n - at, kBlockUnits / 2);
        status = rans_decode(plane.rans, 2 * run, plane.buffer, ahead, isa);
        if (status == Status::kOk) join_halves(plane.buffer, run, dst + at, isa);
    }
    if (status != Status::kOk) return status;
    uint8_t carried[2 * kMaxLanes];
    return rans_close(plane.rans, false, carried);
}

}  // namespace packhorse
