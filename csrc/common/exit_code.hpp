// Changes the exit code of a process that would report success although its work was not done.
#pragma once

#include <cstdlib>

namespace packhorse {

// From now on an exit code of 0 becomes 1. Python offers no way to do this once its main program
// has ended. Does nothing if the C library has no on_exit, which only glibc has.
inline void fail_at_exit() {
#ifdef __GLIBC__
    static const int registered = on_exit(
        [](int status, void*) {
            if (status == 0) std::exit(1);  // glibc then runs the handlers that are left
        },
        nullptr);
    static_cast<void>(registered);
#endif
}

}  // namespace packhorse
