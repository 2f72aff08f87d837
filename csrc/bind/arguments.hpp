// What all bindings share: checks of arguments.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>

#include "bind/gil.hpp"
#include "common/dispatch.hpp"

namespace nb = nanobind;

namespace packhorse {

inline void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

inline Isa checked_isa(int isa) {
    require(isa >= 0 && isa <= static_cast<int>(detect_isa()),
            "isa must not be above what detect_isa() returns");
    return static_cast<Isa>(isa);
}

}  // namespace packhorse
