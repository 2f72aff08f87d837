// Gathers rows of a packed table.
#pragma once

#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "tables/bytes_avx512.hpp"
#include "tables/dense_avx2.hpp"
#include "tables/dense_avx512.hpp"
#include "tables/indices_avx512.hpp"
#include "tables/triples_avx2.hpp"

namespace packhorse {

template <class U>
inline void join_planes(const TablePlanes& planes, const TableElements<U>& table, uint8_t* dst,
                        Isa isa) {
    std::size_t done = 0;
#if PACKHORSE_X86
    if (table.code_bits <= 4) {
        if (isa >= Isa::kAvx512) return join_planes_avx512(planes, table, dst);
        if constexpr (sizeof(U) <= 4)
            if (isa >= Isa::kAvx2) done = join_planes_avx2(planes, table, dst);
    }
#endif
    (void)isa;
    join_planes_portable(planes, table, done, dst);
}

// What all rows of a gather share.
template <class U>
struct TableReader {
    const TableShape& shape;
    TableElements<U> table;
    Isa isa;
    bool has_bytes;
    uint32_t n_low;    // whole bytes below the highest byte of a packed element
    bool has_indices;  // looked up with VBMI
    ValueBytes value_bytes{};
    IndexedBytes<U> indexed;
#if PACKHORSE_X86
    HighBits512 high;
#endif

    TableReader(const TableShape& of, Isa which)
        : shape(of),
          table(of),
          isa(which),
          has_bytes(has_byte_rests<U>(of))
#if PACKHORSE_X86
          ,
          high(of)
#endif
    {
        n_low = (std::max(of.packed_bits(), 1u) - 1) / 8;
        has_indices = isa >= Isa::kAvx512Vbmi2 && sizeof(U) <= 4 && of.rest_bits >= 8 * n_low &&
                      (of.mode == TableMode::kDense || of.packed_bits() == 8);
        if (has_bytes) value_bytes = part_values(table);
        if (has_indices) indexed.fill(table, n_low);
    }
};

// The triples of a row. `scratch` as for unpack_high(): its second part receives the bits above
// their low bytes.
inline TripleSpan open_triples(const TableShape& shape, const uint8_t* row, uint8_t* scratch,
                               Isa isa) {
    const std::size_t count = shape.n_triples();
    const uint8_t* const low = row + shape.triples_offset();
    uint8_t* const top = scratch + round_up(shape.n_columns, 64);
    vectorised(isa, [=]() PACKHORSE_VECTORISED { unpack_narrow<2>(low + count, count, top); });
    return {low, top, shape.n_columns, count};
}

#if PACKHORSE_X86

// Calls join_bytes_avx2 for the number of whole bytes of the rest.
template <class U, class Codes>
PACKHORSE_AVX2 inline void join_bytes(const ColumnSpan& span, uint32_t n_whole,
                                      const ValueBytes& values, const Codes& codes) {
    if constexpr (sizeof(U) == 2) {
        join_bytes_avx2<U, 1>(span, values, codes);
    } else if constexpr (sizeof(U) == 4) {
        if (n_whole == 1) return join_bytes_avx2<U, 1>(span, values, codes);
        if (n_whole == 2) return join_bytes_avx2<U, 2>(span, values, codes);
        join_bytes_avx2<U, 3>(span, values, codes);
    }
    (void)n_whole;
}

// Both halves of a row whose codes have 4 bits, with 32 columns each at least.
template <class U>
PACKHORSE_AVX2 inline void join_nibbles(const TableReader<U>& reader, const uint8_t* row,
                                        const uint8_t* narrow, uint8_t* dst) {
    const std::size_t n = reader.shape.n_columns, half = narrow_nbytes(4, n);
    const uint32_t n_whole = reader.shape.n_whole();
    const ValueBytes& values = reader.value_bytes;
    join_bytes<U>({row, n, 0, half, dst}, n_whole, values, NibbleCodesAvx2<false>{narrow});
    join_bytes<U>({row, n, half, n - half, dst}, n_whole, values, NibbleCodesAvx2<true>{narrow});
}

// A row whose codes are in triples, of which 32 have three columns at least.
template <class U>
PACKHORSE_AVX2 inline void join_triples(const TableReader<U>& reader, const TripleSpan& span,
                                        const uint8_t* row, uint8_t* dst) {
    const uint32_t n_whole = reader.shape.n_whole();
    const ValueBytes& values = reader.value_bytes;
    if constexpr (sizeof(U) == 2) {
        join_triples_avx2<U, 1>(span, row, values, dst);
    } else {
        if (n_whole == 1)
            join_triples_avx2<U, 1>(span, row, values, dst);
        else if (n_whole == 2)
            join_triples_avx2<U, 2>(span, row, values, dst);
        else
            join_triples_avx2<U, 3>(span, row, values, dst);
    }
    const std::size_t n = span.n;
    const auto put = [&](std::size_t column, U code) {
        U packed = 0;
        for (uint32_t i = 0; i < n_whole; ++i)
            packed = static_cast<U>(packed | static_cast<U>(row[i * n + column]) << 8 * i);
        packed = static_cast<U>(packed | code << 8 * n_whole);
        store(dst + sizeof(U) * column, reader.table.element(packed));
    };
    for (std::size_t i = span.n_full(); i < span.count; ++i) {
        const Triple codes(span.low[i], span.top[i]);
        put(i, static_cast<U>(codes.first));
        put(i + span.count, static_cast<U>(codes.second));
    }
}

#endif

// Writes the bits above whole bytes as bytes. `high` has two parts of n_columns bytes, rounded up
// to 64, and receives them in the first one.
inline void unpack_high(const TableShape& shape, const uint8_t* row, uint8_t* high, Isa isa) {
    const std::size_t n = shape.n_columns, t = shape.n_triples();
    const uint8_t* const narrow = row + n * shape.n_whole();
    const uint32_t bits = shape.narrow_bits();
    with_narrow(bits, [&]<uint32_t kNarrow>() {
        vectorised(isa, [=]() PACKHORSE_VECTORISED { unpack_narrow<kNarrow>(narrow, n, high); });
    });
    if (t == 0) return;
    if (bits == 0) std::memset(high, 0, n);
    const TripleSpan span = open_triples(shape, row, high, isa);
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) done = put_codes_avx2(span, bits, high);
#endif
    put_codes_portable(span, done, bits, high);
}

