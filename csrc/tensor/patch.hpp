// What a frame changes in its base: lists of changes, and patching the base in place.
//
// All chunks are checked and decoded before the first one is written, so a frame that breaks a rule
// changes nothing. The changes of chunks of mode sparse delta are kept meanwhile; they take at most
// 12 bytes for each unit that changes. Other chunks are decoded twice, because their units may take
// as much memory as the whole tensor.
#pragma once

#include <algorithm>
#include <vector>

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

// Decodes whole chunks, one worker at a time.
class ChunkReader {
  public:
    ChunkReader(const EncodedTensor& tensor, Isa isa)
        : tensor_(tensor), isa_(isa), worker_(tensor.geometry, true, tensor.base.units != nullptr) {
        worker_.partial.resize(tensor.geometry.largest_units() * unit_nbytes());
    }

    // Decodes a chunk to memory that is valid until the next call.
    Status decode(std::size_t chunk, bool check_crc, const uint8_t*& units) {
        units = worker_.partial.data();
        DecodeScratch scratch{worker_.planes.get(), worker_.whole.get(), nullptr};
        return decode_checked(tensor_, chunk, check_crc, false, scratch, worker_,
                              worker_.partial.data(), isa_);
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
                tensor_.geometry.units_of(chunk), worker_.changes, changes, isa_);
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
        if (status != Status::kOk) return status;
        const std::size_t n = tensor_.geometry.units_of(chunk);
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
        return status;
    }

  private:
    uint32_t unit_nbytes() const { return tensor_.geometry.spec.unit_nbytes; }

    const uint8_t* base_of(std::size_t chunk) const {
        const std::size_t n = tensor_.geometry.units_of(chunk);
        return chunk_base(tensor_.base, chunk * tensor_.geometry.chunk_units, n, unit_nbytes(),
                          worker_.cast_memory(n, unit_nbytes()), isa_);
    }

    const EncodedTensor& tensor_;
    Isa isa_;
    DecodeWorker worker_;
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
        const ChunkChanges& of_chunk = changes[chunk];
        with_units(unit, false, [&]<class Unit, bool kFloat>() {
            for (std::size_t i = 0; i < of_chunk.places.size(); ++i)
                store(at + of_chunk.places[i] * sizeof(Unit),
                      load<Unit>(of_chunk.units.data() + i * sizeof(Unit)));
        });
        if (patch_kind(tensor.row(chunk)) != PatchKind::kUnits) return Status::kOk;
        const uint8_t* units;
        const Status status = reader.decode(chunk, false, units);
        if (status == Status::kOk) std::memcpy(at, units, geometry.units_of(chunk) * unit);
        return status;
    });
}

}  // namespace packhorse
