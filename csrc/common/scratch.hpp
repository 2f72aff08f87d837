// Scratch memory that outlives the call it was taken for.
// New memory costs a page fault for every page, which takes about ten microseconds in a virtual
// machine. So up to sixteen blocks that calls have used are kept for later calls. A block has room
// for the matches of a chunk of 2 MiB, but at level `max`; what a call does not touch of it takes
// no memory. Nothing here is locked, so a fork never finds a lock taken.
#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <utility>

#include "common/layout.hpp"

namespace packhorse {

// Memory for one call, of undefined content, aligned to 64 bytes.
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

    // A little less than 32 MiB: the C library never keeps longer pieces that are freed.
    static constexpr std::size_t kBlockNbytes = (32 << 20) - (64 << 10);

  private:
    struct Free {
        void operator()(uint8_t* memory) const { ::operator delete[](memory, kAlignment); }
    };

    static constexpr std::align_val_t kAlignment{64};
    static constexpr std::size_t kMaxIdle = 16;
    // With memory checkers, each piece has exactly its own length.
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
