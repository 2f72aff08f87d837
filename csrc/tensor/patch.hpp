// What a frame changes in its base: lists of changes, patching the base in place, and patches that
// are made at one time and written at another.
//
// All chunks are checked and decoded before the first one is written, so a frame that breaks a rule
// changes nothing. The changes of chunks of mode sparse delta are kept meanwhile; they take at most
// 12 bytes for each unit that changes. To patch in place, other chunks are decoded twice, because
// their units may take as much memory as the whole tensor. A patch keeps what it will write: few
// changes of a chunk as a list, and a chunk with more of them as it will be.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "tensor/tensor.hpp"

namespace packhorse {

// The changes of a chunk: places of units in the chunk, and the new units.
struct ChunkChanges {
    std::vector<uint32_t> places;
    std::vector<uint8_t> units;
    bool is_whole = false;  // whether `units` has all units of the chunk, and there are no places

    template <class Unit>
    void take(const SparseChanges<Unit>& changes) {
        places.assign(changes.places, changes.places + changes.n);
        const auto* const bytes = reinterpret_cast<const uint8_t*>(changes.units);
        units.assign(bytes, bytes + changes.n * sizeof(Unit));
    }
};

// Writes the changes of a chunk, which is at `to`.
inline void write_changes(const ChunkChanges& changes, uint32_t unit_nbytes, uint8_t* to) {
    with_units(unit_nbytes, false, [&]<class Unit, bool kFloat>() {
        // The next lines are fetched ahead: most of them are in memory only.
        constexpr std::size_t kAhead = 32;
        const std::size_t n = changes.places.size();
        const uint32_t* const places = changes.places.data();
        const uint8_t* const units = changes.units.data();
        for (std::size_t i = 0; i < n; ++i) {
            __builtin_prefetch(to + places[std::min(i + kAhead, n - 1)] * sizeof(Unit), 1);
            store(to + places[i] * sizeof(Unit), load<Unit>(units + i * sizeof(Unit)));
        }
    });
}

// Decodes whole chunks, one worker at a time.
class ChunkReader {
  public:
    ChunkReader(const EncodedTensor& tensor, Isa isa) : tensor_(tensor), isa_(isa) {}

    // Decodes a chunk to memory that is valid until the next call.
    Status decode(std::size_t chunk, bool check_crc, const uint8_t*& units) {
        DecodeWorker& memory = worker();
        memory.partial.resize(tensor_.geometry.largest_units() * unit_nbytes());
        units = memory.partial.data();
        DecodeScratch scratch{memory.planes.get(), memory.whole.get(), nullptr};
        return decode_checked(tensor_, chunk, check_crc, false, scratch, memory,
                              memory.partial.data(), isa_);
    }

    // Lists the changes of a chunk of mode sparse delta, in ascending order if they are to be
    // sorted.
    Status list(std::size_t chunk, bool sorted, ChunkChanges& out) {
        const Status status = check_around(tensor_, chunk, true, isa_);
        if (status != Status::kOk) return status;
        return with_units(unit_nbytes(), tensor_.base.is_float, [&]<class Unit, bool kFloat>() {
            SparseChanges<Unit> changes;
            const Status found = decode_changes<Unit, kFloat>(
                tensor_.chunk(chunk), descriptor_nbytes(tensor_.row(chunk)[1]), base_of(chunk),
                tensor_.geometry.units_of(chunk), memory_, changes, isa_);
            if (found != Status::kOk) return found;
            if (sorted) sort_changes(changes);
            out.take(changes);
            return found;
        });
    }

    // Lists the changes of any chunk, by comparing its units with those of the base.
    Status compare(std::size_t chunk, ChunkChanges& out) {
        const uint8_t* units;
        const Status status = decode(chunk, true, units);
        if (status == Status::kOk) compare_units(chunk, units, chunk_units(chunk), out);
        return status;
    }

    // Finds what a patch writes to a chunk of the base, which is not cast, and hashes the chunk as
    // it will be.
    Status prepare(std::size_t chunk, const ContentLeaves& leaves, ChunkChanges& out) {
        const std::size_t n = chunk_units(chunk), nbytes = n * unit_nbytes();
        const uint8_t* units;
        Status status = Status::kOk;
        if (descriptor_mode(tensor_.row(chunk)[1]) == Mode::kSparseDelta) {
            status = list(chunk, false, out);
            if (status == Status::kOk) hash_changed(chunk, out, leaves);
            return status;
        }
        if (tensor_.row(chunk)[1] == make_descriptor(Mode::kDelta, 0)) {
            status = check_around(tensor_, chunk, true, isa_);
            if (status == Status::kOk) hash_whole(base_of(chunk), nbytes, leaves);
            return status;
        }
        status = decode(chunk, true, units);
        if (status != Status::kOk) return status;
        hash_whole(units, nbytes, leaves);
        if (compare_units(chunk, units, n / kUnitsOfListedChange, out)) return status;
        out.units.assign(units, units + nbytes);
        out.is_whole = true;
        return status;
    }

