// Decoding a few differences from a base (docs/format.md, 6.7). First all numbers of the stream are
// read. Then the units of each class are counted off along the base, which gives the places of the
// changes. Nothing is written to the tensor before that, so a stream that breaks a rule changes
// nothing.
#pragma once

#include <algorithm>
#include <array>

#include "chunk/intake.hpp"
#include "common/copy.hpp"
#include "common/scratch.hpp"
#include "delta/order.hpp"
#include "delta/sparse.hpp"

namespace packhorse {

// Reads the numbers of a stream, from bit 0 of the first byte on. Bits behind the end are zero.
class SparseReader {
  public:
    SparseReader(const uint8_t* src, std::size_t nbytes)
        : src_(src), nbytes_(nbytes), n_bits_(8 * nbytes) {}

    // Whether more bits were taken than there are.
    bool is_short() const { return at_ > n_bits_; }

    // Takes a number that has at most kSparseCountBits bits.
    PACKHORSE_INLINE uint32_t take_count(uint32_t shift) {
        const uint64_t bits = window();
        const auto zeros = static_cast<uint32_t>(std::countr_zero(bits | 1u << kMaxSparseZeros));
        if (zeros == kMaxSparseZeros) [[unlikely]] {
            at_ += kMaxSparseZeros + kSparseCountBits;
            return static_cast<uint32_t>(bits >> kMaxSparseZeros) & ((1u << kSparseCountBits) - 1);
        }
        at_ += zeros + 1 + shift;
        const auto low = static_cast<uint32_t>(bits >> (zeros + 1)) & ((1u << shift) - 1);
        return zeros << shift | low;
    }

    // Takes a number of up to 64 bits, which has `unit_bits` bits if it is written in full.
    PACKHORSE_INLINE uint64_t take_size(uint32_t shift, uint32_t unit_bits) {
        const auto zeros =
            static_cast<uint32_t>(std::countr_zero(window() | 1u << kMaxSparseZeros));
        if (zeros == kMaxSparseZeros) [[unlikely]] {
            at_ += kMaxSparseZeros;
            return take(unit_bits);
        }
        at_ += zeros + 1;
        return uint64_t{zeros} << shift | take(shift);
    }

    // Checks that the last byte was reached but not passed, and that its unused bits are zero.
    Status finish() const {
        if (is_short() || n_bits_ - at_ >= 8) return Status::kStreamLength;
        if (at_ % 8 != 0 && src_[at_ / 8] >> (at_ % 8) != 0) return Status::kReserved;
        return Status::kOk;
    }

  private:
    static constexpr uint32_t kWindowBits = 57;

    uint64_t take(uint32_t n) {
        if (n > kWindowBits) {
            const uint64_t low = take(32);
            return low | take(n - 32) << 32;
        }
        const uint64_t bits = window() & ((uint64_t{1} << n) - 1);
        at_ += n;
        return bits;
    }

    // Returns at least the next kWindowBits bits.
    PACKHORSE_INLINE uint64_t window() const {
        const std::size_t byte = at_ / 8;
        if (byte + 8 <= nbytes_) [[likely]]
            return load<uint64_t>(src_ + byte) >> (at_ % 8);
        uint64_t bits = 0;
        if (byte < nbytes_) std::memcpy(&bits, src_ + byte, nbytes_ - byte);
        return bits >> (at_ % 8);
    }

