// Encodes whole tensors: cuts a tensor into chunks and distributes the chunks among threads.
//
// Callers check arguments first (with geometry_fault()) and keep all buffers alive. Scratch memory
// is allocated here, once for each call, so std::bad_alloc is the only exception.
#pragma once

#include <algorithm>
#include <vector>

#include "chunk/encode.hpp"
#include "chunk/side_data.hpp"
#include "common/copy.hpp"
#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "delta/encode.hpp"
#include "delta/sparse_source.hpp"
#include "matches/encode.hpp"
#include "nibbles/encode.hpp"
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
        const std::size_t tables = round_up(sizeof(RansEncodeMemory), 64);
        const uint32_t unit_nbytes = geometry.spec.unit_nbytes;
        memory_ = Scratch(planes + (one_byte ? 3 * units : 0) + (classes ? 4 * units : 0) +
                          (copies ? units : 0) + tables + output +
                          (has_base ? delta_encode_nbytes(units, unit_nbytes) : 0));
        uint8_t* at = memory_.get();
        for (uint32_t p = 0; p < kMaxPlanes; ++p) scratch.planes[p] = nullptr;
        for (uint32_t p = 0; splits && p < geometry.spec.n_planes; ++p, at += units)
            scratch.planes[p] = at;
        scratch.tables = reinterpret_cast<RansEncodeMemory*>(at);
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
    Mode whole = Mode::kStored;           // matches or nibbles: how whole units are coded

    // Then there is no base.
    bool codes_whole() const { return whole != Mode::kStored; }
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
    const uint32_t unit_nbytes = geometry.spec.unit_nbytes;
    if (context.whole == Mode::kMatches)
        return encode_matched({job.src, &job.leaves}, job.n, unit_nbytes, context.level, to,
                              descriptors, isa);
    if (context.codes_whole())
        return encode_nibbles({job.src, &job.leaves}, job.n, unit_nbytes, job.n * unit_nbytes,
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

// Encodes a chunk of a tensor, whose bytes begin at `src`, to its place in the output, where
// `ordered` puts it. A single worker knows where the chunk goes. Several workers must wait until
// they know the sizes of the chunks before it.
inline void encode_in_place(const uint8_t* src, const Geometry& geometry,
                            const EncodeContext& context, const EncodeOutput& output,
                            std::size_t chunk, std::size_t n_workers, EncodeWorker& worker,
                            OrderedOutput& ordered, Isa isa) {
    uint8_t* const dst = output.payload;
    const std::size_t at = chunk * geometry.chunk_nbytes();
    const EncodeJob job{src,
                        geometry.units_of(chunk),
                        chunk * geometry.chunk_units,
                        output.leaves.from(at),
                        output.base_leaves,
                        output.kept == nullptr
                            ? KeptBase{}
                            : KeptBase{output.kept + at, at, output.changes + chunk}};
    uint32_t* const row = output.table + chunk * geometry.row_length();
    uint8_t* const to = n_workers == 1 ? dst + ordered.used() : worker.output;
    if (context.base.units == nullptr && !context.codes_whole() &&
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
    scratch.next_src = more ? job.src + n_workers * geometry.chunk_nbytes() : scratch.after;
    scratch.cold_output = n_workers == 1;
    std::size_t nbytes = 0;
    try {
        nbytes = encode_any_chunk(job, geometry, context, worker, to, row + 1, isa);
    } catch (const std::bad_alloc&) {
        if (n_workers > 1) ordered.reserve(chunk, 0);  // others wait for its place
        throw;
    }
    if (n_workers == 1) {
        row[0] = crc32c(to, nbytes, isa);
        ordered.reserve(chunk, nbytes);
        return;
    }
    uint32_t crc = ~0u;
    copy_with_crc(to, nbytes, dst + ordered.reserve(chunk, nbytes), crc, true, isa);
    row[0] = ~crc;
}

// Some of the chunks of a tensor, one after another.
struct ChunkRun {
    std::size_t first, n_chunks;
};

// Encodes a run of a tensor's chunks. The tensor may change meanwhile: the leaves, or the sums, are
// those of the bytes that are encoded. Chunks hold whole leaves unless there is only one chunk.
// With a base, planes have one byte. `src` has the bytes of the run, and `output.payload` room for
// them; all else is that of the whole tensor. Returns the length of the run's payload. The bytes do
// not depend on `threads`.
inline std::size_t encode_run(const uint8_t* src, const Geometry& geometry, const ChunkRun& run,
                              const EncodeContext& context, const EncodeOutput& output,
                              std::size_t threads, Isa isa) {
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, run.n_chunks));
    std::vector<EncodeWorker> workers;
    for (std::size_t w = 0; w < n_workers; ++w)
        workers.emplace_back(geometry, uses_classes(geometry, context),
                             context.base.units != nullptr, n_workers > 1);
    OrderedOutput ordered(run.first);
    parallel_for(run.n_chunks, n_workers, [&](std::size_t w, std::size_t i) {
        encode_in_place(src + i * geometry.chunk_nbytes(), geometry, context, output, run.first + i,
                        n_workers, workers[w], ordered, isa);
    });
    return ordered.used();
}

// Encodes all chunks of a tensor.
inline std::size_t encode_tensor(const uint8_t* src, const Geometry& geometry,
                                 const EncodeContext& context, const EncodeOutput& output,
                                 std::size_t threads, Isa isa) {
    return encode_run(src, geometry, {0, geometry.n_chunks()}, context, output, threads, isa);
}

}  // namespace packhorse
