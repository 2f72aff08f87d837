// Encodes and decodes whole tensors: cuts a tensor into chunks, distributes the chunks among
// threads, and checks the table of descriptors.
//
// This is the core as a library: plain pointers and sizes, and no Python. bind/bind.cpp binds it;
// fuzz targets and thread tests use it directly. Callers check arguments first (with
// geometry_fault()) and keep all buffers alive. Scratch memory is allocated here, once for each
// call, so std::bad_alloc is the only exception. Bad data comes back as a status and the number of
// a chunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "chunk/decode.hpp"
#include "chunk/encode.hpp"
#include "chunk/side_data.hpp"
#include "common/copy.hpp"
#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "delta/decode.hpp"
#include "delta/encode.hpp"
#include "delta/sparse_decode.hpp"
#include "delta/sparse_source.hpp"
#include "matches/decode.hpp"
#include "matches/encode.hpp"
#include "tensor/geometry.hpp"

namespace packhorse {

// One worker's memory for encoding, in one allocation.
class EncodeWorker {
  public:
    EncodeWorker(const Geometry& geometry, bool classes, bool has_base, bool owns_output) {
        const std::size_t units = round_up(geometry.largest_units(), 64) + kPlaneSlack;
        const bool splits = geometry.spec.splits();
        const bool one_byte = item_nbytes(geometry.spec) == 1;
        const bool copies = one_byte && !splits && !has_base;
        const std::size_t planes = splits ? geometry.spec.n_planes * units : 0;
        const std::size_t output =
            owns_output ? round_up(geometry.largest_units() * geometry.spec.unit_nbytes, 64) : 0;
        const std::size_t tables = round_up(sizeof(RansEncodeTables), 64);
        const uint32_t unit_nbytes = geometry.spec.unit_nbytes;
        memory_ = Scratch(planes + (one_byte ? 3 * units : 0) + (classes ? 4 * units : 0) +
                          (copies ? units : 0) + tables + output +
                          (has_base ? delta_encode_nbytes(units, unit_nbytes) : 0));
        uint8_t* at = memory_.get();
        for (uint32_t p = 0; p < kMaxPlanes; ++p) scratch.planes[p] = nullptr;
        for (uint32_t p = 0; splits && p < geometry.spec.n_planes; ++p, at += units)
            scratch.planes[p] = at;
        scratch.tables = reinterpret_cast<RansEncodeTables*>(at);
        at += tables;
        this->output = at;
        at += output;
        if (has_base) {
            delta = place_delta_scratch(at, units, unit_nbytes);
            at += delta_encode_nbytes(units, unit_nbytes);
        }
        scratch.escapes = at;
        scratch.words = at + units;
        at += one_byte ? 3 * units : 0;
        scratch.units = at;
        at += copies ? units : 0;
        scratch.classes = at;
        scratch.yielded = at + units;
        scratch.sorted[0] = at + 2 * units;
        scratch.sorted[1] = at + 3 * units;
    }

    EncodeScratch scratch;
    DeltaScratch delta;  // if there is a base
    uint8_t* output;

