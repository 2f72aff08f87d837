// What the system is told and asked about pages.
// The pages of mapped files are brought into memory before they are used. A page that is missing
// when a worker meets it makes the worker wait, and the system guesses from such faults what to
// read next: badly, if several workers and a sampler meet pages in different places.
// Windows has a twin in common/advice_windows.hpp.
#pragma once

#if defined(_WIN32)
#include "common/advice_windows.hpp"
#else

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace packhorse {

// Gives the system one kind of advice about the pages of a range.
inline void advise(const uint8_t* data, std::size_t nbytes, int advice) {
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data) & ~(page - 1);
    const auto stop = reinterpret_cast<uintptr_t>(data) + nbytes;
    posix_madvise(reinterpret_cast<void*>(start), stop - start, advice);
}

// Starts to read the pages of a range, and does not wait for them. Memory that is no mapping of a
// file is left as it is.
inline void will_need(const uint8_t* data, std::size_t nbytes) {
    advise(data, nbytes, POSIX_MADV_WILLNEED);
}

// Makes the system read single pages of a mapping, when they are used. Otherwise it reads up to
// megabytes around each.
inline void will_sample(const uint8_t* data, std::size_t nbytes) {
    advise(data, nbytes, POSIX_MADV_RANDOM);
}

// Reads the missing pages of a range from front to back, waits for them, and maps all pages. If a
// page is lost, it is left as it is: whoever uses it meets the fault. Linux before 5.14 and other
// systems start to read, and do not wait.
inline void read_now(const uint8_t* data, std::size_t nbytes) {
#if defined(__linux__)
    constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers do not have
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto start = reinterpret_cast<uintptr_t>(data) & ~(page - 1);
    const auto stop = reinterpret_cast<uintptr_t>(data) + nbytes;
    if (start < stop && madvise(reinterpret_cast<void*>(start), stop - start, kPopulateRead) != 0 &&
        errno == EINVAL)
        will_need(data, nbytes);
#else
    will_need(data, nbytes);
#endif
}

// Asks for huge pages for memory that will be written as a whole, so that one page fault brings
// 2 MiB instead of 4 KiB.
inline void want_huge_pages(uint8_t* data, std::size_t nbytes) {
#ifdef MADV_HUGEPAGE
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + page - 1) & ~(page - 1);
    const uintptr_t stop = (reinterpret_cast<uintptr_t>(data) + nbytes) & ~(page - 1);
    if (start < stop) madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE);
#else
    (void)data;
    (void)nbytes;
#endif
}

// The mappings of this process; 0 if the system does not say.
inline std::size_t count_mappings() {
    std::size_t n = 0;
#if defined(__linux__)
    const int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    char text[1 << 14];
    for (ssize_t got; (got = read(file, text, sizeof text)) > 0;)
        n += static_cast<std::size_t>(std::count(text, text + got, '\n'));
    close(file);
#endif
    return n;
}

// Whether memory has been used before: the system clears a new page when it is first written, and
// then the page is in the cache. The middle of the range stands for all of it. (A page that was
// only read counts as used.)
inline bool is_used(const uint8_t* data, std::size_t nbytes) {
#if defined(__APPLE__)
    char is_there = 0;
#else
    unsigned char is_there = 0;
#endif
    static const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t middle = reinterpret_cast<uintptr_t>(data) + nbytes / 2;
    return mincore(reinterpret_cast<void*>(middle & ~(page - 1)), page, &is_there) == 0 &&
           (is_there & 1) != 0;
}

}  // namespace packhorse

#endif
