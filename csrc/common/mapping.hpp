// Maps files so that losing a part of one does not end the process. If a mapped file is truncated,
// or its disk fails, pages of it are gone: reading such a page raises the signal SIGBUS, which
// kills the process. The handler in this file turns the page, and all later pages of the mapping,
// into zeros, and sets the file's `Loss`. A caller that has read a mapped file checks its `Loss`
// afterwards.
// The handler is installed when a file is mapped, if it is not installed already. A fault outside
// of our mappings goes to the handler that was installed before; then our handler stays uninstalled
// until the next file is mapped.
// Windows has a twin in common/mapping_windows.hpp.
#pragma once

#if defined(_WIN32)
#include "common/mapping_windows.hpp"
#else

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <system_error>
#include <utility>

namespace packhorse {

// Whether a part of a file was lost while it was mapped.
using Loss = std::atomic<bool>;

// What the handler knows about a mapping. Records are reused and never freed, because the handler
// may be running in another thread.
struct MappedRange {
    std::atomic<bool> is_taken{true};
    std::atomic<uintptr_t> start{0};  // 0 while the record is free
    std::atomic<std::size_t> nbytes{0};
    std::atomic<Loss*> loss{nullptr};
    MappedRange* next = nullptr;
};

class MappedRanges {
  public:
    MappedRange* add(void* start, std::size_t nbytes, Loss* loss) {
        MappedRange* const range = take();
        range->nbytes = nbytes;
        range->loss = loss;
        range->start = reinterpret_cast<uintptr_t>(start);
        return range;
    }

    static void remove(MappedRange* range) {
        range->start = 0;
        range->is_taken = false;
    }

    // Finds the mapping that an address lies in. A signal handler may call this.
    MappedRange* find(uintptr_t address) const {
        for (MappedRange* range = first_; range != nullptr; range = range->next) {
            const uintptr_t start = range->start;
            const std::size_t nbytes = range->nbytes;
            if (start != 0 && address - start < nbytes && range->start == start) return range;
        }
        return nullptr;
    }

  private:
    // There is no lock, because a process may fork at any time.
    MappedRange* take() {
        for (MappedRange* range = first_; range != nullptr; range = range->next)
            if (!range->is_taken.exchange(true)) return range;
        MappedRange* const range = new MappedRange;
        range->next = first_;
        while (!first_.compare_exchange_weak(range->next, range)) {
        }
        return range;
    }

    std::atomic<MappedRange*> first_{nullptr};
};

inline MappedRanges mapped_ranges;
inline struct sigaction handler_before;
inline std::atomic<bool> is_passed_on{false};

inline std::size_t page_nbytes() {
    return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// Maps zeros from the fault to the end of the mapping. mmap is a plain system call, as safe in a
// signal handler as write is.
inline bool replace_lost(const siginfo_t* info) {
    if (info->si_code <= 0) return false;  // sent by a process: there is no address
#ifdef BUS_MCEERR_AR
    if (info->si_code == BUS_MCEERR_AR) return false;  // broken memory, not a file
#endif
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    MappedRange* const range = mapped_ranges.find(address);
    if (range == nullptr) return false;
    const uintptr_t page = address / page_nbytes() * page_nbytes();
    const std::size_t nbytes = range->start + range->nbytes - page;
    range->loss.load()->store(true);
    return mmap(reinterpret_cast<void*>(page), nbytes, PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

// Leaves a fault outside of our mappings to the previous handler. When this returns, the
// instruction at fault runs again; a signal that a process has sent is sent again. Some handlers,
// such as Python's faulthandler, install the handler before them, which is ours, and send the
// signal again. Then this function installs the default action, which ends the process.
inline void pass_on(const siginfo_t* info) {
    struct sigaction end = {};
    end.sa_handler = SIG_DFL;
    sigaction(SIGBUS, is_passed_on.exchange(true) ? &end : &handler_before, nullptr);
    if (info->si_code <= 0) raise(SIGBUS);
}

inline void on_lost_page(int, siginfo_t* info, void*) {
    const int error = errno;
    if (!replace_lost(info)) pass_on(info);
    errno = error;
}

// Callers hold Python's lock, so only one thread at a time runs this.
inline void handle_lost_pages() {
    struct sigaction now = {};
    sigaction(SIGBUS, nullptr, &now);
    if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_lost_page) return;
    handler_before = now;
    is_passed_on = false;
    struct sigaction ours = {};
    ours.sa_sigaction = on_lost_page;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

// A part of a file in memory, read-only, as long as this object lives.
class Mapping {
  public:
    // Throws std::system_error.
    Mapping(int descriptor, uint64_t offset, std::size_t nbytes, std::shared_ptr<Loss> loss)
        : loss_(std::move(loss)),
          skip_(offset % page_nbytes()),
          nbytes_((skip_ + nbytes + page_nbytes() - 1) / page_nbytes() * page_nbytes()) {
        handle_lost_pages();
        start_ = mmap(nullptr, nbytes_, PROT_READ, MAP_SHARED, descriptor,
                      static_cast<off_t>(offset - skip_));
        if (start_ == MAP_FAILED) throw std::system_error(errno, std::generic_category());
        range_ = mapped_ranges.add(start_, nbytes_, loss_.get());
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    ~Mapping() {
        MappedRanges::remove(range_);
        munmap(start_, nbytes_);
    }

    const uint8_t* data() const { return static_cast<const uint8_t*>(start_) + skip_; }
    std::size_t nbytes() const { return nbytes_; }

  private:
    std::shared_ptr<Loss> loss_;
    std::size_t skip_;
    std::size_t nbytes_;  // whole pages
    void* start_ = nullptr;
    MappedRange* range_ = nullptr;
};

}  // namespace packhorse

#endif
