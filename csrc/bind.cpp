// The Python module packhorse._core, and the only file that knows nanobind. It checks arguments,
// allocates scratch, releases the GIL and hands out chunks to threads; the headers compute. Data
// errors come back as (status, chunk) for frame.py to put into words; caller mistakes raise.
#if defined(__GNUC__) && !defined(__clang__)
// GCC's own AVX-512 headers start some results from an "undefined" register and then warn about it
// (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>
#include <stdexcept>

#include "checksum.hpp"
#include "chunk.hpp"
#include "parallel.hpp"

namespace nb = nanobind;

namespace packhorse {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using WritableTable = nb::ndarray<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct FreeAligned {
    void operator()(void* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};
using AlignedBuffer = std::unique_ptr<uint8_t[], FreeAligned>;

AlignedBuffer allocate_aligned(std::size_t nbytes) {
    return AlignedBuffer(static_cast<uint8_t*>(::operator new[](nbytes, std::align_val_t{64})));
}

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

Isa checked_isa(int isa) {
    require(isa >= 0 && isa <= static_cast<int>(detect_isa()),
            "isa must not be above what detect_isa() returns");
    return static_cast<Isa>(isa);
}

// How a tensor is cut: the arguments that every chunk operation shares.
struct Geometry {
    PlaneSpec spec;
    std::size_t chunk_units;
    std::size_t n_units;

    Geometry(uint32_t unit_nbytes, int split, uint32_t chunk_log, std::size_t nbytes) {
        require(unit_nbytes == 1 || unit_nbytes == 2 || unit_nbytes == 4 || unit_nbytes == 8,
                "unit_nbytes must be 1, 2, 4 or 8");
        require(split >= 0 && split <= 2, "split must be 0, 1 or 2");
        require(split == 0 || unit_nbytes > 1, "one-byte units have no split");
        require(chunk_log >= kMinChunkLog && chunk_log <= kMaxChunkLog,
                "chunk_log is out of range");
        require(nbytes % unit_nbytes == 0, "the length must be a multiple of unit_nbytes");
        spec = plane_spec(unit_nbytes, static_cast<Split>(split));
        chunk_units = std::size_t{1} << chunk_log;
        require(chunk_units * unit_nbytes <= kMaxChunkNbytes, "chunks must not be above 2 MiB");
        n_units = nbytes / unit_nbytes;
    }

    std::size_t n_chunks() const { return (n_units + chunk_units - 1) / chunk_units; }
    std::size_t units_of(std::size_t chunk) const {
        return std::min(chunk_units, n_units - chunk * chunk_units);
    }
    std::size_t chunk_nbytes() const { return chunk_units * spec.unit_nbytes; }
    std::size_t largest_units() const { return std::min(chunk_units, n_units); }
};

// One worker's encode scratch, in one allocation.
class EncodeWorker {
  public:
    EncodeWorker(const Geometry& geometry, bool owns_output) {
        const std::size_t units = round_up(geometry.largest_units(), 64) + kPlaneSlack;
        const bool splits = geometry.spec.n_planes > 1;
        const bool one_byte = item_nbytes(geometry.spec) == 1;
        const std::size_t planes = splits ? geometry.spec.n_planes * units : 0;
        const std::size_t output =
            owns_output ? round_up(geometry.largest_units() * geometry.spec.unit_nbytes, 64) : 0;
        const std::size_t tables = round_up(sizeof(RansEncodeTables), 64);
        memory_ = allocate_aligned(planes + (one_byte ? 3 * units : 0) + tables + output);
        uint8_t* at = memory_.get();
        for (uint32_t p = 0; p < kMaxPlanes; ++p) scratch.planes[p] = nullptr;
        for (uint32_t p = 0; splits && p < geometry.spec.n_planes; ++p, at += units)
            scratch.planes[p] = at;
        scratch.tables = reinterpret_cast<RansEncodeTables*>(at);
        at += tables;
        this->output = at;
        at += output;
        scratch.escapes = at;
        scratch.words = at + units;
    }

