// Moves the bytes of differences to the order by class and back with AVX-512, for up to eight
// classes.
#pragma once

#include "common/dispatch.hpp"
#include "delta/rows.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Lists those of `n` bytes that have the bit `mark`, for a multiple of 64 below 2^16. Returns the
// end of the list, which has room for `n` and 64 more.
PACKHORSE_AVX512_VBMI2 inline uint16_t* list_marked_vbmi2(const uint8_t* bytes, std::size_t n,
                                                          uint8_t mark, uint16_t* places) {
    const __m512i marks = _mm512_set1_epi8(static_cast<char>(mark));
    const __m512i step = _mm512_set1_epi16(32);
    alignas(64) uint16_t ascending[32];
    for (uint16_t i = 0; i < 32; ++i) ascending[i] = i;
    __m512i place = _mm512_load_si512(ascending);
    for (std::size_t i = 0; i < n; i += 64) {
        const __mmask64 set = _mm512_test_epi8_mask(_mm512_loadu_si512(bytes + i), marks);
        for (int h = 0; h < 2; ++h, place = _mm512_add_epi16(place, step)) {
            const auto half = static_cast<__mmask32>(set >> (32 * h));
            _mm512_storeu_si512(places, _mm512_maskz_compress_epi16(half, place));
            places += __builtin_popcount(half);
        }
    }
    return places;
}

// Lists the bytes themselves that have the bit `mark`. `found` has room for `n` and 64 more.
PACKHORSE_AVX512_VBMI2 inline uint8_t* pick_marked_vbmi2(const uint8_t* bytes, std::size_t n,
                                                         uint8_t mark, uint8_t* found) {
    const __m512i marks = _mm512_set1_epi8(static_cast<char>(mark));
    for (std::size_t i = 0; i < n; i += 64) {
        const __m512i some = _mm512_loadu_si512(bytes + i);
        const __mmask64 set = _mm512_test_epi8_mask(some, marks);
        _mm512_storeu_si512(found, _mm512_maskz_compress_epi8(set, some));
        found += __builtin_popcountll(set);
    }
    return found;
}

// What is the same for all units. The loops below keep it in registers, because stores of bytes
// might change it in memory.
template <uint32_t kClasses>
struct ClassRegisters {
    __m512i cuts[kClasses];  // the last one is not used
    __m512i shifts[kClasses];
    uint32_t n_rows[kClasses];
    std::size_t next[kClasses];

    PACKHORSE_AVX512 ClassRegisters(const DeltaRule& rule, const DeltaRowCounts& counts,
                                    const std::size_t* begin) {
        for (uint32_t c = 0; c < kClasses; ++c) {
            cuts[c] =
                _mm512_set1_epi8(static_cast<char>(c + 1 < kClasses ? rule.thresholds[c] : 0));
            shifts[c] = _mm512_set1_epi8(static_cast<char>(rule.shifts[c]));
            n_rows[c] = counts.of[c];
            next[c] = begin[c];
        }
    }
};

