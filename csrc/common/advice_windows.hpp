// What Windows is told and asked about pages, as common/advice.hpp does elsewhere.
#pragma once

#include "common/windows.hpp"
// It needs the types of the header above.
#include <psapi.h>

#include <cstddef>
#include <cstdint>

namespace packhorse {

// Starts to read the pages of a range, and does not wait for them. If the system refuses, whoever
// uses a page waits for it.
inline void will_need(const uint8_t* data, std::size_t nbytes) {
    WIN32_MEMORY_RANGE_ENTRY range{const_cast<uint8_t*>(data), nbytes};
    if (nbytes > 0) PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0);
}

// There is no such advice.
inline void will_sample(const uint8_t*, std::size_t) {}

// Nothing waits for pages without using them.
inline void read_now(const uint8_t* data, std::size_t nbytes) {
    will_need(data, nbytes);
}

// Large pages need a privilege that users do not have.
inline void want_huge_pages(uint8_t*, std::size_t) {}

// The system has no limit on mappings that could be met, and does not say how many there are.
inline std::size_t count_mappings() {
    return 0;
}

// Whether memory has been used before, and is in memory now. The middle of the range stands for all
// of it.
inline bool is_used(const uint8_t* data, std::size_t nbytes) {
    PSAPI_WORKING_SET_EX_INFORMATION page = {};
    page.VirtualAddress = const_cast<uint8_t*>(data) + nbytes / 2;
    return QueryWorkingSetEx(GetCurrentProcess(), &page, sizeof page) != 0 &&
           page.VirtualAttributes.Valid != 0;
}

}  // namespace packhorse
