// Choices of the encoder of few differences (docs/format.md, 6.7): the cuts between classes, from
// the units that differ and a sample of the base, and the shifts of a class, from its numbers. All
// costs are integers, so every machine chooses the same.
#pragma once

#include <algorithm>
#include <bit>

#include "delta/sparse.hpp"
#include "planes/histogram.hpp"

namespace packhorse {

constexpr std::size_t kSparseSampleUnits = 4096;    // of the base
constexpr std::size_t kSparseSampleRun = 64;        // consecutive ones
constexpr std::size_t kSparseSampleChanges = 4096;  // at most, roughly
// Shifts are chosen from this number of runs of this length of the numbers of a class.
constexpr uint32_t kSparseShiftRuns = 4;
constexpr uint32_t kSparseShiftRun = 512;
constexpr uint32_t kMaxSparseGroups = 20;
constexpr uint32_t kSparseKeys = 256;

// Maps sizes of base units to keys, which ascend: exponents of floats, lengths of integers.
template <class Unit, bool kFloat>
struct SparseKeys {
    static constexpr uint32_t kF64Bias = 1023 - 224;

    PACKHORSE_INLINE static uint32_t key(Unit size) {
        if constexpr (!kFloat)
            return static_cast<uint32_t>(std::bit_width(size));
        else if constexpr (sizeof(Unit) == 8)
            return static_cast<uint32_t>(
                std::clamp<uint64_t>(size >> 52, kF64Bias, kF64Bias + kSparseKeys - 1) - kF64Bias);
        else if constexpr (sizeof(Unit) == 1)
            return size;
        else
            return static_cast<uint32_t>(size >> (kUnitBits<Unit> - 9));
    }

    // The smallest size that has a key of 1 or more.
    static Unit cut(uint32_t key) {
        if constexpr (!kFloat)
            return static_cast<Unit>(Wide<Unit>{1} << (key - 1));
        else if constexpr (sizeof(Unit) == 8)
            return static_cast<Unit>(uint64_t{key + kF64Bias} << 52);
        else if constexpr (sizeof(Unit) == 1)
            return static_cast<Unit>(key);
        else
            return static_cast<Unit>(Wide<Unit>{key} << (kUnitBits<Unit> - 9));
    }
};

// Counts of units: in a sample of the base, of all changes, and of changes by a step of 1.
struct SparseCounts {
    uint64_t base = 0;
    uint64_t changes = 0;
    uint64_t ones = 0;

    SparseCounts& operator+=(const SparseCounts& more) {
        base += more.base;
        changes += more.changes;
        ones += more.ones;
        return *this;
    }
    SparseCounts operator-(const SparseCounts& less) const {
        return {base - less.base, changes - less.changes, ones - less.ones};
    }
};

// log2(x) in 2^-16 bits, a little too small.
inline uint64_t rough_log2(uint64_t x) {
    const auto length = static_cast<uint32_t>(std::bit_width(x) - 1);
    const uint64_t fraction = (x << (63 - length) << 1) >> 48;
    return (uint64_t{length} << kCostBits) + fraction;
}

// Estimates the bits of a class in 2^-16: of its gaps, and of whether its steps are longer than 1.
inline uint64_t sparse_class_cost(const SparseCounts& counts, uint64_t n_units_of_base) {
    const uint64_t n = counts.changes;
    if (n == 0) return 0;
    const uint64_t population = std::max(n, counts.base * n_units_of_base / kSparseSampleUnits);
    uint64_t cost = n * (rough_log2(population) - std::min(rough_log2(population), rough_log2(n)));
    const auto log_times = [](uint64_t x) { return x == 0 ? 0 : x * rough_log2(x); };
    cost += log_times(n) - log_times(counts.ones) - log_times(n - counts.ones);
    // The exact places of gaps, unless almost every unit changes.
    return cost + (population - n) * (n << kCostBits) / population * 3 / 2;
}

// Neighbouring keys, joined to few groups, with counts as running sums.
struct SparseGroups {
    uint32_t n = 0;
    uint32_t first[kMaxSparseGroups];
    SparseCounts sums[kMaxSparseGroups + 1];