#if PACKHORSE_X86

template <class U>
PACKHORSE_AVX512 inline void gather_bytes_avx512(const TableReader<U>& reader, const uint8_t* row,
                                                 uint8_t* scratch, uint8_t* dst) {
    const std::size_t n = reader.shape.n_columns;
    const uint32_t n_whole = reader.shape.n_whole();
    const ValueBytes& values = reader.value_bytes;
    if constexpr (sizeof(U) == 2) {
        join_bytes_avx512<U, 1>(reader.high, row, n, values, scratch, dst);
    } else if constexpr (sizeof(U) == 4) {
        if (n_whole == 1) return join_bytes_avx512<U, 1>(reader.high, row, n, values, scratch, dst);
        if (n_whole == 2) return join_bytes_avx512<U, 2>(reader.high, row, n, values, scratch, dst);
        join_bytes_avx512<U, 3>(reader.high, row, n, values, scratch, dst);
    }
}

template <class U>
PACKHORSE_AVX512_VBMI2 inline void gather_indices(const TableReader<U>& reader, const uint8_t* row,
                                                  uint8_t* scratch, uint8_t* dst) {
    const TableShape& shape = reader.shape;
    const LowRest low{shape.shift, shape.has_sign && shape.rest_bits == 8 * reader.n_low};
    const auto run = [&]<uint32_t kLow>() PACKHORSE_AVX512_VBMI2 {
        join_indices_avx512<U, kLow>(reader.high, reader.indexed, low, row, shape.n_columns,
                                     scratch, dst);
    };
    if (reader.n_low == 0) return run.template operator()<0>();
    if constexpr (sizeof(U) > 1)
        if (reader.n_low == 1) return run.template operator()<1>();
    if constexpr (sizeof(U) == 4) {
        if (reader.n_low == 2) return run.template operator()<2>();
        run.template operator()<3>();
    }
}

// Returns whether there was a way for the row.
template <class U>
PACKHORSE_AVX2 inline bool gather_bytes_avx2(const TableReader<U>& reader, const uint8_t* row,
                                             uint8_t* dst, uint8_t* scratch) {
    const TableShape& shape = reader.shape;
    const std::size_t n = shape.n_columns;
    if constexpr (sizeof(U) == 2 || sizeof(U) == 4) {
        if (shape.has_triples) {
            const TripleSpan span = open_triples(shape, row, scratch, Isa::kAvx2);
            if (span.n_full() < 32) return false;
            join_triples<U>(reader, span, row, dst);
            return true;
        }
    }
    if (n < 72) return false;
    if (shape.narrow_bits() == 4) {
        join_nibbles(reader, row, row + n * shape.n_whole(), dst);
        return true;
    }
    unpack_high(shape, row, scratch, Isa::kAvx2);
    join_bytes<U>({row, n, 0, n, dst}, shape.n_whole(), reader.value_bytes, ByteCodesAvx2{scratch});
    return true;
}