    const uint8_t* src_;
    std::size_t nbytes_;
    std::size_t n_bits_;
    std::size_t at_ = 0;
};

// The numbers of a stream, class after class. ranks[i] is how many units of its class come before a
// changed unit. Behind the ranks of each class there is one that no unit has.
template <class Unit>
struct SparseNumbers {
    uint32_t* ranks;
    Unit* steps;
    std::size_t starts[kMaxSparseClasses];
};

// Above the number of units of any chunk, twice.
constexpr uint32_t kNoRank = 1u << 30;
static_assert(kNoRank / 2 > kMaxChunkNbytes);

// Reads the ranks and the signs of a class. The steps become 1 or -1.
template <class Unit>
inline Status read_sparse_ranks(const SparseClass& fields, std::size_t n_units,
                                SparseReader& reader, uint32_t* __restrict ranks,
                                Unit* __restrict steps) {
    std::size_t next = 0;
    for (uint32_t i = 0; i < fields.n_changes; ++i) {
        const uint32_t gap_and_sign = reader.take_count(fields.gap_shift + 1);
        next += gap_and_sign >> 1;
        if (next >= n_units || reader.is_short()) [[unlikely]]
            return reader.is_short() ? Status::kStreamLength : Status::kBadField;
        ranks[i] = static_cast<uint32_t>(next++);
        steps[i] = static_cast<Unit>(1 - 2 * static_cast<int>(gap_and_sign & 1));
    }
    ranks[fields.n_changes] = kNoRank;
    return Status::kOk;
}

// Makes a step longer: from 1 to `more` + 1.
template <class Unit>
PACKHORSE_INLINE Status lengthen_step(uint64_t more, Unit& step) {
    if (more >= static_cast<Unit>(~Unit{0})) return Status::kBadField;
    const auto size = static_cast<Unit>(more + 1);
    step = step == 1 ? size : static_cast<Unit>(0 - Wide<Unit>{size});
    return Status::kOk;
}

// Reads the sizes of the steps of a class.
template <class Unit>
inline Status read_sparse_sizes(const SparseClass& fields, SparseReader& reader, Unit* steps) {
    if (fields.run_shift == kSparseNoSizes) return Status::kOk;
    const bool has_runs = fields.run_shift != kSparseEverySize;
    for (uint32_t i = 0; i < fields.n_changes; ++i) {
        if (has_runs) {
            const uint32_t run = reader.take_count(fields.run_shift);
            if (run > fields.n_changes - i) return Status::kBadField;
            i += run;
            if (i == fields.n_changes) break;
        }
        const uint64_t more = reader.take_size(fields.size_shift, kUnitBits<Unit>);
        if (reader.is_short()) return Status::kStreamLength;
        if (has_runs && more == ~uint64_t{0}) return Status::kBadField;
        const Status status = lengthen_step(more + (has_runs ? 1 : 0), steps[i]);
        if (status != Status::kOk) return status;
    }
    return reader.is_short() ? Status::kStreamLength : Status::kOk;
}

template <class Unit>
inline Status read_sparse_numbers(const SparseHeader<Unit>& header, std::size_t n_units,
                                  SparseReader& reader, SparseNumbers<Unit>& numbers) {
    std::size_t at = 0;
    for (uint32_t c = 0; c < header.n_classes; ++c) {
        numbers.starts[c] = at;
        Status status = read_sparse_ranks(header.classes[c], n_units, reader, numbers.ranks + at,
                                          numbers.steps + at);
        if (status == Status::kOk)
            status = read_sparse_sizes(header.classes[c], reader, numbers.steps + at);
        if (status != Status::kOk) return status;
        at += header.classes[c].n_changes + 1;
    }
    std::fill(numbers.starts + header.n_classes, std::end(numbers.starts), at - 1);
    return reader.finish();
}

template <class Unit, bool kFloat>
PACKHORSE_INLINE Unit stepped(const uint8_t* base, Unit step) {
    return from_ordered<Unit, kFloat>(
        static_cast<Unit>(to_ordered<Unit, kFloat>(load<Unit>(base)) + step));
}

// The changes that have been found so far.
template <class Unit, uint32_t kCuts>
struct SparseSearch {
    const uint32_t* next[kCuts + 1];  // ranks that were not found yet
    uint32_t* places;
    Unit* units;

    explicit SparseSearch(const SparseNumbers<Unit>& numbers, const SparseChanges<Unit>& changes)
        : places(changes.places), units(changes.units) {
        for (uint32_t c = 0; c <= kCuts; ++c) next[c] = numbers.ranks + numbers.starts[c];
    }
};

// Finds the changes of a block, whose units of each class are `sets`. left[c] is how many units of
// class c come before its next change, counted from the end of the block, so it is negative if the
// change is in the block.
template <class Unit, bool kFloat, uint32_t kCuts, bool kWide>
PACKHORSE_INLINE void place_in_block(const uint8_t* base, std::size_t first, const uint64_t* sets,
                                     const SparseNumbers<Unit>& numbers,
                                     SparseSearch<Unit, kCuts>& search, int32_t* left) {
    uint32_t hits = 0;
    for (uint32_t c = 0; c <= kCuts; ++c) hits |= (left[c] < 0 ? 1u : 0u) << c;
    while (hits != 0) {  // once for each change: only the end of this loop is hard to predict
        const auto c = static_cast<uint32_t>(std::countr_zero(hits));
        const uint32_t* const rank = search.next[c]++;
        const auto in_block = static_cast<uint32_t>(left[c] + std::popcount(sets[c]));
        const std::size_t at = first + place_of_rank<kWide>(sets[c], in_block);
        *search.places++ = static_cast<uint32_t>(at);
        *search.units++ =
            stepped<Unit, kFloat>(base + at * sizeof(Unit), numbers.steps[rank - numbers.ranks]);
        left[c] += static_cast<int32_t>(rank[1] - rank[0]);
        hits &= ~((left[c] < 0 ? 0u : 1u) << c);
    }
}

// Looks for changes block by block. `left` is a part of it, so that it stays in registers.
template <class Unit, bool kFloat, uint32_t kCuts, bool kWide>
struct SparseVisitor {
    const uint8_t* base;
    const SparseNumbers<Unit>& numbers;
    SparseSearch<Unit, kCuts>& search;
    std::array<int32_t, kCuts + 1> left;

