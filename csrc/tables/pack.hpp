// Packs rows of a table, and lists the elements that rows cannot hold.
#pragma once

#include <vector>

#include "common/parallel.hpp"
#include "common/scratch.hpp"
#include "tables/codes_avx512.hpp"
#include "tables/flagged_avx512.hpp"
#include "tables/triples_avx2.hpp"

namespace packhorse {

// Exceptions of some rows, row after row.
struct TableExceptionList {
    std::vector<uint16_t> columns;
    std::vector<uint8_t> elements;

    template <class U>
    void put(std::size_t column, U element) {
        columns.push_back(static_cast<uint16_t>(column));
        const std::size_t end = elements.size();
        elements.resize(end + sizeof(U));
        store(elements.data() + end, element);
    }
};

// Finds the lowest code of a value. Up to 16 values are compared one by one, for many elements at
// once, or looked up by byte. More are found in a list of all numbers of 16 bits, or for larger
// numbers by a hash without collisions: of some multipliers, the first one that gives each value a
// slot of its own is taken. So a look-up has no branch, because values come in no order that a
// processor could predict.
template <class U>
class TableCodes {
  public:
    static constexpr uint32_t kComparedBits = 4;
    static constexpr uint32_t kNone = 0xFFFF;

    explicit TableCodes(const TableElements<U>& table)
        : table_(table), is_hashed_(table.code_bits > kComparedBits), bytes_(table) {
        constexpr std::size_t kTries = 256;
        if (is_hashed_ && sizeof(U) == 2) {
            listed_.assign(std::size_t{1} << 16, kNone);
            for (uint32_t i = 1u << table.code_bits; i-- > 0;)
                listed_[static_cast<std::size_t>(table.values[i])] = static_cast<uint16_t>(i);
            return;
        }
        for (std::size_t i = 0; is_hashed_ && !is_perfect_ && i < kTries; ++i) {
            multiplier_ = multiplier_ * 0xD1342543DE82EF95u + 2;  // stays odd
            is_perfect_ = fill();
        }
    }

    bool is_hashed() const { return is_hashed_; }
    const CodeBytes<U>& bytes() const { return bytes_; }
    // The code of each number, or kNone; null if there is no such list.
    const uint16_t* listed() const { return listed_.empty() ? nullptr : listed_.data(); }
    // Whether look_up() finds every value that has a code.
    bool is_perfect() const { return is_perfect_; }
    uint64_t multiplier() const { return multiplier_; }
    const uint8_t* slots() const { return slots_; }

    static PACKHORSE_INLINE std::size_t slot_of(U value, uint64_t multiplier) {
        return static_cast<std::size_t>((static_cast<uint64_t>(value) * multiplier) >>
                                        (64 - kSlotsLog));
    }

    // The code of a value, or kNone.
    PACKHORSE_INLINE uint32_t find(U value) const {
        if (sizeof(U) == 2 && is_hashed_) return listed_[static_cast<std::size_t>(value)];
        if (is_perfect_) {
            const uint32_t code = slots_[slot_of(value, multiplier_)];
            return table_.values[code] == value ? code : kNone;
        }
        for (uint32_t i = 0; i < 1u << table_.code_bits; ++i)
            if (table_.values[i] == value) return i;
        return kNone;
    }

    // The packed element of an element. False if there is none.
    PACKHORSE_INLINE bool pack(U element, U rest_mask, U& packed) const {
        const uint32_t code = find(static_cast<U>(element & static_cast<U>(~rest_mask)));
        if (code == kNone) return false;
        const uint64_t moved =
            table_.code_bits == 0 ? 0 : static_cast<uint64_t>(code) << table_.rest_bits;
        packed = static_cast<U>(moved | table_.packed_rest(element));
        return true;
    }

  private:
    static constexpr std::size_t kSlotsLog = 14;  // fits the first cache
    static constexpr std::size_t kSlots = std::size_t{1} << kSlotsLog;

    // Returns whether each value has a slot of its own. Other slots have code 0.
    bool fill() {
        std::fill(std::begin(slots_), std::end(slots_), uint8_t{0});
        for (uint32_t i = 1u << table_.code_bits; i-- > 0;)
            slots_[slot_of(table_.values[i], multiplier_)] = static_cast<uint8_t>(i);
        bool all = true;
        for (uint32_t i = 0; i < 1u << table_.code_bits; ++i) {
            const U value = table_.values[i];
            all = all && table_.values[slots_[slot_of(value, multiplier_)]] == value;
        }
        return all;
    }