#endif

// `scratch` has gather_scratch_nbytes().
template <class U>
inline void gather_dense(const TableReader<U>& reader, const uint8_t* row, uint8_t* dst,
                         uint8_t* scratch) {
    const TableShape& shape = reader.shape;
    const Isa isa = reader.isa;
    const std::size_t n = shape.n_columns;
    const bool has_high = shape.narrow_bits() != 0 || shape.has_triples;
#if PACKHORSE_X86
    if (reader.has_bytes) {
        if (isa >= Isa::kAvx512) return gather_bytes_avx512(reader, row, scratch, dst);
        if (isa >= Isa::kAvx2 && gather_bytes_avx2(reader, row, dst, scratch)) return;
    }
    if constexpr (sizeof(U) <= 4)
        if (reader.has_indices) return gather_indices(reader, row, scratch, dst);
    if (has_high && isa >= Isa::kAvx512)
        unpack_high_avx512(reader.high, row, scratch + round_up(n, 64), scratch);
    else
#endif
        unpack_high(shape, row, scratch, isa);
    if (shape.code_bits == 8 && shape.rest_bits == 0) {
        for (std::size_t c = 0; c < n; ++c) store(dst + sizeof(U) * c, reader.table.values[row[c]]);
        return;
    }
    join_planes<U>({row, shape.n_whole(), has_high ? scratch : nullptr, n}, reader.table, dst, isa);
}

template <class U>
inline void fill_background(uint8_t* dst, std::size_t n, U background, Isa isa) {
    if (background == 0) {
        std::memset(dst, 0, n * sizeof(U));
        return;
    }
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t c = 0; c < n; ++c) store(dst + sizeof(U) * c, background);
    });
}

// Kinds of elements that a sparse row stores. Each reads an element at `at`.
template <class U>
struct SameElement {
    U element;
    static constexpr std::size_t kNbytes = 0;
    PACKHORSE_INLINE U load_at(const uint8_t*) const { return element; }
};

template <class U>
struct IndexedElement {
    const U* values;
    static constexpr std::size_t kNbytes = 1;
    PACKHORSE_INLINE U load_at(const uint8_t* at) const { return values[*at]; }
};

// A packed element of 8 bits that has a code and a rest.
template <class U>
struct NarrowElement {
    const TableElements<U>& table;
    static constexpr std::size_t kNbytes = 1;
    PACKHORSE_INLINE U load_at(const uint8_t* at) const {
        return table.element(static_cast<U>(*at));
    }
};

template <class U>
struct PackedElement {
    const TableElements<U>& table;
    static constexpr std::size_t kNbytes = sizeof(U);
    PACKHORSE_INLINE U load_at(const uint8_t* at) const { return table.element(load<U>(at)); }
};

template <class U, class Stored>
inline void gather_list(const TableShape& shape, const Stored& stored, const uint8_t* entry,
                        uint8_t* dst) {
    for (std::size_t k = 0; k < shape.capacity; ++k, entry += 2 + Stored::kNbytes) {
        const std::size_t column = load<uint16_t>(entry);
        if (column >= shape.n_columns) return;  // the end of the list
        store(dst + sizeof(U) * column, stored.load_at(entry + 2));
    }
}

template <class U, class Stored>
inline void gather_bitmap(const TableShape& shape, const Stored& stored, const uint8_t* bitmap,
                          uint8_t* dst) {
    const uint8_t* at = bitmap + shape.bitmap_nbytes();
    std::size_t left = shape.capacity;
    for (std::size_t first = 0; first < shape.n_columns; first += 64) {
        const std::size_t n = std::min<std::size_t>(64, shape.n_columns - first);
        uint64_t word = load<uint64_t>(bitmap + first / 8);
        if (n < 64) word &= (uint64_t{1} << n) - 1;
        auto count = std::min(static_cast<std::size_t>(std::popcount(word)), left);
        left -= count;
        uint8_t* const to = dst + sizeof(U) * first;
        for (; count != 0; --count, word &= word - 1, at += Stored::kNbytes)
            store(to + sizeof(U) * static_cast<std::size_t>(std::countr_zero(word)),
                  stored.load_at(at));
    }
}

