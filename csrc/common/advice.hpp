// Tells the system that mapped memory will be read soon, so that it reads the file ahead.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(_WIN32)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace packhorse {

// Starts to read the pages of a range, and does not wait for them. Memory that is no mapping of a
// file is left as it is.
inline void will_need(const uint8_t* data, std::size_t nbytes) {
#if defined(_WIN32)
    (void)data;  // the system reads a mapped file ahead by its own rules
    (void)nbytes;
#else
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data) & ~(page - 1);
    const auto stop = reinterpret_cast<uintptr_t>(data) + nbytes;
    posix_madvise(reinterpret_cast<void*>(start), stop - start, POSIX_MADV_WILLNEED);
#endif
}

}  // namespace packhorse
