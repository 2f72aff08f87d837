// Finds the class of each unit of a chunk (docs/format.md, 6.5). Classes come from side data (a
// prediction from row and column) or from the plane that leads. They never depend on the stream
// itself, so every class decodes with the same loops as a plain rANS stream.
#pragma once

#include <algorithm>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/class_order.hpp"

namespace packhorse {

// The side data of a frame; `rows` is null for a frame without side data.
struct SideData {
    const uint8_t* rows = nullptr;
    const uint8_t* columns = nullptr;
    std::size_t n_columns = 1;
};

struct ClassRule {
    ClassSource source = ClassSource::kNone;
    uint32_t n_classes = 1;
    uint8_t thresholds[kMaxClasses - 1] = {};
};

// Calls visit(base, columns, n, at) for the part of each row among the `n` units from `first` on.
// The part begins at unit `at` of these, and q of section 6.5 is base + columns[i].
template <class Visit>
PACKHORSE_INLINE void for_each_row(const SideData& side, std::size_t first, std::size_t n,
                                   Visit visit) {
    std::size_t row = first / side.n_columns;
    std::size_t column = first % side.n_columns;
    for (std::size_t at = 0; at < n; ++row, column = 0) {
        const std::size_t run = std::min(n - at, side.n_columns - column);
        visit(side.rows[row], side.columns + column, run, at);
        at += run;
    }
}

// Computes the classes of a prediction, which serve as keys, and the bytes that plane 0's stream
// yields.
inline void apply_prediction(const SideData& side, std::size_t first, std::size_t n,
                             const uint8_t* plane, uint8_t* __restrict classes,
                             uint8_t* __restrict yielded, Isa isa) {
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for_each_row(side, first, n,
                     [=](uint8_t base, const uint8_t* columns, std::size_t run, std::size_t at)
                         PACKHORSE_VECTORISED {
                             for (std::size_t i = 0; i < run; ++i) {
                                 const auto q = static_cast<uint8_t>(base + columns[i]);
                                 classes[at + i] = q % kPredictionClasses;
                                 yielded[at + i] = static_cast<uint8_t>(
                                     plane[at + i] - q / kPredictionClasses + kPredictionBias);
                             }
                         });
    });
}

// Computes only the classes.
inline void predict_keys(const SideData& side, std::size_t first, std::size_t n,
                         uint8_t* __restrict classes, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for_each_row(side, first, n,
                     [=](uint8_t base, const uint8_t* columns, std::size_t run, std::size_t at)
                         PACKHORSE_VECTORISED {
                             for (std::size_t i = 0; i < run; ++i)
                                 classes[at + i] =
                                     static_cast<uint8_t>(base + columns[i]) % kPredictionClasses;
                         });
    });
}

// Turns the bytes that plane 0's stream yields into plane 0.
inline void add_prediction(const SideData& side, std::size_t first, std::size_t n,
                           uint8_t* __restrict plane, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for_each_row(side, first, n,
                     [=](uint8_t base, const uint8_t* columns, std::size_t run, std::size_t at)
                         PACKHORSE_VECTORISED {
                             for (std::size_t i = 0; i < run; ++i) {
                                 const auto q = static_cast<uint8_t>(base + columns[i]);
                                 plane[at + i] = static_cast<uint8_t>(
                                     plane[at + i] + q / kPredictionClasses - kPredictionBias);
                             }
                         });
    });
}

// The cuts that divide keys into classes. Keys are the classes themselves, or the bytes that plane
// 0 yields.
inline ClassCuts class_cuts(const ClassRule& rule) {
    if (rule.source == ClassSource::kPrediction) return kCutsOfClasses;
    ClassCuts cuts;
    for (uint32_t t = 0; t + 1 < rule.n_classes; ++t) {
        cuts.at[t] = rule.thresholds[t];
        cuts.used[t] = ~uint64_t{0};
    }
    return cuts;
}

// Counts the columns in each class, for a row whose byte of side data is 0.
inline ClassStarts count_columns(const uint8_t* columns, std::size_t n, Isa isa) {
    constexpr std::size_t kBlock = 2048;
    ClassStarts starts{};
    for (std::size_t at = 0; at < n; at += kBlock) {
        uint8_t classes[kBlock];
        const std::size_t run = std::min(kBlock, n - at);
        for (std::size_t i = 0; i < run; ++i) classes[i] = columns[at + i] % kPredictionClasses;
        const ClassStarts counts = count_classes(classes, run, kCutsOfClasses, isa);
        for (uint32_t c = 1; c <= kMaxClasses; ++c) starts.at[c] += counts.at[c];
    }
    return starts;
}

// Counts how many of `n` units, from `first` on, fall into each class of a prediction. A row's byte
// of side data shifts the classes of all its columns equally, so the units of whole rows need not
// be read.
inline ClassStarts count_predicted(const SideData& side, std::size_t first, std::size_t n,
                                   Isa isa) {
    ClassStarts whole{};
    if (n >= side.n_columns) whole = count_columns(side.columns, side.n_columns, isa);
    std::size_t counts[kMaxClasses] = {};
    for_each_row(side, first, n,
                 [&](uint8_t base, const uint8_t* columns, std::size_t run, std::size_t)
                     PACKHORSE_VECTORISED {
                         const ClassStarts starts =
                             run == side.n_columns ? whole : count_columns(columns, run, isa);
                         for (uint32_t c = 0; c < kMaxClasses; ++c)
                             counts[(c + base) % kPredictionClasses] += starts.count(c);
                     });
    ClassStarts starts{};
    for (uint32_t c = 0; c < kMaxClasses; ++c) starts.at[c + 1] = starts.at[c] + counts[c];
    return starts;
}

// Reads the fields of a classed stream that follow the common header.
inline Status read_class_rule(const uint8_t* src, std::size_t nbytes, ClassRule& rule) {
    if (nbytes < kClassedModelsOffset) return Status::kStreamLength;
    const uint32_t source = src[8], n_classes = src[9];
    const bool predicts = source == static_cast<uint32_t>(ClassSource::kPrediction);
    if (!predicts && source != static_cast<uint32_t>(ClassSource::kLead)) return Status::kBadField;
    if (n_classes < 1 || n_classes > kMaxClasses || (predicts && n_classes != kPredictionClasses))
        return Status::kBadField;
    rule.source = static_cast<ClassSource>(source);
    rule.n_classes = n_classes;
    const uint32_t n_thresholds = predicts ? 0 : n_classes - 1;
    for (uint32_t t = 0; t < kMaxClasses - 1; ++t) {
        rule.thresholds[t] = src[10 + t];
        if (t >= n_thresholds && rule.thresholds[t] != 0) return Status::kReserved;
        if (t > 0 && t < n_thresholds && rule.thresholds[t] < rule.thresholds[t - 1])
            return Status::kBadField;
    }
    return src[13] == 0 && src[14] == 0 && src[15] == 0 ? Status::kOk : Status::kReserved;
}

inline void write_class_rule(const ClassRule& rule, uint8_t* dst) {
    dst[8] = static_cast<uint8_t>(rule.source);
    dst[9] = static_cast<uint8_t>(rule.n_classes);
    for (uint32_t t = 0; t < kMaxClasses - 1; ++t) dst[10 + t] = rule.thresholds[t];
    dst[13] = dst[14] = dst[15] = 0;
}

}  // namespace packhorse