    const TableElements<U>& table_;
    bool is_hashed_;
    CodeBytes<U> bytes_;
    bool is_perfect_ = false;
    uint64_t multiplier_ = 0x9E3779B97F4A7C15u;
    uint8_t slots_[kSlots];
    std::vector<uint16_t> listed_;
};

// Packs elements whose values have a code in a list.
template <class U>
inline void pack_listed(const TableElements<U>& table, const uint16_t* __restrict listed,
                        const uint8_t* __restrict src, std::size_t n, U* __restrict packed,
                        U* __restrict found) {
    const U outside = static_cast<U>(~table.rest_mask());
    const uint32_t rest_bits = table.rest_bits;
    for (std::size_t c = 0; c < n; ++c) {
        const U element = load<U>(src + sizeof(U) * c);
        const uint32_t code = listed[static_cast<std::size_t>(element & outside)];
        const auto hit = static_cast<U>(code == TableCodes<U>::kNone ? 0 : ~U{0});
        U whole = static_cast<U>(code);
        if (rest_bits != 0) whole = static_cast<U>(code << rest_bits | table.packed_rest(element));
        packed[c] = static_cast<U>(whole & hit);
        found[c] = hit;
    }
}

// Packs elements whose values have slots of their own.
template <class U>
inline void pack_hashed(const TableElements<U>& table, const TableCodes<U>& codes,
                        const uint8_t* __restrict src, std::size_t n, U* __restrict packed,
                        U* __restrict found) {
    const U* __restrict const values = table.values;
    const uint8_t* __restrict const slots = codes.slots();
    const U mask = table.rest_mask(), outside = static_cast<U>(~mask);
    const uint64_t multiplier = codes.multiplier();
    const bool has_rest = table.rest_bits != 0;
    const uint32_t rest_bits = table.rest_bits;
    for (std::size_t c = 0; c < n; ++c) {
        const U element = load<U>(src + sizeof(U) * c);
        const auto value = static_cast<U>(element & outside);
        const uint64_t code = slots[TableCodes<U>::slot_of(value, multiplier)];
        const auto hit = static_cast<U>(0 - static_cast<uint64_t>(values[code] == value));
        U whole = static_cast<U>(code);
        if (has_rest) whole = static_cast<U>(code << rest_bits | table.packed_rest(element));
        packed[c] = static_cast<U>(whole & hit);
        found[c] = hit;
    }
}

// Packs elements with one of kValues values. `found` is 0 where there is no packed element.
template <class U, uint32_t kCodeBits>
PACKHORSE_INLINE void pack_compared(const TableElements<U>& table, const uint8_t* __restrict src,
                                    std::size_t n, U* __restrict packed, U* __restrict found) {
    constexpr uint32_t kValues = 1u << kCodeBits;
    const U mask = table.rest_mask(), outside = static_cast<U>(~mask);
    const U moved_mask = table.moved_mask;
    const uint32_t shift = table.shift % (8 * sizeof(U)), rest_bits = table.rest_bits;
    const uint32_t moved = table.moved_bits % (8 * sizeof(U));
    constexpr uint32_t kTop = 8 * sizeof(U) - 1;
    const U has_sign = table.has_sign ? 1 : 0;
    U values[kValues], codes[kValues];
    for (uint32_t i = 0; i < kValues; ++i) {
        values[i] = table.values[i];
        codes[i] = kCodeBits == 0 ? U{0} : static_cast<U>(uint64_t{i} << rest_bits);
    }
    for (std::size_t c = 0; c < n; ++c) {
        const U element = load<U>(src + sizeof(U) * c);
        const auto value = static_cast<U>(element & outside);
        U code = 0, hit = 0;
        for (uint32_t i = kValues; i-- > 0;) {
            const auto equal = static_cast<U>(value == values[i] ? ~U{0} : U{0});
            code = static_cast<U>((code & static_cast<U>(~equal)) | (codes[i] & equal));
            hit = static_cast<U>(hit | equal);
        }
        const auto sign = static_cast<U>(static_cast<U>((element >> kTop) & has_sign) << moved);
        const auto rest = static_cast<U>((static_cast<U>(element >> shift) & moved_mask) | sign);
        packed[c] = static_cast<U>((code | rest) & hit);
        found[c] = hit;
    }
}

template <class U>
inline void pack_elements(const TableElements<U>& table, const TableCodes<U>& codes,
                          const uint8_t* src, std::size_t n, U* packed, U* found, Isa isa) {
    if constexpr (sizeof(U) == 2)
        if (codes.listed() != nullptr)
            return pack_listed(table, codes.listed(), src, n, packed, found);
    if (codes.is_perfect()) return pack_hashed(table, codes, src, n, packed, found);
    if (codes.is_hashed()) {
        const U mask = table.rest_mask();
        for (std::size_t c = 0; c < n; ++c) {
            packed[c] = 0;
            found[c] = codes.pack(load<U>(src + sizeof(U) * c), mask, packed[c]) ? 1 : 0;
        }
        return;
    }
#if PACKHORSE_X86
    if (codes.bytes().is_valid && isa >= Isa::kAvx512Vbmi2)
        return look_up_codes_avx512(table, codes.bytes(), src, n, packed, found);
#endif
    const TableElements<U>* const at = &table;
    const auto run = [&]<uint32_t kCodeBits>() {
        vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
            pack_compared<U, kCodeBits>(*at, src, n, packed, found);
        });
    };
    switch (table.code_bits) {
        case 0:
            return run.template operator()<0>();
        case 1:
            return run.template operator()<1>();
        case 2:
            return run.template operator()<2>();
        case 3:
            return run.template operator()<3>();
        default:
            return run.template operator()<4>();
    }
}