  private:
    Scratch memory_;
};

// nbytes * part / whole.
inline std::size_t scale_bytes(std::size_t nbytes, std::size_t part, std::size_t whole) {
    return static_cast<std::size_t>(static_cast<double>(nbytes) * static_cast<double>(part) /
                                    static_cast<double>(whole));
}

inline std::size_t n_leaves(std::size_t nbytes) {
    return (nbytes + kContentLeafNbytes - 1) / kContentLeafNbytes;
}

// Hashes the leaves that start in [src, src + nbytes). If the last leaf is too short for the long
// form, its digest is left unchanged.
inline void hash_leaves(const uint8_t* src, std::size_t nbytes, uint8_t* digests, Isa isa) {
    for (std::size_t at = 0; at < nbytes; at += kContentLeafNbytes, digests += 16) {
        const std::size_t leaf = std::min(kContentLeafNbytes, nbytes - at);
        if (leaf >= kXxh3LongMinNbytes) xxh3_128_long(src + at, leaf, digests, isa);
    }
}

// Stores a chunk as it is: one pass copies it, hashes its leaves and computes the CRC of the padded
// chunk. Returns the padded length.
inline std::size_t store_chunk(const uint8_t* src, std::size_t nbytes, uint8_t* dst,
                               const ContentLeaves& leaves, uint32_t* row, bool past_cache,
                               Isa isa) {
    uint32_t crc = ~0u;
    for (std::size_t at = 0; at < nbytes; at += kContentLeafNbytes) {
        const std::size_t leaf = std::min(kContentLeafNbytes, nbytes - at);
        if (leaf >= kXxh3LongMinNbytes) {
            copy_with_digest(src + at, leaf, dst + at, leaves.from(at).digests, crc, past_cache,
                             isa);
        } else {
            std::memcpy(leaves.tail, src + at, leaf);
            seal(leaves.tail);
            std::memcpy(dst + at, leaves.tail, leaf);
            crc = crc32c_continue(crc, leaves.tail, leaf, isa);
        }
    }
    const std::size_t padded = round_up(nbytes, kFrameAlignment);
    std::memset(dst + nbytes, 0, padded - nbytes);
    row[0] = ~crc32c_continue(crc, dst + nbytes, padded - nbytes, isa);
    row[1] = make_descriptor(Mode::kStored, nbytes);
    return padded;
}

inline void hash_leaves_threaded(const uint8_t* src, std::size_t nbytes, uint8_t* digests,
                                 std::size_t threads, Isa isa) {
    parallel_for(n_leaves(nbytes), std::max<std::size_t>(1, threads),
                 [&](std::size_t, std::size_t leaf) {
                     const std::size_t at = leaf * kContentLeafNbytes;
                     hash_leaves(src + at, std::min(kContentLeafNbytes, nbytes - at),
                                 digests + 16 * leaf, isa);
                 });
}

// The inputs of a tensor's encoder besides the tensor.
struct EncodeContext {
    Level level = Level::kDefault;
    SideData side = {};
    Base base = {};
    std::size_t plain_nbytes = 0;         // bytes of the whole tensor without the base
    Mode last_mode = Mode::kSparseDelta;  // chunks have no later mode
    uint32_t max_classes = 0;             // of few differences; 0: as the level says
    bool matches = false;                 // whether whole units become matches; then no base
};

// Where the encoder of a tensor writes.
struct EncodeOutput {
    uint8_t* payload;  // room for round_up(nbytes, 64) bytes
    uint32_t* table;   // a row for each chunk
    ContentLeaves leaves;
    ContentLeaves base_leaves = {};  // of all bytes of the base; null if nobody changes the base
    // The memory of the base, if it is to become the tensor, chunk after chunk; otherwise null.
    // Then nobody else changes the base, it is not cast, and nothing is hashed: `changes`
    // get, for each chunk, how the content sum changes.
    uint8_t* kept = nullptr;
    SumChange* changes = nullptr;
};

// A chunk of a tensor, before it is encoded.
struct EncodeJob {
    const uint8_t* src;
    std::size_t n;      // units
    std::size_t first;  // the tensor's unit at which it begins
    ContentLeaves leaves;
    ContentLeaves base_leaves;  // of the tensor's whole base
    KeptBase kept;
};

// Hashes a chunk and compares it with the same chunk of the base. Returns whether they are equal.
// The first bytes of most unequal chunks differ, so these are compared before anything is hashed.
inline bool take_in_same(const EncodeJob& job, const uint8_t* base, std::size_t nbytes, Isa isa) {
    if (std::memcmp(job.src, base, std::min(nbytes, kIntakeNbytes)) != 0) return false;
    bool same = true;
    visit_source(job.src, nbytes, job.leaves, isa,
                 [&](const uint8_t* piece, std::size_t at, std::size_t n) {
                     same = same && std::memcmp(piece, base + at, n) == 0;
                 });
    return same;
}

// Makes a chunk of the base what was encoded. Both are read once, piece by piece.
inline void replace_base(const uint8_t* units, std::size_t nbytes, const KeptBase& kept, Isa isa) {
    SumChange change;
    for (std::size_t at = 0; at < nbytes; at += kIntakeNbytes) {
        const std::size_t n = std::min(kIntakeNbytes, nbytes - at);
        change.add(content_sum_change(units + at, kept.memory + at, n, kept.first_byte + at, isa));
        std::memcpy(kept.memory + at, units + at, n);
    }
    *kept.change = change;
}

// Tries to encode a chunk as differences from the base. Returns its descriptor if that saved bytes.
// If it did not, returns that of a stored chunk, and the chunk's units are in the worker's memory.
// Either way, the leaves of the base are hashed, unless the base does not change. If the base is to
// become the tensor, it gets the units that were encoded: the source is read only once.
inline uint32_t encode_from_base(const EncodeJob& job, const Geometry& geometry,
                                 const EncodeContext& context, EncodeWorker& worker, uint8_t* to,
                                 Isa isa) {
    const Base& base = context.base;
    const uint32_t unit = geometry.spec.unit_nbytes;
    if (job.kept.change != nullptr) *job.kept.change = {};
    const std::size_t base_unit = base.cast == Cast::kNone ? unit : 4;
    const bool is_fixed = job.base_leaves.digests == nullptr;
    const ContentLeaves leaves =
        is_fixed ? ContentLeaves{} : job.base_leaves.from(job.first * base_unit);
    if (!is_fixed && base.cast == Cast::kNone &&
        take_in_same(job, base.at(job.first, unit), job.n * unit, isa)) {
        copy_leaves(job.leaves, job.n * unit, leaves);
        return make_descriptor(Mode::kDelta, 0);
    }
    const uint8_t* units = worker.delta.base;
    if (is_fixed)
        units = chunk_base(base, job.first, job.n, unit, worker.delta.base, isa);
    else
        take_in_base(base, job.first, job.n, unit, worker.delta.base, leaves, isa);
    const std::size_t plain = scale_bytes(context.plain_nbytes, job.n, geometry.n_units);
    std::size_t nbytes = 0;
    SparseOutcome outcome = SparseOutcome::kCopied;
    if (context.last_mode >= Mode::kSparseDelta)
        outcome = encode_sparse(
            job.src, units, job.n, unit, base.is_float, job.leaves, plain,
            context.max_classes != 0 ? context.max_classes : sparse_classes(context.level),
            worker.delta, job.kept, to, nbytes, isa);
    else
        take_in(job.src, job.n * unit, worker.delta.source, job.leaves, isa);
    if (outcome == SparseOutcome::kEqual) return make_descriptor(Mode::kDelta, 0);
    if (outcome == SparseOutcome::kCoded) return make_descriptor(Mode::kSparseDelta, nbytes);
    const bool pays = encode_delta(worker.delta.source, units, job.n, unit, base.is_float, plain,
                                   context.level, worker.delta, worker.scratch.words,
                                   worker.scratch.escapes, *worker.scratch.tables, to, nbytes, isa);
    if (job.kept.memory != nullptr) replace_base(worker.delta.source, job.n * unit, job.kept, isa);
    return pays ? make_descriptor(Mode::kDelta, nbytes) : make_descriptor(Mode::kStored, 0);
}

// Encodes a chunk to `to` and its descriptors to `descriptors`. Returns the padded length.
inline std::size_t encode_any_chunk(const EncodeJob& job, const Geometry& geometry,
                                    const EncodeContext& context, EncodeWorker& worker, uint8_t* to,
                                    uint32_t* descriptors, Isa isa) {
    if (context.matches)
        return encode_matched({job.src, &job.leaves}, job.n, geometry.spec.unit_nbytes,
                              context.level, to, descriptors, isa);
    const bool has_base = context.base.units != nullptr;
    const uint32_t descriptor = has_base ? encode_from_base(job, geometry, context, worker, to, isa)
                                         : make_descriptor(Mode::kStored, 0);
    if (!is_from_base(descriptor_mode(descriptor))) {
        const ChunkSource source = has_base ? ChunkSource{worker.delta.source, nullptr}
                                            : ChunkSource{job.src, &job.leaves};
        return encode_chunk(source, job.n, job.first, geometry.spec, context.side, context.level,
                            worker.scratch, to, descriptors, isa);
    }
    std::fill_n(descriptors, geometry.spec.n_planes, 0);
    descriptors[0] = descriptor;
    const std::size_t nbytes = descriptor_nbytes(descriptor);
    const std::size_t padded = round_up(nbytes, kFrameAlignment);
    std::memset(to + nbytes, 0, padded - nbytes);
    return padded;
}

// Whether the encoder of such a tensor needs memory for classes.
inline bool uses_classes(const Geometry& geometry, const EncodeContext& context) {
    return geometry.spec.splits() && (context.side.rows != nullptr || context.level == Level::kMax);
}

// Encodes a chunk of a tensor to its place in the output, where `ordered` puts it. A single worker
// knows where the chunk goes. Several workers must wait until they know the sizes of the chunks
// before it.
inline void encode_in_place(const uint8_t* src, const Geometry& geometry,
                            const EncodeContext& context, const EncodeOutput& output,
                            std::size_t chunk, std::size_t n_workers, EncodeWorker& worker,
                            OrderedOutput& ordered, Isa isa) {
    uint8_t* const dst = output.payload;
    const std::size_t at = chunk * geometry.chunk_nbytes();
    const EncodeJob job{src + at,
                        geometry.units_of(chunk),
                        chunk * geometry.chunk_units,
                        output.leaves.from(at),
                        output.base_leaves,
                        output.kept == nullptr
                            ? KeptBase{}
                            : KeptBase{output.kept + at, at, output.changes + chunk}};
    uint32_t* const row = output.table + chunk * geometry.row_length();
    uint8_t* const to = n_workers == 1 ? dst + ordered.used() : worker.output;
    if (context.base.units == nullptr && !context.matches &&
        is_stored_whole(job.src, job.n, geometry.spec, context.level)) {
        const std::size_t nbytes = job.n * geometry.spec.unit_nbytes;
        // The length of a stored chunk is known beforehand, so no worker needs a copy.
        const std::size_t offset = ordered.reserve(chunk, round_up(nbytes, kFrameAlignment));
        store_chunk(job.src, nbytes, dst + offset, job.leaves, row,
                    geometry.nbytes() >= kPastCacheMinNbytes, isa);
        return;
    }
    EncodeScratch& scratch = worker.scratch;
    const bool more = chunk + n_workers < geometry.n_chunks();
    scratch.next_src = more ? job.src + n_workers * geometry.chunk_nbytes() : nullptr;
    scratch.cold_output = n_workers == 1;
    const std::size_t nbytes = encode_any_chunk(job, geometry, context, worker, to, row + 1, isa);
    if (n_workers == 1) {
        row[0] = crc32c(to, nbytes, isa);
        ordered.reserve(chunk, nbytes);
        return;
    }
    uint32_t crc = ~0u;
    copy_with_crc(to, nbytes, dst + ordered.reserve(chunk, nbytes), crc, true, isa);
    row[0] = ~crc;
}

// Encodes a tensor, which may change meanwhile: the leaves, or the sums, are those of the bytes
// that are encoded. Chunks hold whole leaves unless there is only one chunk. With a base, planes
// have one byte. Returns the length of the payload. The bytes do not depend on `threads`.
inline std::size_t encode_tensor(const uint8_t* src, const Geometry& geometry,
                                 const EncodeContext& context, const EncodeOutput& output,
                                 std::size_t threads, Isa isa) {
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, geometry.n_chunks()));
    std::vector<EncodeWorker> workers;
    for (std::size_t w = 0; w < n_workers; ++w)
        workers.emplace_back(geometry, uses_classes(geometry, context),
                             context.base.units != nullptr, n_workers > 1);
    OrderedOutput ordered;
    parallel_for(geometry.n_chunks(), n_workers, [&](std::size_t w, std::size_t chunk) {
        encode_in_place(src, geometry, context, output, chunk, n_workers, workers[w], ordered, isa);
    });
    return ordered.used();
}

