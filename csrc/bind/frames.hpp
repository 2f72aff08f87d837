// Frames for Python: opened one by one, packed and unpacked many at a time. Unlike the classes of
// bind/tensors.hpp, an OpenFrame is made from bytes that nobody has checked.
#pragma once

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "bind/files.hpp"
#include "bind/tensors.hpp"
#include "bind/views.hpp"
#include "frame/pack.hpp"
#include "frame/unpack.hpp"

namespace packhorse {

// A frame whose header was checked.
struct OpenFrame {
    nb::object memory;  // what owns the bytes
    const uint8_t* data = nullptr;
    std::size_t nbytes = 0;
    FrameHeader header;
    bool has_zstd = false;
    bool stands_alone = false;

    // Reads the header of the frame that the bytes are.
    HeaderCheck open(std::size_t max_nbytes, Isa isa) {
        const HeaderCheck check = read_header(data, nbytes, max_nbytes, header, isa);
        if (check.fault != HeaderFault::kNone) return check;
        has_zstd = packhorse::has_zstd(header);
        stands_alone = packhorse::stands_alone(header);
        return check;
    }
};

inline nb::bytes to_bytes(const uint8_t* src, std::size_t n) {
    return nb::bytes(reinterpret_cast<const char*>(src), n);
}

inline bool overlap(const uint8_t* a, std::size_t a_nbytes, const uint8_t* b,
                    std::size_t b_nbytes) {
    const auto from = reinterpret_cast<uintptr_t>(a), to = reinterpret_cast<uintptr_t>(b);
    return from < to + b_nbytes && to < from + a_nbytes;
}

// Returns an OpenFrame, or (fault, place, what was found, what would fit).
inline nb::object open_frame(nb::object memory, std::optional<std::size_t> max_nbytes) {
    HeldBuffer buffer;
    require(buffer.take(memory, PyBUF_SIMPLE), "a frame must be a buffer of bytes in C order");
    OpenFrame frame;
    frame.data = static_cast<const uint8_t*>(buffer.get().buf);
    frame.nbytes = static_cast<std::size_t>(buffer.get().len);
    frame.memory = std::move(memory);
    const HeaderCheck check =
        frame.open(max_nbytes.value_or(std::numeric_limits<std::size_t>::max()), choose_isa());
    if (check.fault != HeaderFault::kNone)
        return nb::make_tuple(static_cast<int>(check.fault), check.at, check.found, check.expected);
    return nb::cast(std::move(frame));
}

// Opens frames, each of them a buffer of plain bytes. None for one that is no such buffer, or is
// not right. Memory that its owner might resize is kept by a memoryview.
inline nb::list open_each(const nb::list& buffers) {
    const Isa isa = choose_isa();
    nb::list frames;
    for (const nb::handle buffer : buffers) {
        OpenFrame frame;
        frame.memory = PyBytes_Check(buffer.ptr())
                           ? nb::borrow(buffer)
                           : nb::steal(PyMemoryView_FromObject(buffer.ptr()));
        if (!frame.memory.is_valid()) PyErr_Clear();
        HeldBuffer held;
        const bool is_held =
            frame.memory.is_valid() && held.take(frame.memory, PyBUF_ND | PyBUF_FORMAT);
        if (!is_held ||
            (held.get().format != nullptr && std::strcmp(held.get().format, "B") != 0)) {
            frames.append(nb::none());
            continue;
        }
        frame.data = static_cast<const uint8_t*>(held.get().buf);
        frame.nbytes = static_cast<std::size_t>(held.get().len);
        const HeaderCheck check = frame.open(std::numeric_limits<std::size_t>::max(), isa);
        if (check.fault == HeaderFault::kNone)
            frames.append(std::move(frame));
        else
            frames.append(nb::none());
    }
    return frames;
}

// Opens frames of one buffer, at these places, as far as they are frames of tensors of these dtypes
// and shapes.
inline nb::list open_frames(nb::object memory, const std::vector<std::size_t>& starts,
                            const std::vector<std::size_t>& lengths,
                            const std::vector<uint32_t>& codes,
                            const std::vector<std::vector<uint64_t>>& shapes) {
    const Isa isa = choose_isa();
    const std::size_t n = starts.size();
    require(lengths.size() == n && codes.size() == n && shapes.size() == n,
            "each frame needs a length, a dtype and a shape");
    HeldBuffer buffer;
    require(buffer.take(memory, PyBUF_SIMPLE), "frames must be a buffer of bytes in C order");
    const auto size = static_cast<std::size_t>(buffer.get().len);
    nb::list frames;
    for (std::size_t i = 0; i < n; ++i) {
        require(starts[i] <= size && lengths[i] <= size - starts[i], "a frame lies elsewhere");
        OpenFrame frame;
        frame.data = static_cast<const uint8_t*>(buffer.get().buf) + starts[i];
        frame.nbytes = lengths[i];
        frame.memory = memory;
        const HeaderCheck check = frame.open(std::numeric_limits<std::size_t>::max(), isa);
        if (check.fault != HeaderFault::kNone || frame.header.dtype_code != codes[i] ||
            frame.header.shape != shapes[i])
            break;
        frames.append(std::move(frame));
    }
    return frames;
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
        require(!overlap(frame.data, frame.nbytes, dsts[i].data(), dsts[i].size()),
                "dst and the frame share memory; decode elsewhere");
        jobs.push_back({&frame.header, frame.data, dsts[i].data()});
        nbytes += dsts[i].size();
    }
    const ReleasedGil released(nbytes);
    const UnpackFault fault = unpack_many(jobs, check, threads, isa);
    return {static_cast<int>(fault.status), fault.job, fault.chunk};
}

