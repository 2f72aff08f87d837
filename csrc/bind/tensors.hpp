// The classes of packhorse._core that describe a tensor, its side data, its base and its encoded
// form. Python makes each object once in a call and passes it to every function, instead of a dozen
// numbers and arrays. The objects keep their arrays alive.
//
// Only a Geometry and an EncodedTensor are checked when they are made. Side data, a base and the
// memory for an encoder are checked against the geometry of the tensor that they are used with.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bind/arguments.hpp"
#include "tensor/tensor.hpp"

namespace packhorse {

inline Level checked_level(int level) {
    require(level >= 1 && level <= 3, "level must be 1, 2 or 3");
    return static_cast<Level>(level);
}

inline Geometry checked_geometry(uint32_t unit_nbytes, int split, uint32_t chunk_log,
                                 std::size_t nbytes) {
    const char* const fault = geometry_fault(unit_nbytes, split, chunk_log, nbytes);
    require(fault == nullptr, fault);
    return Geometry(unit_nbytes, split, chunk_log, nbytes);
}

inline void require_tensor(const Bytes& src, const Geometry& geometry) {
    require(src.size() == geometry.nbytes(), "src must be as long as its geometry says");
}

template <class AnyTable>
void require_table(const AnyTable& table, const Geometry& geometry) {
    require(table.shape(0) == geometry.n_chunks() && table.shape(1) == geometry.row_length(),
            "table must have a row for each chunk and a column more than planes");
}

// Returns a view of `leaves`, which has room for the hashes of the leaves of `nbytes` bytes, and
// after them for a last leaf that is too short to be hashed.
inline ContentLeaves checked_leaves(const WritableBytes& leaves, std::size_t nbytes) {
    const std::size_t n_hashes = 16 * n_leaves(nbytes);
    require(leaves.size() == n_hashes + kXxh3LongMinNbytes - 1,
            "leaves must have 16 bytes for each leaf, and 240 more");
    return {leaves.data(), leaves.data() + n_hashes};
}

// Side data: a byte for each row, then one for each column.
struct SideArgument {
    Bytes values;
    std::size_t n_rows;

    SideData view(const Geometry& geometry) const {
        const char* const fault = side_fault(geometry, values.size(), n_rows);
        require(fault == nullptr, fault);
        return view_side(values.data(), values.size(), n_rows);
    }
};

// The base of a tensor. It has as many units as the tensor, or as many F32 if the tensor is a cast.
struct BaseArgument {
    Bytes data;
    bool is_float;
    Cast cast;

    BaseArgument(Bytes data, bool is_float, int cast)
        : data(std::move(data)), is_float(is_float), cast(static_cast<Cast>(cast)) {
        require(cast >= 0 && cast <= static_cast<int>(Cast::kToFp16), "cast must be 0, 1 or 2");
    }

    Base view(const Geometry& geometry) const {
        const uint32_t unit_nbytes = geometry.spec.unit_nbytes;
        const bool is_cast = cast != Cast::kNone;
        require(!is_cast || (unit_nbytes == 2 && is_float), "only floats of two bytes are cast");
        require(data.size() == geometry.n_units * (is_cast ? 4 : unit_nbytes),
                "the base must have as many units as the tensor");
        return {data.size() == 0 ? nullptr : data.data(), is_float, cast};
    }
};

inline SideData view_of(const std::optional<SideArgument>& side, const Geometry& geometry) {
    return side ? side->view(geometry) : SideData{};
}

inline Base view_of(const std::optional<BaseArgument>& base, const Geometry& geometry) {
    return base ? base->view(geometry) : Base{};
}

struct ContextArgument {
    Level level;
    std::optional<SideArgument> side;
    std::optional<BaseArgument> base;
    std::size_t plain_nbytes;
    Mode last_mode;
    uint32_t max_classes;
    Mode whole;

