// Packs rows of BF16 elements as weights in memory, or counts the exceptions that they would have.
// A row is split into exponents and the rest, its exponents are counted, its window is chosen, and
// both parts become packed elements. The number of exceptions is not known beforehand, so each
// block of rows collects its own list; the caller joins the lists.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <new>
#include <vector>

#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "rows/weights_window.hpp"

namespace packhorse {

constexpr uint32_t kNoWindow = ~uint32_t{0};
constexpr std::size_t kExceptionSlack = 2;

// The output arrays of some rows.
struct WeightRows {
    uint8_t* low_bytes;
    uint8_t* high_bits;
    uint8_t* first_exponents;
    int32_t* counts;  // exceptions of each row
};

// A row while it is packed. `low_bytes` belong to the output, and first hold signs and mantissas;
// the other arrays are scratch.
struct WeightRow {
    uint8_t* low_bytes;
    uint8_t* exponents;  // later the bits above the low byte
    uint8_t* marks;      // 1 for exceptions
};

PACKHORSE_INLINE void split_weights(const uint8_t* __restrict src, std::size_t n,
                                    uint8_t* __restrict exponents, uint8_t* __restrict rest) {
    for (std::size_t i = 0; i < n; ++i) {
        const auto element = load<uint16_t>(src + 2 * i);
        exponents[i] = static_cast<uint8_t>(element >> 7);
        rest[i] = static_cast<uint8_t>((element >> 8 & 0x80) | (element & 0x7F));
    }
}

PACKHORSE_INLINE uint32_t count_zeros(const uint8_t* exponents, const uint8_t* rest,
                                      std::size_t n) {
    uint32_t zeros = 0;
    for (std::size_t i = 0; i < n; ++i) zeros += (exponents[i] | (rest[i] & 0x7F)) == 0;
    return zeros;
}

// Splits a row and chooses its window: near `first`, the window of the row before, if there is one.
// Returns the number of exceptions. Exponents are written up to a multiple of 32 behind the row.
template <class Format>
PACKHORSE_INLINE uint32_t scan_weights(const uint8_t* src, std::size_t n, const WeightRow& row,
                                       uint32_t& first, Isa isa) {
    split_weights(src, n, row.exponents, row.low_bytes);
    Window window;
    bool chosen = false;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2 && first != kNoWindow) {
        std::memset(row.exponents + n, 0, round_up(n, 32) - n);
        chosen = choose_near_window<Format>(row.exponents, n, first, src + 2 * n, window);
    }
#endif
    (void)isa;
    if (!chosen) window = choose_window<Format>(row.exponents, n);
    first = window.first;
    const auto outside = static_cast<uint32_t>(n) - window.covered;
    if (Format::kFirstCode == 0 || outside == 0) return outside;
    return outside - count_zeros(row.exponents, row.low_bytes, n);
}

// Makes packed elements: their low bytes replace signs and mantissas, their high bits replace
// exponents. Padding is treated as an element that is not an exception.
template <class Format>
PACKHORSE_INLINE void code_weights(const WeightShape<Format>& shape, uint8_t first,
                                   uint8_t* __restrict exponents, uint8_t* __restrict rest,
                                   uint8_t* __restrict marks) {
    const std::size_t n = shape.n_columns, n_padded = shape.n_padded;
    std::memset(exponents + n, Format::kFirstCode == 0 ? first : 0, n_padded - n);
    std::memset(rest + n, 0, n_padded - n);
    for (std::size_t i = 0; i < n_padded; ++i) {
        const uint8_t exponent = exponents[i], sign = rest[i] & 0x80, mantissa = rest[i] & 0x7F;
        const auto place = static_cast<uint8_t>(exponent - first - Format::kFirstCode);
        const bool inside = place < kWindowWidth<Format>;
        const bool zero = Format::kFirstCode != 0 && (exponent | mantissa) == 0;
        const uint8_t code = inside ? static_cast<uint8_t>(exponent - first) : uint8_t{0};
        const uint8_t keep = (inside | zero) ? 0xFF : 0;
        rest[i] = static_cast<uint8_t>((mantissa | code << 7) & keep);
        exponents[i] = static_cast<uint8_t>((sign >> (16 - Format::kBits) | code >> 1) & keep);
        marks[i] = static_cast<uint8_t>(~keep & 1);
    }
}

