// Bindings of embeddings between ranks. Shapes are checked here; wire/embeddings/ knows the
// meaning.
#pragma once

#include <nanobind/stl/optional.h>

#include <numeric>
#include <optional>

#include "bags/group.hpp"
#include "bags/ids.hpp"
#include "bags/sums.hpp"
#include "bind/arguments.hpp"

namespace packhorse {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WritableIntegers = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Joins the ids of features to keys: those of feature f have `bases[f]` added. Returns the first
// feature with an id that is not in 0 <= id < limits[f]; -1 if there is none. The caller keeps
// what lies at the addresses alive.
inline int64_t join_ids(Addresses sources, Addresses counts, Addresses limits, Addresses bases,
                        WritableIntegers keys) {
    const std::size_t n_features = sources.size();
    require(
        counts.size() == n_features && limits.size() == n_features && bases.size() == n_features,
        "counts, limits and bases must be as long as sources");
    const uint64_t* const lengths = counts.data();
    require(std::accumulate(lengths, lengths + n_features, uint64_t{0}) == keys.size(),
            "keys must be as long as all sources");
    int64_t* dst = keys.data();
    for (std::size_t f = 0; f < n_features; ++f) {
        const auto* const ids =
            reinterpret_cast<const int64_t*>(static_cast<uintptr_t>(sources.data()[f]));
        uint64_t most = 0;
        for (std::size_t i = 0; i < lengths[f]; ++i) {
            most = std::max(most, static_cast<uint64_t>(ids[i]));
            dst[i] = static_cast<int64_t>(static_cast<uint64_t>(ids[i]) + bases.data()[f]);
        }
        if (lengths[f] > 0 && most >= limits.data()[f]) return static_cast<int64_t>(f);
        dst += lengths[f];
    }
    return -1;
}

// Returns how many keys are distinct; -1 if a key does not fit 32 bits.
inline int64_t group_all(Integers keys, WritableIntegers unique, WritableIntegers inverse,
                         WritableIntegers order, WritableIntegers starts) {
    const std::size_t n = keys.size();
    require(
        unique.size() == n && inverse.size() == n && order.size() == n && starts.size() == n + 1,
        "outputs must be as long as keys, starts one longer");
    if (n > kMaxKey) return -1;
    const ReleasedGil released(8 * n);
    return group_keys(keys.data(), n, {unique.data(), inverse.data(), order.data(), starts.data()});
}

// Sums rows of blocks of fp32 into blocks. The caller keeps what lies at the addresses alive.
inline void sum_rows_of_blocks(Addresses sources, Addresses source_counts, Integers order,
                               std::optional<Integers> via, Integers starts, Addresses targets,
                               Addresses target_counts, std::size_t width, std::size_t threads) {
    require(source_counts.size() == sources.size() && target_counts.size() == targets.size(),
            "counts must be as long as addresses");
    const RowSums sums{order.data(), via ? via->data() : nullptr, starts.data(), width};
    const ReleasedGil released(order.size() * width * sizeof(float));
    const Rows<const float> rows(sources.data(), source_counts.data(), sources.size(), width);
    const Rows<float> dst(targets.data(), target_counts.data(), targets.size(), width);
    require(starts.size() == dst.size() + 1, "starts must be one longer than there are sums");
    require(are_inside(sums, order.size(), via ? via->size() : 0, rows.size(), dst.size()),
            "an index is outside");
    sum_rows(sums, rows, dst, std::max<std::size_t>(threads, 1), choose_isa());
}

inline void pack_numbers(Integers numbers, uint32_t bits, WritableBytes dst) {
    require(bits >= 1 && bits <= 63, "bits must be 1 to 63");
    require(dst.size() == packed_list_nbytes(numbers.size(), bits), "dst must fit the numbers");
    pack_list(numbers.data(), numbers.size(), bits, dst.data());
}

inline void unpack_numbers(Bytes packed, uint32_t bits, WritableIntegers numbers) {
    require(bits >= 1 && bits <= 63, "bits must be 1 to 63");
    require(packed.size() == packed_list_nbytes(numbers.size(), bits), "numbers must fit packed");
    unpack_list(packed.data(), numbers.size(), bits, numbers.data());
}

inline void mark_ids_in(Integers ids, WritableBytes bitmap) {
    std::fill_n(bitmap.data(), bitmap.size(), uint8_t{0});
    require(mark_ids(ids.data(), ids.size(), bitmap.data(), bitmap.size()), "an id is outside");
}

inline std::size_t find_ids_of(Bytes bitmap, WritableIntegers ids) {
    return find_ids(bitmap.data(), bitmap.size(), ids.size(), ids.data());
}

inline void bind_bags(nb::module_& m) {
    using namespace nb::literals;
    m.def("join_ids", &join_ids, "sources"_a, "counts"_a, "limits"_a, "bases"_a,
          "keys"_a.noconvert());
    m.def("group_keys", &group_all, "keys"_a, "unique"_a.noconvert(), "inverse"_a.noconvert(),
          "order"_a.noconvert(), "starts"_a.noconvert());
    m.def("sum_rows", &sum_rows_of_blocks, "sources"_a, "source_counts"_a, "order"_a,
          "via"_a.none(), "starts"_a, "targets"_a, "target_counts"_a, "width"_a, "threads"_a);
    m.def("pack_numbers", &pack_numbers, "numbers"_a, "bits"_a, "dst"_a.noconvert());
    m.def("unpack_numbers", &unpack_numbers, "packed"_a, "bits"_a, "numbers"_a.noconvert());
    m.def("mark_ids", &mark_ids_in, "ids"_a, "bitmap"_a.noconvert());
    m.def("find_ids", &find_ids_of, "bitmap"_a, "ids"_a.noconvert());
}

}  // namespace packhorse