inline std::size_t stream_sum(const uint32_t* descriptors, uint32_t n_planes) {
    std::size_t sum = 0;
    for (uint32_t p = 0; p < n_planes; ++p) sum += descriptor_nbytes(descriptors[p]);
    return sum;
}

// Whether a stored stream may lack the bytes that rANS streams carry. Only the last stored stream
// of a chunk may, and only if the chunk has rANS streams.
inline bool may_carry(const uint32_t* descriptors, uint32_t n_planes, uint32_t plane) {
    bool has_rans = false, is_last = true;
    for (uint32_t p = 0; p < n_planes; ++p) {
        has_rans |= is_rans(descriptor_mode(descriptors[p]));
        is_last &= p <= plane || descriptor_mode(descriptors[p]) != Mode::kStored;
    }
    return has_rans && is_last;
}

// Whether the mode and the length of a descriptor are allowed at its place in the chunk, which has
// `n` units.
inline bool descriptor_is_allowed(const uint32_t* descriptors, const PlaneSpec& spec,
                                  uint32_t plane, std::size_t n) {
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
        case Mode::kClassedRans:
            return spec.splits();
        case Mode::kDelta:
        case Mode::kSparseDelta:
            return false;
        default:
            return !spec.splits();
    }
}

// Finds the first plane of a chunk of differences whose descriptor is not allowed. Returns n_planes
// if there is none.
inline uint32_t misplaced_beside_delta(const uint32_t* descriptors, uint32_t n_planes,
                                       bool has_base) {
    if (!has_base) return 0;
    uint32_t plane = 1;
    while (plane < n_planes && descriptors[plane] == 0) ++plane;
    return plane;
}

