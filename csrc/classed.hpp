// Units in classes (docs/format.md, 6.5): which class each unit of a chunk falls into, and the
// order by class and back. Classes come from side data (a prediction from row and column) or from
// the plane that leads; never from what the stream itself yields, so every class decodes by the
// same loops as a plain rANS stream.
#pragma once

#include "dispatch.hpp"
#include "layout.hpp"

namespace packhorse {

// What a frame knows of its rows and columns; `rows` is null for a frame without side data.
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

// q of section 6.5 for `n` units from `first` on.
PACKHORSE_INLINE void predict(const SideData& side, std::size_t first, std::size_t n,
                              uint8_t* __restrict q) {
    std::size_t row = first / side.n_columns;
    std::size_t column = first % side.n_columns;
    while (n > 0) {
        const std::size_t run = n < side.n_columns - column ? n : side.n_columns - column;
        const uint8_t base = side.rows[row];
        const uint8_t* from = side.columns + column;
        for (std::size_t i = 0; i < run; ++i) q[i] = static_cast<uint8_t>(base + from[i]);
        q += run;
        n -= run;
        column = 0;
        ++row;
    }
}

// q and the classes of a prediction.
inline void predict_classes(const SideData& side, std::size_t first, std::size_t n, uint8_t* q,
                            uint8_t* __restrict classes, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        predict(side, first, n, q);
        for (std::size_t i = 0; i < n; ++i) classes[i] = q[i] % kPredictionClasses;
    });
}

inline void subtract_prediction(const uint8_t* plane, const uint8_t* q, std::size_t n,
                                uint8_t* __restrict yielded, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i)
            yielded[i] =
                static_cast<uint8_t>(plane[i] - q[i] / kPredictionClasses + kPredictionBias);
    });
}

inline void add_prediction(const uint8_t* __restrict q, std::size_t n, uint8_t* plane, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i)
            plane[i] = static_cast<uint8_t>(plane[i] + q[i] / kPredictionClasses - kPredictionBias);
    });
}

inline void lead_classes(const uint8_t* lead, std::size_t n, const ClassRule& rule,
                         uint8_t* __restrict classes, Isa isa) {
    std::memset(classes, 0, n);
    for (uint32_t t = 0; t + 1 < rule.n_classes; ++t) {
        const uint8_t threshold = rule.thresholds[t];
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                classes[i] = static_cast<uint8_t>(classes[i] + (lead[i] >= threshold ? 1 : 0));
        });
    }
}

// Where each class begins in the order by class; at[kMaxClasses] is the end.
struct ClassStarts {
    std::size_t at[kMaxClasses + 1];

    std::size_t count(uint32_t c) const { return at[c + 1] - at[c]; }
};

#if PACKHORSE_X86

PACKHORSE_AVX512 inline std::size_t count_blocks_avx512(const uint8_t* classes, std::size_t n,
                                                        std::size_t* counts) {
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i block = _mm512_loadu_si512(classes + i);
        for (uint32_t c = 0; c < kMaxClasses; ++c)
            counts[c] += static_cast<std::size_t>(__builtin_popcountll(
                _mm512_cmpeq_epi8_mask(block, _mm512_set1_epi8(static_cast<char>(c)))));
    }
    return i;
}

#endif

inline ClassStarts count_classes(const uint8_t* classes, std::size_t n, Isa isa) {
    std::size_t counts[kMaxClasses] = {};
    std::size_t i = 0;
#if PACKHORSE_X86
    if (isa == Isa::kAvx512) i = count_blocks_avx512(classes, n, counts);
#endif
    (void)isa;
    for (; i < n; ++i) ++counts[classes[i]];
    ClassStarts starts;
    starts.at[0] = 0;
    for (uint32_t c = 0; c < kMaxClasses; ++c) starts.at[c + 1] = starts.at[c] + counts[c];
    return starts;
}

constexpr std::size_t kClassSlack = 64;  // bytes that unsorting may read past the end

PACKHORSE_INLINE void sort_rest(const uint8_t* plane, const uint8_t* classes, std::size_t n,
                                uint8_t** to) {
    for (std::size_t i = 0; i < n; ++i) *to[classes[i]]++ = plane[i];
}

PACKHORSE_INLINE void unsort_rest(const uint8_t** from, const uint8_t* classes, std::size_t n,
                                  uint8_t* plane) {
    for (std::size_t i = 0; i < n; ++i) plane[i] = *from[classes[i]]++;
}

#if PACKHORSE_X86

// 16 units at a time: each class's units, compressed. Returns the units done.
PACKHORSE_AVX512 inline std::size_t sort_blocks_avx512(const uint8_t* plane, const uint8_t* classes,
                                                       std::size_t n, uint8_t** to) {
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512i units =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(plane + i)));
        const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(classes + i));
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            const __mmask16 mine = _mm_cmpeq_epi8_mask(of, _mm_set1_epi8(static_cast<char>(c)));
            const auto count = static_cast<uint32_t>(__builtin_popcount(mine));
            _mm_mask_storeu_epi8(to[c], static_cast<__mmask16>((1u << count) - 1),
                                 _mm512_cvtepi32_epi8(_mm512_maskz_compress_epi32(mine, units)));
            to[c] += count;
        }
    }
    return i;
}

PACKHORSE_AVX512 inline std::size_t unsort_blocks_avx512(const uint8_t** from,
                                                         const uint8_t* classes, std::size_t n,
                                                         uint8_t* plane) {
    std::size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m128i of = _mm_loadu_si128(reinterpret_cast<const __m128i*>(classes + i));
        __m512i units = _mm512_setzero_si512();
        for (uint32_t c = 0; c < kMaxClasses; ++c) {
            const __mmask16 mine = _mm_cmpeq_epi8_mask(of, _mm_set1_epi8(static_cast<char>(c)));
            const __m512i next =
                _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from[c])));
            units = _mm512_mask_expand_epi32(units, mine, next);
            from[c] += __builtin_popcount(mine);
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(plane + i), _mm512_cvtepi32_epi8(units));
    }
    return i;
}

#endif

// The units in the order by class.
inline void sort_by_class(const uint8_t* plane, const uint8_t* classes, std::size_t n,
                          const ClassStarts& starts, uint8_t* sorted, Isa isa) {
    uint8_t* to[kMaxClasses];
    for (uint32_t c = 0; c < kMaxClasses; ++c) to[c] = sorted + starts.at[c];
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa == Isa::kAvx512) done = sort_blocks_avx512(plane, classes, n, to);
#endif
    (void)isa;
    sort_rest(plane + done, classes + done, n - done, to);
}

// The next `n` units in the order of units; `from` points at the next of each class and is moved
// on. What is behind the last unit can be read for kClassSlack bytes.
inline void unsort_by_class(const uint8_t** from, const uint8_t* classes, std::size_t n,
                            uint8_t* plane, Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa == Isa::kAvx512) done = unsort_blocks_avx512(from, classes, n, plane);
#endif
    (void)isa;
    unsort_rest(from, classes + done, n - done, plane + done);
}

// Reads the fields behind the common header of a classed stream.
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
