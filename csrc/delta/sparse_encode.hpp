// Encoding a few differences from a base (docs/format.md, 6.7). One pass over the source copies it
// piece by piece, hashes the copy, and lists the units that differ from the base. The list gives
// the classes. A pass over the base, which is in the cache by then, finds the rank of each change
// in its class.
#pragma once

#include <algorithm>

#include "chunk/choose.hpp"
#include "chunk/intake.hpp"
#include "delta/sparse.hpp"
#include "delta/sparse_choose.hpp"

namespace packhorse {

// One worker's memory, with room for max_sparse_changes(), and for kSetUnits more.
struct SparseScratch {
    uint32_t* places;
    uint32_t* gaps;  // with signs, class after class
    // Rows of units:
    uint8_t* units;
    uint8_t* bases;
    uint8_t* steps;
    uint8_t* sizes;  // less one, class after class
};

// Lists the units of a piece that differ from the base. The piece begins at unit `first` of its
// chunk.
template <class Unit>
class ChangeList {
  public:
    ChangeList(const SparseScratch& scratch, std::size_t capacity)
        : changes_{scratch.places, reinterpret_cast<Unit*>(scratch.units)},
          bases_(reinterpret_cast<Unit*>(scratch.bases)),
          capacity_(capacity) {}

    const SparseChanges<Unit>& changes() const { return changes_; }
    const Unit* bases() const { return bases_; }  // the units of the base at these places

    // Returns false, and stops, if there are more changes than there is room for.
    bool add(const uint8_t* piece, const uint8_t* base, std::size_t first, std::size_t n, Isa isa) {
        const std::size_t whole = n / kSetUnits * kSetUnits;
        bool fits = true;
#if PACKHORSE_X86
        if (isa >= Isa::kAvx512)
            fits = add_avx512(piece, base, first, whole);
        else
#endif
            fits = add_plain(piece, base, first, whole, isa);
        if (!fits) return false;
        for (std::size_t i = whole; i < n; ++i)
            if (std::memcmp(piece + i * sizeof(Unit), base + i * sizeof(Unit), sizeof(Unit)) != 0)
                add_set(1, piece + i * sizeof(Unit), base + i * sizeof(Unit), first + i);
        return changes_.n <= capacity_;
    }

  private:
#if PACKHORSE_X86
    PACKHORSE_AVX512 bool add_avx512(const uint8_t* piece, const uint8_t* base, std::size_t first,
                                     std::size_t n) {
        for (std::size_t i = 0; i < n; i += kSetUnits) {
            fetch_units_ahead<Unit>(base + i * sizeof(Unit));
            const uint64_t set =
                differing_avx512<Unit>(piece + i * sizeof(Unit), base + i * sizeof(Unit));
            if (set != 0)
                add_set(set, piece + i * sizeof(Unit), base + i * sizeof(Unit), first + i);
            if (changes_.n > capacity_) return false;
        }
        return true;
    }
#endif

    bool add_plain(const uint8_t* piece, const uint8_t* base, std::size_t first, std::size_t n,
                   Isa isa) {
        for (std::size_t i = 0; i < n; i += kSetUnits) {
            const std::size_t at = i * sizeof(Unit);
            fetch_units_ahead<Unit>(base + at);
            if (std::memcmp(piece + at, base + at, kSetUnits * sizeof(Unit)) == 0) continue;
            add_set(differing_plain<Unit>(piece + at, base + at, isa), piece + at, base + at,
                    first + i);
            if (changes_.n > capacity_) return false;
        }
        return true;
    }

    PACKHORSE_INLINE void add_set(uint64_t set, const uint8_t* units, const uint8_t* bases,
                                  std::size_t first) {
        uint32_t* places = changes_.places + changes_.n;
        Unit* to = changes_.units + changes_.n;
        Unit* bases_to = bases_ + changes_.n;
        changes_.n += static_cast<std::size_t>(std::popcount(set));
        const auto take_next = [&] {
            const std::size_t place = static_cast<std::size_t>(std::countr_zero(set)) % kSetUnits;
            *places++ = static_cast<uint32_t>(first + place);
            *to++ = load<Unit>(units + place * sizeof(Unit));
            *bases_to++ = load<Unit>(bases + place * sizeof(Unit));
            set &= set - 1;
        };
        // Two changes are written even if there is but one, because no processor could predict it.
        take_next();
        take_next();
        while (set != 0) take_next();
    }