enum class TableFault : int { kNone = 0, kUnknownMode = 1, kNotAllowed = 2 };

struct TableCheck {
    TableFault fault;
    std::size_t chunk;  // where the fault is
    uint32_t plane;
    std::size_t payload_nbytes;  // 0 if there is a fault
};

// Checks all descriptors (docs/format.md, section 9). Reads only the table. `last_mode` is the last
// mode that the frame's version has.
inline TableCheck check_descriptors(const uint32_t* table, const Geometry& geometry, bool has_base,
                                    Mode last_mode = Mode::kMatches) {
    const uint32_t n_planes = geometry.spec.n_planes;
    std::size_t payload = 0;
    for (std::size_t chunk = 0; chunk < geometry.n_chunks(); ++chunk) {
        const uint32_t* descriptors = table + chunk * geometry.row_length() + 1;
        const std::size_t n = geometry.units_of(chunk);
        for (uint32_t plane = 0; plane < n_planes; ++plane)
            if (descriptor_mode(descriptors[plane]) > last_mode)
                return {TableFault::kUnknownMode, chunk, plane, 0};
        if (is_from_base(descriptor_mode(descriptors[0]))) {
            const uint32_t plane = misplaced_beside_delta(descriptors, n_planes, has_base);
            if (plane < n_planes) return {TableFault::kNotAllowed, chunk, plane, 0};
            payload += round_up(descriptor_nbytes(descriptors[0]), kFrameAlignment);
            continue;
        }
        for (uint32_t plane = 0; plane < n_planes; ++plane) {
            if (!descriptor_is_allowed(descriptors, geometry.spec, plane, n))
                return {TableFault::kNotAllowed, chunk, plane, 0};
        }
        payload += round_up(stream_sum(descriptors, n_planes), kFrameAlignment);
    }
    return {TableFault::kNone, 0, 0, payload};
}

