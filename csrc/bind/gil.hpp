// Lets go of Python's lock while a kernel works, and takes it back afterwards. For a short piece of
// work it is kept: to take it back from another thread means to be woken, which takes as long.
//
// Unlike nanobind's own guard it survives the end of the interpreter. A daemon thread that asks for
// the lock then is ended by Python with pthread_exit (up to 3.13; later it is put to sleep). That
// unwinds C++ frames, of which some must not throw, and the process would abort instead of exiting.
// So the thread stays asleep here until the process is gone.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <cstddef>

namespace packhorse {

// What takes some 20 microseconds.
constexpr std::size_t kMinReleasedNbytes = 1 << 16;

class ReleasedGil {
  public:
    // `nbytes` that the work goes through.
    explicit ReleasedGil(std::size_t nbytes)
        : state_(nbytes >= kMinReleasedNbytes ? PyEval_SaveThread() : nullptr) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

    ~ReleasedGil() {
        if (state_ == nullptr) return;
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // C code throws nothing: this is pthread_exit
            for (;;) pause();
        }
    }

  private:
    PyThreadState* state_;
};

}  // namespace packhorse
