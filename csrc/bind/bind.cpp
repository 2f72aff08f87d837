// The Python module packhorse._core. Only this folder uses nanobind. It checks arguments and
// releases Python's lock; tensor/tensor.hpp and the headers below it do the work. Bad data is
// returned as (status, chunk), which codecs/base.py puts into words; mistakes of the caller raise
// an exception.
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
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "bind/bags.hpp"
#include "bind/bounded.hpp"
#include "bind/frames.hpp"
#include "bind/repeats.hpp"
#include "bind/tables.hpp"
#include "bind/tensors.hpp"
#include "bind/weights.hpp"
#include "common/advice.hpp"
#include "common/exit_code.hpp"
#include "common/gather.hpp"
#include "common/mapping.hpp"
#include "common/moments.hpp"
#include "matches/glance.hpp"
#include "tensor/chain.hpp"
#include "tensor/estimate.hpp"
#include "tensor/patch.hpp"
#include "tensor/plan.hpp"
#include "tensor/single_plane.hpp"
#include "tensor/zstd_frame.hpp"

namespace packhorse {
namespace {

// Planning a stream takes as long as coding this number of bytes.
constexpr std::size_t kPlannedStreamNbytes = 1024;

// Maps parts of one file, and remembers whether any of them was lost.
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

// Encodes the chunks of a tensor from `first` on, whose bytes are `src`: as many as are there.
// Returns the length of their payload.
std::size_t encode_chunks(Bytes src, const Geometry& geometry, const ContextArgument& context,
                          const OutputArgument& output, std::size_t threads, std::size_t first) {
    const Isa isa = choose_isa();
    const std::size_t chunk = geometry.chunk_nbytes();
    require(first == 0 || first < geometry.n_chunks(), "first is out of range");
    require(src.size() <= geometry.nbytes() - first * chunk &&
                (src.size() % chunk == 0 || first * chunk + src.size() == geometry.nbytes()),
            "src must be whole chunks of the tensor");
    require(chunk % kContentLeafNbytes == 0 || geometry.n_chunks() <= 1,
            "chunks must hold whole leaves");
    const EncodeContext given = context.view(geometry);
    const EncodeOutput memory = output.view(geometry, context, src.size());
    const ReleasedGil released(src.size());
    const ChunkRun run{first, (src.size() + chunk - 1) / chunk};
    return encode_run(src.data(), geometry, run, given, memory, threads, isa);
}

void require_units(Bytes src, uint32_t unit_nbytes) {
    require(unit_nbytes == 1 || unit_nbytes == 2 || unit_nbytes == 4 || unit_nbytes == 8,
            "unit_nbytes must be 1, 2, 4 or 8");
    require(0 < src.size() && src.size() % unit_nbytes == 0, "src must be one whole unit or more");
}

bool may_match(Bytes src, uint32_t unit_nbytes, std::size_t planes_nbytes) {
    require_units(src, unit_nbytes);
    const Isa isa = choose_isa();
    const ReleasedGil released(src.size());
    return glance_for_matches(src.data(), src.size() / unit_nbytes, unit_nbytes, planes_nbytes,
                              isa);
}

std::size_t estimate_matches(Bytes src, uint32_t unit_nbytes, int level) {
    require_units(src, unit_nbytes);
    require(
        src.size() <= kMaxChunkNbytes && reinterpret_cast<uintptr_t>(src.data()) % unit_nbytes == 0,
        "src must be at most a chunk of aligned units");
    const Level given = checked_level(level);
    const Isa isa = choose_isa();
    const ReleasedGil released(src.size());
    return matched_nbytes(src.data(), src.size() / unit_nbytes, unit_nbytes, given, isa);
}

// Returns the bytes in mode nibbles, and those by planes that are alike.
std::pair<std::size_t, std::size_t> estimate_nibbles(Bytes src, uint32_t unit_nbytes, int level,
                                                     std::size_t n_samples) {
    require_units(src, unit_nbytes);
    require(n_samples > 0, "there must be something to sample");
    const Level given = checked_level(level);
    const ReleasedGil released(std::min(src.size(), n_samples * kNibbleSampleNbytes));
    const NibbleEstimate found =
        estimate_nibble_tensor(src.data(), src.size() / unit_nbytes, unit_nbytes, given, n_samples);
    return {found.nbytes, found.planes_nbytes};
}

// Returns (fault, chunk, plane, payload length).
std::tuple<int, std::size_t, uint32_t, std::size_t> check_table(Table table,
                                                                const Geometry& geometry,
                                                                bool has_base, int last_mode) {
    require_table(table, geometry);
    const TableCheck check =
        check_descriptors(table.data(), geometry, has_base, static_cast<Mode>(last_mode));
    return {static_cast<int>(check.fault), check.chunk, check.plane, check.payload_nbytes};
}

// Decodes bytes [start, start + dst.size()) of the tensor. Returns (status, chunk).
std::pair<int, std::size_t> decode_range(const EncodedArgument& tensor, std::size_t start,
                                         WritableBytes dst, bool check, std::size_t threads) {
    const Isa isa = choose_isa();
    const std::size_t nbytes = tensor.geometry().nbytes();
    require(start <= nbytes && dst.size() <= nbytes - start, "the range is outside of the tensor");
    const ReleasedGil released(dst.size());
    const DecodeResult result =
        decode_tensor(tensor.view(), start, dst.data(), dst.size(), check, threads, isa);
    return {static_cast<int>(result.status), result.chunk};
}

// Decodes a chain: `tensors` begins with the one that the others are differences from. `kinds` has,
// for each, whether its units are floats and how its base is cast. Only the first has the units of
// its base, if it has one. Returns (status, number of the tensor, chunk).
std::tuple<int, std::size_t, std::size_t> decode_links(
    const std::vector<const EncodedArgument*>& tensors,
    const std::vector<std::pair<bool, int>>& kinds, WritableBytes dst, bool check,
    std::size_t threads) {
    const Isa isa = choose_isa();
    require(!tensors.empty() && tensors.size() == kinds.size(), "each tensor needs its kind");
    std::vector<EncodedTensor> links;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto [is_float, cast] = kinds[i];
        const Geometry& geometry = tensors[i]->geometry();
        require(cast >= 0 && cast <= static_cast<int>(Cast::kToFp16), "cast must be 0, 1 or 2");
        links.push_back(tensors[i]->view());
        if (i == 0) continue;
        const Geometry& before = tensors[i - 1]->geometry();
        require(geometry.n_units == before.n_units &&
                    before.spec.unit_nbytes == (cast == 0 ? geometry.spec.unit_nbytes : 4),
                "each tensor must have the units of the one before it as its base");
        require(cast == 0 || (geometry.spec.unit_nbytes == 2 && is_float),
                "only floats of two bytes are cast");
        links[i].base = {nullptr, is_float, static_cast<Cast>(cast)};
    }
    require(dst.size() == tensors.back()->geometry().nbytes(), "dst must be as long as the tensor");
    const ReleasedGil released(dst.size());
    const ChainResult result = decode_chain(links, dst.data(), check, threads, isa);
    return {static_cast<int>(result.status), result.link, result.chunk};
}

// Makes the base of a tensor, which is `target`, the tensor. Returns (status, chunk). Nothing was
// written if there is a fault, unless the payload changed meanwhile.
std::pair<int, std::size_t> patch_base(const EncodedArgument& tensor, WritableBytes target,
                                       std::size_t threads) {
    const Isa isa = choose_isa();
    const EncodedTensor view = tensor.view();
    require(target.size() == tensor.geometry().nbytes(), "target must be as long as the tensor");
    if (target.size() == 0) return {static_cast<int>(Status::kOk), 0};
    require(view.base.cast == Cast::kNone && view.base.units == target.data(),
            "target must be the base");
    const ReleasedGil released(target.size());
    const DecodeResult result = patch_tensor(view, target.data(), threads, isa);
    return {static_cast<int>(result.status), result.chunk};
}

// A content sum, and how one changes.
using SumPair = std::pair<uint64_t, uint64_t>;
using SumChanges = std::tuple<uint64_t, uint64_t, uint64_t>;

// Checks and decodes a tensor. Returns (status, chunk, patch, how the content sum changes). The
// base is not written to before the patch is.
std::tuple<int, std::size_t, TensorPatch, SumChanges> prepare_base_patch(
    const EncodedArgument& tensor, std::size_t threads) {
    const Isa isa = choose_isa();
    const EncodedTensor view = tensor.view();
    const Geometry& geometry = tensor.geometry();
    require(geometry.n_units == 0 || (view.base.units != nullptr && view.base.cast == Cast::kNone),
            "a base of the tensor's units is needed");
    TensorPatch patch{geometry, {}, {}};
    SumChange change;
    DecodeResult result{};
    {
        const ReleasedGil released(geometry.nbytes());
        result = prepare_patch(view, threads, isa, patch, change);
    }
    return {static_cast<int>(result.status), result.chunk, std::move(patch),
            SumChanges(change.sum.low, change.sum.high, change.before)};
}

// Writes a patch to what was its base.
void write_patch(const TensorPatch& patch, WritableBytes target, std::size_t threads) {
    require(target.size() == patch.geometry.nbytes(), "target must be as long as the tensor");
    const ReleasedGil released(patch.nbytes());
    patch.write(target.data(), threads);
}

// Memory that Python owns.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> own(std::unique_ptr<uint8_t[]> bytes, std::size_t n) {
    uint8_t* const memory = bytes.release();
    nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<uint8_t*>(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {n}, owner);
}

