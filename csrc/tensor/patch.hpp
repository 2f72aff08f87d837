// What a frame changes in its base: lists of changes, patching the base in place, and patches that
// are made at one time and written at another.
//
// All chunks are checked and decoded before the first one is written, so a frame that breaks a rule
// changes nothing. The changes of chunks of mode sparse delta are kept meanwhile; they take at most
// 12 bytes for each unit that changes. To patch in place, other chunks are decoded twice, because
// their units may take as much memory as the whole tensor. A patch keeps them as they will be.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "common/tensor_memory.hpp"
#include "tensor/tensor.hpp"

namespace packhorse {

// The changes of a chunk: places of units in the chunk, and the new units.
struct ChunkChanges {
    std::vector<uint32_t> places;
    std::vector<uint8_t> units;

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

// How a chunk is patched.
enum class PatchKind { kNothing, kChanges, kUnits };

inline PatchKind patch_kind(const uint32_t* row) {
    if (descriptor_mode(row[1]) == Mode::kSparseDelta) return PatchKind::kChanges;
    return row[1] == make_descriptor(Mode::kDelta, 0) ? PatchKind::kNothing : PatchKind::kUnits;
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
        return decode_to(chunk, check_crc, memory.partial.data());
    }

    Status decode_to(std::size_t chunk, bool check_crc, uint8_t* units) {
        DecodeWorker& memory = worker();
        DecodeScratch scratch{memory.planes.get(), memory.whole.get(), nullptr};
        return decode_checked(tensor_, chunk, check_crc, scratch, memory, units, isa_);
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
        if (status == Status::kOk) compare_units(chunk, units, out);
        return status;
    }

    // Finds what a patch writes to a chunk of the base, which is not cast, and how it changes the
    // content sum of the base. A chunk of which many units change is decoded to its place in
    // `whole`, which has room for the tensor.
    Status prepare(std::size_t chunk, uint8_t* whole, ChunkChanges& out, SumChange& change) {
        Status status = Status::kOk;
        switch (patch_kind(tensor_.row(chunk))) {
            case PatchKind::kNothing:
                return check_around(tensor_, chunk, true, isa_);
            case PatchKind::kChanges:
                status = list(chunk, false, out);
                if (status == Status::kOk) change = change_by(chunk, out);
                return status;
            default:
                whole += first_byte(chunk);
                status = decode_to(chunk, true, whole);
                if (status == Status::kOk)
                    change = content_sum_change(whole, base_of(chunk),
                                                chunk_units(chunk) * unit_nbytes(),
                                                first_byte(chunk), isa_);
                return status;
        }
    }

  private:
    uint32_t unit_nbytes() const { return tensor_.geometry.spec.unit_nbytes; }
    std::size_t chunk_units(std::size_t chunk) const { return tensor_.geometry.units_of(chunk); }

    // Lists the units that differ from those of the base.
    void compare_units(std::size_t chunk, const uint8_t* units, ChunkChanges& out) {
        const std::size_t n = chunk_units(chunk);
        const std::size_t row = round_up((n + kSetUnits) * unit_nbytes(), 64);
        const Scratch memory(round_up(4 * (n + kSetUnits), 64) + 2 * row);
        SparseScratch rows{};
        rows.places = reinterpret_cast<uint32_t*>(memory.get());
        rows.units = memory.get() + round_up(4 * (n + kSetUnits), 64);
        rows.bases = rows.units + row;
        with_units(unit_nbytes(), tensor_.base.is_float, [&]<class Unit, bool kFloat>() {
            ChangeList<Unit> list(rows, n);
            list.add(units, base_of(chunk), 0, n, isa_);
            out.take(list.changes());
        });
    }

    // How listed changes change the content sum of the base. What they replace is gathered piece by
    // piece.
    SumChange change_by(std::size_t chunk, const ChunkChanges& changes) {
        const uint8_t* const base = base_of(chunk);
        return with_units(unit_nbytes(), false, [&]<class Unit, bool kFloat>() {
            constexpr std::size_t kPiece = 1024;
            SumChange change;
            Unit units[kPiece], before[kPiece];
            for (std::size_t at = 0; at < changes.places.size(); at += kPiece) {
                const std::size_t n = std::min(kPiece, changes.places.size() - at);
                const uint32_t* const places = changes.places.data() + at;
                std::memcpy(units, changes.units.data() + at * sizeof(Unit), n * sizeof(Unit));
                for (std::size_t i = 0; i < n; ++i)
                    before[i] = load<Unit>(base + places[i] * sizeof(Unit));
                change.add(content_sum_change(places, units, before, n, first_byte(chunk), isa_));
            }
            return change;
        });
    }

    uint64_t first_byte(std::size_t chunk) const {
        return uint64_t{chunk} * tensor_.geometry.chunk_nbytes();
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
    std::vector<PatchKind> kinds;
    TensorMemory whole = {};  // the tensor, with those chunks that are written as a whole

    // Bytes of memory that the changes take.
    std::size_t nbytes() const {
        std::size_t sum = 0;
        for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk)
            sum += kinds[chunk] == PatchKind::kUnits
                       ? chunk_nbytes(chunk)
                       : chunks[chunk].units.size() + chunks[chunk].places.size() * 4;
        return sum;
    }

    // Makes the base, which is at `target`, the tensor.
    void write(uint8_t* target, std::size_t threads) const {
        const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, chunks.size()));
        parallel_for(chunks.size(), n_workers, [&](std::size_t, std::size_t chunk) {
            const std::size_t at = chunk * geometry.chunk_nbytes();
            if (kinds[chunk] == PatchKind::kUnits)
                std::memcpy(target + at, whole.get() + at, chunk_nbytes(chunk));
            else
                write_changes(chunks[chunk], geometry.spec.unit_nbytes, target + at);
        });
    }

  private:
    std::size_t chunk_nbytes(std::size_t chunk) const {
        return geometry.units_of(chunk) * geometry.spec.unit_nbytes;
    }
};

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
// zstd. The base is not cast and is only read. `change` says how the content sum changes.
inline DecodeResult prepare_patch(const EncodedTensor& tensor, std::size_t threads, Isa isa,
                                  TensorPatch& patch, SumChange& change) {
    const std::size_t n_chunks = tensor.geometry.n_chunks();
    patch.chunks.resize(n_chunks);
    for (std::size_t chunk = 0; chunk < n_chunks; ++chunk)
        patch.kinds.push_back(patch_kind(tensor.row(chunk)));
    if (std::find(patch.kinds.begin(), patch.kinds.end(), PatchKind::kUnits) != patch.kinds.end())
        patch.whole = TensorMemory(tensor.geometry.nbytes());
    std::vector<SumChange> changes(n_chunks);
    const DecodeResult result =
        read_chunks(tensor, threads, isa, [&](ChunkReader& reader, std::size_t chunk) {
            return reader.prepare(chunk, patch.whole.get(), patch.chunks[chunk], changes[chunk]);
        });
    for (const SumChange& part : changes) change.add(part);
    return result;
}

}  // namespace packhorse
