// Threads for one call: they are started for the call and joined before it returns. No thread
// outlives its call, so nothing breaks after a fork or when the interpreter shuts down, and
// concurrent calls share nothing. Starting a thread costs about as much as coding a tenth of a
// chunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "common/layout.hpp"

namespace packhorse {

// Waits for other threads to end, a while without sleeping: a thread that sleeps in a virtual
// machine takes a tenth of a millisecond to wake up. Meanwhile the core is given to whoever needs
// it.
inline void await_end(const std::atomic<std::size_t>& running) {
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::microseconds(200);
    while (running > 0 && Clock::now() < until) std::this_thread::yield();
}

// Calls work(worker) in the caller's thread and in others, `n_workers` in all, or fewer if the
// system gives no more threads: each call must be able to do all the work. If one throws
// std::bad_alloc, so does this function once all have ended: no other must wait for that one.
template <class Work>
void in_threads(std::size_t n_workers, const Work& work) {
    std::atomic<std::size_t> running{0};
    std::atomic<bool> out_of_memory{false};
    const auto work_of = [&](std::size_t worker) {
        try {
            work(worker);
        } catch (const std::bad_alloc&) {
            out_of_memory = true;
        }
    };
    const auto run = [&](std::size_t worker) {
        work_of(worker);
        --running;
    };
    std::vector<std::thread> threads;
    threads.reserve(n_workers);
    try {
        for (std::size_t worker = 1; worker < n_workers; ++worker) {
            ++running;
            threads.emplace_back(run, worker);
        }
    } catch (const std::exception&) {
        // No more threads, or no memory for one. The threads that already run, and this one, do all
        // the work.
        --running;
    }
    work_of(0);
    await_end(running);
    for (std::thread& thread : threads) thread.join();
    if (out_of_memory) throw std::bad_alloc();
}

// Calls work(worker, item) once for every item. Items start in ascending order. `work` may throw
// what in_threads() allows.
template <class Work>
void parallel_for(std::size_t n_items, std::size_t n_workers, const Work& work) {
    std::atomic<std::size_t> next{0};
    in_threads(std::min(n_workers, n_items), [&](std::size_t worker) {
        for (std::size_t item = next.fetch_add(1); item < n_items; item = next.fetch_add(1))
            work(worker, item);
    });
}

// Calls work(worker, item, following) once for every item. A worker takes a few items at a time, so
// that it knows what to fetch ahead; fewer towards the end, so that all workers end at about the
// same time. `following` is its next item, a guess after the last one it has taken; it may be
// `n_items` or more. `work` may throw what in_threads() allows.
template <class Work>
void parallel_runs(std::size_t n_items, std::size_t n_workers, const Work& work) {
    constexpr std::size_t kMost = 8;
    std::atomic<std::size_t> next{0};
    in_threads(std::min(n_workers, n_items), [&](std::size_t worker) {
        std::size_t start = next.load();
        while (start < n_items) {
            const std::size_t share = (n_items - start) / (4 * std::max<std::size_t>(1, n_workers));
            const std::size_t stop = start + std::clamp<std::size_t>(share, 1, kMost);
            if (!next.compare_exchange_weak(start, stop)) continue;
            for (std::size_t item = start; item < stop; ++item)
                work(worker, item, item + 1 < stop ? item + 1 : next.load());
            start = next.load();
        }
    });
}

// The number of threads that are worth starting for `nbytes` bytes, if a thread pays from
// `nbytes_each` bytes on.
constexpr std::size_t useful_threads(std::size_t threads, std::size_t nbytes,
                                     std::size_t nbytes_each) {
    const std::size_t most = nbytes / nbytes_each;
    return most < 1 ? 1 : most < threads ? most : threads;
}

// Assigns places in the output in the order of chunks, even if a later chunk is finished first. So
// the bytes do not depend on the number of threads.
class OrderedOutput {
  public:
    explicit OrderedOutput(std::size_t first = 0) : next_(first) {}

    // Blocks until all earlier chunks have their places. Workers take chunks in order, so one of
    // them is always working on the first chunk without a place.
    std::size_t reserve(std::size_t chunk, std::size_t nbytes) {
        std::unique_lock lock(mutex_);
        turn_.wait(lock, [&] { return next_ == chunk; });
        const std::size_t offset = used_;
        used_ += nbytes;
        ++next_;
        turn_.notify_all();
        return offset;
    }

    std::size_t used() const { return used_; }

  private:
    std::mutex mutex_;
    std::condition_variable turn_;
    std::size_t next_;  // chunk
    std::size_t used_ = 0;
};

}  // namespace packhorse