// The status, the chunk, the indices of the changes as bytes, and their units as bytes.
using Changes = std::tuple<int, std::size_t, nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>,
                           nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>>;

// Writes all changes one after the other. Index is u32 or u64.
template <class Index>
void join_changes(const std::vector<ChunkChanges>& changes, std::size_t chunk_units,
                  uint8_t* indices, uint8_t* units) {
    for (std::size_t chunk = 0; chunk < changes.size(); ++chunk) {
        for (const uint32_t place : changes[chunk].places) {
            store(indices, static_cast<Index>(chunk * chunk_units + place));
            indices += sizeof(Index);
        }
        units = std::copy(changes[chunk].units.begin(), changes[chunk].units.end(), units);
    }
}

// Lists the units that differ from the base. An index has 8 bytes if the tensor has 2^32 units or
// more, otherwise 4.
Changes find_changes(const EncodedArgument& tensor, std::size_t threads) {
    const Isa isa = choose_isa();
    const EncodedTensor view = tensor.view();
    const Geometry& geometry = tensor.geometry();
    require(view.base.units != nullptr || geometry.n_units == 0, "a base is needed");
    const std::size_t index_nbytes = geometry.n_units >> 32 == 0 ? 4 : 8;
    DecodeResult result{};
    std::unique_ptr<uint8_t[]> indices, units;
    std::size_t n = 0;
    {
        const ReleasedGil released(geometry.nbytes());
        std::vector<ChunkChanges> changes;
        result = list_changes(view, threads, isa, changes);
        if (result.status == Status::kOk)
            for (const ChunkChanges& chunk : changes) n += chunk.places.size();
        indices.reset(new uint8_t[n * index_nbytes]);
        units.reset(new uint8_t[n * geometry.spec.unit_nbytes]);
        if (n > 0 && index_nbytes == 4)
            join_changes<uint32_t>(changes, geometry.chunk_units, indices.get(), units.get());
        else if (n > 0)
            join_changes<uint64_t>(changes, geometry.chunk_units, indices.get(), units.get());
    }
    return {static_cast<int>(result.status), result.chunk,
            own(std::move(indices), n * index_nbytes),
            own(std::move(units), n * geometry.spec.unit_nbytes)};
}