// Calls visit(column) for each flag that is 1. The flags are bytes, rounded up to 8 of them.
template <class Visit>
inline void for_each_flag(uint8_t* flags, std::size_t n, const Visit& visit) {
    const std::size_t padded = round_up(n, 8);
    std::memset(flags + n, 0, padded - n);
    for (std::size_t i = 0; i < padded; i += 8)
        for (uint64_t word = load<uint64_t>(flags + i); word != 0; word &= word - 1)
            visit(i + static_cast<std::size_t>(std::countr_zero(word)) / 8);
}

// Memory for a row: packed elements, whether they were found, and high bits.
template <class U>
struct TableScratch {
    Scratch memory;
    U* packed;
    U* found;
    uint8_t* high;    // n + 2 bytes, rounded up to 8
    uint8_t* stored;  // packed elements of n columns, and 64 bytes more

    explicit TableScratch(std::size_t n)
        : TableScratch(round_up(n * sizeof(U), 64), round_up(n + 2, 64)) {}

  private:
    TableScratch(std::size_t elements, std::size_t bytes)
        : memory(3 * elements + 64 + bytes),
          packed(reinterpret_cast<U*>(memory.get())),
          found(reinterpret_cast<U*>(memory.get() + elements)),
          high(memory.get() + 2 * elements),
          stored(high + bytes) {}
};

// Writes the codes of packed elements. `codes` is memory for them. The triples are zero before.
template <class U>
inline void write_triples(const TableShape& shape, const U* packed, uint8_t* codes, uint8_t* dst,
                          Isa isa) {
    const std::size_t n = shape.n_columns, t = shape.n_triples();
    const uint32_t rest_bits = shape.rest_bits;
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        const U* __restrict const from = packed;
        uint8_t* __restrict const to = codes;
        for (std::size_t c = 0; c < n; ++c) to[c] = static_cast<uint8_t>(from[c] >> rest_bits);
        for (std::size_t c = n; c < 3 * t; ++c) to[c] = 0;
    });
    std::size_t done = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) done = make_triples_avx2(codes, t, dst);
#endif
    make_triples_portable(codes, t, done, dst);
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED { pack_narrow<2>(codes, t, dst + t); });
}

// Writes the planes of packed elements. The row is zero before.
template <class U>
inline void write_planes(const TableShape& shape, const U* packed, uint8_t* high, uint8_t* row,
                         Isa isa) {
    const std::size_t n = shape.n_columns;
    const uint32_t n_whole = shape.n_whole();
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (uint32_t i = 0; i < n_whole; ++i) {
            uint8_t* __restrict const plane = row + i * n;
            const U* __restrict const from = packed;
            for (std::size_t c = 0; c < n; ++c) plane[c] = static_cast<uint8_t>(from[c] >> 8 * i);
        }
    });
    with_narrow(shape.narrow_bits(), [&]<uint32_t kNarrow>() {
        vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
            const U* __restrict const from = packed;
            uint8_t* __restrict const to = high;
            for (std::size_t c = 0; c < n; ++c)
                to[c] = static_cast<uint8_t>(from[c] >> 8 * n_whole);
            pack_narrow<kNarrow>(high, n, row + n * n_whole);
        });
    });
    if (shape.has_triples) write_triples(shape, packed, high, row + shape.triples_offset(), isa);
}