    SparseChanges<Unit> changes_;
    Unit* bases_;
    std::size_t capacity_;
};

// Writes numbers from bit 0 of the first byte on, as SparseReader reads them.
class SparseWriter {
  public:
    // May write to 8 bytes at the end of a number, and not beyond `end`.
    SparseWriter(uint8_t* dst, uint8_t* end) : at_(dst), end_(end) {}

    PACKHORSE_INLINE void put_count(uint32_t x, uint32_t shift) {
        const uint32_t zeros = x >> shift;
        if (zeros >= kMaxSparseZeros) [[unlikely]]
            return put(uint64_t{x} << kMaxSparseZeros, kMaxSparseZeros + kSparseCountBits);
        const uint64_t low = x & ((1u << shift) - 1);
        put((low << 1 | 1) << zeros, zeros + 1 + shift);
    }

    PACKHORSE_INLINE void put_size(uint64_t x, uint32_t shift, uint32_t unit_bits) {
        const uint64_t zeros = x >> shift;
        if (zeros >= kMaxSparseZeros) {
            put(0, kMaxSparseZeros);
            put(x & 0xFFFFFFFF, std::min(unit_bits, 32u));
            if (unit_bits > 32) put(x >> 32, unit_bits - 32);
            return;
        }
        put(uint64_t{1} << zeros, static_cast<uint32_t>(zeros + 1));
        if (shift > 32) {
            put(x & 0xFFFFFFFF, 32);
            put(x >> 32 & ((uint64_t{1} << (shift - 32)) - 1), shift - 32);
        } else {
            put(x & ((uint64_t{1} << shift) - 1), shift);
        }
    }

    // Whether all numbers had room.
    bool fits() const { return fits_; }

    // Returns the end of the last byte.
    uint8_t* finish() const { return at_ + (n_pending_ + 7) / 8; }

  private:
    // `n` is at most 56.
    PACKHORSE_INLINE void put(uint64_t bits, uint32_t n) {
        pending_ |= bits << n_pending_;
        n_pending_ += n;
        if (end_ - at_ < 8) [[unlikely]] {
            fits_ = false;
            pending_ = 0;
            n_pending_ = 0;
            return;
        }
        store(at_, pending_);
        at_ += n_pending_ / 8;
        pending_ >>= n_pending_ / 8 * 8;
        n_pending_ %= 8;
    }

    uint8_t* at_;
    uint8_t* end_;
    uint64_t pending_ = 0;
    uint32_t n_pending_ = 0;  // below 8 between calls
    bool fits_ = true;
};

// The most classes that a chunk is cut into. Each takes time, and after the fourth saves little.
constexpr uint32_t sparse_classes(Level level) {
    return level == Level::kMax ? kMaxSparseClasses : 4;
}

// The changes of a chunk, being encoded.
template <class Unit, bool kFloat>
class SparseChunkEncoder {
  public:
    SparseChunkEncoder(const SparseChanges<Unit>& changes, const uint8_t* base, std::size_t n,
                       const SparseScratch& scratch, uint32_t max_classes, Isa isa)
        : changes_(changes),
          bases_(reinterpret_cast<const Unit*>(scratch.bases)),
          base_(base),
          n_(n),
          gaps_(scratch.gaps),
          steps_(reinterpret_cast<Unit*>(scratch.steps)),
          sizes_(reinterpret_cast<Unit*>(scratch.sizes)),
          max_classes_(max_classes),
          isa_(isa) {}