    PACKHORSE_INLINE void operator()(const SetBlock& block) {
        uint64_t sets[kCuts + 1];
        int32_t any = 0;
#pragma GCC unroll 8
        for (uint32_t c = 0; c <= kCuts; ++c) {
            sets[c] = block.of_class<kCuts>(c);
            left[c] -= std::popcount(sets[c]);
            keep_in_register(left[c]);
            any |= left[c];
        }
        if (any >= 0) return;
        auto here = left;  // a copy, for the same reason
        place_in_block<Unit, kFloat, kCuts, kWide>(base, block.first, sets, numbers, search,
                                                   here.data());
        left = here;
    }
};

// Finds the changes of each block of a chunk. The changes ascend from one block to the next, but
// not inside a block. Returns whether there are enough units of each class.
template <class Unit, bool kFloat, uint32_t kCuts, bool kWide>
inline bool place_sparse(const uint8_t* base, std::size_t n, const SparseHeader<Unit>& header,
                         const SparseNumbers<Unit>& numbers, SparseChanges<Unit>& changes,
                         Isa isa) {
    SparseSearch<Unit, kCuts> search(numbers, changes);
    SparseVisitor<Unit, kFloat, kCuts, kWide> visitor{base, numbers, search, {}};
    for (uint32_t c = 0; c <= kCuts; ++c) visitor.left[c] = static_cast<int32_t>(*search.next[c]);
    visit_sets<Unit, kFloat, kCuts, kWide>(base, n, header.cuts, isa, visitor);
    changes.n = static_cast<std::size_t>(search.places - changes.places);
    return changes.n == header.n_changes();
}

// Does the same for a single class, whose ranks are places.
template <class Unit, bool kFloat>
inline void place_one_class(const uint8_t* base, const SparseHeader<Unit>& header,
                            const SparseNumbers<Unit>& numbers, SparseChanges<Unit>& changes) {
    changes.n = header.n_changes();
    for (std::size_t i = 0; i < changes.n; ++i) {
        changes.places[i] = numbers.ranks[i];
        changes.units[i] =
            stepped<Unit, kFloat>(base + numbers.ranks[i] * sizeof(Unit), numbers.steps[i]);
    }
}

// Memory for the numbers and changes of a chunk, which grows as needed.
class SparseMemory {
  public:
    template <class Unit>
    void take(std::size_t n_changes, SparseNumbers<Unit>& numbers, SparseChanges<Unit>& changes) {
        const std::size_t n = n_changes + kMaxSparseClasses;
        const std::size_t row = round_up(4 * n, 64), units = round_up(n * sizeof(Unit), 64);
        if (2 * (row + units) > nbytes_) {
            nbytes_ = 2 * (row + units);
            memory_ = Scratch(nbytes_);
        }
        uint8_t* const at = memory_.get();
        numbers.ranks = reinterpret_cast<uint32_t*>(at);
        numbers.steps = reinterpret_cast<Unit*>(at + row);
        changes.places = reinterpret_cast<uint32_t*>(at + row + units);
        changes.units = reinterpret_cast<Unit*>(at + 2 * row + units);
    }