// The row is zero before.
template <class U>
inline void pack_dense(const TableShape& shape, const TableElements<U>& table,
                       const TableCodes<U>& codes, const uint8_t* src,
                       const TableScratch<U>& scratch, uint8_t* row, TableExceptionList& list,
                       Isa isa) {
    const std::size_t n = shape.n_columns;
    pack_elements(table, codes, src, n, scratch.packed, scratch.found, isa);
    write_planes(shape, scratch.packed, scratch.high, row, isa);
    const U* const found = scratch.found;
    uint8_t* const flags = scratch.high;
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        const U* __restrict const hit = found;
        uint8_t* __restrict const to = flags;
        for (std::size_t c = 0; c < n; ++c) to[c] = hit[c] == 0;
    });
    for_each_flag(flags, n, [&](std::size_t c) { list.put(c, load<U>(src + sizeof(U) * c)); });
}

// Calls visit(column, element) for each element that differs from the background.
template <class U, class Visit>
inline void for_each_differing(const TableShape& shape, const uint8_t* src, uint8_t* flags, Isa isa,
                               const Visit& visit) {
    const std::size_t n = shape.n_columns;
    const U background = static_cast<U>(shape.background);
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        uint8_t* __restrict const to = flags;
        for (std::size_t c = 0; c < n; ++c) to[c] = load<U>(src + sizeof(U) * c) != background;
    });
    for_each_flag(flags, n, [&](std::size_t c) { visit(c, load<U>(src + sizeof(U) * c)); });
}

// The row is 0xFF before.
template <class U>
inline void pack_list(const TableShape& shape, const TableCodes<U>& codes, U rest_mask,
                      const uint8_t* src, const TableScratch<U>& scratch, uint8_t* row,
                      TableExceptionList& list, Isa isa) {
    const std::size_t n_whole = shape.n_whole();
    uint8_t* at = row + shape.first_nbytes();
    std::size_t n_stored = 0;
    bool is_first = true;
    U row_value = 0;
    for_each_differing<U>(shape, src, scratch.high, isa, [&](std::size_t column, U element) {
        if (is_first) row_value = element;
        is_first = false;
        U packed = 0;
        const bool fits =
            shape.has_row_value ? element == row_value : codes.pack(element, rest_mask, packed);
        if (!fits || n_stored == shape.capacity) return list.put(column, element);
        ++n_stored;
        store(at, static_cast<uint16_t>(column));
        std::memcpy(at + 2, &packed, n_whole);
        at += 2 + n_whole;
    });
    if (shape.has_row_value) store(row, row_value);
}

// Stores the packed elements whose flag is 1, without a branch for each. There is room for one
// more.
template <class T, class U>
inline uint8_t* store_flagged(const U* packed, const uint8_t* flags, std::size_t n, uint8_t* at) {
    for (std::size_t c = 0; c < n; ++c) {
        store(at, static_cast<T>(packed[c]));
        at += sizeof(T) * flags[c];
    }
    return at;
}

// As store_flagged() for the low bytes of packed elements, or for whole ones.
template <class U>
inline uint8_t* store_stored(const U* packed, const uint8_t* flags, std::size_t n,
                             std::size_t nbytes, uint8_t* at, Isa isa) {
    if (nbytes == 0) return at;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512Vbmi2) {
        if (nbytes == 1) return store_flagged_avx512<U, 1>(packed, flags, n, at);
        return store_flagged_avx512<U, sizeof(U)>(packed, flags, n, at);
    }
#endif
    (void)isa;
    if (nbytes == 1) return store_flagged<uint8_t>(packed, flags, n, at);
    return store_flagged<U>(packed, flags, n, at);
}