    EncodeScratch scratch;
    uint8_t* output;

  private:
    AlignedBuffer memory_;
};

// Hashes of the leaves that start in [src, src + nbytes) of a chunk; a last leaf too short for the
// long form is left zero.
void hash_leaves(const uint8_t* src, std::size_t nbytes, uint8_t* digests, Isa isa) {
    for (std::size_t at = 0; at < nbytes; at += kContentLeafNbytes, digests += 16) {
        const std::size_t leaf = std::min(kContentLeafNbytes, nbytes - at);
        if (leaf >= kXxh3LongMinNbytes) xxh3_128_long(src + at, leaf, digests, isa);
    }
}

std::size_t n_leaves(std::size_t nbytes) {
    return (nbytes + kContentLeafNbytes - 1) / kContentLeafNbytes;
}

std::size_t encode_chunks(Bytes src, uint32_t unit_nbytes, int split, uint32_t chunk_log, int level,
                          WritableBytes dst, WritableTable table, WritableBytes digests,
                          std::size_t threads, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry(unit_nbytes, split, chunk_log, src.size());
    require(level >= 1 && level <= 3, "level must be 1, 2 or 3");
    require(table.shape(0) == geometry.n_chunks() && table.shape(1) == geometry.spec.n_planes + 1,
            "table must have a row for each chunk and a column more than planes");
    require(geometry.chunk_nbytes() % kContentLeafNbytes == 0 || geometry.n_chunks() <= 1,
            "chunks must hold whole leaves");
    require(digests.size() == 16 * n_leaves(src.size()),
            "digests must have 16 bytes for each leaf");
    const std::size_t chunk_capacity = round_up(geometry.chunk_nbytes(), kFrameAlignment);
    require(dst.size() >= round_up(src.size(), kFrameAlignment), "dst is too small");
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, geometry.n_chunks()));
    std::vector<EncodeWorker> workers;
    for (std::size_t w = 0; w < n_workers; ++w) workers.emplace_back(geometry, n_workers > 1);
    OrderedOutput ordered;
    {
        nb::gil_scoped_release release;
        parallel_for(geometry.n_chunks(), n_workers, [&](std::size_t w, std::size_t chunk) {
            const std::size_t n = geometry.units_of(chunk);
            const uint8_t* from = src.data() + chunk * geometry.chunk_nbytes();
            uint32_t* row = table.data() + chunk * (geometry.spec.n_planes + 1);
            // One worker knows where the chunk goes; several must wait until they know the sizes
            // before it.
            uint8_t* to = n_workers == 1 ? dst.data() + ordered.used() : workers[w].output;
            // First the hash: it brings the chunk into the cache.
            hash_leaves(from, n * unit_nbytes,
                        digests.data() + chunk * chunk_capacity / kContentLeafNbytes * 16, isa);
            EncodeScratch& scratch = workers[w].scratch;
            const bool more = chunk + n_workers < geometry.n_chunks();
            scratch.next_src = more ? from + n_workers * geometry.chunk_nbytes() : nullptr;
            scratch.cold_output = n_workers == 1;
            const std::size_t nbytes = encode_chunk(
                from, n, geometry.spec, static_cast<Level>(level), scratch, to, row + 1, isa);
            row[0] = crc32c(to, nbytes, isa);
            const std::size_t offset = ordered.reserve(chunk, nbytes);
            if (n_workers > 1) std::memcpy(dst.data() + offset, to, nbytes);
        });
    }
    return ordered.used();
}

std::size_t stream_sum(const uint32_t* descriptors, uint32_t n_planes) {
    std::size_t sum = 0;
    for (uint32_t p = 0; p < n_planes; ++p) sum += descriptor_nbytes(descriptors[p]);
    return sum;
}

// Whether the chunk's bytes after its streams are zero.
bool padding_is_zero(const uint8_t* chunk, std::size_t nbytes, const uint32_t* descriptors,
                     const PlaneSpec& spec) {
    const std::size_t used = stream_sum(descriptors, spec.n_planes);
    return std::all_of(chunk + used, chunk + nbytes, [](uint8_t byte) { return byte == 0; });
}