// Lists the exceptions of a row.
struct ExceptionList {
    const uint8_t* src;  // the row
    int32_t* end;

    PACKHORSE_INLINE void put(std::size_t column) {
        const uint32_t element = load<uint16_t>(src + 2 * column);
        *end = static_cast<int32_t>(element << 16 | static_cast<uint32_t>(column));
    }
};

inline void list_marked(const uint8_t* marks, std::size_t start, std::size_t stop,
                        ExceptionList& list) {
    for (std::size_t i = start; i < stop; i += 8)
        for (uint64_t word = load<uint64_t>(marks + i); word != 0; word &= word - 1, ++list.end)
            list.put(i + static_cast<std::size_t>(std::countr_zero(word)) / 8);
}

#if PACKHORSE_X86

// For rows with many exceptions. Among every 32 columns, two are written without a branch, because
// no processor can predict whether they are exceptions. The list has room for two more, and `stop`
// is a multiple of 32.
PACKHORSE_AVX2 inline void list_many_avx2(const uint8_t* marks, std::size_t stop,
                                          ExceptionList& list) {
    for (std::size_t i = 0; i < stop; i += 32) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(marks + i));
        auto mask = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7)));
        int32_t* const start = list.end;
        const int n = std::popcount(mask);
        for (int k = 0; k < 2 || mask != 0; ++k, ++list.end, mask &= mask - 1)
            list.put(i + static_cast<std::size_t>(std::countr_zero(mask)) % 32);
        list.end = start + n;
    }
}

#endif

// `dst` has room for all exceptions and kExceptionSlack more.
inline void list_exceptions(const uint8_t* src, const uint8_t* marks, std::size_t n_columns,
                            std::size_t n_padded, bool many, int32_t* dst, Isa isa) {
    ExceptionList list{src, dst};
    std::size_t done = 0;
#if PACKHORSE_X86
    if (many && isa >= Isa::kAvx2) {
        done = n_columns / 32 * 32;
        list_many_avx2(marks, done, list);
    }
#endif
    (void)many, (void)isa, (void)n_columns;
    list_marked(marks, done, n_padded, list);
}

PACKHORSE_INLINE void join_high_bits(const WeightShape<W12>& shape, const uint8_t* __restrict bits,
                                     uint8_t* __restrict dst) {
    for (std::size_t j = 0; j < shape.n_steps; ++j)
        dst[j] = static_cast<uint8_t>(bits[j] | bits[shape.n_steps + j] << 4);
}

PACKHORSE_INLINE void join_high_bits(const WeightShape<W11>& shape, const uint8_t* __restrict bits,
                                     uint8_t* __restrict dst) {
    const std::size_t n = shape.n_steps;
    for (std::size_t j = 0; j < n; ++j) {
        uint8_t signs = 0;
        for (uint32_t i = 0; i < 8; ++i)
            signs = static_cast<uint8_t>(signs | bits[i * n + j] >> 2 << i);
        dst[j] = signs;
    }
    for (std::size_t j = 0; j < 2 * n; ++j) {
        uint8_t below = 0;
        for (uint32_t i = 0; i < 4; ++i)
            below = static_cast<uint8_t>(below | (bits[2 * i * n + j] & 3) << (2 * i));
        dst[n + j] = below;
    }
}

