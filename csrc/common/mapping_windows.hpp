// Maps files on Windows, as common/mapping.hpp does elsewhere. Windows lets nobody truncate a file
// that is mapped, so parts of it are lost only if its disk fails. Then reading raises an exception
// that ends the process; `Loss` stays false.
#pragma once

#include "common/windows.hpp"
// It needs the types of the header above.
#include <io.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>

namespace packhorse {

// Whether a part of a file was lost while it was mapped.
using Loss = std::atomic<bool>;

// Views begin at multiples of this.
inline std::size_t granularity_nbytes() {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwAllocationGranularity;
}

// A part of a file in memory, read-only, as long as this object lives.
class Mapping {
  public:
    // Throws std::system_error.
    Mapping(int descriptor, uint64_t offset, std::size_t nbytes, std::shared_ptr<Loss> loss)
        : loss_(std::move(loss)),
          skip_(static_cast<std::size_t>(offset % granularity_nbytes())),
          nbytes_(skip_ + nbytes) {
        const auto file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
        const HANDLE section = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
        if (section == nullptr) fail();
        const uint64_t start = offset - skip_;
        start_ = MapViewOfFile(section, FILE_MAP_READ, static_cast<DWORD>(start >> 32),
                               static_cast<DWORD>(start), nbytes_);
        const DWORD error = GetLastError();
        CloseHandle(section);  // the view keeps it
        if (start_ == nullptr) fail(error);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    ~Mapping() { UnmapViewOfFile(start_); }

    const uint8_t* data() const { return static_cast<const uint8_t*>(start_) + skip_; }
    std::size_t nbytes() const { return nbytes_; }

  private:
    [[noreturn]] static void fail(DWORD error = GetLastError()) {
        const bool no_memory = error == ERROR_NOT_ENOUGH_MEMORY;
        throw std::system_error(no_memory ? ENOMEM : EIO, std::generic_category());
    }

    std::shared_ptr<Loss> loss_;
    std::size_t skip_;
    std::size_t nbytes_;
    void* start_ = nullptr;
};

}  // namespace packhorse