std::vector<std::size_t> chunk_offsets(const Table& table) {
    const auto n_planes = static_cast<uint32_t>(table.shape(1) - 1);
    std::vector<std::size_t> offsets(table.shape(0) + 1, 0);
    for (std::size_t chunk = 0; chunk < table.shape(0); ++chunk)
        offsets[chunk + 1] =
            offsets[chunk] +
            round_up(stream_sum(table.data() + chunk * (n_planes + 1) + 1, n_planes),
                     kFrameAlignment);
    return offsets;
}

// Whether a stored stream may lack the bytes that rANS streams carry: the last stored one of a
// chunk with such streams.
bool may_carry(const uint32_t* descriptors, uint32_t n_planes, uint32_t plane) {
    bool has_rans = false, is_last = true;
    for (uint32_t p = 0; p < n_planes; ++p) {
        has_rans |= descriptor_mode(descriptors[p]) == Mode::kRans;
        is_last &= p <= plane || descriptor_mode(descriptors[p]) != Mode::kStored;
    }
    return has_rans && is_last;
}

// Whether mode and length of a descriptor are allowed where it stands; `n` units in the chunk.
bool descriptor_is_allowed(const uint32_t* descriptors, const PlaneSpec& spec, uint32_t plane,
                           std::size_t n) {
    const std::size_t item = item_nbytes(spec);
    const std::size_t nbytes = descriptor_nbytes(descriptors[plane]);
    switch (descriptor_mode(descriptors[plane])) {
        case Mode::kStored:
            return nbytes == n * item ||
                   (item == 1 && nbytes < n && may_carry(descriptors, spec.n_planes, plane));
        case Mode::kConstant:
            return nbytes == item;
        case Mode::kPalette:
        case Mode::kRans:
            return item == 1;
        default:
            return spec.n_planes == 1;
    }
}

// Checks all descriptors (docs/format.md, section 9). Returns (what, chunk, plane, payload length):
// what is 0 for good, 1 for an unknown mode, 2 for a mode or length that is not allowed at that
// chunk and plane.
std::tuple<int, std::size_t, uint32_t, std::size_t> check_table(Table table, uint32_t unit_nbytes,
                                                                int split, uint32_t chunk_log,
                                                                std::size_t nbytes) {
    const Geometry geometry(unit_nbytes, split, chunk_log, nbytes);
    const uint32_t n_planes = geometry.spec.n_planes;
    require(table.shape(0) == geometry.n_chunks() && table.shape(1) == n_planes + 1,
            "table must have a row for each chunk and a column more than planes");
    std::size_t payload = 0;
    for (std::size_t chunk = 0; chunk < geometry.n_chunks(); ++chunk) {
        const uint32_t* descriptors = table.data() + chunk * (n_planes + 1) + 1;
        const std::size_t n = geometry.units_of(chunk);
        for (uint32_t plane = 0; plane < n_planes; ++plane) {
            if (descriptor_mode(descriptors[plane]) > Mode::kZstd) return {1, chunk, plane, 0};
            if (!descriptor_is_allowed(descriptors, geometry.spec, plane, n))
                return {2, chunk, plane, 0};
        }
        payload += round_up(stream_sum(descriptors, n_planes), kFrameAlignment);
    }
    return {0, 0, 0, payload};
}

// One worker's decode scratch; `partial` receives a chunk of which only a part is wanted.
struct DecodeWorker {
    explicit DecodeWorker(const Geometry& geometry)
        : planes(new PlaneDecoder[item_nbytes(geometry.spec) == 1 ? geometry.spec.n_planes : 1]) {}

    std::unique_ptr<PlaneDecoder[]> planes;
    std::vector<uint8_t> partial;
};