// Estimates the bytes of a tensor if its chunks may be differences from a base.
std::size_t estimate_delta_nbytes(Bytes src, const Geometry& geometry, const BaseArgument& base,
                                  std::size_t plain_nbytes, int level_number) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    require_tensor(src, geometry);
    require(src.size() > 0, "there must be something to compare");
    const Base units = base.view(geometry);
    const ReleasedGil released(std::min(src.size(), kDeltaSampleUnits * geometry.spec.unit_nbytes));
    return estimate_delta_tensor(src.data(), geometry, units, plain_nbytes, level, isa);
}

// Estimates (mode, bytes) of each plane. Also returns whether the tensor was examined again.
std::pair<std::vector<std::pair<int, std::size_t>>, bool> estimate_planes(Bytes src,
                                                                          const Geometry& geometry,
                                                                          int level_number,
                                                                          std::size_t n_samples) {
    const Isa isa = choose_isa();
    const Level level = checked_level(level_number);
    require_tensor(src, geometry);
    require(item_nbytes(geometry.spec) == 1, "planes of one byte are needed");
    require(src.size() > 0 && n_samples > 0, "there must be something to sample");
    const ReleasedGil released(std::min(
        src.size(), std::min(n_samples, src.size()) * kBlockUnits * geometry.spec.unit_nbytes));
    const TensorEstimate tensor = estimate_tensor(src.data(), geometry, level, n_samples, isa);
    std::vector<std::pair<int, std::size_t>> estimates;
    for (const PlaneEstimate& plane : tensor.planes)
        estimates.emplace_back(static_cast<int>(plane.mode), plane.nbytes);
    return {estimates, tensor.is_odd};
}