// Returns where each chunk starts in the payload, and at the end the length of the payload.
inline std::vector<std::size_t> chunk_offsets(const uint32_t* table, const Geometry& geometry) {
    std::vector<std::size_t> offsets(geometry.n_chunks() + 1, 0);
    for (std::size_t chunk = 0; chunk < geometry.n_chunks(); ++chunk) {
        const uint32_t* descriptors = table + chunk * geometry.row_length() + 1;
        offsets[chunk + 1] =
            offsets[chunk] +
            round_up(stream_sum(descriptors, geometry.spec.n_planes), kFrameAlignment);
    }
    return offsets;
}

// An encoded tensor. `payload` has offsets.back() bytes.
struct EncodedTensor {
    const Geometry& geometry;
    SideData side;
    Base base;  // units are null only if no chunk needs it
    const uint8_t* payload;
    const uint32_t* table;
    const std::vector<std::size_t>& offsets;

    const uint32_t* row(std::size_t chunk) const { return table + chunk * geometry.row_length(); }
    const uint8_t* chunk(std::size_t chunk) const { return payload + offsets[chunk]; }
    std::size_t nbytes_of(std::size_t chunk) const { return offsets[chunk + 1] - offsets[chunk]; }
};

// One worker's memory for decoding. `partial` receives a chunk if only a part of it is wanted.
struct DecodeWorker {
    DecodeWorker(const Geometry& geometry, bool classes, bool deltas)
        : planes(new PlaneDecoder[item_nbytes(geometry.spec) == 1 ? geometry.spec.n_planes : 1]),
          whole(classes ? Scratch(classed_scratch_nbytes(geometry.largest_units(),
                                                         geometry.spec.n_planes))
                        : Scratch()),
          delta(deltas ? new DeltaDecoder : nullptr),
          differences(deltas ? Scratch(delta_scratch_nbytes(geometry.largest_units(),
                                                            geometry.spec.unit_nbytes))
                             : Scratch()) {}