// Decodes bytes [start, start + dst.size()) of the tensor. Returns (status, chunk); the chunk is
// the first bad one that was met.
std::pair<int, std::size_t> decode_range(Bytes payload, Table table, uint32_t unit_nbytes,
                                         int split, uint32_t chunk_log, std::size_t nbytes,
                                         std::size_t start, WritableBytes dst, bool check,
                                         std::size_t threads, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry(unit_nbytes, split, chunk_log, nbytes);
    require(table.shape(0) == geometry.n_chunks() && table.shape(1) == geometry.spec.n_planes + 1,
            "table must have a row for each chunk and a column more than planes");
    require(start <= nbytes && dst.size() <= nbytes - start, "the range is outside of the tensor");
    if (dst.size() == 0) return {0, 0};
    const std::vector<std::size_t> offsets = chunk_offsets(table);
    require(offsets.back() <= payload.size(), "payload is shorter than the table says");
    const std::size_t stop = start + dst.size();
    const std::size_t first = start / geometry.chunk_nbytes();
    const std::size_t n_wanted = (stop - 1) / geometry.chunk_nbytes() + 1 - first;
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_wanted));
    std::vector<DecodeWorker> workers;
    for (std::size_t w = 0; w < n_workers; ++w) workers.emplace_back(geometry);
    const auto cuts_chunk = [&](std::size_t at) {
        return at % geometry.chunk_nbytes() != 0 && at != nbytes;
    };
    if (cuts_chunk(start) || cuts_chunk(stop))
        for (DecodeWorker& worker : workers)
            worker.partial.resize(geometry.largest_units() * unit_nbytes);
    std::atomic<std::size_t> bad_chunk{~std::size_t{0}};
    std::atomic<int> bad_status{0};
    std::mutex bad_mutex;
    {
        nb::gil_scoped_release release;
        parallel_for(n_wanted, n_workers, [&](std::size_t w, std::size_t item) {
            const std::size_t chunk = first + item;
            if (bad_chunk.load(std::memory_order_relaxed) < chunk) return;
            const std::size_t chunk_start = chunk * geometry.chunk_nbytes();
            const std::size_t n = geometry.units_of(chunk);
            const std::size_t chunk_stop = chunk_start + n * unit_nbytes;
            const std::size_t from = std::max(start, chunk_start);
            const std::size_t to = std::min(stop, chunk_stop);
            const bool whole = from == chunk_start && to == chunk_stop;
            const uint32_t* row = table.data() + chunk * (geometry.spec.n_planes + 1);
            const uint8_t* encoded = payload.data() + offsets[chunk];
            const std::size_t encoded_nbytes = offsets[chunk + 1] - offsets[chunk];
            uint8_t* const out = dst.data() + (from - start);
            const bool more = item + n_workers < n_wanted;
            DecodeScratch scratch{workers[w].planes.get(),
                                  more ? payload.data() + offsets[chunk + n_workers] : nullptr};
            Status status = Status::kOk;
            if (check && crc32c(encoded, encoded_nbytes, isa) != row[0]) status = Status::kChecksum;
            if (status == Status::kOk &&
                !padding_is_zero(encoded, encoded_nbytes, row + 1, geometry.spec))
                status = Status::kReserved;
            if (status == Status::kOk)
                status = decode_chunk(encoded, row + 1, n, geometry.spec, scratch,
                                      whole ? out : workers[w].partial.data(), isa);
            if (status == Status::kOk && !whole)
                std::memcpy(out, workers[w].partial.data() + (from - chunk_start), to - from);
            if (status != Status::kOk) {
                const std::lock_guard lock(bad_mutex);
                if (chunk < bad_chunk) {
                    bad_chunk = chunk;
                    bad_status = static_cast<int>(status);
                }
            }
        });
    }
    return {bad_status, bad_status == 0 ? 0 : bad_chunk.load()};
}