// Returns the columns of a tensor that side data can be made for.
std::size_t checked_columns(const Bytes& src, const Geometry& geometry, std::size_t n_rows) {
    require_tensor(src, geometry);
    require(geometry.spec.rotation > 0, "side data need split 2");
    require(n_rows > 0 && geometry.n_units > 0 && geometry.n_units % n_rows == 0,
            "the tensor must have n_rows rows");
    const std::size_t n_columns = geometry.n_units / n_rows;
    require(n_rows <= kMaxSideNbytes && n_columns <= kMaxSideNbytes - n_rows,
            "side data have at most 2 Mi bytes");
    return n_columns;
}

// Estimates the bytes of plane 0 as it is and by prediction.
std::pair<std::size_t, std::size_t> estimate_side_data(Bytes src, const Geometry& geometry,
                                                       std::size_t n_rows, std::size_t most_rows,
                                                       std::size_t most_columns) {
    const Isa isa = choose_isa();
    const std::size_t n_columns = checked_columns(src, geometry, n_rows);
    require(most_rows > 0 && most_columns > 0, "there must be something to sample");
    const ReleasedGil released(src.size());
    const SideEstimate estimate =
        estimate_side(src.data(), n_rows, n_columns, geometry.spec, most_rows, most_columns, isa);
    return {estimate.plain_nbytes, estimate.predicted_nbytes};
}

void make_side_data(Bytes src, const Geometry& geometry, std::size_t n_rows, WritableBytes side) {
    const Isa isa = choose_isa();
    const std::size_t n_columns = checked_columns(src, geometry, n_rows);
    require(side.size() == n_rows + n_columns, "side must have a byte for each row and column");
    const MatrixView whole{src.data(), n_rows, n_columns, 1, n_columns * geometry.spec.unit_nbytes};
    const ReleasedGil released(src.size());
    fill_side(whole, geometry.spec, side.data(), isa);
}