  private:
    // A patch keeps a chunk with more changes than one in this number as a whole: a list of them
    // would take more than half as many bytes, and as long to write.
    static constexpr std::size_t kUnitsOfListedChange = 6;

    uint32_t unit_nbytes() const { return tensor_.geometry.spec.unit_nbytes; }
    std::size_t chunk_units(std::size_t chunk) const { return tensor_.geometry.units_of(chunk); }

    // Lists the units that differ from those of the base. Returns false if there are more than
    // `capacity`; then `out` is unchanged.
    bool compare_units(std::size_t chunk, const uint8_t* units, std::size_t capacity,
                       ChunkChanges& out) {
        const std::size_t n = chunk_units(chunk);
        const std::size_t row = round_up((capacity + kSetUnits) * unit_nbytes(), 64);
        const Scratch memory(round_up(4 * (capacity + kSetUnits), 64) + 2 * row);
        SparseScratch rows{};
        rows.places = reinterpret_cast<uint32_t*>(memory.get());
        rows.units = memory.get() + round_up(4 * (capacity + kSetUnits), 64);
        rows.bases = rows.units + row;
        return with_units(unit_nbytes(), tensor_.base.is_float, [&]<class Unit, bool kFloat>() {
            ChangeList<Unit> list(rows, capacity);
            const bool fits = list.add(units, base_of(chunk), 0, n, isa_);
            if (fits) out.take(list.changes());
            return fits;
        });
    }

    // Hashes a chunk as it is.
    void hash_whole(const uint8_t* units, std::size_t nbytes, const ContentLeaves& leaves) const {
        hash_leaves(units, nbytes, leaves.digests, isa_);
        const std::size_t last = nbytes % kContentLeafNbytes;
        if (0 < last && last < kXxh3LongMinNbytes)
            std::memcpy(leaves.tail, units + nbytes - last, last);
    }

    // Hashes a chunk of the base with some changes. They are made in a copy of one piece at a time.
    void hash_changed(std::size_t chunk, const ChunkChanges& changes, ContentLeaves leaves) {
        const uint8_t* const base = base_of(chunk);
        const std::size_t nbytes = chunk_units(chunk) * unit_nbytes();
        with_units(unit_nbytes(), false, [&]<class Unit, bool kFloat>() {
            // Up to 64 bytes of the piece before are in front of a piece.
            alignas(64) uint8_t memory[kXxh3StripeNbytes + kIntakeNbytes] = {};
            uint8_t* const piece = memory + kXxh3StripeNbytes;
            const uint32_t* place = changes.places.data();
            const uint32_t* const end = place + changes.places.size();
            const uint8_t* unit = changes.units.data();
            for (std::size_t leaf = 0; leaf < nbytes; leaf += kContentLeafNbytes) {
                const std::size_t leaf_nbytes = std::min(kContentLeafNbytes, nbytes - leaf);
                Xxh3Accumulator acc;
                for (std::size_t at = 0; at < leaf_nbytes; at += kIntakeNbytes) {
                    const std::size_t n = std::min(kIntakeNbytes, leaf_nbytes - at);
                    const std::size_t first = (leaf + at) / sizeof(Unit);
                    std::memcpy(memory, memory + kIntakeNbytes, kXxh3StripeNbytes);
                    std::memcpy(piece, base + leaf + at, n);
                    for (; place < end && *place < first + n / sizeof(Unit); ++place) {
                        store(piece + (*place - first) * sizeof(Unit), load<Unit>(unit));
                        unit += sizeof(Unit);
                    }
                    const bool is_last = at + n == leaf_nbytes;
                    xxh3_blocks(acc, piece, is_last ? xxh3_n_blocks(n) : n / kXxh3BlockNbytes,
                                isa_);
                    if (!is_last) continue;
                    if (leaf_nbytes >= kXxh3LongMinNbytes)
                        xxh3_finish(acc, piece + n, leaf_nbytes, leaves.digests, isa_);
                    else
                        std::memcpy(leaves.tail, piece, n);
                }
                leaves.digests += 16;
            }
        });
    }

    const uint8_t* base_of(std::size_t chunk) {
        const std::size_t n = chunk_units(chunk), first = chunk * tensor_.geometry.chunk_units;
        if (tensor_.base.cast == Cast::kNone) return tensor_.base.at(first, unit_nbytes());
        return chunk_base(tensor_.base, first, n, unit_nbytes(),
                          worker().cast_memory(n, unit_nbytes()), isa_);
    }

    // Most chunks are listed, which needs none of this memory.
    DecodeWorker& worker() {
        if (!worker_) worker_.emplace(tensor_.geometry, true, tensor_.base.units != nullptr);
        return *worker_;
    }

    const EncodedTensor& tensor_;
    Isa isa_;
    SparseMemory memory_;
    std::optional<DecodeWorker> worker_;
};

// A tensor as the changes of its base, which were checked and can be written at any time.
struct TensorPatch {
    Geometry geometry;
    std::vector<ChunkChanges> chunks;

