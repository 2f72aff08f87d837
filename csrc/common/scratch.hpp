// Scratch memory that outlives the call it was taken for.
//
// A thread that takes new memory pays a page fault for every page of it, in a virtual machine some
// ten microseconds each. So blocks that calls have used wait for the next calls: at most eight of
// 2 MiB. Nothing here is locked, so no fork can find a lock taken.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <utility>

#include "common/layout.hpp"

namespace packhorse {

// Memory of undefined content on a multiple of 64, for one call.
class Scratch {
  public:
    Scratch() = default;
    explicit Scratch(std::size_t nbytes) : is_block_(kKeeps && nbytes <= kBlockNbytes) {
        for (std::size_t i = 0; is_block_ && memory_ == nullptr && i < kMaxIdle; ++i)
            memory_.reset(idle_[i].exchange(nullptr));
        if (memory_ == nullptr)
            memory_.reset(static_cast<uint8_t*>(
                ::operator new[](is_block_ ? kBlockNbytes : nbytes, kAlignment)));
    }
    Scratch(Scratch&&) = default;
    Scratch& operator=(Scratch&& other) noexcept {
        std::swap(is_block_, other.is_block_);
        std::swap(memory_, other.memory_);
        return *this;
    }

    ~Scratch() {
        for (std::size_t i = 0; is_block_ && memory_ != nullptr && i < kMaxIdle; ++i) {
            uint8_t* none = nullptr;
            if (idle_[i].compare_exchange_strong(none, memory_.get())) memory_.release();
        }
    }

    uint8_t* get() const { return memory_.get(); }

  private:
    struct Free {
        void operator()(uint8_t* memory) const { ::operator delete[](memory, kAlignment); }
    };

    static constexpr std::align_val_t kAlignment{64};
    static constexpr std::size_t kBlockNbytes = 2 << 20;
    static constexpr std::size_t kMaxIdle = 8;
    // Memory checkers want each piece to end where it ends.
#if defined(__SANITIZE_ADDRESS__) || defined(PACKHORSE_EXACT_SCRATCH)
    static constexpr bool kKeeps = false;
#else
    static constexpr bool kKeeps = true;
#endif
    static inline std::atomic<uint8_t*> idle_[kMaxIdle] = {};

    bool is_block_ = false;
    std::unique_ptr<uint8_t[], Free> memory_;
};

}  // namespace packhorse