// A row of a bitmap. Often half of the columns are stored, so nothing here branches on a column.
// The row is zero before.
template <class U>
inline void pack_bitmap(const TableShape& shape, const TableElements<U>& table,
                        const TableCodes<U>& codes, const uint8_t* src,
                        const TableScratch<U>& scratch, uint8_t* row, TableExceptionList& list,
                        Isa isa) {
    const std::size_t n = shape.n_columns, padded = round_up(n, 8);
    const U background = static_cast<U>(shape.background);
    uint8_t* const flags = scratch.high;
    U* const found = scratch.found;
    std::memset(flags + n, 0, padded - n);
    if (shape.has_row_value) {
        U row_value = 0;
        for (std::size_t c = 0; c < n; ++c)
            if (const U element = load<U>(src + sizeof(U) * c); element != background) {
                row_value = element;
                break;
            }
        store(row, row_value);
        vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t c = 0; c < n; ++c)
                found[c] = load<U>(src + sizeof(U) * c) == row_value ? static_cast<U>(~U{0}) : U{0};
        });
    } else {
        pack_elements(table, codes, src, n, scratch.packed, found, isa);
    }
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        uint8_t* __restrict const to = flags;
        const U* __restrict const hit = found;
        for (std::size_t c = 0; c < n; ++c) {
            const bool differs = load<U>(src + sizeof(U) * c) != background;
            to[c] = static_cast<uint8_t>((differs ? 1 : 0) & (hit[c] != 0 ? 1 : 0));
        }
    });
    std::size_t left = shape.capacity;
    uint8_t* const bitmap = row + shape.row_value_nbytes();
    for (std::size_t i = 0; i < padded; i += 8) {
        uint64_t eight = load<uint64_t>(flags + i);
        std::size_t count = eight * 0x0101010101010101u >> 56;  // each byte is 0 or 1
        for (; count > left; --count) {  // beyond the capacity: the last ones are not stored
            eight &= ~(uint64_t{1} << (63 - static_cast<uint32_t>(std::countl_zero(eight))));
            store(flags + i, eight);
        }
        left -= count;
        bitmap[i / 8] = static_cast<uint8_t>(eight * 0x0102040810204080u >> 56);
    }
    // Storing without a branch writes some bytes too many, so it goes to other memory.
    uint8_t* const stored = scratch.stored;
    const uint8_t* const end =
        store_stored<U>(scratch.packed, flags, n, shape.n_whole(), stored, isa);
    std::memcpy(row + shape.first_nbytes(), stored, static_cast<std::size_t>(end - stored));
    bool some = false;
    bool* const result = &some;
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        uint8_t any = 0;
        for (std::size_t c = 0; c < n; ++c) {
            const bool differs = load<U>(src + sizeof(U) * c) != background;
            any = static_cast<uint8_t>(any | ((differs ? 1 : 0) & (flags[c] ^ 1)));
        }
        *result = any != 0;
    });
    for (std::size_t c = 0; some && c < n; ++c)
        if (const U element = load<U>(src + sizeof(U) * c); element != background && flags[c] == 0)
            list.put(c, element);
}

constexpr std::size_t kPackBlockNbytes = 1 << 18;  // of input that a thread takes at once

// Packs rows to `dst`, and writes the number of each row's exceptions. Returns the exceptions in a
// list for each block of rows, in order.
template <class U>
inline std::vector<TableExceptionList> pack_rows_of(const TableShape& shape, const uint8_t* src,
                                                    std::size_t n_rows, uint8_t* dst,
                                                    uint32_t* counts, std::size_t threads,
                                                    Isa isa) {
    const TableElements<U> table(shape);
    const TableCodes<U> codes(table);
    const std::size_t row_nbytes = shape.row_nbytes();
    const std::size_t at_once = std::max<std::size_t>(1, kPackBlockNbytes / row_nbytes);
    const std::size_t n_blocks = (n_rows + at_once - 1) / at_once;
    std::vector<TableExceptionList> lists(n_blocks);
    const int fill = shape.mode == TableMode::kList ? 0xFF : 0;
    parallel_for(n_blocks, threads, [&](std::size_t, std::size_t block) {
        const TableScratch<U> scratch(shape.n_columns);
        const std::size_t stop = std::min((block + 1) * at_once, n_rows);
        for (std::size_t r = block * at_once; r < stop; ++r) {
            const uint8_t* const from = src + r * row_nbytes;
            uint8_t* const row = dst + r * shape.stride;
            std::memset(row, fill, shape.stride);
            TableExceptionList& list = lists[block];
            const std::size_t before = list.columns.size();
            if (shape.mode == TableMode::kRaw)
                std::memcpy(row, from, row_nbytes);
            else if (shape.mode == TableMode::kDense)
                pack_dense(shape, table, codes, from, scratch, row, list, isa);
            else if (shape.mode == TableMode::kBitmap)
                pack_bitmap(shape, table, codes, from, scratch, row, list, isa);
            else
                pack_list(shape, codes, table.rest_mask(), from, scratch, row, list, isa);
            counts[r] = static_cast<uint32_t>(list.columns.size() - before);
        }
    });
    return lists;
}

}  // namespace packhorse
