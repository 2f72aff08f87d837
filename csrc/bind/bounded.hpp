// Bindings of bounded codes. Lengths are checked here. The core checks bounds and messages, and
// codecs/bounded.py puts faults into words.
#pragma once

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "bind/arguments.hpp"
#include "bounded/decode.hpp"
#include "bounded/encode.hpp"

namespace packhorse {

// (n, bound, bits, center): the fields of `packhorse.codecs.bounded.Segment`, in its order.
using SegmentArgument = std::tuple<uint64_t, double, int64_t, double>;

inline std::vector<SegmentSpec> specs_of(const std::vector<SegmentArgument>& segments) {
    std::vector<SegmentSpec> specs;
    specs.reserve(segments.size());
    for (const auto& [n, bound, bits, center] : segments) specs.push_back({n, bound, center, bits});
    return specs;
}

inline std::size_t bounded_element_nbytes(uint32_t dtype_code) {
    std::size_t nbytes = 0;
    const bool known =
        with_element(dtype_code, [&]<class Element>() { nbytes = Element::kNbytes; });
    require(known, "elements must be F16, BF16, F32 or F64");
    return nbytes;
}

// The first segment with an impossible length or number of bits, as (fault, segment).
inline std::pair<BoundedFault, std::size_t> check_sizes(const std::vector<SegmentSpec>& specs) {
    for (std::size_t s = 0; s < specs.size(); ++s) {
        if (specs[s].n > kMaxBoundedLength) return {BoundedFault::kLength, s};
        if (specs[s].bits < 1 || specs[s].bits > kMaxBoundedBits) return {BoundedFault::kBits, s};
    }
    return {BoundedFault::kNone, 0};
}

// Returns (fault, segment, most bytes of a message, elements).
inline std::tuple<int, std::size_t, std::size_t, uint64_t> max_bounded_sizes(
    const std::vector<SegmentArgument>& segments, uint32_t dtype_code) {
    const std::size_t element_nbytes = bounded_element_nbytes(dtype_code);
    const std::vector<SegmentSpec> specs = specs_of(segments);
    const auto [fault, segment] = check_sizes(specs);
    if (fault != BoundedFault::kNone) return {static_cast<int>(fault), segment, 0, 0};
    uint64_t n = 0;
    for (const SegmentSpec& spec : specs) n += spec.n;
    return {0, 0, max_bounded_nbytes(specs, element_nbytes), n};
}

// Returns (fault, segment, bytes of the message, escapes of the segment with the fault).
inline std::tuple<int, std::size_t, std::size_t, uint64_t> encode_bounded_segments(
    Bytes src, const std::vector<SegmentArgument>& segments, uint32_t dtype_code, uint32_t rounding,
    uint64_t seed, int doublings, WritableBytes dst, std::size_t threads) {
    const Isa isa = choose_isa();
    require(rounding <= 1, "rounding must be 0 or 1");
    require(doublings >= -1 && doublings <= 65535, "doublings must be -1 to 65535");
    const std::vector<SegmentSpec> specs = specs_of(segments);
    const std::size_t element_nbytes = bounded_element_nbytes(dtype_code);
    require(check_sizes(specs).first == BoundedFault::kNone, "a segment has an impossible size");
    uint64_t n = 0;
    for (const SegmentSpec& spec : specs) n += spec.n;
    require(src.size() == n * element_nbytes, "src must be as long as its segments");
    require(dst.size() >= max_bounded_nbytes(specs, element_nbytes), "dst is too small");
    require(doublings == -1 || specs.size() == 1, "the fixed form has one segment");
    const BoundedForm form = doublings == -1 ? BoundedForm::kPlain : BoundedForm::kFixed;
    const BoundedRequest request{{dtype_code, static_cast<Rounding>(rounding), form, specs.size()},
                                 seed,
                                 static_cast<uint32_t>(std::max(doublings, 0)),
                                 std::max<std::size_t>(threads, 1)};
    const ReleasedGil released(src.size());
    const BoundedEncoding result =
        encode_bounded_message(src.data(), specs, request, dst.data(), isa);
    return {static_cast<int>(result.fault), result.segment, result.nbytes, result.n_escapes};
}

// Returns (fault, segment, dtype code, elements). Decodes only if dtype and number of elements are
// those of `dst`.
inline std::tuple<int, std::size_t, uint32_t, uint64_t> decode_bounded_segments(
    Bytes message, uint32_t dtype_code, WritableBytes dst, std::size_t threads) {
    const Isa isa = choose_isa();
    const std::size_t element_nbytes = bounded_element_nbytes(dtype_code);
    const ReleasedGil released(dst.size());
    BoundedMessage found = read_bounded(message.data(), message.size(), isa);
    const bool fits = found.header.dtype_code == dtype_code && dst.size() % element_nbytes == 0 &&
                      dst.size() / element_nbytes == found.n_elements;
    if (found.fault == BoundedFault::kNone && fits)
        decode_bounded_message(message.data(), found, dst.data(), std::max<std::size_t>(threads, 1),
                               isa);
    return {static_cast<int>(found.fault), found.fault_segment, found.header.dtype_code,
            found.n_elements};
}

inline void bind_bounded(nb::module_& m) {
    using namespace nb::literals;
    m.def("max_bounded_nbytes", &max_bounded_sizes, "segments"_a, "dtype_code"_a);
    m.def("encode_bounded", &encode_bounded_segments, "src"_a, "segments"_a, "dtype_code"_a,
          "rounding"_a, "seed"_a, "doublings"_a, "dst"_a.noconvert(), "threads"_a);
    m.def("decode_bounded", &decode_bounded_segments, "message"_a, "dtype_code"_a,
          "dst"_a.noconvert(), "threads"_a);
}

}  // namespace packhorse