    std::unique_ptr<PlaneDecoder[]> planes;
    Scratch whole;
    std::unique_ptr<DeltaDecoder> delta;
    Scratch differences;
    SparseMemory changes;
    std::vector<uint8_t> partial;

    // Where the base's units of a chunk go if they are cast.
    uint8_t* cast_memory(std::size_t n, uint32_t unit_nbytes) const {
        return differences.get() + 2 * delta_row_nbytes(n) + delta_row_nbytes(n * unit_nbytes);
    }
};

// Checks the bytes of chunk `index` that are outside of its streams.
inline Status check_around(const EncodedTensor& tensor, std::size_t index, bool check_crc,
                           Isa isa) {
    const uint8_t* const chunk = tensor.chunk(index);
    const std::size_t nbytes = tensor.nbytes_of(index);
    const uint32_t* const row = tensor.row(index);
    if (check_crc && crc32c(chunk, nbytes, isa) != row[0]) return Status::kChecksum;
    const uint8_t* const padding = chunk + stream_sum(row + 1, tensor.geometry.spec.n_planes);
    return std::all_of(padding, chunk + nbytes, [](uint8_t byte) { return byte == 0; })
               ? Status::kOk
               : Status::kReserved;
}

// Checks the bytes of chunk `index` that are outside of its streams, then decodes it to `dst`. The
// chunk does not need the base.
inline Status decode_plain_chunk(const EncodedTensor& tensor, std::size_t index, bool check_crc,
                                 bool past_cache, DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    const uint8_t* const chunk = tensor.chunk(index);
    const std::size_t nbytes = tensor.nbytes_of(index);
    const std::size_t n = tensor.geometry.units_of(index);
    const uint32_t* const row = tensor.row(index);
    const PlaneSpec& spec = tensor.geometry.spec;
    const uint32_t stored = make_descriptor(Mode::kStored, n * spec.unit_nbytes);
    if (check_crc && !spec.splits() && row[1] == stored && descriptor_nbytes(stored) == nbytes) {
        uint32_t crc = ~0u;  // there is no padding to check
        copy_with_crc(chunk, nbytes, dst, crc, past_cache, isa);
        return ~crc == row[0] ? Status::kOk : Status::kChecksum;
    }
    const Status around = check_around(tensor, index, check_crc, isa);
    if (around != Status::kOk) return around;
    if (descriptor_mode(row[1]) == Mode::kMatches)
        return decode_matches(chunk, descriptor_nbytes(row[1]), n, spec.unit_nbytes, dst, isa);
    return decode_chunk(chunk, row + 1, n, index * tensor.geometry.chunk_units, spec, tensor.side,
                        scratch, dst, isa);
}

// Does the same with any chunk.
inline Status decode_checked(const EncodedTensor& tensor, std::size_t index, bool check_crc,
                             bool past_cache, DecodeScratch& scratch, DecodeWorker& worker,
                             uint8_t* dst, Isa isa) {
    const uint32_t descriptor = tensor.row(index)[1];
    if (!is_from_base(descriptor_mode(descriptor)))
        return decode_plain_chunk(tensor, index, check_crc, past_cache, scratch, dst, isa);
    const Status around = check_around(tensor, index, check_crc, isa);
    if (around != Status::kOk) return around;
    const uint8_t* const chunk = tensor.chunk(index);
    const uint32_t unit_nbytes = tensor.geometry.spec.unit_nbytes;
    const std::size_t n = tensor.geometry.units_of(index);
    const std::size_t first = index * tensor.geometry.chunk_units;
    if (descriptor_mode(descriptor) == Mode::kSparseDelta)
        return decode_sparse(
            chunk, descriptor_nbytes(descriptor), n, unit_nbytes, tensor.base.is_float,
            chunk_base(tensor.base, first, n, unit_nbytes, worker.cast_memory(n, unit_nbytes), isa),
            worker.changes, past_cache, dst, isa);
    return decode_delta(chunk, descriptor_nbytes(descriptor), n, first, unit_nbytes, tensor.base,
                        *worker.delta, worker.differences.get(), dst, isa);
}

