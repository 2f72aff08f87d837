// Bindings of tables in memory. Shapes and lengths are checked here; codecs/tables.py puts what is
// wrong into words.
#pragma once

#include <nanobind/stl/tuple.h>

#include <tuple>
#include <vector>

#include "bind/arguments.hpp"
#include "bind/weights.hpp"
#include "tables/gather.hpp"
#include "tables/pack.hpp"
#include "tables/sum.hpp"

namespace packhorse {

// mode, element_nbytes, n_columns, rest_bits, shift, has_sign, capacity, background, has_row_value,
// has_triples, stride.
constexpr std::size_t kTableFields = 11;

inline TableShape table_shape(const Array<const uint64_t, 1>& fields,
                              const Array<const uint64_t, 1>& values) {
    require(fields.shape(0) == kTableFields, "a table has eleven fields");
    const std::size_t n_values = values.shape(0);
    require(std::has_single_bit(n_values) && n_values <= kMaxTableValues,
            "there must be 1, 2, 4 ... 256 values");
    const uint64_t* const at = fields.data();
    require(at[0] <= 3, "there is no such mode");
    for (const std::size_t i : {1, 2, 3, 4, 6, 10})
        require(at[i] <= UINT32_MAX, "a field is out of range");
    TableShape shape{static_cast<TableMode>(at[0]),
                     static_cast<uint32_t>(at[1]),
                     at[2],
                     static_cast<uint32_t>(std::countr_zero(n_values)),
                     static_cast<uint32_t>(at[3]),
                     static_cast<uint32_t>(at[4]),
                     at[5] != 0,
                     at[6],
                     at[7],
                     at[8] != 0,
                     at[9] != 0,
                     at[10],
                     {}};
    std::copy_n(values.data(), n_values, shape.values);
    require(shape.fits(), "the fields of the table do not fit each other");
    return shape;
}

// Packs rows. Returns the columns and the bytes of their exceptions.
inline auto pack_table_rows(Array<const uint64_t, 1> fields, Array<const uint64_t, 1> values,
                            Array<const uint8_t, 2> src, Array<uint8_t, 2> rows,
                            Array<uint32_t, 1> counts, std::size_t threads) {
    const Isa isa = choose_isa();
    const TableShape shape = table_shape(fields, values);
    const std::size_t n_rows = src.shape(0);
    require(src.shape(1) == shape.row_nbytes(), "the rows have another length");
    require(rows.shape(0) == n_rows && rows.shape(1) == shape.stride && counts.shape(0) == n_rows,
            "there must be a packed row and a count for each row");
    const std::vector<TableExceptionList> lists =
        with_elements(shape.element_nbytes, [&]<class U>() {
            const ReleasedGil released(src.nbytes());
            return pack_rows_of<U>(shape, src.data(), n_rows, rows.data(), counts.data(), threads,
                                   isa);
        });
    return std::make_tuple(
        join_lists<uint16_t>(lists, [](const auto& list) -> const auto& { return list.columns; }),
        join_lists<uint8_t>(lists, [](const auto& list) -> const auto& { return list.elements; }));
}

// A packed table as Python has it.
struct TableArrays {
    Array<const uint8_t, 2> rows;
    Array<const uint32_t, 1> marks, ranks, starts;
    Array<const uint16_t, 1> columns;
    Array<const uint8_t, 1> elements;

