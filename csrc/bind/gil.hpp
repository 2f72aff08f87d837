// Releases Python's lock while a kernel works, and takes it back afterwards. Short work keeps the
// lock: taking it back from another thread means waiting to be woken, which takes as long.
//
// Unlike nanobind's own guard, this one survives the end of the interpreter. Up to 3.13, Python
// then ends a daemon thread that asks for the lock with pthread_exit; later versions put it to
// sleep. pthread_exit unwinds C++ frames, some of which must not throw, and the process would abort
// instead of exiting. So the thread sleeps here until the process has ended.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <cstddef>

namespace packhorse {

// Going through so many bytes takes some 20 microseconds.
constexpr std::size_t kMinReleasedNbytes = 1 << 16;

class ReleasedGil {
  public:
    // `nbytes`: how many bytes the work goes through.
    explicit ReleasedGil(std::size_t nbytes)
        : state_(nbytes >= kMinReleasedNbytes ? PyEval_SaveThread() : nullptr) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

    ~ReleasedGil() {
        if (state_ == nullptr) return;
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // C code throws nothing, so this is pthread_exit
            for (;;) pause();
        }
    }

  private:
    PyThreadState* state_;
};

}  // namespace packhorse