    // Writes the stream, of at most `capacity` bytes. Returns 0 if it would be longer.
    std::size_t encode(uint8_t* dst, std::size_t capacity) {
        find_steps();
        choose_cuts();
        place_classes();
        if (header_.n_classes == 1)
            list_one_class();
        else
            with_cuts(header_, [&]<uint32_t kCuts>() {
                isa_ >= Isa::kAvx512 ? list_numbers<kCuts, true>() : list_numbers<kCuts, false>();
            });
        for (uint32_t c = 0; c < header_.n_classes; ++c) choose_shifts(c);
        if (capacity < header_.nbytes() + 8) return 0;
        SparseWriter writer(write_sparse_header(header_, dst), dst + capacity);
        for (uint32_t c = 0; c < header_.n_classes && writer.fits(); ++c)
            writer = write_class(c, writer);
        return writer.fits() ? static_cast<std::size_t>(writer.finish() - dst) : 0;
    }

  private:
    using Keys = SparseKeys<Unit, kFloat>;

    // Computes each step as a sign, and above it the size less one.
    void find_steps() {
        const std::size_t n = changes_.n;
        const Unit* const units = changes_.units;
        const Unit* const bases = bases_;
        Unit* const to = steps_;
        vectorised(isa_, [=]() PACKHORSE_VECTORISED {
            Unit* __restrict out = to;
            for (std::size_t i = 0; i < n; ++i) {
                const auto step = static_cast<Unit>(to_ordered<Unit, kFloat>(units[i]) -
                                                    to_ordered<Unit, kFloat>(bases[i]));
                const Unit sign = spread_sign(step);
                const auto size = static_cast<Unit>((step ^ sign) - sign - 1u);
                out[i] = static_cast<Unit>(Wide<Unit>{size} << 1 | (sign & 1u));
            }
        });
    }

    void choose_cuts() {
        if (max_classes_ == 1) return;
        SparseCounts counts[kSparseKeys];
        const std::size_t run = std::min(n_, kSparseSampleRun);
        const std::size_t n_runs =
            std::max<std::size_t>(1, std::min(n_, kSparseSampleUnits) / kSparseSampleRun);
        const std::size_t weight = std::max<std::size_t>(1, kSparseSampleUnits / (run * n_runs));
        for (std::size_t r = 0; r < n_runs; ++r) {
            const uint8_t* const units = base_ + r * (n_ / n_runs) * sizeof(Unit);
            for (std::size_t i = 0; i < run; ++i)
                counts[key_of_base(load<Unit>(units + i * sizeof(Unit)))].base += weight;
        }
        const std::size_t step = changes_.n / kSparseSampleChanges + 1;
        for (std::size_t i = 0; i < changes_.n; i += step) {
            SparseCounts& of_key = counts[key_of_base(bases_[i])];
            of_key.changes += step;
            of_key.ones += steps_[i] >> 1 == 0 ? step : 0;
        }
        choose_sparse_cuts<Unit, kFloat>(counts, n_, max_classes_, header_);
    }

    static uint32_t key_of_base(Unit unit) { return Keys::key(size_of_base<Unit, kFloat>(unit)); }

    // Counts the changes of each class, and gives each its place in the lists.
    void place_classes() {
        std::size_t above[kMaxSparseClasses + 1] = {};
        above[0] = changes_.n;
        const std::size_t n = changes_.n;
        const Unit* const bases = bases_;
        for (uint32_t t = 0; t + 1 < header_.n_classes; ++t) {
            const Unit cut = header_.cuts[t];
            std::size_t* const count = above + t + 1;
            vectorised(isa_, [=]() PACKHORSE_VECTORISED {
                std::size_t sum = 0;
                for (std::size_t i = 0; i < n; ++i)
                    sum += size_of_base<Unit, kFloat>(bases[i]) >= cut ? 1 : 0;
                *count = sum;
            });
        }
        std::size_t at = 0;
        for (uint32_t c = 0; c < kMaxSparseClasses; ++c) {
            header_.classes[c].n_changes = static_cast<uint32_t>(above[c] - above[c + 1]);
            starts_[c] = at;
            at += header_.classes[c].n_changes;
        }
    }

    PACKHORSE_INLINE void add(uint32_t gap, Unit step, std::size_t to) {
        gaps_[to] = gap << 1 | (step & 1u);
        sizes_[to] = static_cast<Unit>(step >> 1);
    }

