// Releases Python's lock while a kernel works, and takes it back afterwards. The lock is kept
// during short work: to take it back from another thread, this thread must wait to be woken, which
// takes as long as the work.
// Unlike nanobind's own guard, this one survives the end of the interpreter. When a daemon thread
// asks for the lock after that, Python up to 3.13 ends the thread with pthread_exit; later versions
// put it to sleep. pthread_exit unwinds C++ frames, some of which must not throw, so the process
// would abort instead of exiting. To prevent that, the thread sleeps here until the process has
// ended.
#pragma once

#include <Python.h>

#include <chrono>
#include <cstddef>
#include <thread>

namespace packhorse {

// Processing this number of bytes takes about 20 microseconds.
constexpr std::size_t kMinReleasedNbytes = 1 << 16;

class ReleasedGil {
  public:
    // `nbytes`: the number of bytes that the work processes.
    explicit ReleasedGil(std::size_t nbytes)
        : state_(nbytes >= kMinReleasedNbytes ? PyEval_SaveThread() : nullptr) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

    ~ReleasedGil() {
        if (state_ == nullptr) return;
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // C code throws nothing, so this is pthread_exit
            for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }

  private:
    PyThreadState* state_;
};

}  // namespace packhorse
