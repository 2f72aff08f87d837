// The Python module packhorse._core. This folder knows nanobind, and no other does. It checks
// arguments and releases the GIL; tensor/tensor.hpp and the headers below it compute. Data errors
// come back as (status, chunk), for which codecs/base.py has the words; caller mistakes raise.
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

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/weights.hpp"
#include "common/exit_code.hpp"
#include "common/mapping.hpp"
#include "tensor/estimate.hpp"
#include "tensor/plan.hpp"
#include "tensor/zstd_frame.hpp"

namespace packhorse {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using WritableTable = nb::ndarray<uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// To plan a stream takes as long as to go through so many bytes.
constexpr std::size_t kPlannedStreamNbytes = 1024;

Level checked_level(int level) {
    require(level >= 1 && level <= 3, "level must be 1, 2 or 3");
    return static_cast<Level>(level);
}

Geometry checked_geometry(uint32_t unit_nbytes, int split, uint32_t chunk_log, std::size_t nbytes) {
    const char* const fault = geometry_fault(unit_nbytes, split, chunk_log, nbytes);
    require(fault == nullptr, fault);
    return Geometry(unit_nbytes, split, chunk_log, nbytes);
}

template <class AnyTable>
void require_table(const AnyTable& table, const Geometry& geometry) {
    require(table.shape(0) == geometry.n_chunks() && table.shape(1) == geometry.row_length(),
            "table must have a row for each chunk and a column more than planes");
}

// A view of `side`, which may be empty.
SideData checked_side(const Bytes& side, std::size_t n_rows, const Geometry& geometry) {
    const char* const fault = side_fault(geometry.spec, geometry.n_units, side.size(), n_rows);
    require(fault == nullptr, fault);
    return view_side(side.data(), side.size(), n_rows);
}

// What os.environ holds, which does not change while Python's lock is held.
nb::object environment(const char* name) {
    const char* const value = std::getenv(name);
    return value == nullptr ? nb::none() : nb::steal(PyUnicode_DecodeFSDefault(value));
}

// Maps parts of one file, and knows whether any of them was lost.
class FileMapper {
  public:
    using View = nb::ndarray<nb::memview, const uint8_t, nb::ndim<1>>;

