// Copies rows of one length from many places in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace packhorse {

struct Source {
    const uint8_t* data;
    std::size_t nbytes;
};

// Row i is the `row_nbytes` bytes at `offsets[i]` of `sources[which[i]]`; it is zero if `which[i]`
// is negative, and from where its source ends. Every `which[i]` is less than the number of sources.
inline void gather_rows(const Source* sources, const int32_t* which, const uint64_t* offsets,
                        std::size_t n_rows, std::size_t row_nbytes, uint8_t* dst) {
    constexpr std::size_t kAhead = 4;
    for (std::size_t i = 0; i < n_rows; ++i, dst += row_nbytes) {
        if (i + kAhead < n_rows && which[i + kAhead] >= 0) {
            const Source& next = sources[which[i + kAhead]];
            if (offsets[i + kAhead] < next.nbytes)
                __builtin_prefetch(next.data + offsets[i + kAhead]);
        }
        std::size_t n = 0;
        if (which[i] >= 0) {
            const Source& source = sources[which[i]];
            if (offsets[i] < source.nbytes) {
                const std::size_t left = source.nbytes - static_cast<std::size_t>(offsets[i]);
                n = left < row_nbytes ? left : row_nbytes;
                std::memcpy(dst, source.data + offsets[i], n);
            }
        }
        std::memset(dst + n, 0, row_nbytes - n);
    }
}

}  // namespace packhorse