template <class U>
inline void gather_sparse(const TableReader<U>& reader, const uint8_t* row, uint8_t* dst) {
    const TableShape& shape = reader.shape;
    const auto background = static_cast<U>(shape.background);
    const U row_value = shape.has_row_value ? load<U>(row) : U{0};
    row += shape.row_value_nbytes();
#if PACKHORSE_X86
    if (shape.mode == TableMode::kBitmap && reader.isa >= Isa::kAvx512Vbmi2) {
        const BitmapRow bits{row, shape.n_columns, row + shape.bitmap_nbytes(), shape.capacity};
        if constexpr (sizeof(U) <= 4)
            if (reader.has_indices)
                return look_up_bitmap_avx512<U>(bits, background, reader.indexed, dst);
        if (shape.rest_bits == 8 * sizeof(U)) return spread_bitmap_avx512<U>(bits, background, dst);
    }
#endif
    fill_background(dst, shape.n_columns, background, reader.isa);
    const auto gather = [&](const auto& stored) {
        if (shape.mode == TableMode::kList) return gather_list<U>(shape, stored, row, dst);
        gather_bitmap<U>(shape, stored, row, dst);
    };
    if (shape.packed_bits() == 0)
        return gather(SameElement<U>{shape.has_row_value ? row_value : reader.table.values[0]});
    if (shape.code_bits == 8 && shape.rest_bits == 0)
        return gather(IndexedElement<U>{reader.table.values});
    if (shape.packed_bits() == 8) return gather(NarrowElement<U>{reader.table});
    gather(PackedElement<U>{reader.table});
}

constexpr std::size_t kTableBlockNbytes = 1 << 16;  // of output that a thread takes at once
constexpr std::size_t kMaxTableRowAhead = 1024;     // of a row; its own reads fetch the rest

// High bits as bytes, and memory to get them: 8 slices of whole vectors at most.
inline std::size_t gather_scratch_nbytes(const TableShape& shape) {
    return 2 * round_up(shape.n_columns, 64) + 8 * 64 + 64;
}

// A table in memory.
struct TableRows {
    const uint8_t* rows;
    std::size_t n_rows;
    TableExceptions exceptions;
};

// Fetches what rows need long before their turn, so that no row waits for memory. Exceptions take
// three fetches of which each needs the one before: the mark of a row, the place of its exceptions,
// the exceptions. Addresses that are only fetched may lie anywhere.
template <class U>
class TableRowsAhead {
  public:
    static constexpr std::size_t kRows = 16;  // a row is fetched that many turns before its own

    TableRowsAhead(const TableRows& from, std::size_t stride)
        : from_(from), stride_(stride), nbytes_(std::min(stride, kMaxTableRowAhead)) {}

    // The first line of a row. Where several rows are asked for at once, the processor looks up
    // their pages side by side, and not each one while all else waits.
    PACKHORSE_INLINE void touch(std::size_t row) const { __builtin_prefetch(at(row), 0, 2); }

    // Into the second cache: the first one takes too few fetches at a time.
    PACKHORSE_INLINE void fetch(std::size_t row) const {
        fetch_lines<2>(row);
        if (!has_exceptions()) return;
        __builtin_prefetch(from_.exceptions.marks + row / 32);
        __builtin_prefetch(from_.exceptions.ranks + row / 32);
    }

    // From the second cache to the first: a row is read in many small parts.
    PACKHORSE_INLINE void bring(std::size_t row) const { fetch_lines<3>(row); }

    // `turn` is that of the row. Rows whose turn is kRows or more apart share a place.
    PACKHORSE_INLINE void find_exceptions(std::size_t turn, std::size_t row) {
        std::size_t& found = found_[turn % kRows];
        found = TableExceptions::kNone;
        if (!has_exceptions() || row >= from_.n_rows) return;
        found = from_.exceptions.find(row);
        if (found != TableExceptions::kNone) __builtin_prefetch(from_.exceptions.starts + found);
    }

    PACKHORSE_INLINE void fetch_exceptions(std::size_t turn) const {
        const std::size_t k = found_[turn % kRows];
        if (k == TableExceptions::kNone) return;
        const std::size_t start = from_.exceptions.starts[k];
        __builtin_prefetch(from_.exceptions.columns + start);
        __builtin_prefetch(from_.exceptions.elements + sizeof(U) * start);
    }

    PACKHORSE_INLINE void put_exceptions(std::size_t turn, std::size_t n_columns,
                                         uint8_t* dst) const {
        const std::size_t k = found_[turn % kRows];
        if (k != TableExceptions::kNone) from_.exceptions.template put<U>(k, n_columns, dst);
    }

