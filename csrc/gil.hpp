// Lets go of Python's lock while a kernel works, and takes it back afterwards.
//
// Unlike nanobind's own guard it survives the end of the interpreter. A daemon thread that asks for
// the lock then is ended by Python with pthread_exit (up to 3.13; later it is put to sleep). That
// unwinds C++ frames, of which some must not throw, and the process would abort instead of exiting.
// So the thread stays asleep here until the process is gone.
#pragma once

#include <Python.h>
#include <unistd.h>

namespace packhorse {

class ReleasedGil {
  public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ReleasedGil& operator=(const ReleasedGil&) = delete;

    ~ReleasedGil() {
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