// Unpacks frames that stand alone to tensors that are known and fit. Returns (status, frame, chunk)
// of the first fault, and which frames are left to the caller.
inline std::tuple<int, std::size_t, std::size_t, std::vector<std::size_t>> unpack_to_views(
    const std::vector<const OpenFrame*>& frames, const Views& dsts, std::size_t threads) {
    const Isa isa = choose_isa();
    require(frames.size() == dsts.size(), "each frame needs memory for its tensor");
    std::vector<UnpackJob> jobs;
    std::vector<std::size_t> numbers, rest;
    jobs.reserve(frames.size());
    numbers.reserve(frames.size());
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < frames.size(); ++i) {
        const OpenFrame& frame = *frames[i];
        const View& dst = dsts[i];
        const bool fits = dst.is_known && dst.is_writable &&
                          dst.nbytes == frame.header.geometry.nbytes() &&
                          !overlap(frame.data, frame.nbytes, dst.data, dst.nbytes);
        if (!fits || !frame.stands_alone) {
            rest.push_back(i);
            continue;
        }
        jobs.push_back({&frame.header, frame.data, dst.data});
        numbers.push_back(i);
        nbytes += dst.nbytes;
    }
    const ReleasedGil released(nbytes);
    const UnpackFault fault = unpack_many(jobs, true, threads, isa);
    const std::size_t frame = fault.status == Status::kOk ? 0 : numbers[fault.job];
    return {static_cast<int>(fault.status), frame, fault.chunk, std::move(rest)};
}

// Which tensors are not known to be writable memory for the tensors of frames.
inline std::vector<std::size_t> misfits(const std::vector<const OpenFrame*>& frames,
                                        const Views& dsts) {
    require(frames.size() == dsts.size(), "each frame needs memory for its tensor");
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < frames.size(); ++i)
        if (!dsts[i].is_known || !dsts[i].is_writable ||
            dsts[i].code != frames[i]->header.dtype_code ||
            dsts[i].shape != frames[i]->header.shape)
            found.push_back(i);
    return found;
}

// Which tensors do not have the content that their frames declare. Those of several leaves of the
// hash, and of frames whose hashes are sums, are among them: they need more than this.
inline std::vector<std::size_t> content_faults(const std::vector<const OpenFrame*>& frames,
                                               const Views& views) {
    require(frames.size() == views.size(), "each frame needs a tensor");
    const Isa isa = choose_isa();
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < frames.size(); ++i) {
        const View& view = views[i];
        uint8_t hash[kXxh3Nbytes];
        const bool is_short = view.is_known && view.nbytes > 0 &&
                              view.nbytes <= kContentLeafNbytes && !frames[i]->header.has_sum;
        if (is_short) xxh3_128(view.data, view.nbytes, hash, isa);
        if (!is_short || std::memcmp(hash, frames[i]->header.content_hash(), sizeof hash) != 0)
            found.push_back(i);
    }
    return found;
}

