// Moves the bytes of differences to the order by class and back, for up to eight classes
// (docs/format.md, 6.6). A unit's class is the number of cuts that are at most its key. The first
// row of bytes has a token for each unit, and the others have raw bits, the lowest byte first. A
// class has only the rows that its shift needs.
// AVX-512 with VBMI2 compresses and expands 64 bytes at a time. Without VBMI2, AVX-512 compresses
// elements of four bytes, one of each row. AVX2 and NEON move bytes as planes/class_order.hpp does,
// and the baseline moves them one by one. The loops are in delta/order_avx512.hpp,
// delta/order_avx2.hpp and delta/order_neon.hpp.
#pragma once

#include <algorithm>

#include "delta/delta.hpp"
#include "delta/order_avx2.hpp"
#include "delta/order_avx512.hpp"
#include "delta/order_neon.hpp"
#include "delta/rows.hpp"
#include "planes/class_order.hpp"

namespace packhorse {

// Does what for_each_marked() does, for at most kDeltaBlockUnits bytes of which some have the bit
// here and there: no predictor could guess where, so they are listed first, if that is fast.
template <class Visit>
PACKHORSE_INLINE void for_each_scattered(const uint8_t* bytes, std::size_t n, uint8_t mark, Isa isa,
                                         const Visit& visit) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2) {
        uint16_t places[kDeltaBlockUnits + 64];
        done = n / 64 * 64;
        const uint16_t* const end = list_marked_vbmi2(bytes, done, mark, places);
        for (const uint16_t* place = places; place < end; ++place) visit(std::size_t{*place});
    }
#endif
    for_each_marked(bytes + done, n - done, mark, isa,
                    [&, done](std::size_t i) PACKHORSE_VECTORISED { visit(done + i); });
}

// Calls visit(byte) for each of `n` bytes that has the bit `mark`, in order.
template <class Visit>
PACKHORSE_INLINE void for_each_marked_byte(const uint8_t* bytes, std::size_t n, uint8_t mark,
                                           Isa isa, const Visit& visit) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2) {
        uint8_t found[kDeltaBlockUnits + 64];
        for (const std::size_t whole = n / 64 * 64; done < whole;) {
            const std::size_t part = std::min(kDeltaBlockUnits, whole - done);
            const uint8_t* const end = pick_marked_vbmi2(bytes + done, part, mark, found);
            for (const uint8_t* byte = found; byte < end; ++byte) visit(*byte);
            done += part;
        }
    }
#endif
    for_each_marked(bytes + done, n - done, mark, isa,
                    [&, done](std::size_t i) PACKHORSE_VECTORISED { visit(bytes[done + i]); });
}

// Where each class begins in the order by class.
struct DeltaStarts {
    std::size_t at[kMaxDeltaClasses + 1] = {};

    std::size_t count(uint32_t c) const { return at[c + 1] - at[c]; }
};

// The class of each key.
struct ClassOfKey {
    uint8_t of[256];

    explicit ClassOfKey(const DeltaRule& rule) {
        std::fill(std::begin(of), std::end(of), uint8_t{0});
        for (uint32_t t = 0; t + 1 < rule.n_classes; ++t)
            std::fill(of + rule.thresholds[t], std::end(of), static_cast<uint8_t>(t + 1));
    }
};

// Calls work.template operator()<n_classes>(), so that the state of each class can stay in
// registers.
template <class Work>
inline auto with_classes(uint32_t n_classes, const Work& work) {
    switch (n_classes) {
        case 1:
            return work.template operator()<1>();
        case 2:
            return work.template operator()<2>();
        case 3:
            return work.template operator()<3>();
        case 4:
            return work.template operator()<4>();
        case 5:
            return work.template operator()<5>();
        case 6:
            return work.template operator()<6>();
        case 7:
            return work.template operator()<7>();
        default:
            return work.template operator()<8>();
    }
}

inline DeltaStarts count_delta_classes(const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                                       Isa isa) {
    std::size_t above[kMaxDeltaClasses] = {};
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2 && rule.n_classes > 1) {
        with_classes(rule.n_classes - 1, [&]<uint32_t kCuts>() {
            if (isa >= Isa::kAvx512)
                count_cuts_avx512<kCuts>(keys, n / 64, rule.thresholds, above);
            else
                count_cuts_avx2<kCuts>(keys, n / 64 * 2, rule.thresholds, above);
        });
        done = n / 64 * 64;
    }
#endif
    (void)isa;
    DeltaStarts starts;
    for (uint32_t c = 1; c <= kMaxDeltaClasses; ++c)
        starts.at[c] =
            c < rule.n_classes
                ? n - above[c - 1] - count_above(keys + done, n - done, rule.thresholds[c - 1])
                : n;
    return starts;
}