// The first bad chunk that the workers have met.
class FirstFault {
  public:
    bool is_before(std::size_t chunk) const {
        return chunk_.load(std::memory_order_relaxed) < chunk;
    }
    void report(std::size_t chunk, Status status) {
        const std::lock_guard lock(mutex_);
        if (chunk >= chunk_) return;
        chunk_ = chunk;
        status_ = status;
    }
    // Call this after all workers are done.
    Status status() const { return status_; }
    std::size_t chunk() const { return status_ == Status::kOk ? 0 : chunk_.load(); }

  private:
    std::mutex mutex_;
    std::atomic<std::size_t> chunk_{~std::size_t{0}};
    Status status_ = Status::kOk;
};

struct DecodeResult {
    Status status;
    std::size_t chunk;  // the first bad one, or 0 if there is none
};

// Decodes bytes [start, start + nbytes) of a tensor to `dst`. The range must be inside the tensor.
// The table may be unchecked. Chunks of mode zstd are an error here.
inline DecodeResult decode_tensor(const EncodedTensor& tensor, std::size_t start, uint8_t* dst,
                                  std::size_t nbytes, bool check_crc, std::size_t threads,
                                  Isa isa) {
    if (nbytes == 0) return {Status::kOk, 0};
    const Geometry& geometry = tensor.geometry;
    const std::size_t stop = start + nbytes;
    const std::size_t first = start / geometry.chunk_nbytes();
    const std::size_t n_wanted = (stop - 1) / geometry.chunk_nbytes() + 1 - first;
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_wanted));
    std::vector<DecodeWorker> workers;
    bool classes = false, deltas = false;
    for (std::size_t chunk = first; chunk < first + n_wanted; ++chunk) {
        classes |= is_classed(tensor.row(chunk) + 1, geometry.spec.n_planes);
        deltas |= is_from_base(descriptor_mode(tensor.row(chunk)[1]));
    }
    if (deltas && tensor.base.units == nullptr) return {Status::kBadField, first};
    for (std::size_t w = 0; w < n_workers; ++w) workers.emplace_back(geometry, classes, deltas);
    const auto cuts_chunk = [&](std::size_t at) {
        return at % geometry.chunk_nbytes() != 0 && at != geometry.nbytes();
    };
    if (cuts_chunk(start) || cuts_chunk(stop))
        for (DecodeWorker& worker : workers)
            worker.partial.resize(geometry.largest_units() * geometry.spec.unit_nbytes);
    FirstFault fault;
    parallel_for(n_wanted, n_workers, [&](std::size_t w, std::size_t item) {
        const std::size_t chunk = first + item;
        if (fault.is_before(chunk)) return;
        const std::size_t chunk_start = chunk * geometry.chunk_nbytes();
        const std::size_t chunk_stop =
            chunk_start + geometry.units_of(chunk) * geometry.spec.unit_nbytes;
        const std::size_t from = std::max(start, chunk_start);
        const std::size_t to = std::min(stop, chunk_stop);
        const bool whole = from == chunk_start && to == chunk_stop;
        uint8_t* const out = dst + (from - start);
        uint8_t* const partial = workers[w].partial.data();
        const bool more = item + n_workers < n_wanted;
        DecodeScratch scratch{workers[w].planes.get(), workers[w].whole.get(),
                              more ? tensor.chunk(chunk + n_workers) : nullptr};
        const bool past_cache = whole && nbytes >= kPastCacheMinNbytes;
        const Status status = decode_checked(tensor, chunk, check_crc, past_cache, scratch,
                                             workers[w], whole ? out : partial, isa);
        if (status != Status::kOk)
            fault.report(chunk, status);
        else if (!whole)
            std::memcpy(out, partial + (from - chunk_start), to - from);
    });
    return {fault.status(), fault.chunk()};
}

}  // namespace packhorse