    View map(int descriptor, uint64_t offset, std::size_t nbytes) const {
        try {
            auto* const mapping = new Mapping(descriptor, offset, nbytes, loss_);
            return View(mapping->data(), {nbytes}, nb::capsule(mapping, &unmap));
        } catch (const std::system_error& error) {
            errno = error.code().value();
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
    }

    bool has_lost() const { return *loss_; }

  private:
    static void unmap(void* mapping) noexcept {
        const auto* const owned = static_cast<Mapping*>(mapping);
        const ReleasedGil released(owned->nbytes());
        delete owned;
    }

    std::shared_ptr<Loss> loss_ = std::make_shared<Loss>(false);
};

// A view of `bytes`, which may be empty: no base.
Base checked_base(const Bytes& bytes, bool is_float, int cast, const Geometry& geometry) {
    require(cast >= 0 && cast <= static_cast<int>(Cast::kToFp16), "cast must be 0, 1 or 2");
    require(cast == 0 || (geometry.spec.unit_nbytes == 2 && is_float),
            "only floats of two bytes are cast");
    if (bytes.size() == 0) return {nullptr, is_float, static_cast<Cast>(cast)};
    require(bytes.size() == geometry.n_units * (cast == 0 ? geometry.spec.unit_nbytes : 4),
            "the base must have as many units as the tensor");
    return {bytes.data(), is_float, static_cast<Cast>(cast)};
}

// Hashes of the leaves of so many bytes, and behind them room for a last leaf that is too short.
ContentLeaves checked_leaves(const WritableBytes& leaves, std::size_t nbytes) {
    const std::size_t n_hashes = 16 * n_leaves(nbytes);
    require(leaves.size() == n_hashes + kXxh3LongMinNbytes - 1,
            "leaves must have 16 bytes for each leaf, and 240 more");
    return {leaves.data(), leaves.data() + n_hashes};
}

std::size_t encode_chunks(Bytes src, uint32_t unit_nbytes, int split, uint32_t chunk_log,
                          int level_number, Bytes side, std::size_t n_rows, Bytes base,
                          bool is_float, int cast, std::size_t plain_nbytes, WritableBytes dst,
                          WritableTable table, WritableBytes leaves, WritableBytes base_leaves,
                          std::size_t threads, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry = checked_geometry(unit_nbytes, split, chunk_log, src.size());
    const Level level = checked_level(level_number);
    require_table(table, geometry);
    require(geometry.chunk_nbytes() % kContentLeafNbytes == 0 || geometry.n_chunks() <= 1,
            "chunks must hold whole leaves");
    require(dst.size() >= round_up(src.size(), kFrameAlignment), "dst is too small");
    require(base.size() == 0 || item_nbytes(geometry.spec) == 1,
            "a tensor with a base is split into bytes");
    const ContentLeaves content = checked_leaves(leaves, src.size());
    const EncodeContext context{checked_side(side, n_rows, geometry),
                                checked_base(base, is_float, cast, geometry),
                                checked_leaves(base_leaves, base.size()), plain_nbytes, level};
    const ReleasedGil released(src.size());
    return encode_tensor(src.data(), geometry, context, dst.data(), table.data(), content, threads,
                         isa);
}

// Returns (fault, chunk, plane, payload length).
std::tuple<int, std::size_t, uint32_t, std::size_t> check_table(Table table, uint32_t unit_nbytes,
                                                                int split, uint32_t chunk_log,
                                                                std::size_t nbytes, bool has_base) {
    const Geometry geometry = checked_geometry(unit_nbytes, split, chunk_log, nbytes);
    require_table(table, geometry);
    const TableCheck check = check_descriptors(table.data(), geometry, has_base);
    return {static_cast<int>(check.fault), check.chunk, check.plane, check.payload_nbytes};
}

// Decodes bytes [start, start + dst.size()) of the tensor. Returns (status, chunk).
std::pair<int, std::size_t> decode_range(Bytes payload, Table table, uint32_t unit_nbytes,
                                         int split, uint32_t chunk_log, std::size_t nbytes,
                                         Bytes side, std::size_t n_rows, Bytes base, bool is_float,
                                         int cast, std::size_t start, WritableBytes dst, bool check,
                                         std::size_t threads, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry = checked_geometry(unit_nbytes, split, chunk_log, nbytes);
    require_table(table, geometry);
    require(start <= nbytes && dst.size() <= nbytes - start, "the range is outside of the tensor");
    if (dst.size() == 0) return {0, 0};
    const std::vector<std::size_t> offsets = chunk_offsets(table.data(), geometry);
    require(offsets.back() <= payload.size(), "payload is shorter than the table says");
    const SideData side_data = checked_side(side, n_rows, geometry);
    const Base base_units = checked_base(base, is_float, cast, geometry);
    const ReleasedGil released(dst.size());
    const EncodedTensor tensor{geometry,       side_data,    base_units,
                               payload.data(), table.data(), offsets};
    const DecodeResult result =
        decode_tensor(tensor, start, dst.data(), dst.size(), check, threads, isa);
    return {static_cast<int>(result.status), result.chunk};
}

// Estimated bytes of a tensor if chunks may be differences from a base.
std::size_t estimate_delta_nbytes(Bytes src, uint32_t unit_nbytes, int split, uint32_t chunk_log,
                                  Bytes base, bool is_float, int cast, std::size_t plain_nbytes,
                                  int level_number, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Level level = checked_level(level_number);
    const Geometry geometry = checked_geometry(unit_nbytes, split, chunk_log, src.size());
    require(src.size() > 0 && base.size() > 0, "there must be something to compare");
    const Base base_units = checked_base(base, is_float, cast, geometry);
    const ReleasedGil released(std::min(src.size(), kDeltaSampleUnits * unit_nbytes));
    return estimate_delta_tensor(src.data(), geometry, base_units, plain_nbytes, level, isa);
}

// Estimated (mode, bytes) of each plane, and whether the tensor was looked at again.
std::pair<std::vector<std::pair<int, std::size_t>>, bool> estimate_planes(
    Bytes src, uint32_t unit_nbytes, int split, int level_number, std::size_t n_samples,
    int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry = checked_geometry(unit_nbytes, split, kMinChunkLog, src.size());
    const Level level = checked_level(level_number);
    require(item_nbytes(geometry.spec) == 1, "planes of one byte are needed");
    require(src.size() > 0 && n_samples > 0, "there must be something to sample");
    const ReleasedGil released(
        std::min(src.size(), std::min(n_samples, src.size()) * kBlockUnits * unit_nbytes));
    const TensorEstimate tensor = estimate_tensor(src.data(), geometry, level, n_samples, isa);
    std::vector<std::pair<int, std::size_t>> estimates;
    for (const PlaneEstimate& plane : tensor.planes)
        estimates.emplace_back(static_cast<int>(plane.mode), plane.nbytes);
    return {estimates, tensor.is_odd};
}

// The spec of a tensor that side data can be made for, and its columns.
PlaneSpec checked_matrix(const Bytes& src, uint32_t unit_nbytes, std::size_t n_rows,
                         std::size_t& n_columns) {
    const Geometry geometry =
        checked_geometry(unit_nbytes, static_cast<int>(Split::kFloat), kMinChunkLog, src.size());
    require(n_rows > 0 && geometry.n_units > 0 && geometry.n_units % n_rows == 0,
            "the tensor must have n_rows rows");
    n_columns = geometry.n_units / n_rows;
    require(n_rows <= kMaxSideNbytes && n_columns <= kMaxSideNbytes - n_rows,
            "side data have at most 2 Mi bytes");
    return geometry.spec;
}

// Estimated bytes of plane 0 as it is and by prediction.
std::pair<std::size_t, std::size_t> estimate_side_data(Bytes src, uint32_t unit_nbytes,
                                                       std::size_t n_rows, std::size_t most_rows,
                                                       std::size_t most_columns, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    std::size_t n_columns = 0;
    const PlaneSpec spec = checked_matrix(src, unit_nbytes, n_rows, n_columns);
    require(most_rows > 0 && most_columns > 0, "there must be something to sample");
    const ReleasedGil released(src.size());
    const SideEstimate estimate =
        estimate_side(src.data(), n_rows, n_columns, spec, most_rows, most_columns, isa);
    return {estimate.plain_nbytes, estimate.predicted_nbytes};
}

void make_side_data(Bytes src, uint32_t unit_nbytes, std::size_t n_rows, WritableBytes side,
                    int isa_number) {
    const Isa isa = checked_isa(isa_number);
    std::size_t n_columns = 0;
    const PlaneSpec spec = checked_matrix(src, unit_nbytes, n_rows, n_columns);
    require(side.size() == n_rows + n_columns, "side must have a byte for each row and column");
    const ReleasedGil released(src.size());
    fill_side({src.data(), n_rows, n_columns, 1, n_columns * unit_nbytes}, spec, side.data(), isa);
}

std::size_t encode_plane(Bytes src, int mode, WritableBytes dst, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    require(mode == static_cast<int>(Mode::kPalette) || mode == static_cast<int>(Mode::kRans),
            "mode must be palette or rans");
    require(src.size() > 0 && src.size() <= kMaxChunkNbytes, "a plane has 1 to 2 Mi units");
    require(dst.size() >= src.size(), "dst is too small");
    const ReleasedGil released(src.size());
    return encode_single_plane(src.data(), src.size(), static_cast<Mode>(mode), dst.data(), isa);
}

int decode_plane(Bytes stream, int mode, WritableBytes dst, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    require(stream.size() <= kStreamNbytesMask, "a stream is below 16 MiB");
    require(mode >= 0 && mode <= static_cast<int>(Mode::kRans), "mode must be 0 to 3");
    require(dst.size() > 0 && dst.size() <= kMaxChunkNbytes, "a plane has 1 to 2 Mi units");
    const ReleasedGil released(dst.size());
    return static_cast<int>(decode_single_plane(
        stream.data(), stream.size(), static_cast<Mode>(mode), dst.data(), dst.size(), isa));
}

// Planes of a tensor, one row of `planes` each, and back.
void split(Bytes src, uint32_t unit_nbytes, int split_number, WritableBytes planes,
           int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry = checked_geometry(unit_nbytes, split_number, kMinChunkLog, src.size());
    require(geometry.spec.splits(), "split 0 has no planes");
    require(planes.size() == src.size(), "planes must be as long as src");
    uint8_t* rows[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
        rows[p] = planes.data() + p * geometry.n_units;
    const ReleasedGil released(src.size());
    split_planes(src.data(), geometry.n_units, geometry.spec, rows, isa);
}

void merge(Bytes planes, uint32_t unit_nbytes, int split_number, WritableBytes dst,
           int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const Geometry geometry = checked_geometry(unit_nbytes, split_number, kMinChunkLog, dst.size());
    require(geometry.spec.splits(), "split 0 has no planes");
    require(planes.size() == dst.size(), "dst must be as long as planes");
    const uint8_t* rows[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
        rows[p] = planes.data() + p * geometry.n_units;
    const ReleasedGil released(dst.size());
    merge_planes(rows, geometry.n_units, geometry.spec, dst.data(), isa);
}

uint32_t crc32c_of(Bytes src, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    const ReleasedGil released(src.size());
    return crc32c(src.data(), src.size(), isa);
}

// Digests of all leaves; a last one too short for the long form stays as it was.
void leaf_digests(Bytes src, WritableBytes digests, std::size_t threads, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    require(digests.size() == 16 * n_leaves(src.size()),
            "digests must have 16 bytes for each leaf");
    const ReleasedGil released(src.size());
    hash_leaves_threaded(src.data(), src.size(), digests.data(), threads, isa);
}

// Copies bytes; what the hashes of the leaves are of is the copy, whatever becomes of the source.
void copy_with_leaves(Bytes src, WritableBytes dst, WritableBytes leaves, int isa_number) {
    const Isa isa = checked_isa(isa_number);
    require(dst.size() == src.size(), "dst must be as long as src");
    const ContentLeaves content = checked_leaves(leaves, src.size());
    const ReleasedGil released(src.size());
    take_in(src.data(), src.size(), dst.data(), content, isa);
}

// Memory that Python owns.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> own(std::unique_ptr<uint8_t[]> bytes, std::size_t n) {
    uint8_t* const memory = bytes.release();
    nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {n}, owner);
}

// What is wrong as (status, chunk, plane, byte of the payload), a chunk too many and the bytes of
// all chunks if the payload has another length; the plan; and its shape as (number of palettes,
// escaped planes, rANS streams with buckets, those without, buckets, bytes of scratch memory).
using Plan = std::tuple<
    std::tuple<int, std::size_t, uint32_t, std::size_t>,
    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>,
    std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, uint32_t, std::size_t>>;

// A plan by which kernels decode all chunks.
Plan plan_chunks(Bytes payload, Table table, uint32_t unit_nbytes, int split, uint32_t chunk_log,
                 std::size_t nbytes) {
    const Geometry geometry = checked_geometry(unit_nbytes, split, chunk_log, nbytes);
    require_table(table, geometry);
    require(item_nbytes(geometry.spec) == 1, "planes of one byte are needed");
    const std::vector<std::size_t> offsets = chunk_offsets(table.data(), geometry);
    const EncodedTensor tensor{geometry, {}, {}, payload.data(), table.data(), offsets};
    PlanFault fault;
    if (offsets.back() != payload.size())
        fault = {Status::kStreamLength, geometry.n_chunks(), 0, offsets.back()};
    PlanShape shape{};
    std::unique_ptr<uint8_t[]> memory;
    {
        const ReleasedGil released(table.size() * kPlannedStreamNbytes);
        ChunkPlanner planner(tensor);
        if (fault.status == Status::kOk) fault = planner.read();
        if (fault.status == Status::kOk) shape = planner.shape();
        memory.reset(new uint8_t[shape.nbytes]);
        if (fault.status == Status::kOk) planner.write(memory.get());
    }
    return {{static_cast<int>(fault.status), fault.chunk, fault.plane, fault.at},
            own(std::move(memory), shape.nbytes),
            {shape.n_palettes, shape.n_escaped, shape.n_bucketed, shape.n_plain, shape.n_buckets,
             shape.scratch_nbytes}};
}

std::size_t zstd_frame_nbytes_of(Bytes src, std::size_t header_nbytes, bool has_checksum) {
    return zstd_frame_nbytes(src.data(), src.size(), header_nbytes, has_checksum);
}

}  // namespace
}  // namespace packhorse