// Estimated (mode, bytes) of each plane, from at most `n_samples` runs of 4096 units spread over
// the tensor.
std::vector<std::pair<int, std::size_t>> estimate_planes(Bytes src, uint32_t unit_nbytes, int split,
                                                         int level, std::size_t n_samples,
                                                         int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry(unit_nbytes, split, kMinChunkLog, src.size());
    require(item_nbytes(geometry.spec) == 1, "planes of one byte are needed");
    require(level >= 1 && level <= 3, "level must be 1, 2 or 3");
    require(src.size() > 0 && n_samples > 0, "there must be something to sample");
    const std::size_t run = std::min(geometry.n_units, kBlockUnits);
    n_samples = std::min(n_samples, geometry.n_units / run);
    const std::size_t n = run * n_samples;
    const uint32_t n_planes = geometry.spec.n_planes;
    const AlignedBuffer memory = allocate_aligned(n_planes * (n + kPlaneSlack));
    std::vector<std::pair<int, std::size_t>> estimates;
    nb::gil_scoped_release release;
    for (std::size_t s = 0; s < n_samples; ++s) {
        const std::size_t gap = n_samples > 1 ? (geometry.n_units - run) / (n_samples - 1) : 0;
        const uint8_t* from = src.data() + s * gap * unit_nbytes;
        uint8_t* planes[kMaxPlanes];
        for (uint32_t p = 0; p < n_planes; ++p)
            planes[p] = memory.get() + p * (n + kPlaneSlack) + s * run;
        if (n_planes > 1)
            split_planes(from, run, geometry.spec, planes, isa);
        else
            std::memcpy(planes[0], from, run);
    }
    // Headers count once a chunk, so the estimate is for a chunk.
    const std::size_t chunk_units = std::min(geometry.n_units, kChunkNbytes / unit_nbytes);
    const auto n_chunks = static_cast<double>(geometry.n_units) / static_cast<double>(chunk_units);
    for (uint32_t p = 0; p < n_planes; ++p) {
        PlaneChoice choice;
        const std::size_t nbytes =
            choose_mode(memory.get() + p * (n + kPlaneSlack), n, std::max(n, chunk_units),
                        static_cast<Level>(level), choice);
        estimates.emplace_back(static_cast<int>(choice.mode),
                               static_cast<std::size_t>(n_chunks * static_cast<double>(nbytes)));
    }
    return estimates;
}

// The stream of one plane in the given mode, nothing carried; 0 if it would not be smaller than the
// plane.
std::size_t encode_plane(Bytes src, int mode, WritableBytes dst, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    require(mode == static_cast<int>(Mode::kPalette) || mode == static_cast<int>(Mode::kRans),
            "mode must be palette or rans");
    require(src.size() > 0 && src.size() <= kMaxChunkNbytes, "a plane has 1 to 2 Mi units");
    require(dst.size() >= src.size(), "dst is too small");
    const Geometry geometry(1, 0, kMaxChunkLog, src.size());
    EncodeWorker worker(geometry, false);
    nb::gil_scoped_release release;
    Histogram histogram;
    count_bytes(src.data(), src.size(), 0, histogram);
    PlaneChoice choice;
    choice.mode = static_cast<Mode>(mode);
    if (choice.mode == Mode::kPalette)
        choose_palette(histogram, choice.palette);
    else if (choose_model(histogram, choice.rans); choice.rans.n_codes < 2)
        return 0;
    Ahead nothing;
    return write_stream(src.data(), src.size(), choice, nullptr, worker.scratch, dst.data(),
                        nothing, isa);
}

int decode_plane(Bytes stream, int mode, WritableBytes dst, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    require(stream.size() <= kStreamNbytesMask, "a stream is below 16 MiB");
    require(mode >= 0 && mode <= static_cast<int>(Mode::kRans), "mode must be 0 to 3");
    require(dst.size() > 0 && dst.size() <= kMaxChunkNbytes, "a plane has 1 to 2 Mi units");
    const auto plane = std::make_unique<PlaneDecoder>();
    nb::gil_scoped_release release;
    DecodeScratch scratch{plane.get(), nullptr};
    const uint32_t descriptor = make_descriptor(static_cast<Mode>(mode), stream.size());
    return static_cast<int>(decode_chunk(stream.data(), &descriptor, dst.size(),
                                         plane_spec(1, Split::kWhole), scratch, dst.data(), isa));
}