    // Bytes of memory that the changes take.
    std::size_t nbytes() const {
        std::size_t sum = 0;
        for (const ChunkChanges& chunk : chunks)
            sum += chunk.units.size() + chunk.places.size() * sizeof(uint32_t);
        return sum;
    }

    // Makes the base, which is at `target`, the tensor.
    void write(uint8_t* target, std::size_t threads) const {
        const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, chunks.size()));
        parallel_for(chunks.size(), n_workers, [&](std::size_t, std::size_t chunk) {
            write_chunk(chunks[chunk], target + chunk * geometry.chunk_nbytes());
        });
    }

  private:
    void write_chunk(const ChunkChanges& changes, uint8_t* to) const {
        if (changes.is_whole) {
            std::memcpy(to, changes.units.data(), changes.units.size());
            return;
        }
        write_changes(changes, geometry.spec.unit_nbytes, to);
    }
};

// How a chunk is patched.
enum class PatchKind { kNothing, kChanges, kUnits };

inline PatchKind patch_kind(const uint32_t* row) {
    if (descriptor_mode(row[1]) == Mode::kSparseDelta) return PatchKind::kChanges;
    return row[1] == make_descriptor(Mode::kDelta, 0) ? PatchKind::kNothing : PatchKind::kUnits;
}

// Calls work(reader, chunk) -> Status for all chunks. Returns the first fault.
template <class Work>
inline DecodeResult read_chunks(const EncodedTensor& tensor, std::size_t threads, Isa isa,
                                const Work& work) {
    const std::size_t n_chunks = tensor.geometry.n_chunks();
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_chunks));
    std::vector<ChunkReader> readers;
    readers.reserve(n_workers);
    for (std::size_t w = 0; w < n_workers && n_chunks > 0; ++w) readers.emplace_back(tensor, isa);
    FirstFault fault;
    parallel_for(n_chunks, n_workers, [&](std::size_t w, std::size_t chunk) {
        if (fault.is_before(chunk)) return;
        const Status status = work(readers[w], chunk);
        if (status != Status::kOk) fault.report(chunk, status);
    });
    return {fault.status(), fault.chunk()};
}

// Lists the units of a tensor that differ from its base, chunk by chunk. The tensor has a base,
// even if no chunk needs it, and no chunk of mode zstd.
inline DecodeResult list_changes(const EncodedTensor& tensor, std::size_t threads, Isa isa,
                                 std::vector<ChunkChanges>& changes) {
    changes.resize(tensor.geometry.n_chunks());
    return read_chunks(tensor, threads, isa, [&](ChunkReader& reader, std::size_t chunk) {
        switch (patch_kind(tensor.row(chunk))) {
            case PatchKind::kNothing:
                return check_around(tensor, chunk, true, isa);
            case PatchKind::kChanges:
                return reader.list(chunk, true, changes[chunk]);
            default:
                return reader.compare(chunk, changes[chunk]);
        }
    });
}

// Makes the base of a tensor the tensor. `target` is the memory of the base, which is not cast.
inline DecodeResult patch_tensor(const EncodedTensor& tensor, uint8_t* target, std::size_t threads,
                                 Isa isa) {
    const Geometry& geometry = tensor.geometry;
    const uint32_t unit = geometry.spec.unit_nbytes;
    std::vector<ChunkChanges> changes(geometry.n_chunks());
    const DecodeResult checked =
        read_chunks(tensor, threads, isa, [&](ChunkReader& reader, std::size_t chunk) {
            const uint8_t* ignored;
            switch (patch_kind(tensor.row(chunk))) {
                case PatchKind::kNothing:
                    return check_around(tensor, chunk, true, isa);
                case PatchKind::kChanges:
                    return reader.list(chunk, false, changes[chunk]);
                default:
                    return reader.decode(chunk, true, ignored);
            }
        });
    if (checked.status != Status::kOk) return checked;
    return read_chunks(tensor, threads, isa, [&](ChunkReader& reader, std::size_t chunk) {
        uint8_t* const at = target + chunk * geometry.chunk_nbytes();
        write_changes(changes[chunk], unit, at);
        if (patch_kind(tensor.row(chunk)) != PatchKind::kUnits) return Status::kOk;
        const uint8_t* units;
        const Status status = reader.decode(chunk, false, units);
        if (status == Status::kOk) std::memcpy(at, units, geometry.units_of(chunk) * unit);
        return status;
    });
}

// Checks and decodes a tensor that has a base, even if no chunk needs it, and no chunk of mode
// zstd. The base is not cast and is only read. `leaves` get the hashes of the tensor.
inline DecodeResult prepare_patch(const EncodedTensor& tensor, const ContentLeaves& leaves,
                                  std::size_t threads, Isa isa, std::vector<ChunkChanges>& chunks) {
    chunks.resize(tensor.geometry.n_chunks());
    return read_chunks(tensor, threads, isa, [&](ChunkReader& reader, std::size_t chunk) {
        return reader.prepare(chunk, leaves.from(chunk * tensor.geometry.chunk_nbytes()),
                              chunks[chunk]);
    });
}

}  // namespace packhorse
