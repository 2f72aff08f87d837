// The instruction set of a call: the best of this machine, unless the environment variable
// PACKHORSE_SIMD names another one. Tests and benchmarks set that variable. Every binding that
// computes calls choose_isa() before it releases Python's lock; the core itself never reads the
// environment.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>

#include "common/dispatch.hpp"

namespace nb = nanobind;

namespace packhorse {

constexpr const char* kIsaVariable = "PACKHORSE_SIMD";
constexpr const char* kIsaNames[kIsaCount] = {"portable", "neon", "avx2", "avx512",
                                              "avx512_vbmi2"};  // by number

// Whether two names are equal, whatever the case of their ASCII letters. Does not depend on the
// locale.
inline bool is_same_name(const char* a, const char* b) {
    const auto lower = [](char c) { return 'A' <= c && c <= 'Z' ? c + ('a' - 'A') : c; };
    while (*a != '\0' && lower(*a) == lower(*b)) ++a, ++b;
    return *a == *b;
}

[[noreturn]] inline void refuse_isa_name(const char* wanted) {
    std::string names;
    for (const char* name : kIsaNames) names += std::string(names.empty() ? "" : ", ") + name;
    const auto found = nb::steal(PyUnicode_DecodeFSDefault(wanted));
    if (found.is_valid())
        PyErr_Format(PyExc_ValueError, "%s is %R; it must be one of %s, or unset", kIsaVariable,
                     found.ptr(), names.c_str());
    throw nb::python_error();
}

[[noreturn]] inline void refuse_missing_isa(const char* wanted, Isa best) {
    const nb::object kind = nb::module_::import_("packhorse.errors").attr("MissingBackendError");
    PyErr_Format(kind.ptr(), "%s asks for %s, but this machine has %s; unset it", kIsaVariable,
                 wanted, kIsaNames[static_cast<int>(best)]);
    throw nb::python_error();
}

// The environment does not change meanwhile, because the caller holds Python's lock. `best` is the
// best instruction set of the machine.
inline Isa choose_isa(Isa best = detect_isa()) {
    const char* const wanted = std::getenv(kIsaVariable);
    if (wanted == nullptr || *wanted == '\0') return best;
    for (std::size_t i = 0; i < std::size(kIsaNames); ++i) {
        if (!is_same_name(wanted, kIsaNames[i])) continue;
        const auto isa = static_cast<Isa>(i);
        if (isa > best || !has_isa(static_cast<int>(i))) refuse_missing_isa(wanted, best);
        return isa;
    }
    refuse_isa_name(wanted);
}

// Returns the number of the instruction set to Python. `best` is -1, or the instruction set of a
// machine that a test simulates.
inline int choose_isa_number(int best) {
    const int detected = static_cast<int>(detect_isa());
    if (best < -1 || best > detected)
        throw std::invalid_argument("best must not be above what detect_isa() returns");
    return static_cast<int>(choose_isa(static_cast<Isa>(best == -1 ? detected : best)));
}

}  // namespace packhorse