// The forms (dtype, shape) of tensors, each once, and which one each tensor has.
class FormList {
  public:
    void add(uint32_t code, const std::vector<uint64_t>& shape) {
        const auto [at, is_new] = known_.try_emplace({code, shape}, known_.size());
        if (is_new) forms_.append(nb::make_tuple(code, shape_of(shape)));
        numbers_.push_back(at->second);
    }
    nb::tuple get() const { return nb::make_tuple(forms_, numbers_); }

  private:
    std::map<std::pair<uint32_t, std::vector<uint64_t>>, std::size_t> known_;
    nb::list forms_;
    std::vector<std::size_t> numbers_;
};

inline nb::tuple forms_of_frames(const std::vector<const OpenFrame*>& frames) {
    FormList forms;
    for (const OpenFrame* frame : frames) forms.add(frame->header.dtype_code, frame->header.shape);
    return forms.get();
}

inline nb::tuple forms_of_views(const Views& views) {
    FormList forms;
    for (std::size_t i = 0; i < views.size(); ++i) forms.add(views[i].code, views[i].shape);
    return forms.get();
}

// Whether memory to write to shares nothing with other such memory, nor with memory to read.
inline bool are_apart(const std::vector<const Views*>& written,
                      const std::vector<const Views*>& read) {
    struct Span {
        uintptr_t start, stop;
        bool is_written;
    };
    std::vector<Span> spans;
    const auto add = [&](const std::vector<const Views*>& lists, bool is_written) {
        for (const Views* views : lists)
            for (std::size_t i = 0; i < views->size(); ++i) {
                const auto start = reinterpret_cast<uintptr_t>((*views)[i].data);
                const std::size_t nbytes = (*views)[i].nbytes;
                if (nbytes > 0) spans.push_back({start, start + nbytes, is_written});
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

// The memory of frames, for their tensors to be compared with other memory.
inline Views views_of_frames(const std::vector<const OpenFrame*>& frames) {
    Views views(frames.size());
    for (std::size_t i = 0; i < frames.size(); ++i) {
        views.at(i).data = const_cast<uint8_t*>(frames[i]->data);
        views.at(i).nbytes = frames[i]->nbytes;
        views.at(i).is_known = true;
    }
    return views;
}

// Short frames are copied to Python's own bytes, which are as long as they are.
constexpr std::size_t kMaxCopiedNbytes = std::size_t{1} << 16;

// The work to pack a tensor, without memory for its frame; nothing if it is no known tensor, or if
// it needs a plan whatever its values are.
inline std::optional<PackJob> pack_job(const View& src) {
    const DTypeRow* const dtype = dtype_row(src.code);
    if (!src.is_known || dtype == nullptr) return std::nullopt;
    if (!dtype->is_float() && !is_short(*dtype, src.nbytes)) return std::nullopt;
    return PackJob{src.data, src.code, src.shape,
                   cut_tensor(dtype->unit_nbytes, dtype->last_split(), src.nbytes, kChunkNbytes),
                   nullptr};
}

// The memory that a caller gives for a frame.
inline uint8_t* checked_room(const PackJob& job, const View& src, const View& out) {
    require(out.is_known && out.is_writable && out.nbytes >= job.frame_capacity(),
            "out is too small for a frame of the tensor");
    require(!overlap(src.data, src.nbytes, out.data, out.nbytes),
            "out and src share memory; it would be overwritten while it is read");
    return out.data;
}

// Packs known tensors that need no plan, at a level below `max`. Their frames lie in
// `outs`, or if there are none, in new memory: in bytes that are as long, or at the beginning of
// what `room` returns for a length. Returns an OpenFrame for each tensor; None if it is another
// one, or needs a plan.
inline nb::list pack_views(const Views& srcs, const Views* outs, const nb::object& room,
                           int level_number, std::size_t threads) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    require(outs == nullptr || outs->size() == srcs.size(), "each tensor needs memory");
    std::vector<PackJob> jobs;
    std::vector<std::size_t> numbers;
    std::vector<nb::object> memory;
    std::vector<std::unique_ptr<uint8_t[]>> copied;
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < srcs.size(); ++i) {
        std::optional<PackJob> job = pack_job(srcs[i]);
        if (!job) continue;
        const std::size_t capacity = job->frame_capacity();
        if (outs != nullptr) {
            job->dst = checked_room(*job, srcs[i], (*outs)[i]);
        } else if (capacity <= kMaxCopiedNbytes) {
            copied.emplace_back(new uint8_t[capacity]);
            memory.emplace_back();
            job->dst = copied.back().get();
        } else {
            copied.emplace_back();
            memory.push_back(room(capacity));
            HeldBuffer buffer;
            require(buffer.take(memory.back(), PyBUF_SIMPLE | PyBUF_WRITABLE) &&
                        static_cast<std::size_t>(buffer.get().len) >= capacity,
                    "out is too small for a frame of the tensor");
            job->dst = static_cast<uint8_t*>(buffer.get().buf);
        }
        nbytes += srcs[i].nbytes;
        jobs.push_back(std::move(*job));
        numbers.push_back(i);
    }
    {
        const ReleasedGil released(nbytes);
        pack_many(jobs, level, threads, isa);
    }
    nb::list frames;
    for (std::size_t i = 0, k = 0; i < srcs.size(); ++i) {
        const bool is_packed = k < numbers.size() && numbers[k] == i;
        const std::size_t job = is_packed ? k++ : 0;
        if (!is_packed || jobs[job].frame_nbytes == 0) {
            frames.append(nb::none());
            continue;
        }
        OpenFrame frame;
        frame.nbytes = jobs[job].frame_nbytes;
        frame.data = jobs[job].dst;
        frame.memory = nb::none();
        if (outs == nullptr) {
            if (copied[job] != nullptr) {
                memory[job] = to_bytes(frame.data, frame.nbytes);
                frame.data = reinterpret_cast<const uint8_t*>(PyBytes_AsString(memory[job].ptr()));
                copied[job].reset();
            }
            frame.memory = std::move(memory[job]);
        }
        const HeaderCheck check = frame.open(std::numeric_limits<std::size_t>::max(), isa);
        require(check.fault == HeaderFault::kNone, "the memory of a frame was written to");
        frames.append(std::move(frame));
    }
    return frames;
}

// Does what pack_views() does, to memory of the caller. Returns the length of each frame; 0 for a
// tensor that is left.
inline std::vector<std::size_t> pack_lengths(const Views& srcs, const Views& outs, int level_number,
                                             std::size_t threads) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    require(outs.size() == srcs.size(), "each tensor needs memory");
    std::vector<PackJob> jobs;
    std::vector<std::size_t> numbers, lengths(srcs.size());
    jobs.reserve(srcs.size());
    std::size_t nbytes = 0;
    for (std::size_t i = 0; i < srcs.size(); ++i) {
        std::optional<PackJob> job = pack_job(srcs[i]);
        if (!job) continue;
        job->dst = checked_room(*job, srcs[i], outs[i]);
        nbytes += srcs[i].nbytes;
        jobs.push_back(std::move(*job));
        numbers.push_back(i);
    }
    {
        const ReleasedGil released(nbytes);
        pack_many(jobs, level, threads, isa);
    }
    for (std::size_t k = 0; k < numbers.size(); ++k) lengths[numbers[k]] = jobs[k].frame_nbytes;
    return lengths;
}

