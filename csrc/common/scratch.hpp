// Scratch memory that outlives the call it was taken for.
// New memory costs a page fault for every page, which takes about ten microseconds in a virtual
// machine. So blocks that calls have used are kept for later calls: up to eight with room for the
// differences of a chunk of 1.5 MiB, and eight with room for the matches of a chunk of 2 MiB below
// level `max`. What a call does not touch of a block takes no memory.
// Nothing here is locked, so a fork never finds a lock taken.
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
    explicit Scratch(std::size_t nbytes) : blocks_(blocks_for(nbytes)) {
        for (std::size_t i = 0; blocks_ != nullptr && memory_ == nullptr && i < kMaxIdle; ++i)
            memory_.reset(blocks_->idle[i].exchange(nullptr));
        if (memory_ == nullptr)
            memory_.reset(static_cast<uint8_t*>(
                ::operator new[](blocks_ != nullptr ? blocks_->nbytes : nbytes, kAlignment)));
    }
    Scratch(Scratch&&) = default;
    Scratch& operator=(Scratch&& other) noexcept {
        std::swap(blocks_, other.blocks_);
        std::swap(memory_, other.memory_);
        return *this;
    }

    ~Scratch() {
        for (std::size_t i = 0; blocks_ != nullptr && memory_ != nullptr && i < kMaxIdle; ++i) {
            uint8_t* none = nullptr;
            if (blocks_->idle[i].compare_exchange_strong(none, memory_.get())) memory_.release();
        }
    }

    uint8_t* get() const { return memory_.get(); }

  private:
    static constexpr std::align_val_t kAlignment{64};
    static constexpr std::size_t kMaxIdle = 8;

    struct Free {
        void operator()(uint8_t* memory) const { ::operator delete[](memory, kAlignment); }
    };

    // Blocks of one size that wait for a call.
    struct Blocks {
        std::size_t nbytes;
        std::atomic<uint8_t*> idle[kMaxIdle] = {};
    };

    static Blocks* blocks_for(std::size_t nbytes) {
        // The C library never keeps pieces of 32 MiB that are freed, so long blocks are shorter.
        static Blocks short_blocks{13 << 20}, long_blocks{(32 << 20) - (64 << 10)};
        // With memory checkers, each piece has exactly its own length.
#if defined(__SANITIZE_ADDRESS__) || defined(PACKHORSE_EXACT_SCRATCH)
        return nullptr;
#endif
        if (nbytes <= short_blocks.nbytes) return &short_blocks;
        return nbytes <= long_blocks.nbytes ? &long_blocks : nullptr;
    }

    Blocks* blocks_ = nullptr;
    std::unique_ptr<uint8_t[], Free> memory_;
};

}  // namespace packhorse
