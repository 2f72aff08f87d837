// Copies rows of one length from many places in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace packhorse {

// Row i is the `row_nbytes` bytes at the address `sources[i]`.
inline void gather_rows(const uint64_t* sources, std::size_t n_rows, std::size_t row_nbytes,
                        uint8_t* dst) {
    constexpr std::size_t kAhead = 8;  // rows whose first bytes are asked for early
    const auto at = [](uint64_t address) {
        return reinterpret_cast<const uint8_t*>(static_cast<uintptr_t>(address));
    };
    for (std::size_t i = 0; i < n_rows; ++i) {
        if (i + kAhead < n_rows) __builtin_prefetch(at(sources[i + kAhead]));
        std::memcpy(dst + i * row_nbytes, at(sources[i]), row_nbytes);
    }
}

}  // namespace packhorse