// Whether pack_views() packs a tensor.
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

// How pack_views() packs a short tensor that is no float: its geometry, and mode and bytes of each
// stream. Nothing if it leaves the tensor to a plan.
inline std::optional<std::pair<Geometry, std::vector<std::pair<int, std::size_t>>>> plan_short(
    Bytes src, uint32_t code, std::size_t n_dims, int level_number) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    const DTypeRow* const dtype = dtype_row(code);
    require(dtype != nullptr && src.size() % dtype->unit_nbytes == 0,
            "src must be whole units of a dtype");
    const bool tries = level != Level::kMax || src.size() <= kFrameAlignment;
    if (!tries || !is_short(*dtype, src.size())) return std::nullopt;
    const Geometry geometry =
        cut_tensor(dtype->unit_nbytes, dtype->last_split(), src.size(), kChunkNbytes);
    EncodeWorker worker(geometry, false, false, false);
    ShortPacker packer(src.data(), geometry, n_dims, level, worker, isa);
    ShortWay way;
    if (!packer.find(way)) return std::nullopt;
    const Geometry cut = way.cut(geometry);
    std::vector<std::pair<int, std::size_t>> streams;
    for (uint32_t p = 0; p < cut.spec.n_planes; ++p)
        streams.emplace_back(static_cast<int>(descriptor_mode(way.row[1 + p])),
                             descriptor_nbytes(way.row[1 + p]));
    return std::make_pair(cut, std::move(streams));
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
    bind_files(m);
    nb::class_<Views>(m, "Views")
        .def(nb::init<std::size_t>(), "n"_a)
        .def("__len__", &Views::size)
        .def("part", &Views::part, "numbers"_a, nb::keep_alive<0, 1>())
        .def("forget",
             [](Views& views, std::size_t i) {
                 require(i < views.size(), "there is no such tensor");
                 views.at(i).is_known = false;
             })
        .def("unknown",
             [](const Views& views) {
                 std::vector<std::size_t> found;
                 for (std::size_t i = 0; i < views.size(); ++i)
                     if (!views[i].is_known) found.push_back(i);
                 return found;
             })
        .def("nbytes", [](const Views& views, std::size_t i) {
            require(i < views.size(), "there is no such tensor");
            return views[i].nbytes;
        });
    m.def("views_of_arrays", &views_of_arrays, "arrays"_a, "kind"_a, "codes"_a);
    m.def("views_of_tensors", &views_of_tensors, "tensors"_a, "kinds"_a, "table"_a, "codes"_a,
          "is_negated"_a);
    m.def("views_of_rooms", &views_of_rooms, "memory"_a, "lengths"_a);
    m.def("views_of_buffers", &views_of_buffers, "buffers"_a, "codes"_a, "shapes"_a);
    nb::class_<OpenFrame>(m, "OpenFrame")
        .def_ro("has_zstd", &OpenFrame::has_zstd)
        .def_ro("stands_alone", &OpenFrame::stands_alone)
        .def_ro("memory", &OpenFrame::memory)
        .def_ro("frame_nbytes", &OpenFrame::nbytes)
        .def_prop_ro("dtype_code", [](const OpenFrame& f) { return f.header.dtype_code; })
        .def_prop_ro("shape", [](const OpenFrame& f) { return shape_of(f.header.shape); })
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
    m.def("open_frame", &open_frame, "memory"_a, "max_nbytes"_a.none());
    m.def("unpack_frames", &unpack_frames, "frames"_a, "dsts"_a.noconvert(), "check"_a,
          "threads"_a);
    m.def("open_each", &open_each, "buffers"_a);
    m.def("content_faults", &content_faults, "frames"_a, "views"_a);
    m.def("open_frames", &open_frames, "memory"_a, "starts"_a, "lengths"_a, "codes"_a, "shapes"_a);
    m.def("unpack_to_views", &unpack_to_views, "frames"_a, "dsts"_a, "threads"_a);
    m.def("misfits", &misfits, "frames"_a, "dsts"_a);
    m.def("pack_views", &pack_views, "srcs"_a, "outs"_a.none(), "room"_a.none(), "level"_a,
          "threads"_a);
    m.def("pack_lengths", &pack_lengths, "srcs"_a, "outs"_a, "level"_a, "threads"_a);
    m.def("side_views", &side_views, "shape"_a, "n_units"_a);
    m.def(
        "side_rule",
        [](int level) {
            const SideRule rule = side_rule(checked_level(level));
            return std::tuple(rule.must_save, rule.rows, rule.columns);
        },
        "level"_a);
    m.def("are_apart", &are_apart, "written"_a, "read"_a);
    m.def("forms_of_frames", &forms_of_frames, "frames"_a);
    m.def("forms_of_views", &forms_of_views, "views"_a);
    m.def("views_of_frames", &views_of_frames, "frames"_a);
    m.def("plan_short", &plan_short, "src"_a, "code"_a, "n_dims"_a, "level"_a);
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