    TableRows checked(const TableShape& shape) const {
        const std::size_t n_rows = rows.shape(0), n_words = (n_rows + 31) / 32;
        require(rows.shape(1) == shape.stride, "the rows have another stride");
        require(marks.shape(0) == n_words && ranks.shape(0) == n_words,
                "there must be a mark for each row, and a rank for 32");
        require(
            starts.shape(0) >= 1 && elements.shape(0) == columns.shape(0) * shape.element_nbytes,
            "the exceptions do not fit each other");
        return {rows.data(),
                n_rows,
                {marks.data(), ranks.data(), starts.data(), columns.data(), elements.data(),
                 starts.shape(0) - 1, columns.shape(0)}};
    }
};

// Gathers rows. Returns the position of the first id that is not a row; the number of ids if all
// are. Then all rows were gathered, otherwise none.
inline std::size_t gather_table_rows(Array<const uint64_t, 1> fields,
                                     Array<const uint64_t, 1> values, Array<const uint8_t, 2> rows,
                                     Array<const uint32_t, 1> marks, Array<const uint32_t, 1> ranks,
                                     Array<const uint32_t, 1> starts,
                                     Array<const uint16_t, 1> columns,
                                     Array<const uint8_t, 1> elements, Array<const int64_t, 1> ids,
                                     Array<uint8_t, 2> dst, std::size_t threads) {
    const Isa isa = choose_isa();
    const TableShape shape = table_shape(fields, values);
    const TableRows from =
        TableArrays{rows, marks, ranks, starts, columns, elements}.checked(shape);
    const std::size_t n = ids.shape(0);
    require(dst.shape(0) == n && dst.shape(1) == shape.row_nbytes(),
            "there must be an output row for each id");
    const ReleasedGil released(dst.nbytes());
    const std::size_t bad = find_bad_id(ids.data(), n, from.n_rows);
    if (bad != n) return bad;
    with_elements(shape.element_nbytes, [&]<class U>() {
        gather_rows<U>(shape, from, ids.data(), n, dst.data(), threads, isa);
    });
    return n;
}

// Sums the rows of bags; elements of 4 bytes are FP32, those of 2 bytes BF16. Returns as
// gather_table_rows().
inline std::size_t sum_table_rows(Array<const uint64_t, 1> fields, Array<const uint64_t, 1> values,
                                  Array<const uint8_t, 2> rows, Array<const uint32_t, 1> marks,
                                  Array<const uint32_t, 1> ranks, Array<const uint32_t, 1> starts,
                                  Array<const uint16_t, 1> columns,
                                  Array<const uint8_t, 1> elements, Array<const int64_t, 1> ids,
                                  Array<const int64_t, 1> bag_starts, Array<uint8_t, 2> dst,
                                  std::size_t threads) {
    const Isa isa = choose_isa();
    const TableShape shape = table_shape(fields, values);
    const TableRows from =
        TableArrays{rows, marks, ranks, starts, columns, elements}.checked(shape);
    const std::size_t n = ids.shape(0), n_bags = dst.shape(0);
    require(shape.element_nbytes == 4 || shape.element_nbytes == 2,
            "the elements must be FP32 or BF16");
    require(dst.shape(1) == shape.row_nbytes() && bag_starts.shape(0) == n_bags + 1,
            "there must be an output row and a start for each bag, and an end");
    const ReleasedGil released(n * shape.row_nbytes());
    const std::size_t bad = find_bad_id(ids.data(), n, from.n_rows);
    if (bad != n) return bad;
    const auto sum = [&]<class Number>() {
        sum_rows_of_bags<Number>(shape, from, ids.data(), n, bag_starts.data(), n_bags, dst.data(),
                                 std::max<std::size_t>(threads, 1), isa);
    };
    shape.element_nbytes == 4 ? sum.template operator()<Fp32>() : sum.template operator()<Bf16>();
    return n;
}

inline void bind_tables(nb::module_& m) {
    using namespace nb::literals;
    m.def("pack_table_rows", &pack_table_rows, "fields"_a.noconvert(), "values"_a.noconvert(),
          "src"_a.noconvert(), "rows"_a.noconvert(), "counts"_a.noconvert(), "threads"_a);
    m.def("gather_table_rows", &gather_table_rows, "fields"_a.noconvert(), "values"_a.noconvert(),
          "rows"_a.noconvert(), "marks"_a.noconvert(), "ranks"_a.noconvert(),
          "starts"_a.noconvert(), "columns"_a.noconvert(), "elements"_a.noconvert(),
          "ids"_a.noconvert(), "dst"_a.noconvert(), "threads"_a);
    m.def("sum_table_rows", &sum_table_rows, "fields"_a.noconvert(), "values"_a.noconvert(),
          "rows"_a.noconvert(), "marks"_a.noconvert(), "ranks"_a.noconvert(),
          "starts"_a.noconvert(), "columns"_a.noconvert(), "elements"_a.noconvert(),
          "ids"_a.noconvert(), "bag_starts"_a.noconvert(), "dst"_a.noconvert(), "threads"_a);
}

}  // namespace packhorse
