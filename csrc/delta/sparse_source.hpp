// Encodes a chunk that may differ from its base in few units. A glance at the source tells whether
// that is worth a try. If too many units differ, the list of those found so far and the base give
// back what was read, so that the source need not be read again.
#pragma once

#include <algorithm>

#include "common/content_sum.hpp"
#include "delta/encode.hpp"
#include "delta/sparse_encode.hpp"

namespace packhorse {

enum class SparseOutcome {
    kEqual,   // all units equal those of the base
    kCoded,   // the stream was written
    kCopied,  // there is no stream, and the units are in `source`
};

// The memory of a chunk's base that is to become the chunk; otherwise null. The chunk begins at
// `first_byte` of the tensor, whose content sum changes as `change` says.
struct KeptBase {
    uint8_t* memory = nullptr;
    uint64_t first_byte = 0;
    SumChange* change = nullptr;
};

// Lists of changes use the memory of differences.
inline SparseScratch place_sparse_scratch(const DeltaScratch& scratch, std::size_t n,
                                          uint32_t unit_nbytes) {
    const std::size_t row = sparse_row_nbytes(n, unit_nbytes);
    uint8_t* const rows = scratch.differences;
    return {reinterpret_cast<uint32_t*>(scratch.keys),
            reinterpret_cast<uint32_t*>(scratch.rows[0]),
            rows,
            rows + row,
            rows + 2 * row,
            rows + 3 * row};
}

// Whether few units of a chunk seem to differ. Any answer is valid, whatever the source holds. Runs
// are short, because whole rows of an embedding may differ, and their places are irregular, because
// the same part of each row may.
template <class Unit>
inline bool seems_sparse(const uint8_t* src, const uint8_t* base, std::size_t n) {
    constexpr std::size_t kRuns = 128, kRun = 16;
    if (n < 2 * kRuns * kRun) return true;
    std::size_t places[kRuns];
    const std::size_t gap = n / kRuns;
    for (std::size_t r = 0; r < kRuns; ++r) {
        const uint64_t mixed = (r + 1) * 0x9E3779B97F4A7C15 >> 40;
        places[r] = (r * gap + (mixed * (gap - kRun) >> 24)) * sizeof(Unit);
        __builtin_prefetch(src + places[r]);
        __builtin_prefetch(base + places[r]);
    }
    std::size_t differ = 0;
    for (const std::size_t at : places)
        for (std::size_t i = at; i < at + kRun * sizeof(Unit); i += sizeof(Unit))
            differ += load<Unit>(src + i) != load<Unit>(base + i) ? 1 : 0;
    // Clearly too many, because a sample may have a few more than the chunk.
    return differ * (kUnitsOfSparseChange - 2) <= kRuns * kRun;
}

// Reads the source, which begins with a leaf, and lists what differs from the base. Returns whether
// all changes had room; if not, `source` receives all units.
template <class Unit>
inline bool list_source(const uint8_t* src, const uint8_t* base, std::size_t n,
                        const ContentLeaves& leaves, ChangeList<Unit>& list, uint8_t* source,
                        Isa isa) {
    bool fits = true;
    visit_source(src, n * sizeof(Unit), leaves, isa,
                 [&](const uint8_t* piece, std::size_t at, std::size_t nbytes) {
                     if (fits) {
                         const std::size_t n_before = list.changes().n;
                         fits = list.add(piece, base + at, at / sizeof(Unit), nbytes / sizeof(Unit),
                                         isa);
                         if (fits) return;
                         SparseChanges<Unit> before = list.changes();
                         before.n = n_before;
                         std::memcpy(source, base, at);
                         apply_changes(before, 0, 0, at / sizeof(Unit), source);
                     }
                     std::memcpy(source + at, piece, nbytes);
                 });
    return fits;
}

// Encodes a chunk of `n` >= 1 units, if it takes less than about `plain_nbytes`. The base does not
// change before all of it is encoded. It becomes the chunk here, if it is kept, only if the outcome
// is kCoded. `dst` has room for the chunk.
template <class Unit, bool kFloat>
inline SparseOutcome encode_sparse_units(const uint8_t* src, const uint8_t* base, std::size_t n,
                                         const ContentLeaves& leaves, std::size_t plain_nbytes,
                                         uint32_t max_classes, DeltaScratch& scratch,
                                         const KeptBase& kept, uint8_t* dst, std::size_t& nbytes,
                                         Isa isa) {
    const SparseScratch memory = place_sparse_scratch(scratch, n, sizeof(Unit));
    ChangeList<Unit> list(memory, max_sparse_changes(n));
    if (!seems_sparse<Unit>(src, base, n)) {
        take_in(src, n * sizeof(Unit), scratch.source, leaves, isa);
        return SparseOutcome::kCopied;
    }
    if (!list_source(src, base, n, leaves, list, scratch.source, isa))
        return SparseOutcome::kCopied;
    const SparseChanges<Unit>& changes = list.changes();
    if (changes.n == 0) return SparseOutcome::kEqual;
    nbytes = SparseChunkEncoder<Unit, kFloat>(changes, base, n, memory, max_classes, isa)
                 .encode(dst, n * sizeof(Unit));
    if (nbytes > 0 && nbytes + nbytes / 64 < plain_nbytes) {
        if (kept.memory != nullptr) {
            *kept.change = content_sum_change(changes.places, changes.units, list.bases(),
                                              changes.n, kept.first_byte, isa);
            apply_changes(changes, 0, 0, n, kept.memory);
        }
        return SparseOutcome::kCoded;
    }
    std::memcpy(scratch.source, base, n * sizeof(Unit));
    apply_changes(changes, 0, 0, n, scratch.source);
    return SparseOutcome::kCopied;
}

inline SparseOutcome encode_sparse(const uint8_t* src, const uint8_t* base, std::size_t n,
                                   uint32_t unit_nbytes, bool is_float, const ContentLeaves& leaves,
                                   std::size_t plain_nbytes, uint32_t max_classes,
                                   DeltaScratch& scratch, const KeptBase& kept, uint8_t* dst,
                                   std::size_t& nbytes, Isa isa) {
    return with_units(unit_nbytes, is_float, [&]<class Unit, bool kFloat>() {
        return encode_sparse_units<Unit, kFloat>(src, base, n, leaves, plain_nbytes, max_classes,
                                                 scratch, kept, dst, nbytes, isa);
    });
}

}  // namespace packhorse
