// Bindings of bounded codes. Lengths are checked here. The core checks bounds and messages, and
// codecs/bounded.py puts faults into words.
#pragma once

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <tuple>
#include <vector>

#include "bind/arguments.hpp"
#include "bounded/coded.hpp"
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

// Returns (fault, segment, bytes of the message).
inline std::tuple<int, std::size_t, std::size_t> encode_bounded_segments(
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
    require(doublings == -1 || specs.size() == 1, "the fixed form has one segment");
    const std::size_t nbytes = doublings == -1 ? max_bounded_nbytes(specs, element_nbytes)
                                               : fixed_bounded_nbytes(specs[0], element_nbytes);
    require(dst.size() >= nbytes, "dst is too small");
    const BoundedForm form = doublings == -1 ? BoundedForm::kPlain : BoundedForm::kFixed;
    const BoundedRequest request{{dtype_code, static_cast<Rounding>(rounding), form, specs.size()},
                                 seed,
                                 static_cast<uint32_t>(std::max(doublings, 0)),
                                 std::max<std::size_t>(threads, 1)};
    const ReleasedGil released(src.size());
    const BoundedEncoding result =
        encode_bounded_message(src.data(), specs, request, dst.data(), isa);
    return {static_cast<int>(result.fault), result.segment, result.nbytes};
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

// The models for the codes of a message without faults, serialised.
inline nb::bytes choose_bounded_models(Bytes message) {
    const Isa isa = choose_isa();
    std::vector<uint8_t> models;
    {
        const ReleasedGil released(message.size());
        const BoundedMessage found = read_bounded(message.data(), message.size(), isa);
        require(found.fault == BoundedFault::kNone, "the message has a fault");
        models = choose_code_models(message.data(), found, isa);
    }
    return nb::bytes(reinterpret_cast<const char*>(models.data()), models.size());
}

inline std::unique_ptr<CodeTables> make_code_tables(Bytes models) {
    return std::make_unique<CodeTables>(models.data(), models.size(), choose_isa());
}

// The most bytes of the coded form of a message of `nbytes` bytes.
inline std::size_t max_coded_nbytes_of(std::size_t nbytes, const CodeTables& tables) {
    // A piece has at least 64 bytes of codes.
    return kCodedHeaderNbytes + tables.models_nbytes() + nbytes / 16 + nbytes;
}

// Returns the bytes of the coded message; 0 if the message has a fault.
inline std::size_t encode_coded_message(Bytes message, const CodeTables& tables, bool with_models,
                                        WritableBytes dst, std::size_t threads) {
    const Isa isa = choose_isa();
    require(tables.is_valid(), "the models break a rule");
    require(dst.size() >= max_coded_nbytes_of(message.size(), tables), "dst is too small");
    const ReleasedGil released(message.size());
    const BoundedMessage found = read_bounded(message.data(), message.size(), isa);
    if (found.fault != BoundedFault::kNone) return 0;
    return encode_coded(message.data(), message.size(), found, tables, with_models, dst.data(),
                        std::max<std::size_t>(threads, 1), isa);
}

// What a coded message needs, as (fault, has models, their length, their CRC, bytes of the bounded
// message, which may have at most `capacity`).
inline std::tuple<int, bool, std::size_t, uint32_t, std::size_t> read_coded_message(
    Bytes coded, std::size_t capacity) {
    const Isa isa = choose_isa();
    const ReleasedGil released(coded.size());
    const CodedMessage found = read_coded(coded.data(), coded.size(), capacity, isa);
    return {static_cast<int>(found.fault), found.has_models, found.models_nbytes, found.models_crc,
            found.message_nbytes};
}

// Returns the fault.
inline int decode_coded_message(Bytes coded, const CodeTables& tables, WritableBytes dst,
                                std::size_t threads) {
    const Isa isa = choose_isa();
    require(tables.is_valid(), "the models break a rule");
    const ReleasedGil released(dst.size());
    const CodedMessage found = read_coded(coded.data(), coded.size(), dst.size(), isa);
    if (found.fault != BoundedFault::kNone) return static_cast<int>(found.fault);
    if (found.message_nbytes != dst.size() || found.models_crc != tables.crc() ||
        found.models_nbytes != tables.models_nbytes())
        return static_cast<int>(BoundedFault::kSize);
    const bool is_valid = decode_coded(coded.data(), found, tables, dst.data(),
                                       std::max<std::size_t>(threads, 1), isa);
    return static_cast<int>(is_valid ? BoundedFault::kNone : BoundedFault::kStream);
}

inline void bind_bounded(nb::module_& m) {
    using namespace nb::literals;
    m.def("max_bounded_nbytes", &max_bounded_sizes, "segments"_a, "dtype_code"_a);
    m.def("encode_bounded", &encode_bounded_segments, "src"_a, "segments"_a, "dtype_code"_a,
          "rounding"_a, "seed"_a, "doublings"_a, "dst"_a.noconvert(), "threads"_a);
    m.def("decode_bounded", &decode_bounded_segments, "message"_a, "dtype_code"_a,
          "dst"_a.noconvert(), "threads"_a);
    nb::class_<CodeTables>(m, "CodeTables")
        .def(nb::new_(&make_code_tables), "models"_a)
        .def_prop_ro("is_valid", &CodeTables::is_valid)
        .def_prop_ro("crc", &CodeTables::crc)
        .def_prop_ro("models_nbytes", &CodeTables::models_nbytes);
    m.def("choose_code_models", &choose_bounded_models, "message"_a);
    m.def("max_coded_nbytes", &max_coded_nbytes_of, "nbytes"_a, "tables"_a);
    m.def("encode_coded", &encode_coded_message, "message"_a, "tables"_a, "with_models"_a,
          "dst"_a.noconvert(), "threads"_a);
    m.def("read_coded", &read_coded_message, "coded"_a, "capacity"_a);
    m.def("decode_coded", &decode_coded_message, "coded"_a, "tables"_a, "dst"_a.noconvert(),
          "threads"_a);
}

}  // namespace packhorse
