// Frames for Python: opened one by one, packed and unpacked many at a time. Unlike the classes of
// bind/tensors.hpp, an OpenFrame is made from bytes that nobody has checked.
#pragma once

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "bind/tensors.hpp"
#include "frame/pack.hpp"
#include "frame/unpack.hpp"

namespace packhorse {

// A frame whose header was checked.
struct OpenFrame {
    Bytes data;
    FrameHeader header;
    bool has_zstd;
    bool stands_alone;
};

inline nb::bytes to_bytes(const uint8_t* src, std::size_t n) {
    return nb::bytes(reinterpret_cast<const char*>(src), n);
}

inline nb::tuple shape_of(const FrameHeader& header) {
    nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(header.shape.size())));
    for (std::size_t d = 0; d < header.shape.size(); ++d)
        PyTuple_SetItem(shape.ptr(), static_cast<Py_ssize_t>(d),
                        PyLong_FromUnsignedLongLong(header.shape[d]));
    return nb::borrow<nb::tuple>(shape);
}

inline bool overlap(const uint8_t* a, std::size_t a_nbytes, const uint8_t* b,
                    std::size_t b_nbytes) {
    const auto from = reinterpret_cast<uintptr_t>(a), to = reinterpret_cast<uintptr_t>(b);
    return from < to + b_nbytes && to < from + a_nbytes;
}

// Returns an OpenFrame, or (fault, place, what was found, what would fit).
inline nb::object open_frame(Bytes data, std::optional<std::size_t> max_nbytes) {
    OpenFrame frame{std::move(data), {}, false, false};
    const HeaderCheck check = read_header(
        frame.data.data(), frame.data.size(),
        max_nbytes.value_or(std::numeric_limits<std::size_t>::max()), frame.header, choose_isa());
    if (check.fault != HeaderFault::kNone)
        return nb::make_tuple(static_cast<int>(check.fault), check.at, check.found, check.expected);
    frame.has_zstd = has_zstd(frame.header);
    frame.stands_alone = stands_alone(frame.header);
    return nb::cast(std::move(frame));
}

// Unpacks frames that stand alone. Returns (status, frame, chunk) of the first fault.
inline std::tuple<int, std::size_t, std::size_t> unpack_frames(
    const std::vector<const OpenFrame*>& frames, const std::vector<WritableBytes>& dsts, bool check,
    std::size_t threads) {
    const Isa isa = choose_isa();
    require(frames.size() == dsts.size(), "each frame needs memory for its tensor");
    std::vector<UnpackJob> jobs;
    jobs.reserve(frames.size());
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < frames.size(); ++i) {
        const OpenFrame& frame = *frames[i];
        require(frame.stands_alone, "the frame has a base, side data or chunks of Zstandard");
        require(dsts[i].size() == frame.header.geometry.nbytes(),
                "dst must be as long as the tensor");
        require(!overlap(frame.data.data(), frame.data.size(), dsts[i].data(), dsts[i].size()),
                "dst and the frame share memory; decode elsewhere");
        jobs.push_back({&frame.header, frame.data.data(), dsts[i].data()});
        nbytes += dsts[i].size();
    }
    const ReleasedGil released(nbytes);
    const UnpackFault fault = unpack_many(jobs, check, threads, isa);
    return {static_cast<int>(fault.status), fault.job, fault.chunk};
}

// Whether memory to write to shares nothing with other such memory, nor with memory to read.
inline bool are_apart(const std::vector<Bytes>& written, const std::vector<Bytes>& read) {
    struct Span {
        uintptr_t start, stop;
        bool is_written;
    };
    std::vector<Span> spans;
    spans.reserve(written.size() + read.size());
    const auto add = [&](const std::vector<Bytes>& all, bool is_written) {
        for (const Bytes& bytes : all) {
            const auto start = reinterpret_cast<uintptr_t>(bytes.data());
            if (bytes.size() > 0) spans.push_back({start, start + bytes.size(), is_written});
        }
    };
    add(written, true);
    add(read, false);
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.start < b.start; });
    uintptr_t end = 0, written_end = 0;  // of the memory so far
    for (const Span& span : spans) {
        if (span.start < written_end || (span.is_written && span.start < end)) return false;
        end = std::max(end, span.stop);
        if (span.is_written) written_end = std::max(written_end, span.stop);
    }
    return true;
}

inline PackJob checked_job(const Bytes& src, uint32_t code, const std::vector<uint64_t>& shape,
                           const WritableBytes& dst) {
    const DTypeRow* const dtype = dtype_row(code);
    require(dtype != nullptr && dtype->is_float(), "only floats are packed without a plan");
    require(shape.size() <= kMaxDims && !has_too_many_bits(shape, *dtype) &&
                n_elements(shape) * dtype->bits / 8 == src.size(),
            "src must be as long as dtype and shape say");
    PackJob job{src.data(), code, shape,
                cut_tensor(dtype->unit_nbytes, Split::kFloat, src.size(), kChunkNbytes),
                dst.data()};
    require(dst.size() >= job.frame_capacity(), "out is too small for a frame of the tensor");
    require(!overlap(src.data(), src.size(), dst.data(), dst.size()),
            "out and src share memory; it would be overwritten while it is read");
    return job;
}