// Moves 64 units after 64 units. Rows from the third on are moved in a second pass over the
// classes.
template <uint32_t kClasses, uint32_t kRows>
PACKHORSE_AVX512_VBMI2 inline std::size_t unsort_some_rows_vbmi2(ClassRows<const uint8_t>& rows,
                                                                 const uint8_t* keys, std::size_t n,
                                                                 const DeltaRule& rule,
                                                                 const DeltaRowCounts& counts,
                                                                 BlockRows& dst) {
    ClassRegisters<kClasses> state(rule, counts, rows.next);
    const ClassRows<const uint8_t> from = rows;
    const uint32_t n_rows = counts.most;
    const uint8_t* const first_row = from.at[0];
    const uint8_t* const second_row = from.at[1];
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i key = _mm512_loadu_si512(keys + i);
        __m512i tokens = _mm512_setzero_si512(), bytes = tokens, shifts = state.shifts[0];
        __mmask64 from_here = ~__mmask64{0};
        __mmask64 sets[kClasses];
        std::size_t places[kClasses];
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const __mmask64 above =
                c + 1 < kClasses ? _mm512_cmpge_epu8_mask(key, state.cuts[c]) : 0;
            const __mmask64 set = from_here & ~above;
            from_here = above;
            const std::size_t at = state.next[c];
            tokens = _mm512_mask_expand_epi8(tokens, set, _mm512_loadu_si512(first_row + at));
            if constexpr (kRows > 1) {
                if (state.n_rows[c] > 1)
                    bytes =
                        _mm512_mask_expand_epi8(bytes, set, _mm512_loadu_si512(second_row + at));
                if (c + 1 < kClasses)
                    shifts = _mm512_mask_mov_epi8(shifts, above, state.shifts[(c + 1) % kClasses]);
            }
            if constexpr (kRows > 2) {
                sets[c] = set;
                places[c] = at;
            }
            state.next[c] = at + static_cast<std::size_t>(__builtin_popcountll(set));
        }
        _mm512_store_si512(dst.at[0] + i, tokens);
        if constexpr (kRows > 1) {
            _mm512_store_si512(dst.at[1] + i, bytes);
            _mm512_store_si512(dst.shifts + i, shifts);
        }
        for (uint32_t p = 2; kRows > 2 && p < n_rows; ++p) {
            const uint8_t* const row = from.at[p];
            bytes = _mm512_setzero_si512();
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c)
                if (p < state.n_rows[c])
                    bytes = _mm512_mask_expand_epi8(bytes, sets[c],
                                                    _mm512_loadu_si512(row + places[c]));
            _mm512_store_si512(dst.at[p] + i, bytes);
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) rows.next[c] = state.next[c];
    return i;
}

template <uint32_t kClasses>
PACKHORSE_AVX512_VBMI2 inline std::size_t unsort_rows_vbmi2(ClassRows<const uint8_t>& rows,
                                                            const uint8_t* keys, std::size_t n,
                                                            const DeltaRule& rule,
                                                            const DeltaRowCounts& counts,
                                                            BlockRows& dst) {
    if (counts.most == 1)
        return unsort_some_rows_vbmi2<kClasses, 1>(rows, keys, n, rule, counts, dst);
    if (counts.most == 2)
        return unsort_some_rows_vbmi2<kClasses, 2>(rows, keys, n, rule, counts, dst);
    return unsort_some_rows_vbmi2<kClasses, 3>(rows, keys, n, rule, counts, dst);
}

template <uint32_t kClasses, uint32_t kRows>
PACKHORSE_AVX512_VBMI2 inline std::size_t sort_some_rows_vbmi2(const BlockRows& src,
                                                               const uint8_t* keys, std::size_t n,
                                                               const DeltaRule& rule,
                                                               const DeltaRowCounts& counts,
                                                               ClassRows<uint8_t>& rows) {
    ClassRegisters<kClasses> state(rule, counts, rows.next);
    const ClassRows<uint8_t> to = rows;
    const uint32_t n_rows = counts.most;
    uint8_t* const first_row = to.at[0];
    uint8_t* const second_row = to.at[1];
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const __m512i key = _mm512_loadu_si512(keys + i);
        const __m512i tokens = _mm512_load_si512(src.at[0] + i);
        const __m512i bytes = kRows > 1 ? _mm512_load_si512(src.at[1] + i) : tokens;
        __mmask64 from_here = ~__mmask64{0};
        __mmask64 sets[kClasses];
        std::size_t places[kClasses];
#pragma GCC unroll 8
        for (uint32_t c = 0; c < kClasses; ++c) {
            const __mmask64 above =
                c + 1 < kClasses ? _mm512_cmpge_epu8_mask(key, state.cuts[c]) : 0;
            const __mmask64 set = from_here & ~above;
            from_here = above;
            const std::size_t at = state.next[c];
            _mm512_storeu_si512(first_row + at, _mm512_maskz_compress_epi8(set, tokens));
            if (kRows > 1 && state.n_rows[c] > 1)
                _mm512_storeu_si512(second_row + at, _mm512_maskz_compress_epi8(set, bytes));
            if constexpr (kRows > 2) {
                sets[c] = set;
                places[c] = at;
            }
            state.next[c] = at + static_cast<std::size_t>(__builtin_popcountll(set));
        }
        for (uint32_t p = 2; kRows > 2 && p < n_rows; ++p) {
            const __m512i more = _mm512_load_si512(src.at[p] + i);
            uint8_t* const row = to.at[p];
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c)
                if (p < state.n_rows[c])
                    _mm512_storeu_si512(row + places[c], _mm512_maskz_compress_epi8(sets[c], more));
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) rows.next[c] = state.next[c];
    return i;
}