std::size_t encode_plane(Bytes src, int mode, WritableBytes dst) {
    const Isa isa = choose_isa();
    require(mode == static_cast<int>(Mode::kPalette) || mode == static_cast<int>(Mode::kRans),
            "mode must be palette or rans");
    require(src.size() > 0 && src.size() <= kMaxChunkNbytes, "a plane has 1 to 2 Mi units");
    require(dst.size() >= src.size(), "dst is too small");
    const ReleasedGil released(src.size());
    return encode_single_plane(src.data(), src.size(), static_cast<Mode>(mode), dst.data(), isa);
}

int decode_plane(Bytes stream, int mode, WritableBytes dst) {
    const Isa isa = choose_isa();
    require(stream.size() <= kStreamNbytesMask, "a stream is below 16 MiB");
    require(mode >= 0 && mode <= static_cast<int>(Mode::kRans), "mode must be 0 to 3");
    require(dst.size() > 0 && dst.size() <= kMaxChunkNbytes, "a plane has 1 to 2 Mi units");
    const ReleasedGil released(dst.size());
    return static_cast<int>(decode_single_plane(
        stream.data(), stream.size(), static_cast<Mode>(mode), dst.data(), dst.size(), isa));
}

// Splits a tensor into planes, each of them a row of `planes`, and back.
void split(Bytes src, const Geometry& geometry, WritableBytes planes) {
    const Isa isa = choose_isa();
    require_tensor(src, geometry);
    require(geometry.spec.splits(), "split 0 has no planes");
    require(planes.size() == src.size(), "planes must be as long as src");
    uint8_t* rows[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
        rows[p] = planes.data() + p * geometry.n_units;
    const ReleasedGil released(src.size());
    split_planes(src.data(), geometry.n_units, geometry.spec, rows, isa);
}

void merge(Bytes planes, const Geometry& geometry, WritableBytes dst) {
    const Isa isa = choose_isa();
    require(geometry.spec.splits(), "split 0 has no planes");
    require(planes.size() == geometry.nbytes() && dst.size() == geometry.nbytes(),
            "planes and dst must be as long as the geometry says");
    const uint8_t* rows[kMaxPlanes];
    for (uint32_t p = 0; p < geometry.spec.n_planes; ++p)
        rows[p] = planes.data() + p * geometry.n_units;
    const ReleasedGil released(dst.size());
    merge_planes(rows, geometry.n_units, geometry.spec, dst.data(), isa);
}

uint32_t crc32c_of(Bytes src) {
    const Isa isa = choose_isa();
    const ReleasedGil released(src.size());
    return crc32c(src.data(), src.size(), isa);
}

// The same without folding, which some processors with AVX2 cannot do; for tests.
uint32_t crc32c_unfolded_of(Bytes src) {
#if PACKHORSE_X86
    if (choose_isa() >= Isa::kAvx2) return ~crc32c_hardware(~0u, src.data(), src.size());
#endif
    return crc32c(src.data(), src.size(), Isa::kPortable);
}

// Computes the digests of all leaves. If the last leaf is too short for the long form, its digest
// is left unchanged.
void leaf_digests(Bytes src, WritableBytes digests, std::size_t threads) {
    const Isa isa = choose_isa();
    require(digests.size() == 16 * n_leaves(src.size()),
            "digests must have 16 bytes for each leaf");
    const ReleasedGil released(src.size());
    hash_leaves_threaded(src.data(), src.size(), digests.data(), threads, isa);
}

// Copies bytes, and hashes the leaves of the copy, because the source may change meanwhile.
void copy_with_leaves(Bytes src, WritableBytes dst, WritableBytes leaves) {
    const Isa isa = choose_isa();
    require(dst.size() == src.size(), "dst must be as long as src");
    const ContentLeaves content = checked_leaves(leaves, src.size());
    const ReleasedGil released(src.size());
    take_in(src.data(), src.size(), dst.data(), content, isa);
}

// What some bytes add to the content sum of the tensor in which they begin at `first_byte`.
SumPair content_sum_of(Bytes src, uint64_t first_byte, std::size_t threads) {
    const Isa isa = choose_isa();
    require(first_byte % sizeof(uint32_t) == 0, "first_byte must be a multiple of 4");
    const ReleasedGil released(src.size());
    const ContentSum sum = content_sum_threaded(src.data(), src.size(), first_byte, threads, isa);
    return {sum.low, sum.high};
}

// The key of a word of a content sum.
uint64_t key_of_word(uint64_t word) {
    return content_key(word);
}

// Copies rows of one length. The caller keeps what lies at the addresses alive.
void gather_rows_at(Addresses sources, WritableBytes dst) {
    const std::size_t n = sources.size();
    require(n == 0 ? dst.size() == 0 : dst.size() % n == 0, "dst must have a row for each source");
    if (n == 0) return;
    const ReleasedGil released(dst.size());
    gather_rows(sources.data(), n, dst.size() / n, dst.data());
}

// Adds rows to the mean and the squared deviations of the `count` rows before them.
void add_rows_to_moments(Doubles mean, Doubles squares, const std::vector<Floats>& rows,
                         std::size_t count) {
    require(squares.size() == mean.size(), "squares must be as long as mean");
    std::vector<const float*> pointers;
    for (const Floats& row : rows) {
        require(row.size() == mean.size(), "each row must be as long as mean");
        pointers.push_back(row.data());
    }
    const Isa isa = choose_isa();
    const ReleasedGil released(mean.size() * sizeof(double) * rows.size());
    add_to_moments(pointers.data(), pointers.size(), mean.size(), count, mean.data(),
                   squares.data(), isa);
}

void will_need_all(const std::vector<Bytes>& ranges) {
    for (const Bytes& range : ranges) will_need(range.data(), range.size());
}

// Python's lock is released, because this may wait for a disk. Ranges that follow each other take
// one call of the system.
void read_all_now(const std::vector<Bytes>& ranges) {
    const ReleasedGil released(kMinReleasedNbytes);
    for (std::size_t i = 0; i < ranges.size();) {
        const uint8_t* const start = ranges[i].data();
        std::size_t nbytes = 0;
        for (; i < ranges.size() && ranges[i].data() == start + nbytes; ++i)
            nbytes += ranges[i].size();
        read_now(start, nbytes);
    }
}

// The first fault as (status, chunk, plane, byte of the payload); the plan; and its shape as
// (number of palettes, escaped planes, rANS streams with buckets, rANS streams without, buckets,
// bytes of scratch memory). If the payload has the wrong length, the fault's chunk is the number of
// chunks, and its byte is the length of all chunks.
using Plan = std::tuple<
    std::tuple<int, std::size_t, uint32_t, std::size_t>,
    nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>,
    std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, uint32_t, std::size_t>>;

// Makes a plan that tells kernels how to decode all chunks.
Plan plan_chunks(Bytes payload, Table table, const Geometry& geometry) {
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
    // A program may end while a file is open, which is not worth a warning.
    nb::set_leak_warnings(false);
    m.doc() =
        "Packhorse's C++ core: bytes in, bytes out. Private; packhorse.frame and packhorse.codecs "
        "use it.";
    m.def("detect_isa", [] { return static_cast<int>(detect_isa()); });
    m.def("choose_isa", &choose_isa_number, "best"_a = -1);
    m.def("has_isa", &has_isa, "isa"_a);
    m.def("fail_at_exit", &fail_at_exit);
    nb::class_<FileMapper>(m, "FileMapper")
        .def(nb::init<>())
        .def("map", &FileMapper::map, "descriptor"_a, "offset"_a, "nbytes"_a)
        .def_prop_ro("has_lost", &FileMapper::has_lost);
    bind_tensors(m);
    bind_frames(m);
    m.def("encode_chunks", &encode_chunks, "src"_a, "geometry"_a, "context"_a, "output"_a,
          "threads"_a, "first"_a = 0);
    m.def("decode_range", &decode_range, "tensor"_a, "start"_a, "dst"_a.noconvert(), "check"_a,
          "threads"_a);
    m.def("decode_links", &decode_links, "tensors"_a, "kinds"_a, "dst"_a.noconvert(), "check"_a,
          "threads"_a);
    m.def("patch_base", &patch_base, "tensor"_a, "target"_a.noconvert(), "threads"_a);
    m.def("find_changes", &find_changes, "tensor"_a, "threads"_a);
    nb::class_<TensorPatch>(m, "TensorPatch")
        .def_prop_ro("nbytes", &TensorPatch::nbytes)
        .def("write", &write_patch, "target"_a.noconvert(), "threads"_a);
    m.def("prepare_patch", &prepare_base_patch, "tensor"_a, "threads"_a);
    m.def("check_table", &check_table, "table"_a, "geometry"_a, "has_base"_a, "last_mode"_a);
    m.def("estimate_delta", &estimate_delta_nbytes, "src"_a, "geometry"_a, "base"_a,
          "plain_nbytes"_a, "level"_a);
    m.def("may_match", &may_match, "src"_a, "unit_nbytes"_a, "planes_nbytes"_a);
    m.def("estimate_matches", &estimate_matches, "src"_a, "unit_nbytes"_a, "level"_a);
    m.def("estimate_nibbles", &estimate_nibbles, "src"_a, "unit_nbytes"_a, "level"_a,
          "n_samples"_a);
    m.def("estimate_planes", &estimate_planes, "src"_a, "geometry"_a, "level"_a, "n_samples"_a);
    m.def("estimate_side_data", &estimate_side_data, "src"_a, "geometry"_a, "n_rows"_a,
          "most_rows"_a, "most_columns"_a);
    m.def("make_side_data", &make_side_data, "src"_a, "geometry"_a, "n_rows"_a,
          "side"_a.noconvert());
    m.def("encode_plane", &encode_plane, "src"_a, "mode"_a, "dst"_a.noconvert());
    m.def("decode_plane", &decode_plane, "stream"_a, "mode"_a, "dst"_a.noconvert());
    m.def("split", &split, "src"_a, "geometry"_a, "planes"_a.noconvert());
    m.def("merge", &merge, "planes"_a, "geometry"_a, "dst"_a.noconvert());
    m.def("crc32c", &crc32c_of, "src"_a);
    m.def("crc32c_unfolded", &crc32c_unfolded_of, "src"_a);
    m.def("leaf_digests", &leaf_digests, "src"_a, "digests"_a.noconvert(), "threads"_a);
    m.def("copy_with_leaves", &copy_with_leaves, "src"_a, "dst"_a.noconvert(),
          "leaves"_a.noconvert());
    m.def("content_sum", &content_sum_of, "src"_a, "first_byte"_a, "threads"_a);
    m.def("content_key", &key_of_word, "word"_a);
    m.def("gather_rows", &gather_rows_at, "sources"_a, "dst"_a.noconvert());
    m.def("add_to_moments", &add_rows_to_moments, "mean"_a.noconvert(), "squares"_a.noconvert(),
          "rows"_a, "count"_a);
    m.def("will_need", &will_need_all, "ranges"_a);
    m.def("read_now", &read_all_now, "ranges"_a);
    m.def(
        "will_sample", [](const Bytes& range) { will_sample(range.data(), range.size()); },
        "range"_a);
    m.def("count_mappings", &count_mappings);
    m.def(
        "want_huge_pages",
        [](WritableBytes memory) { want_huge_pages(memory.data(), memory.size()); }, "memory"_a);
    m.def("plan_chunks", &plan_chunks, "payload"_a, "table"_a, "geometry"_a);
    m.def("zstd_frame_nbytes", &zstd_frame_nbytes_of, "src"_a, "header_nbytes"_a, "has_checksum"_a);
    bind_weights(m);
    bind_tables(m);
    bind_bounded(m);
    bind_bags(m);
    bind_repeats(m);
}