// Packs rows of `src`, and appends their exceptions to `exceptions`.
template <class Format>
PACKHORSE_INLINE void pack_rows(const uint8_t* src, std::size_t n_rows,
                                const WeightShape<Format>& shape, const WeightRows& dst,
                                uint8_t* scratch, std::vector<int32_t>& exceptions, Isa isa) {
    const std::size_t n = shape.n_columns;
    std::size_t n_listed = 0;
    uint32_t first = kNoWindow;
    for (std::size_t r = 0; r < n_rows; ++r) {
        const uint8_t* const elements = src + 2 * r * n;
        const WeightRow row{dst.low_bytes + r * shape.n_padded, scratch, scratch + shape.n_padded};
        const uint32_t n_exceptions = scan_weights<Format>(elements, n, row, first, isa);
        code_weights(shape, static_cast<uint8_t>(first), row.exponents, row.low_bytes, row.marks);
        join_high_bits(shape, row.exponents, dst.high_bits + r * shape.n_high_bytes);
        dst.first_exponents[r] = static_cast<uint8_t>(first);
        store(dst.counts + r, static_cast<int32_t>(n_exceptions));
        if (n_exceptions == 0) continue;
        exceptions.resize(n_listed + n_exceptions + kExceptionSlack);
        list_exceptions(elements, row.marks, n, shape.n_padded, n_exceptions > n / 256,
                        exceptions.data() + n_listed, isa);
        n_listed += n_exceptions;
    }
    exceptions.resize(n_listed);
}

// Packs all rows. Returns a list of exceptions for each block of rows, in order.
template <class Format>
inline std::vector<std::vector<int32_t>> pack_weights(const uint8_t* src, std::size_t n_rows,
                                                      std::size_t n_columns, const WeightRows& dst,
                                                      std::size_t threads, Isa isa) {
    const WeightShape<Format> shape(n_columns);
    const std::size_t at_once = weight_rows_at_once(n_columns);
    const std::size_t n_blocks = (n_rows + at_once - 1) / at_once;
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_blocks));
    std::vector<std::vector<int32_t>> exceptions(n_blocks);
    const Scratch scratch(n_workers * 2 * shape.n_padded);
    parallel_for(n_blocks, n_workers, [&](std::size_t worker, std::size_t block) {
        const std::size_t row = block * at_once;
        const std::size_t n = std::min(at_once, n_rows - row);
        const WeightRows to{dst.low_bytes + row * shape.n_padded,
                            dst.high_bits + row * shape.n_high_bytes, dst.first_exponents + row,
                            dst.counts + row};
        uint8_t* const room = scratch.get() + worker * 2 * shape.n_padded;
        std::vector<int32_t>& list = exceptions[block];
        vectorised_wide(isa, [=, &list]() PACKHORSE_VECTORISED {
            pack_rows<Format>(src + 2 * row * shape.n_columns, n, shape, to, room, list, isa);
        });
    });
    return exceptions;
}

// Counts the exceptions that rows 0, row_step, 2 row_step ... would have.
template <class Format>
inline std::size_t count_weight_exceptions(const uint8_t* src, std::size_t n_rows,
                                           std::size_t n_columns, std::size_t row_step,
                                           std::size_t threads, Isa isa) {
    const std::size_t n_samples = (n_rows + row_step - 1) / row_step;
    const std::size_t at_once = weight_rows_at_once(n_columns);
    const std::size_t n_blocks = (n_samples + at_once - 1) / at_once;
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_blocks));
    const std::size_t room_nbytes = round_up(n_columns, 64);
    const Scratch scratch(n_workers * 2 * room_nbytes);
    std::atomic<std::size_t> total{0};
    parallel_for(n_blocks, n_workers, [&](std::size_t worker, std::size_t block) {
        uint8_t* const room = scratch.get() + worker * 2 * room_nbytes;
        const WeightRow row{room + room_nbytes, room, nullptr};
        const std::size_t start = block * at_once, stop = std::min(start + at_once, n_samples);
        vectorised_wide(isa, [=, &total]() PACKHORSE_VECTORISED {
            uint32_t first = kNoWindow;
            for (std::size_t sample = start; sample < stop; ++sample)
                total += scan_weights<Format>(src + 2 * sample * row_step * n_columns, n_columns,
                                              row, first, isa);
        });
    });
    return total;
}

}  // namespace packhorse