    void list_one_class() {
        uint32_t next = 0;
        for (std::size_t i = 0; i < changes_.n; ++i) {
            add(changes_.places[i] - next, steps_[i], i);
            next = changes_.places[i] + 1;
        }
    }

    // Lists gaps and sizes, class by class.
    template <uint32_t kCuts, bool kWide>
    void list_numbers() {
        std::size_t to[kCuts + 1];
        uint32_t before[kCuts + 1] = {};  // units of a class in the blocks before
        uint32_t next[kCuts + 1] = {};    // the rank behind the last change
        std::copy(starts_, starts_ + kCuts + 1, to);
        std::size_t i = 0;
        std::size_t place = changes_.places[0];
        visit_sets<Unit, kFloat, kCuts, kWide>(
            base_, n_, header_.cuts, isa_, [&](const SetBlock& block) PACKHORSE_VECTORISED {
                uint64_t sets[kCuts + 1];
#pragma GCC unroll 8
                for (uint32_t c = 0; c <= kCuts; ++c) sets[c] = block.of_class<kCuts>(c);
                while (place < block.first + kSetUnits) {
                    const std::size_t bit = place - block.first;
                    uint32_t c = 0;
#pragma GCC unroll 8
                    for (uint32_t t = 0; t < kCuts; ++t) c += block.above[t] >> bit & 1;
                    const uint32_t rank =
                        before[c] + static_cast<uint32_t>(std::popcount(sets[c] & first_bits(bit)));
                    add(rank - next[c], steps_[i], to[c]++);
                    next[c] = rank + 1;
                    place = ++i < changes_.n ? changes_.places[i] : ~std::size_t{0};
                }
#pragma GCC unroll 8
                for (uint32_t c = 0; c <= kCuts; ++c)
                    before[c] += static_cast<uint32_t>(std::popcount(sets[c]));
            });
    }

    void choose_shifts(uint32_t c) {
        SparseClass& fields = header_.classes[c];
        if (fields.n_changes == 0) return;
        LengthCounts gaps;
        for_sparse_runs(fields.n_changes, [&](uint32_t first, uint32_t end) {
            for (uint32_t i = first; i < end; ++i) gaps.add(gaps_[starts_[c] + i]);
        });
        fields.gap_shift =
            std::max(1u, choose_sparse_shift(gaps, kSparseCountBits, kMaxSparseCountShift).shift) -
            1;
        choose_sparse_sizes(sizes_ + starts_[c], fields.n_changes, fields);
    }

    // The writer is passed as a value, so that it stays in registers.
    SparseWriter write_class(uint32_t c, SparseWriter writer) const {
        const SparseClass fields = header_.classes[c];
        const uint32_t* const gaps = gaps_ + starts_[c];
        const Unit* const sizes = sizes_ + starts_[c];
        for (uint32_t i = 0; i < fields.n_changes; ++i)
            writer.put_count(gaps[i], fields.gap_shift + 1);
        if (fields.run_shift == kSparseNoSizes) return writer;
        if (fields.run_shift == kSparseEverySize) {
            for (uint32_t i = 0; i < fields.n_changes; ++i)
                writer.put_size(sizes[i], fields.size_shift, kUnitBits<Unit>);
            return writer;
        }
        uint32_t run = 0;
        for (uint32_t i = 0; i < fields.n_changes; ++i) {
            if (sizes[i] == 0) {
                ++run;
                continue;
            }
            writer.put_count(run, fields.run_shift);
            writer.put_size(sizes[i] - 1u, fields.size_shift, kUnitBits<Unit>);
            run = 0;
        }
        if (run > 0) writer.put_count(run, fields.run_shift);
        return writer;
    }

    const SparseChanges<Unit>& changes_;
    const Unit* bases_;
    const uint8_t* base_;
    std::size_t n_;
    uint32_t* gaps_;
    Unit* steps_;
    Unit* sizes_;
    uint32_t max_classes_;
    Isa isa_;
    SparseHeader<Unit> header_;
    std::size_t starts_[kMaxSparseClasses];
};

}  // namespace packhorse
