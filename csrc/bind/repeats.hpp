// Bindings of repeated rows. What a message says is checked by the core.
#pragma once

#include <nanobind/stl/pair.h>

#include <bit>
#include <utility>

#include "bind/arguments.hpp"
#include "repeats/find.hpp"
#include "repeats/restore.hpp"

namespace packhorse {

using Slots = nb::ndarray<uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::size_t guess_row_length(Bytes part, std::size_t hint) {
    const ReleasedGil released(part.size());
    return guess_row_nbytes(part.data(), part.size(), hint);
}

// Returns (bytes of literals, bytes of tokens); no tokens if too few rows repeat.
inline std::pair<std::size_t, std::size_t> find_repeats_of(Bytes part, std::size_t start,
                                                           std::size_t row_nbytes, bool has_past,
                                                           Slots slots, WritableBytes tokens,
                                                           WritableBytes literals) {
    require(is_row_length(row_nbytes), "rows must have 16 to 4096 bytes");
    require(start <= part.size(), "the piece is outside of the part");
    require(part.size() / row_nbytes <= kMaxTableRows, "the part has too many rows");
    require(slots.size() >= RowTable::kBucket && std::has_single_bit(slots.size()),
            "the number of slots must be a power of two, at least 4");
    const std::size_t nbytes = part.size() - start;
    require(tokens.size() >= max_tokens_nbytes(nbytes / row_nbytes),
            "tokens has no room for the tokens of all rows");
    require(literals.size() >= nbytes, "literals has no room for all bytes");
    const ReleasedGil released(nbytes);
    const Repeats found =
        find_repeats(part.data(), start, part.size(), row_nbytes, has_past,
                     RowTable(slots.data(), slots.size()), tokens.data(), literals.data());
    return {found.literals_nbytes, found.tokens_nbytes};
}

// Makes the bytes of `memory` from `start` on. Returns whether lengths and tokens fit each other.
inline bool restore_rows_in(WritableBytes memory, std::size_t start, std::size_t literals_nbytes,
                            std::size_t row_nbytes, std::size_t skipped_nbytes, Bytes tokens) {
    require(start <= memory.size(), "the piece is outside of the memory");
    const ReleasedGil released(memory.size() - start);
    return restore_rows(memory.data(), start, memory.size(),
                        {row_nbytes, skipped_nbytes, literals_nbytes}, tokens.data(),
                        tokens.size());
}

inline void bind_repeats(nb::module_& m) {
    using namespace nb::literals;
    m.def("guess_row_nbytes", &guess_row_length, "part"_a, "hint"_a);
    m.def("find_repeats", &find_repeats_of, "part"_a, "start"_a, "row_nbytes"_a, "has_past"_a,
          "slots"_a.noconvert(), "tokens"_a.noconvert(), "literals"_a.noconvert());
    m.def("restore_rows", &restore_rows_in, "memory"_a.noconvert(), "start"_a, "literals_nbytes"_a,
          "row_nbytes"_a, "skipped_nbytes"_a, "tokens"_a);
}

}  // namespace packhorse