    EncodeContext view(const Geometry& geometry) const {
        require(!base || item_nbytes(geometry.spec) == 1,
                "a tensor with a base is split into bytes");
        require(max_classes <= kMaxSparseClasses, "max_classes is out of range");
        require(whole == Mode::kStored || whole == Mode::kMatches || whole == Mode::kNibbles,
                "whole must be stored, matches or nibbles");
        require(whole == Mode::kStored || (!base && geometry.split == Split::kWhole),
                "matches and nibbles need whole units and no base");
        return {level,
                view_of(side, geometry),
                view_of(base, geometry),
                plain_nbytes,
                last_mode,
                max_classes,
                whole};
    }
};

struct OutputArgument {
    WritableBytes payload;
    WritableTable table;
    std::optional<WritableBytes> leaves;
    std::optional<WritableBytes> base_leaves;
    std::optional<WritableBytes> kept;
    std::optional<WritableBytes> changes;

    // `nbytes` of the tensor are encoded.
    EncodeOutput view(const Geometry& geometry, const ContextArgument& context,
                      std::size_t nbytes) const {
        require_table(table, geometry);
        require(payload.size() >= round_up(nbytes, kFrameAlignment), "payload is too small");
        require(leaves.has_value() != kept.has_value() && kept.has_value() == changes.has_value(),
                "either leaves are needed, or kept and changes");
        EncodeOutput output{payload.data(), table.data(), {}};
        if (leaves) output.leaves = checked_leaves(*leaves, geometry.nbytes());
        if (context.base && base_leaves)
            output.base_leaves = checked_leaves(*base_leaves, context.base->data.size());
        if (kept) {
            require(context.base && context.base->cast == Cast::kNone && !base_leaves &&
                        kept->data() == context.base->data.data() &&
                        kept->size() == geometry.nbytes(),
                    "kept must be the base, which nobody else changes and which is not cast");
            require(changes->size() == geometry.n_chunks() * sizeof(SumChange) &&
                        reinterpret_cast<uintptr_t>(changes->data()) % alignof(SumChange) == 0,
                    "changes must have 24 bytes for each chunk, and be aligned");
            output.kept = kept->data();
            output.changes = reinterpret_cast<SumChange*>(changes->data());
        }
        return output;
    }
};

// The table must not change, because the places of chunks are computed once.
class EncodedArgument {
  public:
    EncodedArgument(Bytes payload, Table table, const Geometry& geometry,
                    const std::optional<SideArgument>& side,
                    const std::optional<BaseArgument>& base)
        : payload_(std::move(payload)),
          table_(std::move(table)),
          geometry_(geometry),
          side_(side),
          base_(base) {
        require_table(table_, geometry);
        offsets_ = chunk_offsets(table_.data(), geometry);
        require(offsets_.back() <= payload_.size(), "payload is shorter than the table says");
        side_data_ = view_of(side_, geometry);
        base_units_ = view_of(base_, geometry);
    }

    const Geometry& geometry() const { return geometry_; }
    EncodedTensor view() const {
        return {geometry_, side_data_, base_units_, payload_.data(), table_.data(), offsets_};
    }