    explicit SparseGroups(const SparseCounts* counts) {
        SparseCounts all;
        for (uint32_t key = 0; key < kSparseKeys; ++key) all += counts[key];
        SparseCounts group;
        for (uint32_t key = 0; key < kSparseKeys; ++key) {
            const bool is_large = (kMaxSparseGroups - 1) * group.changes >= all.changes;
            if (n == 0 || (is_large && counts[key].changes > 0 && n < kMaxSparseGroups)) {
                first[n++] = key;
                sums[n] = sums[n - 1];
                group = {};
            }
            sums[n] += counts[key];
            group += counts[key];
        }
    }
};

// Finds the cuts of least cost, by dynamic programming over groups of keys. To decode several
// classes takes a walk along the whole base, three times as long as one class. So several must save
// a sixteenth, unless as many are allowed as there can be.
template <class Unit, bool kFloat>
inline void choose_sparse_cuts(const SparseCounts* counts, std::size_t n_units,
                               uint32_t max_classes, SparseHeader<Unit>& header) {
    constexpr uint64_t kNever = ~uint64_t{0};
    // What a class takes in the stream, and as much again for the time that it takes.
    constexpr uint64_t kClassCost = (16 * (kSparseClassNbytes + sizeof(Unit))) << kCostBits;
    const SparseGroups groups(counts);
    const uint32_t n = groups.n;
    uint64_t best[kMaxSparseClasses + 1][kMaxSparseGroups + 1];
    uint32_t cut[kMaxSparseClasses + 1][kMaxSparseGroups + 1] = {};
    for (auto& row : best) std::fill(std::begin(row), std::end(row), kNever);
    best[0][0] = 0;
    for (uint32_t begin = 0; begin < n; ++begin)
        for (uint32_t end = begin + 1; end <= n; ++end) {
            const uint64_t cost =
                sparse_class_cost(groups.sums[end] - groups.sums[begin], n_units) + kClassCost;
            for (uint32_t k = 1; k <= max_classes; ++k) {
                if (best[k - 1][begin] == kNever || best[k - 1][begin] + cost >= best[k][end])
                    continue;
                best[k][end] = best[k - 1][begin] + cost;
                cut[k][end] = begin;
            }
        }
    header.n_classes = 1;
    for (uint32_t k = 2; k <= max_classes; ++k)
        if (best[k][n] < best[header.n_classes][n]) header.n_classes = k;
    const uint64_t saved = best[1][n] - best[header.n_classes][n];
    if (max_classes < kMaxSparseClasses && saved < best[1][n] / 16) header.n_classes = 1;
    uint32_t end = n;
    for (uint32_t k = header.n_classes; k > 1; --k) {
        end = cut[k][end];
        header.cuts[k - 2] = SparseKeys<Unit, kFloat>::cut(groups.first[end]);
    }
}

// How many numbers have each length.
struct LengthCounts {
    uint64_t of[65] = {};

    PACKHORSE_INLINE void add(uint64_t x) { ++of[std::bit_width(x)]; }
    uint64_t total() const {
        uint64_t sum = 0;
        for (const uint64_t count : of) sum += count;
        return sum;
    }
};

struct ShiftChoice {
    uint32_t shift = 0;
    uint64_t n_bits = ~uint64_t{0};  // roughly
};

// Chooses the shift of numbers, which take `full_bits` bits if they are written in full.
inline ShiftChoice choose_sparse_shift(const LengthCounts& lengths, uint32_t full_bits,
                                       uint32_t max_shift) {
    ShiftChoice best;
    for (uint32_t shift = 0; shift <= max_shift; ++shift) {
        uint64_t n_bits = 0;
        for (uint32_t length = 0; length <= 64; ++length) {
            if (lengths.of[length] == 0) continue;
            // The middle of the numbers of this length.
            const uint64_t middle = length < 2 ? length : uint64_t{3} << (length - 2);
            const uint64_t zeros = middle >> shift;
            n_bits += lengths.of[length] *
                      (zeros < kMaxSparseZeros ? zeros + 1 + shift : kMaxSparseZeros + full_bits);
        }
        if (n_bits < best.n_bits) best = {shift, n_bits};
    }
    return best;
}

// Calls work(first, end) for runs of `n` numbers that are spread evenly, or for all of them.
template <class Work>
inline void for_sparse_runs(uint32_t n, const Work& work) {
    if (n <= kSparseShiftRuns * kSparseShiftRun) return work(0u, n);
    for (uint32_t r = 0; r < kSparseShiftRuns; ++r) {
        const uint32_t first = (n - kSparseShiftRun) / (kSparseShiftRuns - 1) * r;
        work(first, first + kSparseShiftRun);
    }
}

// Chooses how the sizes of the steps of a class are written. `sizes` are the sizes, less one.
template <class Unit>
inline void choose_sparse_sizes(const Unit* sizes, uint32_t n, SparseClass& fields) {
    constexpr uint32_t kMaxShift = std::min(kUnitBits<Unit> - 1, kMaxSparseSizeShift);
    Unit any = 0;
    for (uint32_t i = 0; i < n; ++i) any = static_cast<Unit>(any | sizes[i]);
    fields.run_shift = kSparseNoSizes;
    if (any == 0) return;
    LengthCounts each, longer, runs;
    for_sparse_runs(n, [&](uint32_t first, uint32_t end) {
        uint32_t run = 0;
        for (uint32_t i = first; i < end; ++i) {
            each.add(sizes[i]);
            if (sizes[i] == 0) {
                ++run;
                continue;
            }
            longer.add(sizes[i] - 1u);
            runs.add(run);
            run = 0;
        }
        runs.add(run);
    });
    const ShiftChoice all = choose_sparse_shift(each, kUnitBits<Unit>, kMaxShift);
    const ShiftChoice some = choose_sparse_shift(longer, kUnitBits<Unit>, kMaxShift);
    const ShiftChoice between = choose_sparse_shift(runs, kSparseCountBits, kMaxSparseCountShift);
    const bool has_runs = some.n_bits + between.n_bits < all.n_bits;
    fields.run_shift = has_runs ? between.shift : kSparseEverySize;
    fields.size_shift = has_runs ? some.shift : all.shift;
}

}  // namespace packhorse
