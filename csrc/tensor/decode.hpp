// Decodes whole tensors: checks the table of descriptors and distributes the chunks among threads.
// Bad data comes back as a status and the number of a chunk.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "chunk/decode.hpp"
#include "common/copy.hpp"
#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "delta/decode.hpp"
#include "delta/sparse_decode.hpp"
#include "matches/decode.hpp"
#include "nibbles/decode.hpp"
#include "tensor/geometry.hpp"

namespace packhorse {

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
                                    Mode last_mode = Mode::kNibbles) {
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
        : DecodeWorker(geometry.largest_units(), geometry.spec.unit_nbytes,
                       item_nbytes(geometry.spec) == 1 ? geometry.spec.n_planes : 1, classes,
                       deltas) {}

    // For chunks of at most `n` units.
    DecodeWorker(std::size_t n, uint32_t unit_nbytes, std::size_t n_planes, bool classes,
                 bool deltas)
        : planes(new PlaneDecoder[n_planes]),
          whole(classes ? Scratch(classed_scratch_nbytes(n, static_cast<uint32_t>(n_planes)))
                        : Scratch()),
          delta(deltas ? new DeltaDecoder : nullptr),
          differences(deltas ? Scratch(delta_scratch_nbytes(n, unit_nbytes)) : Scratch()) {}

    std::unique_ptr<PlaneDecoder[]> planes;
    Scratch whole;
    std::unique_ptr<DeltaDecoder> delta;
    Scratch differences;
    SparseMemory changes;
    std::vector<uint8_t> partial;

    // Where the base's units of a chunk go if they are cast.
    uint8_t* cast_memory(std::size_t n, uint32_t unit_nbytes) const {
        return delta_cast_memory(differences.get(), n, unit_nbytes);
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
                                 DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    const uint8_t* const chunk = tensor.chunk(index);
    const std::size_t nbytes = tensor.nbytes_of(index);
    const std::size_t n = tensor.geometry.units_of(index);
    const uint32_t* const row = tensor.row(index);
    const PlaneSpec& spec = tensor.geometry.spec;
    const uint32_t stored = make_descriptor(Mode::kStored, n * spec.unit_nbytes);
    if (check_crc && !spec.splits() && row[1] == stored && descriptor_nbytes(stored) == nbytes) {
        uint32_t crc = ~0u;  // there is no padding to check
        copy_with_crc(chunk, nbytes, dst, crc, scratch.past_cache, isa);
        return ~crc == row[0] ? Status::kOk : Status::kChecksum;
    }
    const Status around = check_around(tensor, index, check_crc, isa);
    if (around != Status::kOk) return around;
    if (descriptor_mode(row[1]) == Mode::kMatches)
        return decode_matches(chunk, descriptor_nbytes(row[1]), n, spec.unit_nbytes, dst, isa);
    if (descriptor_mode(row[1]) == Mode::kNibbles)
        return decode_nibbles(chunk, descriptor_nbytes(row[1]), n * spec.unit_nbytes, scratch, dst,
                              isa);
    return decode_chunk(chunk, row + 1, n, index * tensor.geometry.chunk_units, spec, tensor.side,
                        scratch, dst, isa);
}

// Does the same with any chunk.
inline Status decode_checked(const EncodedTensor& tensor, std::size_t index, bool check_crc,
                             DecodeScratch& scratch, DecodeWorker& worker, uint8_t* dst, Isa isa) {
    const uint32_t descriptor = tensor.row(index)[1];
    if (!is_from_base(descriptor_mode(descriptor)))
        return decode_plain_chunk(tensor, index, check_crc, scratch, dst, isa);
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
            worker.changes, scratch.past_cache, dst, isa);
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
// The table may be unchecked. Chunks of mode zstd are an error here. A range of at least
// `past_cache_nbytes` bytes is written past the cache if it can be (writes_past_cache()).
inline DecodeResult decode_tensor(const EncodedTensor& tensor, std::size_t start, uint8_t* dst,
                                  std::size_t nbytes, bool check_crc, std::size_t threads, Isa isa,
                                  std::size_t past_cache_nbytes = kPastCacheMinNbytes) {
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
    const bool past_cache = writes_past_cache(dst, nbytes, nbytes, past_cache_nbytes);
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
                              more ? tensor.chunk(chunk + n_workers) : nullptr,
                              whole && past_cache};
        const Status status = decode_checked(tensor, chunk, check_crc, scratch, workers[w],
                                             whole ? out : partial, isa);
        if (status != Status::kOk)
            fault.report(chunk, status);
        else if (!whole)
            std::memcpy(out, partial + (from - chunk_start), to - from);
    });
    return {fault.status(), fault.chunk()};
}

}  // namespace packhorse