  private:
    Bytes payload_;
    Table table_;
    Geometry geometry_;
    std::optional<SideArgument> side_;
    std::optional<BaseArgument> base_;
    std::vector<std::size_t> offsets_;
    SideData side_data_;
    Base base_units_;
};

// The numbers that a Geometry is made from, for pickle, repr() and hash().
using GeometryState = std::tuple<uint32_t, int, uint32_t, std::size_t>;

inline GeometryState state_of(const Geometry& geometry) {
    return {geometry.spec.unit_nbytes, static_cast<int>(geometry.split), geometry.chunk_log(),
            geometry.nbytes()};
}

inline std::string describe(const Geometry& geometry) {
    const auto [unit_nbytes, split, chunk_log, nbytes] = state_of(geometry);
    return "Geometry(unit_nbytes=" + std::to_string(unit_nbytes) +
           ", split=" + std::to_string(split) + ", chunk_log=" + std::to_string(chunk_log) +
           ", nbytes=" + std::to_string(nbytes) + ")";
}

inline void bind_geometry(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<Geometry>(m, "Geometry")
        .def(
            "__init__",
            [](Geometry* self, uint32_t unit_nbytes, int split, uint32_t chunk_log,
               std::size_t nbytes) {
                new (self) Geometry(checked_geometry(unit_nbytes, split, chunk_log, nbytes));
            },
            "unit_nbytes"_a, "split"_a, "chunk_log"_a, "nbytes"_a)
        .def_prop_ro("unit_nbytes", [](const Geometry& g) { return g.spec.unit_nbytes; })
        .def_prop_ro("split", [](const Geometry& g) { return static_cast<int>(g.split); })
        .def_prop_ro("chunk_log", &Geometry::chunk_log)
        .def_prop_ro("nbytes", &Geometry::nbytes)
        .def_prop_ro("n_units", [](const Geometry& g) { return g.n_units; })
        .def_prop_ro("n_planes", [](const Geometry& g) { return g.spec.n_planes; })
        .def_prop_ro("n_chunks", &Geometry::n_chunks)
        .def_prop_ro("chunk_nbytes", &Geometry::chunk_nbytes)
        .def("__eq__",
             [](const Geometry& g, nb::handle other) {
                 return nb::isinstance<Geometry>(other) && g == nb::cast<const Geometry&>(other);
             })
        .def("__hash__", [](const Geometry& g) { return nb::hash(nb::cast(state_of(g))); })
        .def("__repr__", &describe)
        .def("__getstate__", &state_of)
        .def("__setstate__", [](Geometry& self, const GeometryState& state) {
            new (&self) Geometry(std::apply(checked_geometry, state));
        });
}

inline void bind_tensors(nb::module_& m) {
    using namespace nb::literals;
    bind_geometry(m);
    nb::class_<SideArgument>(m, "Side").def(nb::init<Bytes, std::size_t>(), "values"_a, "n_rows"_a);
    nb::class_<BaseArgument>(m, "Base")
        .def(nb::init<Bytes, bool, int>(), "data"_a, "is_float"_a, "cast"_a)
        .def_ro("data", &BaseArgument::data)
        .def_ro("is_float", &BaseArgument::is_float)
        .def_prop_ro("cast", [](const BaseArgument& base) { return static_cast<int>(base.cast); });
    nb::class_<ContextArgument>(m, "EncodeContext")
        .def(
            "__init__",
            [](ContextArgument* self, int level, std::optional<SideArgument> side,
               std::optional<BaseArgument> base, std::size_t plain_nbytes, int last_mode,
               uint32_t max_classes, int whole) {
                new (self) ContextArgument{checked_level(level),
                                           std::move(side),
                                           std::move(base),
                                           plain_nbytes,
                                           static_cast<Mode>(last_mode),
                                           max_classes,
                                           static_cast<Mode>(whole)};
            },
            "level"_a, "side"_a, "base"_a, "plain_nbytes"_a,
            "last_mode"_a = static_cast<int>(Mode::kSparseDelta), "max_classes"_a = 0,
            "whole"_a = static_cast<int>(Mode::kStored));
    nb::class_<OutputArgument>(m, "EncodeOutput")
        .def(nb::init<WritableBytes, WritableTable, std::optional<WritableBytes>,
                      std::optional<WritableBytes>, std::optional<WritableBytes>,
                      std::optional<WritableBytes>>(),
             "payload"_a.noconvert(), "table"_a.noconvert(), "leaves"_a.noconvert(),
             "base_leaves"_a.noconvert() = nb::none(), "kept"_a.noconvert() = nb::none(),
             "changes"_a.noconvert() = nb::none());
    nb::class_<EncodedArgument>(m, "EncodedTensor")
        .def(nb::init<Bytes, Table, const Geometry&, const std::optional<SideArgument>&,
                      const std::optional<BaseArgument>&>(),
             "payload"_a, "table"_a, "geometry"_a, "side"_a, "base"_a);
}

}  // namespace packhorse
