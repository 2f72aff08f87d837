// Where a Zstandard frame ends (RFC 8878, section 3.1.1), told from the headers of its blocks. The
// library that decodes it writes to the caller's memory only in a way that does not tell.
#pragma once

#include "common/layout.hpp"

namespace packhorse {

constexpr std::size_t kZstdBlockHeaderNbytes = 3;
constexpr std::size_t kZstdChecksumNbytes = 4;

// Length of the frame whose header takes the first `header_nbytes` of `nbytes` at `src`; 0 if it
// is not there to its end, or has a block of the reserved type.
inline std::size_t zstd_frame_nbytes(const uint8_t* src, std::size_t nbytes,
                                     std::size_t header_nbytes, bool has_checksum) {
    std::size_t at = header_nbytes;
    for (bool is_last = false; !is_last;) {
        if (at > nbytes || nbytes - at < kZstdBlockHeaderNbytes) return 0;
        const uint32_t header = src[at] | src[at + 1] << 8 | src[at + 2] << 16;
        const uint32_t type = header >> 1 & 3;
        if (type == 3) return 0;
        is_last = header & 1;
        at += kZstdBlockHeaderNbytes + (type == 1 ? 1 : header >> 3);  // 1: one byte, repeated
    }
    at += has_checksum ? kZstdChecksumNbytes : 0;
    return at <= nbytes ? at : 0;
}

}  // namespace packhorse