  private:
    Scratch memory_;
    std::size_t nbytes_ = 0;
};

// Decodes the stream of a chunk of `n` >= 1 units to its changes, which stay valid until the memory
// is used again. `base` has the chunk's base units.
template <class Unit, bool kFloat>
inline Status decode_changes(const uint8_t* stream, std::size_t nbytes, const uint8_t* base,
                             std::size_t n, SparseMemory& memory, SparseChanges<Unit>& changes,
                             Isa isa) {
    SparseHeader<Unit> header;
    Status status = read_sparse_header(stream, nbytes, n, header);
    if (status != Status::kOk) return status;
    SparseNumbers<Unit> numbers;
    memory.take(header.n_changes(), numbers, changes);
    SparseReader reader(stream + header.nbytes(), nbytes - header.nbytes());
    status = read_sparse_numbers(header, n, reader, numbers);
    if (status != Status::kOk) return status;
    if (header.n_classes == 1) {
        place_one_class<Unit, kFloat>(base, header, numbers, changes);
        return Status::kOk;
    }
    const bool fits = with_cuts(header, [&]<uint32_t kCuts>() {
        return isa >= Isa::kAvx512
                   ? place_sparse<Unit, kFloat, kCuts, true>(base, n, header, numbers, changes, isa)
                   : place_sparse<Unit, kFloat, kCuts, false>(base, n, header, numbers, changes,
                                                              isa);
    });
    return fits ? Status::kOk : Status::kBadField;
}

// Puts changes in ascending order. They are in order already, except inside of blocks.
template <class Unit>
inline void sort_changes(const SparseChanges<Unit>& changes) {
    for (std::size_t i = 1; i < changes.n; ++i) {
        const uint32_t place = changes.places[i];
        const Unit unit = changes.units[i];
        std::size_t to = i;
        for (; to > 0 && changes.places[to - 1] > place; --to) {
            changes.places[to] = changes.places[to - 1];
            changes.units[to] = changes.units[to - 1];
        }
        changes.places[to] = place;
        changes.units[to] = unit;
    }
}

// Writes the units of a chunk: those of its base, with the changes.
template <class Unit>
inline void write_changed(const uint8_t* base, std::size_t n, const SparseChanges<Unit>& changes,
                          bool past_cache, uint8_t* dst, Isa isa) {
    if (dst == base) {
        apply_changes(changes, 0, 0, n, dst);
        return;
    }
    std::size_t done = 0, next = 0;  // units, changes
#if PACKHORSE_X86
    constexpr std::size_t kPieceUnits = kIntakeNbytes / sizeof(Unit);
    if (past_cache && isa >= Isa::kAvx2 && n > 2 * kPieceUnits) {
        // A piece is written from the line on that the piece before it left unfinished.
        const std::size_t back = reinterpret_cast<uintptr_t>(dst) % 64;
        alignas(64) uint8_t memory[64 + kIntakeNbytes];
        uint8_t* const piece = memory + 64;
        for (; n - done >= kPieceUnits; done += kPieceUnits) {
            uint8_t* const to = dst + done * sizeof(Unit);
            std::memcpy(memory, memory + kIntakeNbytes, 64);
            std::memcpy(piece, base + done * sizeof(Unit), kIntakeNbytes);
            next = apply_changes(changes, next, done, done + kPieceUnits, piece);
            if (done == 0) {
                std::memcpy(to, piece, kIntakeNbytes);
                continue;
            }
            for (std::size_t at = 0; at < kIntakeNbytes; at += kXxh3BlockNbytes)
                copy_block<true>(piece - back + at, to - back + at, isa);
        }
        std::memcpy(dst + done * sizeof(Unit) - back, piece + kIntakeNbytes - back, back);
        _mm_sfence();  // so that other threads see the output
    }
#endif
    (void)past_cache;
    (void)isa;
    std::memcpy(dst + done * sizeof(Unit), base + done * sizeof(Unit), (n - done) * sizeof(Unit));
    apply_changes(changes, next, done, n, dst + done * sizeof(Unit));
}

// Decodes a chunk to `dst`, as decode_delta() does.
inline Status decode_sparse(const uint8_t* stream, std::size_t nbytes, std::size_t n,
                            uint32_t unit_nbytes, bool is_float, const uint8_t* base,
                            SparseMemory& memory, bool past_cache, uint8_t* dst, Isa isa) {
    return with_units(unit_nbytes, is_float, [&]<class Unit, bool kFloat>() {
        SparseChanges<Unit> changes;
        const Status status =
            decode_changes<Unit, kFloat>(stream, nbytes, base, n, memory, changes, isa);
        if (status == Status::kOk) write_changed(base, n, changes, past_cache, dst, isa);
        return status;
    });
}

}  // namespace packhorse
