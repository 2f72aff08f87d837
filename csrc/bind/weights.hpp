// Bindings of weights in memory. Shapes are checked here. The core checks the content of arrays
// from elsewhere, and codecs/weights.py puts faults into words.
#pragma once

#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "bind/arguments.hpp"
#include "rows/weights_pack.hpp"
#include "rows/weights_unpack.hpp"

namespace packhorse {

template <class T, int kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;

template <class T>
const uint8_t* bytes_of(const T& array) {
    return reinterpret_cast<const uint8_t*>(array.data());
}

// Calls work.operator()<Format>() for the format whose packed elements have `bits` bits.
template <class Work>
auto with_format(int bits, const Work& work) {
    require(bits == 11 || bits == 12, "bits must be 11 or 12");
    return bits == 12 ? work.template operator()<W12>() : work.template operator()<W11>();
}

inline void require_columns(std::size_t n_columns) {
    require(n_columns >= 1 && n_columns <= kMaxWeightColumns, "n_columns must be 1 to 65536");
}

template <class Format, class Planes>
void require_planes(const Planes& low_bytes, const Planes& high_bits, std::size_t n_rows,
                    std::size_t n_columns) {
    const WeightShape<Format> shape(n_columns);
    require(low_bytes.shape(0) == n_rows && low_bytes.shape(1) == shape.n_padded,
            "low_bytes have another shape");
    require(high_bits.shape(0) == n_rows && high_bits.shape(1) == shape.n_high_bytes,
            "high_bits have another shape");
}

// Joins part(list) of all lists, one after the other, in an array of T that Python owns.
template <class T, class Lists, class Part>
auto join_lists(const Lists& lists, const Part& part) {
    std::size_t n = 0;
    for (const auto& list : lists) n += part(list).size();
    auto joined = std::make_unique<T[]>(n);
    T* end = joined.get();
    for (const auto& list : lists) end = std::copy(part(list).begin(), part(list).end(), end);
    T* const memory = joined.release();
    nb::capsule owner(memory, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return nb::ndarray<nb::numpy, T, nb::ndim<1>>(memory, {n}, owner);
}

// Packs rows. Returns their exceptions.
inline nb::ndarray<nb::numpy, int32_t, nb::ndim<1>> pack_weight_rows(
    Array<const uint16_t, 2> elements, int bits, Array<uint8_t, 2> low_bytes,
    Array<uint8_t, 2> high_bits, Array<uint8_t, 1> first_exponents, Array<int32_t, 1> counts,
    std::size_t threads) {
    const Isa isa = choose_isa();
    const std::size_t n_rows = elements.shape(0), n_columns = elements.shape(1);
    require_columns(n_columns);
    require(first_exponents.shape(0) == n_rows && counts.shape(0) == n_rows,
            "there must be a first exponent and a count for each row");
    const auto exceptions = with_format(bits, [&]<class Format>() {
        require_planes<Format>(low_bytes, high_bits, n_rows, n_columns);
        const WeightRows dst{low_bytes.data(), high_bits.data(), first_exponents.data(),
                             counts.data()};
        const ReleasedGil released(elements.nbytes());
        return pack_weights<Format>(bytes_of(elements), n_rows, n_columns, dst, threads, isa);
    });
    return join_lists<int32_t>(exceptions, [](const auto& list) -> const auto& { return list; });
}

// Exceptions of rows 0, row_step, 2 row_step ...
inline std::size_t count_exceptions_of_rows(Array<const uint16_t, 2> elements, int bits,
                                            std::size_t row_step, std::size_t threads) {
    const Isa isa = choose_isa();
    require_columns(elements.shape(1));
    require(row_step > 0, "row_step must be positive");
    return with_format(bits, [&]<class Format>() {
        const ReleasedGil released(elements.nbytes() / row_step);
        return count_weight_exceptions<Format>(bytes_of(elements), elements.shape(0),
                                               elements.shape(1), row_step, threads, isa);
    });
}

using Planes = Array<const uint8_t, 2>;
using Firsts = Array<const uint8_t, 1>;
using Numbers = Array<const int32_t, 1>;

inline PackedWeights packed_weights(const Planes& low_bytes, const Planes& high_bits,
                                    const Firsts& first_exponents, const Numbers& exception_starts,
                                    const Numbers& exceptions) {
    const std::size_t n_rows = first_exponents.shape(0);
    require(exception_starts.shape(0) == n_rows + 1, "there must be a start more than rows");
    return {low_bytes.data(),           high_bits.data(),     first_exponents.data(),
            bytes_of(exception_starts), bytes_of(exceptions), n_rows,
            exceptions.shape(0)};
}

// Unpacks rows [row_start, row_start + dst.shape(0)). Returns the number of rows on success,
// otherwise a row that has an exception outside of it.
inline std::size_t unpack_weight_rows(Planes low_bytes, Planes high_bits, Firsts first_exponents,
                                      Numbers exception_starts, Numbers exceptions, int bits,
                                      std::size_t row_start, Array<uint16_t, 2> dst,
                                      std::size_t threads) {
    const Isa isa = choose_isa();
    const PackedWeights from =
        packed_weights(low_bytes, high_bits, first_exponents, exception_starts, exceptions);
    const std::size_t n_rows = dst.shape(0), n_columns = dst.shape(1);
    require_columns(n_columns);
    require(row_start <= from.n_rows && n_rows <= from.n_rows - row_start,
            "the rows are outside of the matrix");
    return with_format(bits, [&]<class Format>() {
        require_planes<Format>(low_bytes, high_bits, from.n_rows, n_columns);
        const ReleasedGil released(dst.nbytes());
        return unpack_weights<Format>(from, n_columns, row_start, row_start + n_rows,
                                      reinterpret_cast<uint8_t*>(dst.data()), threads, isa);
    });
}

// Returns (fault, row, place, what was found).
inline std::tuple<int, std::size_t, int64_t, int64_t> check_weight_rows(
    Planes low_bytes, Planes high_bits, Firsts first_exponents, Numbers exception_starts,
    Numbers exceptions, int bits, std::size_t n_columns) {
    const Isa isa = choose_isa();
    const PackedWeights from =
        packed_weights(low_bytes, high_bits, first_exponents, exception_starts, exceptions);
    require_columns(n_columns);
    const WeightCheck check = with_format(bits, [&]<class Format>() {
        require_planes<Format>(low_bytes, high_bits, from.n_rows, n_columns);
        const ReleasedGil released(low_bytes.nbytes());
        return check_weights<Format>(from, n_columns, isa);
    });
    return {static_cast<int>(check.fault), check.row, check.place, check.found};
}

inline void bind_weights(nb::module_& m) {
    using namespace nb::literals;
    m.def("pack_weights", &pack_weight_rows, "elements"_a.noconvert(), "bits"_a,
          "low_bytes"_a.noconvert(), "high_bits"_a.noconvert(), "first_exponents"_a.noconvert(),
          "counts"_a.noconvert(), "threads"_a);
    m.def("count_weight_exceptions", &count_exceptions_of_rows, "elements"_a.noconvert(), "bits"_a,
          "row_step"_a, "threads"_a);
    m.def("unpack_weights", &unpack_weight_rows, "low_bytes"_a.noconvert(),
          "high_bits"_a.noconvert(), "first_exponents"_a.noconvert(),
          "exception_starts"_a.noconvert(), "exceptions"_a.noconvert(), "bits"_a, "row_start"_a,
          "dst"_a.noconvert(), "threads"_a);
    m.def("check_weights", &check_weight_rows, "low_bytes"_a.noconvert(), "high_bits"_a.noconvert(),
          "first_exponents"_a.noconvert(), "exception_starts"_a.noconvert(),
          "exceptions"_a.noconvert(), "bits"_a, "n_columns"_a);
}

}  // namespace packhorse