// Calls move(place, p, i) for each row `p` and each of the units [first, n) of a block, one by one.
template <class Byte, class Move>
inline void move_one_by_one(ClassRows<Byte>& rows, uint32_t n_rows, const uint8_t* steps,
                            std::size_t first, std::size_t n, Move move) {
    using Few = Moving<Byte, kMaxDeltaClasses>;
    for (; first < n; first += Few::kMaxUnits) {
        const std::size_t end = std::min(n, first + Few::kMaxUnits);
        Byte* at[kMaxDeltaClasses];
        for (uint32_t p = 0; p < n_rows; ++p) {
            for (uint32_t c = 0; c < kMaxDeltaClasses; ++c) at[c] = rows.at[p] + rows.next[c];
            Few moving(at);
            for (std::size_t i = first; i < end; ++i) move(moving.next(steps[i]), p, i);
            moving.finish(at);
        }
        for (uint32_t c = 0; c < kMaxDeltaClasses; ++c)
            rows.next[c] = static_cast<std::size_t>(at[c] - rows.at[n_rows - 1]);
    }
}

// Fills in the shift of each unit's class.
inline void fill_shifts(const uint8_t* keys, std::size_t n, const DeltaRule& rule,
                        uint8_t* __restrict shifts, Isa isa) {
    std::memset(shifts, rule.shifts[0], n);
    for (uint32_t t = 0; t + 1 < rule.n_classes; ++t) {
        const uint8_t cut = rule.thresholds[t];
        const auto change = static_cast<uint8_t>(rule.shifts[t + 1] - rule.shifts[t]);
        if (change == 0) continue;
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                shifts[i] = static_cast<uint8_t>(shifts[i] + (keys[i] >= cut ? change : 0));
        });
    }
}

constexpr uint32_t kDeltaStep = Moving<uint8_t, kMaxDeltaClasses>::kStep;

// Puts the bytes of at most kDeltaBlockUnits units in the order of units, and fills in their
// shifts, if there is more than one row. A byte is undefined where a class lacks the row, unless
// the row of classes is zero there. Up to kDeltaSlackNbytes behind each class may be read.
inline void unsort_rows(ClassRows<const uint8_t>& rows, const uint8_t* keys, std::size_t n,
                        const DeltaRule& rule, const DeltaRowCounts& counts, BlockRows& dst,
                        Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_rows_vbmi2<kClasses>(rows, keys, n, rule, counts, dst);
        });
    else if (isa >= Isa::kAvx2)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_rows_avx2<kClasses>(rows, keys, n, rule, counts, dst);
        });
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return unsort_rows_neon<kClasses>(rows, keys, n, rule, counts.most, dst);
        });
#endif
    if (counts.most > 1) {
        const std::size_t from = isa >= Isa::kAvx512Vbmi2 ? done : 0;
        fill_shifts(keys + from, n - from, rule, dst.shifts + from, isa);
    }
    if (done == n) return;
    uint8_t steps[kDeltaBlockUnits];
    fill_steps(keys + done, n - done, rule.thresholds, rule.n_classes - 1, kDeltaStep, steps + done,
               isa);
    move_one_by_one(rows, counts.most, steps, done, n,
                    [&](const uint8_t& byte, uint32_t p, std::size_t i) { dst.at[p][i] = byte; });
}

// Moves the bytes of at most kDeltaBlockUnits units to the order by class. Bytes that a class does
// not need may be moved or not. Up to kDeltaSlackNbytes behind each class may be written.
inline void sort_rows(const BlockRows& src, const uint8_t* keys, std::size_t n,
                      const DeltaRule& rule, const DeltaRowCounts& counts, ClassRows<uint8_t>& rows,
                      Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            if (isa >= Isa::kAvx512Vbmi2)
                return sort_rows_vbmi2<kClasses>(src, keys, n, rule, counts, rows);
            if (isa >= Isa::kAvx512)
                return sort_rows_avx512<kClasses>(src, keys, n, rule, counts, rows);
            return sort_rows_avx2<kClasses>(src, keys, n, rule, counts, rows);
        });
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        done = with_classes(rule.n_classes, [&]<uint32_t kClasses>() {
            return sort_rows_neon<kClasses>(src, keys, n, rule, counts.most, rows);
        });
#endif
    if (done == n) return;
    uint8_t steps[kDeltaBlockUnits];
    fill_steps(keys + done, n - done, rule.thresholds, rule.n_classes - 1, kDeltaStep, steps + done,
               isa);
    move_one_by_one(rows, counts.most, steps, done, n,
                    [&](uint8_t& byte, uint32_t p, std::size_t i) { byte = src.at[p][i]; });
}

}  // namespace packhorse
