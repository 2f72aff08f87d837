// Memory for a tensor's worth of bytes. Up to 6 MiB come from memory that calls have used before
// (scratch.hpp). More is new memory in huge pages, where the system has them: it costs a page fault
// for every 2 MiB that are touched, instead of every 4 KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#if !defined(_WIN32)
#include <sys/mman.h>
#endif

#include "common/scratch.hpp"

namespace packhorse {

// Of undefined content, aligned to 64 bytes. What is never touched takes no memory.
class TensorMemory {
  public:
    TensorMemory() = default;
    // Throws std::bad_alloc.
    explicit TensorMemory(std::size_t nbytes) {
        if (nbytes <= Scratch::kBlockNbytes) {
            small_ = Scratch(nbytes);
            return;
        }
        nbytes_ = nbytes;
        memory_ = static_cast<uint8_t*>(allocate(nbytes));
    }
    TensorMemory(TensorMemory&& other) noexcept { *this = std::move(other); }
    TensorMemory& operator=(TensorMemory&& other) noexcept {
        std::swap(small_, other.small_);
        std::swap(memory_, other.memory_);
        std::swap(nbytes_, other.nbytes_);
        return *this;
    }
    ~TensorMemory() {
        if (memory_ != nullptr) release(memory_, nbytes_);
    }

    uint8_t* get() const { return memory_ != nullptr ? memory_ : small_.get(); }

  private:
#if defined(_WIN32)
    // Windows gives large blocks as new pages, too.
    static void* allocate(std::size_t nbytes) { return ::operator new(nbytes, kAlignment); }
    static void release(void* memory, std::size_t) { ::operator delete(memory, kAlignment); }

    static constexpr std::align_val_t kAlignment{64};
#else
    static void* allocate(std::size_t nbytes) {
        void* const memory =
            mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(memory, nbytes, MADV_HUGEPAGE);
#endif
        return memory;
    }
    static void release(void* memory, std::size_t nbytes) { munmap(memory, nbytes); }
#endif

    Scratch small_;
    uint8_t* memory_ = nullptr;
    std::size_t nbytes_ = 0;
};

}  // namespace packhorse