// Packs tensors that need no plan. Returns the length of each frame; 0 if a tensor needs a plan.
inline std::vector<std::size_t> pack_frames(const std::vector<Bytes>& srcs,
                                            const std::vector<uint32_t>& codes,
                                            const std::vector<std::vector<uint64_t>>& shapes,
                                            const std::vector<WritableBytes>& outs,
                                            int level_number, std::size_t threads) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    require(
        codes.size() == srcs.size() && shapes.size() == srcs.size() && outs.size() == srcs.size(),
        "each tensor needs a dtype, a shape and memory");
    std::vector<PackJob> jobs;
    jobs.reserve(srcs.size());
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < srcs.size(); ++i) {
        jobs.push_back(checked_job(srcs[i], codes[i], shapes[i], outs[i]));
        nbytes += srcs[i].size();
    }
    {
        const ReleasedGil released(nbytes);
        pack_many(jobs, level, threads, isa);
    }
    std::vector<std::size_t> lengths;
    lengths.reserve(jobs.size());
    for (const PackJob& job : jobs) lengths.push_back(job.frame_nbytes);
    return lengths;
}

// Whether pack_frames() packs a tensor.
inline bool needs_no_plan(Bytes src, uint32_t code, const std::vector<uint64_t>& shape,
                          int level_number) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    const DTypeRow* const dtype = dtype_row(code);
    require(dtype != nullptr, "there is no such dtype");
    if (!dtype->is_float()) return false;
    const Geometry geometry =
        cut_tensor(dtype->unit_nbytes, Split::kFloat, src.size(), kChunkNbytes);
    return is_plain(src.data(), *dtype, shape, geometry, level, isa);
}

// For each view of a tensor that side data are tried for, how many dimensions make its rows.
inline std::vector<std::size_t> side_views(const std::vector<uint64_t>& shape,
                                           std::size_t n_units) {
    std::size_t product = 1;
    bool overflows = false;
    for (uint64_t size : shape) overflows |= __builtin_mul_overflow(product, size, &product);
    require(!overflows && (product > 0 || n_units == 0) && n_units / 2 <= product,
            "the shape has another number of units");
    std::vector<std::size_t> views;
    for_each_side_view(shape, n_units, [&](std::size_t n_row_dims, std::size_t, std::size_t) {
        views.push_back(n_row_dims);
    });
    return views;
}

inline nb::bytes xxh3_128_of(Bytes src) {
    uint8_t hash[kXxh3Nbytes];
    const Isa isa = choose_isa();
    xxh3_128(src.data(), src.size(), hash, isa);
    return to_bytes(hash, sizeof hash);
}

inline void bind_frames(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<OpenFrame>(m, "OpenFrame")
        .def_ro("has_zstd", &OpenFrame::has_zstd)
        .def_ro("stands_alone", &OpenFrame::stands_alone)
        .def_prop_ro("dtype_code", [](const OpenFrame& f) { return f.header.dtype_code; })
        .def_prop_ro("shape", [](const OpenFrame& f) { return shape_of(f.header); })
        .def_prop_ro("geometry", [](const OpenFrame& f) { return f.header.geometry; })
        .def_prop_ro("nbytes", [](const OpenFrame& f) { return f.header.geometry.nbytes(); })
        .def_prop_ro("content_hash",
                     [](const OpenFrame& f) { return to_bytes(f.header.content_hash(), 16); })
        .def_prop_ro("base_hash",
                     [](const OpenFrame& f) -> nb::object {
                         if (f.header.base_code == 0) return nb::none();
                         return to_bytes(f.header.text.data() + f.header.base_at, 16);
                     })
        .def_prop_ro("text", [](const OpenFrame& f) {
            return to_bytes(f.header.text.data(), f.header.text.size());
        });
    m.def("open_frame", &open_frame, "data"_a, "max_nbytes"_a.none());
    m.def("unpack_frames", &unpack_frames, "frames"_a, "dsts"_a.noconvert(), "check"_a,
          "threads"_a);
    m.def("pack_frames", &pack_frames, "srcs"_a, "codes"_a, "shapes"_a, "outs"_a.noconvert(),
          "level"_a, "threads"_a);
    m.def("side_views", &side_views, "shape"_a, "n_units"_a);
    m.def(
        "side_rule",
        [](int level) {
            const SideRule rule = side_rule(checked_level(level));
            return std::tuple(rule.must_save, rule.rows, rule.columns);
        },
        "level"_a);
    m.def("are_apart", &are_apart, "written"_a, "read"_a);
    m.def("needs_no_plan", &needs_no_plan, "src"_a, "code"_a, "shape"_a, "level"_a);
    m.def(
        "cut_tensor",
        [](uint32_t unit_nbytes, int split, std::size_t nbytes, std::size_t chunk_nbytes) {
            const char* const fault = geometry_fault(unit_nbytes, split, kMaxChunkLog - 3, nbytes);
            require(fault == nullptr, fault);
            require(chunk_nbytes >= kMinChunkNbytes && chunk_nbytes <= kMaxChunkNbytes,
                    "chunk_nbytes is out of range");
            return cut_tensor(unit_nbytes, static_cast<Split>(split), nbytes, chunk_nbytes);
        },
        "unit_nbytes"_a, "split"_a, "nbytes"_a, "chunk_nbytes"_a);
    m.def("dtype_rows", [] {
        nb::list rows;
        for (const DTypeRow& row : kDTypeRows)
            rows.append(nb::make_tuple(row.bits, row.unit_nbytes, row.splits));
        return rows;
    });
    m.def("xxh3_128", &xxh3_128_of, "src"_a);
}

}  // namespace packhorse