// Planes of a tensor, one row of `planes` each, and back.
void split(Bytes src, uint32_t unit_nbytes, int split_number, WritableBytes planes,
           int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry(unit_nbytes, split_number, kMinChunkLog, src.size());
    require(geometry.spec.n_planes > 1, "split 0 has no planes");
    require(planes.size() == src.size(), "planes must be as long as src");
    uint8_t* rows[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
        rows[p] = planes.data() + p * geometry.n_units;
    nb::gil_scoped_release release;
    split_planes(src.data(), geometry.n_units, geometry.spec, rows, isa);
}

void merge(Bytes planes, uint32_t unit_nbytes, int split_number, WritableBytes dst,
           int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry(unit_nbytes, split_number, kMinChunkLog, dst.size());
    require(geometry.spec.n_planes > 1, "split 0 has no planes");
    require(planes.size() == dst.size(), "dst must be as long as planes");
    const uint8_t* rows[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
        rows[p] = planes.data() + p * geometry.n_units;
    nb::gil_scoped_release release;
    merge_planes(rows, geometry.n_units, geometry.spec, dst.data(), isa);
}

uint32_t crc32c_of(Bytes src, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    nb::gil_scoped_release release;
    return crc32c(src.data(), src.size(), isa);
}

// Digests of all leaves; a last one too short for the long form stays as it was.
void leaf_digests(Bytes src, WritableBytes digests, std::size_t threads, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const std::size_t count = n_leaves(src.size());
    require(digests.size() == 16 * count, "digests must have 16 bytes for each leaf");
    nb::gil_scoped_release release;
    parallel_for(count, std::max<std::size_t>(1, threads), [&](std::size_t, std::size_t leaf) {
        const std::size_t at = leaf * kContentLeafNbytes;
        hash_leaves(src.data() + at, std::min(kContentLeafNbytes, src.size() - at),
                    digests.data() + 16 * leaf, isa);
    });
}

}  // namespace
}  // namespace packhorse

NB_MODULE(_core, m) {
    using namespace packhorse;
    using namespace nb::literals;
    m.doc() =
        "Packhorse's C++ core: bytes in, bytes out. Private; packhorse.frame and packhorse.codecs "
        "use it.";
    m.def("detect_isa", [] { return static_cast<int>(detect_isa()); });
    m.def("encode_chunks", &encode_chunks, "src"_a, "unit_nbytes"_a, "split"_a, "chunk_log"_a,
          "level"_a, "dst"_a.noconvert(), "table"_a.noconvert(), "digests"_a.noconvert(),
          "threads"_a, "isa"_a);
    m.def("decode_range", &decode_range, "payload"_a, "table"_a, "unit_nbytes"_a, "split"_a,
          "chunk_log"_a, "nbytes"_a, "start"_a, "dst"_a.noconvert(), "check"_a, "threads"_a,
          "isa"_a);
    m.def("check_table", &check_table, "table"_a, "unit_nbytes"_a, "split"_a, "chunk_log"_a,
          "nbytes"_a);
    m.def("estimate_planes", &estimate_planes, "src"_a, "unit_nbytes"_a, "split"_a, "level"_a,
          "n_samples"_a, "isa"_a);
    m.def("encode_plane", &encode_plane, "src"_a, "mode"_a, "dst"_a.noconvert(), "isa"_a);
    m.def("decode_plane", &decode_plane, "stream"_a, "mode"_a, "dst"_a.noconvert(), "isa"_a);
    m.def("split", &split, "src"_a, "unit_nbytes"_a, "split"_a, "planes"_a.noconvert(), "isa"_a);
    m.def("merge", &merge, "planes"_a, "unit_nbytes"_a, "split"_a, "dst"_a.noconvert(), "isa"_a);
    m.def("crc32c", &crc32c_of, "src"_a, "isa"_a);
    m.def("leaf_digests", &leaf_digests, "src"_a, "digests"_a.noconvert(), "threads"_a, "isa"_a);
}
