// The numbers that a segment is coded with (docs/format.md, section 13): its step from its bound,
// and the limits that the encoder checks decoded values against.
//
// Decoding multiplies a code by the step and adds the center. The step has so few digits that the
// product is exact: then a fused multiply-add, on whatever processor, gives the same bits.
#pragma once

#include <algorithm>
#include <cmath>

#include "bounded/loops_portable.hpp"

namespace packhorse {

// What a caller asks for.
struct SegmentSpec {
    uint64_t n;
    double bound;
    double center;
    int64_t bits;
};

enum class BoundedFault : int {
    kNone = 0,
    // Mistakes of the caller of the encoder.
    kLength = 1,       // a segment is too long
    kBits = 2,         // bits are not 1 to 16
    kBound = 3,        // the bound is not a positive, finite number
    kCenter = 4,       // the center is not finite in the numbers of the coder
    kTinyBound = 5,    // no step is small enough
    kNothingFits = 6,  // no value but the center has a code
    kEscapes = 7,      // more escapes than the fixed form has slots
    // Faults of a message.
    kShort = 16,  // it ends before its header, its table or its declared length
    kMagic = 17,
    kVersionZero = 18,
    kVersion = 19,
    kOtherDtype = 20,  // no dtype of this section
    kField = 21,       // a field of the header is outside of its range
    kTable = 22,       // a field of a segment is outside of its range
    kReserved = 23,    // reserved bytes or bits are not zero
    kSize = 24,        // the length is not the one that the table makes
    kChecksum = 25,
    kEscapeCount = 26,  // counts of escapes do not agree with the codes or the table
    kStream = 27,       // a stream of a coded message is not valid
};

// Cuts a positive, finite number down to `kDigits - bits` binary digits.
template <class Numbers>
inline double cut_digits(double x, uint32_t bits) {
    int exponent = 0;
    std::frexp(x, &exponent);
    const int last =
        std::max(exponent - (Numbers::kDigits - static_cast<int>(bits)), Numbers::kMinExponent);
    return std::ldexp(std::floor(std::ldexp(x, -last)), last);
}

// The spacing of the coder's numbers at a positive number.
template <class Numbers>
inline double spacing_at(double x) {
    int exponent = Numbers::kMaxExponent + 1;
    if (x <= Numbers::kMax) std::frexp(x, &exponent);
    return std::ldexp(1.0, std::max(exponent - Numbers::kDigits, Numbers::kMinExponent));
}

// The step for a bound: a little below twice the bound, so that errors of rounding do not add up to
// more than the bound; for stochastic rounding, which takes either neighbour, half of that. It is
// at most the largest value of the elements' type: a longer one would lead to infinity.
template <class Element>
inline double step_for(double bound, double center, uint32_t bits, Rounding rounding) {
    const double reach = std::fabs(center) + std::ldexp(bound, static_cast<int>(bits));
    const double margin = spacing_at<Element>(reach) / 2;
    const double shrunk = std::max(bound - margin, bound / 2);
    const double whole = rounding == Rounding::kNearest ? 2 * shrunk : shrunk;
    return cut_digits<Element>(std::min(whole, Element::kLargest), bits);
}

// The largest number of the coder that is within the bound.
template <class Numbers>
inline typename Numbers::Real outer_limit(double bound) {
    using Real = typename Numbers::Real;
    const auto limit = static_cast<Real>(std::min<double>(bound, Numbers::kMax));
    return static_cast<double>(limit) > bound ? std::nextafter(limit, Real{0}) : limit;
}

// The largest number of the coder to which only differences within the bound are rounded: the
// middle between it and the next number is within the bound. So a rounded difference up to this
// limit proves that the exact one is within the bound.
template <class Numbers>
inline typename Numbers::Real inner_limit(double bound) {
    using Real = typename Numbers::Real;
    const Real limit = outer_limit<Numbers>(bound);
    if constexpr (sizeof(Real) == sizeof(double)) return std::nextafter(limit, Real{0});
    const bool holds = limit + spacing_at<Numbers>(limit) / 2 <= bound;
    return holds ? limit : std::nextafter(limit, Real{0});
}

// 1 / step, or the largest number if that is beyond all numbers.
template <class Numbers>
inline typename Numbers::Real inverse_of(double step) {
    return static_cast<typename Numbers::Real>(std::min<double>(1 / step, Numbers::kMax));
}

template <class Element>
inline Quantiser<typename Element::Real> make_quantiser(double step, double center, double bound,
                                                        uint32_t bits) {
    using Real = typename Element::Real;
    return {static_cast<Real>(center),
            static_cast<Real>(step),
            inverse_of<Element>(step),
            inner_limit<Element>(bound),
            outer_limit<Element>(bound),
            most_steps(bits),
            bits};
}

// Whether any value but the center can be coded.
template <class Element>
inline bool anything_fits(double step, double center, double bound, uint32_t bits) {
    using Real = typename Element::Real;
    const double reach = most_steps(bits) * step + bound;
    const auto value = [](double x) {
        typename bounded_portable::Group<Real>::Reals values{};
        values[0] = static_cast<Real>(std::clamp<double>(x, -Element::kMax, Element::kMax));
        bounded_portable::round_values(Element{}, values);
        return values[0];
    };
    return value(center - reach) != value(center) || value(center + reach) != value(center);
}

// Checks what a caller asks for, and finds the step.
template <class Element>
inline BoundedFault plan_segment(const SegmentSpec& spec, Rounding rounding, double& center,
                                 double& step) {
    using Real = typename Element::Real;
    if (spec.n > kMaxBoundedLength) return BoundedFault::kLength;
    if (spec.bits < 1 || spec.bits > kMaxBoundedBits) return BoundedFault::kBits;
    if (!(spec.bound > 0) || !std::isfinite(spec.bound)) return BoundedFault::kBound;
    if (!(std::fabs(spec.center) <= Element::kMax)) return BoundedFault::kCenter;
    const auto bits = static_cast<uint32_t>(spec.bits);
    center = static_cast<double>(static_cast<Real>(spec.center));
    step = step_for<Element>(spec.bound, center, bits, rounding);
    if (step == 0) return BoundedFault::kTinyBound;
    if (!anything_fits<Element>(step, center, spec.bound, bits)) return BoundedFault::kNothingFits;
    return BoundedFault::kNone;
}

// Whether what is behind the `n` < 512 elements of a segment's last block is zero: codes of missing
// elements and bits of the last words.
inline bool padding_is_zero(const uint8_t* codes, std::size_t n, uint32_t bits) {
    const std::size_t last = n % kBoundedLanes;  // elements of the last row, if it is not full
    const std::size_t n_words = lane_words(rows_of(n), bits);
    for (std::size_t lane = 0; lane < kBoundedLanes; ++lane) {
        const std::size_t n_rows = rows_of(n) - (last != 0 && lane >= last ? 1 : 0);
        for (std::size_t word = n_rows * bits / 32; word < n_words; ++word) {
            const std::size_t used = std::max(n_rows * bits, 32 * word) - 32 * word;
            const auto value = load<uint32_t>(codes + 4 * (word * kBoundedLanes + lane));
            if (used < 32 && value >> used != 0) return false;
        }
    }
    return true;
}

}  // namespace packhorse