template <uint32_t kClasses>
PACKHORSE_AVX512_VBMI2 inline std::size_t sort_rows_vbmi2(const BlockRows& src, const uint8_t* keys,
                                                          std::size_t n, const DeltaRule& rule,
                                                          const DeltaRowCounts& counts,
                                                          ClassRows<uint8_t>& rows) {
    if (counts.most == 1)
        return sort_some_rows_vbmi2<kClasses, 1>(src, keys, n, rule, counts, rows);
    if (counts.most == 2)
        return sort_some_rows_vbmi2<kClasses, 2>(src, keys, n, rule, counts, rows);
    return sort_some_rows_vbmi2<kClasses, 3>(src, keys, n, rule, counts, rows);
}

// Compresses elements that hold a byte of each of four rows.
template <uint32_t kClasses>
PACKHORSE_AVX512 inline std::size_t sort_rows_avx512(const BlockRows& src, const uint8_t* keys,
                                                     std::size_t n, const DeltaRule& rule,
                                                     const DeltaRowCounts& row_counts,
                                                     ClassRows<uint8_t>& rows) {
    const ClassRows<uint8_t> to = rows;
    const DeltaRowCounts counts = row_counts;
    std::size_t next[kClasses];
    const std::size_t n_done = n / 16 * 16;
    for (uint32_t first = 0; first < counts.most; first += 4) {
        const uint32_t most = std::min(4u, counts.most - first);
        for (uint32_t c = 0; c < kClasses; ++c) next[c] = to.next[c];
        for (std::size_t i = 0; i < n_done; i += 16) {
            const __m128i key = _mm_loadu_si128(reinterpret_cast<const __m128i*>(keys + i));
            __m512i units = _mm512_setzero_si512();
            for (uint32_t p = 0; p < most; ++p) {
                const auto* const bytes = reinterpret_cast<const __m128i*>(src.at[first + p] + i);
                units = _mm512_or_si512(
                    units, _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_load_si128(bytes)), 8 * p));
            }
            __mmask16 from_here = 0xFFFF;
#pragma GCC unroll 8
            for (uint32_t c = 0; c < kClasses; ++c) {
                const __mmask16 above =
                    c + 1 < kClasses
                        ? _mm_cmpge_epu8_mask(key,
                                              _mm_set1_epi8(static_cast<char>(rule.thresholds[c])))
                        : __mmask16{0};
                const auto set = static_cast<__mmask16>(from_here & ~above);
                from_here = above;
                const __m512i moved = _mm512_maskz_compress_epi32(set, units);
                for (uint32_t p = 0; p < most && first + p < counts.of[c]; ++p)
                    _mm_storeu_si128(reinterpret_cast<__m128i*>(to.at[first + p] + next[c]),
                                     _mm512_cvtepi32_epi8(_mm512_srli_epi32(moved, 8 * p)));
                next[c] += static_cast<std::size_t>(__builtin_popcount(set));
            }
        }
    }
    for (uint32_t c = 0; c < kClasses; ++c) rows.next[c] = next[c];
    return n_done;
}

#endif

}  // namespace packhorse