  private:
    bool has_exceptions() const { return from_.exceptions.n_marked != 0; }
    PACKHORSE_INLINE const uint8_t* at(std::size_t row) const { return from_.rows + row * stride_; }

    // All lines that the row touches: it may begin within one.
    template <int kLocality>
    PACKHORSE_INLINE void fetch_lines(std::size_t row) const {
        const auto start = reinterpret_cast<uintptr_t>(at(row));
        for (uintptr_t line = start & ~uintptr_t{63}; line < start + nbytes_; line += 64)
            __builtin_prefetch(reinterpret_cast<const void*>(line), 0, kLocality);
    }

    const TableRows& from_;
    std::size_t stride_;
    std::size_t nbytes_;  // of a row that are fetched
    std::size_t found_[kRows];
};

template <class U>
inline void gather_row(const TableReader<U>& reader, const uint8_t* row, uint8_t* dst,
                       uint8_t* scratch) {
    if (reader.shape.mode == TableMode::kRaw)
        std::memcpy(dst, row, reader.shape.row_nbytes());
    else if (reader.shape.mode == TableMode::kDense)
        gather_dense(reader, row, dst, scratch);
    else
        gather_sparse(reader, row, dst);
}

// The ids of a gather. Another thread may write to them meanwhile, so each is read anew and checked
// where it is used; what is no row then is left out.
struct TableIds {
    const volatile int64_t* at;

    explicit TableIds(const int64_t* ids) : at(ids) {}
    std::size_t operator[](std::size_t i) const { return static_cast<std::size_t>(at[i]); }
};

// Gathers row ids[i] to place(i), and then calls done(i), for i from `start` to `stop` - 1.
template <class U, class Place, class Done>
inline void gather_some_rows(const TableReader<U>& reader, const TableRows& from,
                             const TableIds& ids, std::size_t start, std::size_t stop,
                             const Place& place, const Done& done) {
    using Rows = TableRowsAhead<U>;
    constexpr std::size_t kRows = Rows::kRows, kFind = 4, kFetch = 10, kBring = 13;  // turns after
    const TableShape& shape = reader.shape;
    const Scratch scratch(gather_scratch_nbytes(shape));
    Rows ahead(from, shape.stride);
    for (std::size_t turn = start; turn < stop + kRows; ++turn) {
        const auto is_turn = [=](std::size_t after) {
            return turn >= start + after && turn < stop + after;
        };
        if ((turn - start) % kRows == 0)
            for (std::size_t i = turn; i < std::min(turn + kRows, stop); ++i) ahead.touch(ids[i]);
        if (is_turn(0)) ahead.fetch(ids[turn]);
        if (is_turn(kFind)) ahead.find_exceptions(turn - kFind, ids[turn - kFind]);
        if (is_turn(kFetch)) ahead.fetch_exceptions(turn - kFetch);
        if (is_turn(kBring)) ahead.bring(ids[turn - kBring]);
        if (!is_turn(kRows)) continue;
        const std::size_t i = turn - kRows, row = ids[i];
        if (row >= from.n_rows) continue;
        uint8_t* const dst = place(i);
        gather_row(reader, from.rows + row * shape.stride, dst, scratch.get());
        ahead.put_exceptions(i, shape.n_columns, dst);
        done(i);
    }
}

// Rows ids[0 .. n) to `dst`, one after the other.
template <class U>
inline void gather_rows(const TableShape& shape, const TableRows& from, const int64_t* ids,
                        std::size_t n, uint8_t* dst, std::size_t threads, Isa isa) {
    const TableReader<U> reader(shape, isa);
    const TableIds numbers(ids);
    const std::size_t row_nbytes = shape.row_nbytes();
    const std::size_t at_once = std::max<std::size_t>(1, kTableBlockNbytes / row_nbytes);
    parallel_for((n + at_once - 1) / at_once, threads, [&](std::size_t, std::size_t block) {
        const std::size_t start = block * at_once, stop = std::min(start + at_once, n);
        gather_some_rows(
            reader, from, numbers, start, stop, [=](std::size_t i) { return dst + i * row_nbytes; },
            [](std::size_t) {});
    });
}

// The position of the first id that is not a row; n if all are rows.
inline std::size_t find_bad_id(const int64_t* ids, std::size_t n, std::size_t n_rows) {
    bool bad = false;
    for (std::size_t i = 0; i < n; ++i) bad |= static_cast<uint64_t>(ids[i]) >= n_rows;
    if (!bad) return n;
    std::size_t i = 0;
    while (static_cast<uint64_t>(ids[i]) < n_rows) ++i;
    return i;
}

}  // namespace packhorse