NB_MODULE(_core, m) {
    using namespace packhorse;
    using namespace nb::literals;
    // A program may end while a file is open; that is no business of whoever reads its output.
    nb::set_leak_warnings(false);
    m.doc() =
        "Packhorse's C++ core: bytes in, bytes out. Private; packhorse.frame and packhorse.codecs "
        "use it.";
    m.def("detect_isa", [] { return static_cast<int>(detect_isa()); });
    m.def("environment", &environment, "name"_a);
    m.def("fail_at_exit", &fail_at_exit);
    nb::class_<FileMapper>(m, "FileMapper")
        .def(nb::init<>())
        .def("map", &FileMapper::map, "descriptor"_a, "offset"_a, "nbytes"_a)
        .def_prop_ro("has_lost", &FileMapper::has_lost);
    m.def("encode_chunks", &encode_chunks, "src"_a, "unit_nbytes"_a, "split"_a, "chunk_log"_a,
          "level"_a, "side"_a, "n_rows"_a, "base"_a, "is_float"_a, "cast"_a, "plain_nbytes"_a,
          "dst"_a.noconvert(), "table"_a.noconvert(), "leaves"_a.noconvert(),
          "base_leaves"_a.noconvert(), "threads"_a, "isa"_a);
    m.def("decode_range", &decode_range, "payload"_a, "table"_a, "unit_nbytes"_a, "split"_a,
          "chunk_log"_a, "nbytes"_a, "side"_a, "n_rows"_a, "base"_a, "is_float"_a, "cast"_a,
          "start"_a, "dst"_a.noconvert(), "check"_a, "threads"_a, "isa"_a);
    m.def("check_table", &check_table, "table"_a, "unit_nbytes"_a, "split"_a, "chunk_log"_a,
          "nbytes"_a, "has_base"_a);
    m.def("estimate_delta", &estimate_delta_nbytes, "src"_a, "unit_nbytes"_a, "split"_a,
          "chunk_log"_a, "base"_a, "is_float"_a, "cast"_a, "plain_nbytes"_a, "level"_a, "isa"_a);
    m.def("estimate_planes", &estimate_planes, "src"_a, "unit_nbytes"_a, "split"_a, "level"_a,
          "n_samples"_a, "isa"_a);
    m.def("estimate_side_data", &estimate_side_data, "src"_a, "unit_nbytes"_a, "n_rows"_a,
          "most_rows"_a, "most_columns"_a, "isa"_a);
    m.def("make_side_data", &make_side_data, "src"_a, "unit_nbytes"_a, "n_rows"_a,
          "side"_a.noconvert(), "isa"_a);
    m.def("encode_plane", &encode_plane, "src"_a, "mode"_a, "dst"_a.noconvert(), "isa"_a);
    m.def("decode_plane", &decode_plane, "stream"_a, "mode"_a, "dst"_a.noconvert(), "isa"_a);
    m.def("split", &split, "src"_a, "unit_nbytes"_a, "split"_a, "planes"_a.noconvert(), "isa"_a);
    m.def("merge", &merge, "planes"_a, "unit_nbytes"_a, "split"_a, "dst"_a.noconvert(), "isa"_a);
    m.def("crc32c", &crc32c_of, "src"_a, "isa"_a);
    m.def("leaf_digests", &leaf_digests, "src"_a, "digests"_a.noconvert(), "threads"_a, "isa"_a);
    m.def("copy_with_leaves", &copy_with_leaves, "src"_a, "dst"_a.noconvert(),
          "leaves"_a.noconvert(), "isa"_a);
    m.def("plan_chunks", &plan_chunks, "payload"_a, "table"_a, "unit_nbytes"_a, "split"_a,
          "chunk_log"_a, "nbytes"_a);
    m.def("zstd_frame_nbytes", &zstd_frame_nbytes_of, "src"_a, "header_nbytes"_a, "has_checksum"_a);
    bind_weights(m);
}
