// Finds the end of a Zstandard frame (RFC 8878, section 3.1.1) by the headers of its blocks. The
// library that decodes the frame does not report its end when it writes to the caller's memory.
#pragma once

#include "common/layout.hpp"

namespace packhorse {

constexpr std::size_t kZstdBlockHeaderNbytes = 3;
constexpr std::size_t kZstdChecksumNbytes = 4;

// Returns the length of the frame at `src`, whose header has `header_nbytes`. Returns 0 if it is
// longer than `nbytes`, or has a block of the reserved type.
inline std::size_t zstd_frame_nbytes(const uint8_t* src, std::size_t nbytes,
                                     std::size_t header_nbytes, bool has_checksum) {
    std::size_t at = header_nbytes;
    for (bool is_last = false; !is_last;) {
        if (at > nbytes || nbytes - at < kZstdBlockHeaderNbytes) return 0;
        const uint32_t header = src[at] | src[at + 1] << 8 | src[at + 2] << 16;
        const uint32_t type = header >> 1 & 3;
        if (type == 3) return 0;
        is_last = header & 1;
        at += kZstdBlockHeaderNbytes + (type == 1 ? 1 : header >> 3);  // type 1 repeats one byte
    }
    at += has_checksum ? kZstdChecksumNbytes : 0;
    return at <= nbytes ? at : 0;
}

}  // namespace packhorse
