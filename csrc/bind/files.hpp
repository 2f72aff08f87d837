// Headers of files and places of frames in them, for Python: as text, as tuples, as pieces.
#pragma once

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/views.hpp"
#include "frame/file_header.hpp"

namespace packhorse {

// The UTF-8 of a string of Python, which keeps it.
inline std::string_view utf8_of(nb::handle string) {
    Py_ssize_t size = 0;
    const char* const text = PyUnicode_AsUTF8AndSize(string.ptr(), &size);
    if (text == nullptr) throw nb::python_error();
    return {text, static_cast<std::size_t>(size)};
}

// Appends a string of JSON, with escapes for what needs one.
inline void append_quoted(std::string& text, std::string_view string) {
    constexpr std::string_view kShort = "\"\"\\\\\bb\ff\nn\rr\tt";  // each with its letter
    constexpr char kDigits[] = "0123456789abcdef";
    text += '"';
    std::size_t start = 0;  // of what needs no escape
    for (std::size_t i = 0; i < string.size(); ++i) {
        const char c = string[i];
        const auto unit = static_cast<unsigned char>(c);
        if (unit >= 0x20 && c != '"' && c != '\\') continue;
        text.append(string, start, i - start);
        start = i + 1;
        std::size_t at = 0;
        while (at < kShort.size() && kShort[at] != c) at += 2;
        text += '\\';
        if (at < kShort.size())
            text += kShort[at + 1];
        else
            text.append("u00").append({kDigits[unit >> 4], kDigits[unit & 15]});
    }
    text.append(string, start).append(1, '"');
}

// The data of a file are no longer, so that no offset overflows.
constexpr std::size_t kMaxDataNbytes = (std::size_t{1} << 63) - 1;

// Where a tensor's bytes lie, at the end of its row.
inline void append_offsets(std::string& rows, std::size_t start, std::size_t stop) {
    rows.append("\"data_offsets\":[").append(std::to_string(start)).append(1, ',');
    rows.append(std::to_string(stop)).append("]}");
}

// The rows of a packed file's header: JSON of the entries of frames that follow each other.
inline nb::bytes rows_of_frames(const nb::list& names, const std::vector<std::size_t>& lengths) {
    require(names.size() == lengths.size(), "each frame needs a name");
    std::string rows;
    std::size_t stop = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        const std::size_t start = stop;
        stop += lengths[i];
        if (i > 0) rows += ',';
        append_quoted(rows, utf8_of(names[i]));
        rows.append(":{\"dtype\":\"U8\",\"shape\":[").append(std::to_string(lengths[i]));
        rows += "],";
        append_offsets(rows, start, stop);
    }
    return nb::bytes(rows.data(), rows.size());
}

// A tuple of a subclass of Python's, such as a named tuple.
inline nb::object tuple_of(nb::handle kind, const nb::tuple& items) {
    const auto make = reinterpret_cast<newfunc>(PyType_GetSlot(&PyTuple_Type, Py_tp_new));
    const nb::tuple args = nb::make_tuple(items);
    nb::object made =
        nb::steal(make(reinterpret_cast<PyTypeObject*>(kind.ptr()), args.ptr(), nullptr));
    if (!made.is_valid()) throw nb::python_error();
    return made;
}

// The rows of a plain file's header: JSON of tensors that follow each other. `forms` are what
// tensors have in common (rank, dtype, shape, JSON of both, length), and `numbers` says which form
// each has. Tensors of a lower rank come first, then those whose names have lower bytes. Returns
// the rows, the number of the tensor in each, and the tensors as file_entries() returns them.
inline std::tuple<nb::bytes, std::vector<std::size_t>, nb::list> rows_of_tensors(
    const nb::list& names, const std::vector<std::size_t>& numbers,
    const std::vector<std::tuple<int, nb::object, nb::object, std::string, std::size_t>>& forms,
    nb::handle kind) {
    require(names.size() == numbers.size(), "each tensor needs a name");
    std::vector<std::tuple<int, std::string_view, std::size_t>> keys;
    keys.reserve(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        require(numbers[i] < forms.size(), "there is no such form");
        keys.emplace_back(std::get<0>(forms[numbers[i]]), utf8_of(names[i]), i);
    }
    std::sort(keys.begin(), keys.end());
    std::string rows;
    std::vector<std::size_t> order;
    nb::list entries;
    std::size_t stop = 0;
    for (const auto& [rank, name, i] : keys) {
        const auto& [form_rank, dtype, shape, text, nbytes] = forms[numbers[i]];
        const std::size_t start = stop;
        require(nbytes <= kMaxDataNbytes - start, "the tensors are larger than any memory");
        stop += nbytes;
        if (!order.empty()) rows += ',';
        append_quoted(rows, name);
        rows.append(":{").append(text).append(1, ',');
        append_offsets(rows, start, stop);
        order.push_back(i);
        entries.append(tuple_of(kind, nb::make_tuple(names[i], dtype, shape, start, stop)));
    }
    return {nb::bytes(rows.data(), rows.size()), std::move(order), std::move(entries)};
}

// Moves short frames, which lie one after another in `memory`, each in a room of its own, so that
// they follow those before them. Returns what they have become: pieces (start, stop) of `memory`.
inline std::vector<std::pair<std::size_t, std::size_t>> close_gaps(
    WritableBytes memory, const std::vector<std::size_t>& rooms,
    const std::vector<std::size_t>& lengths, std::size_t max_moved_nbytes) {
    require(rooms.size() == lengths.size(), "each frame needs a room");
    std::vector<std::pair<std::size_t, std::size_t>> pieces;
    std::size_t start = 0;
    for (std::size_t i = 0; i < rooms.size(); ++i) {
        require(lengths[i] <= rooms[i] && rooms[i] <= memory.size() - start,
                "a frame lies elsewhere");
        const bool is_moved = !pieces.empty() && lengths[i] <= max_moved_nbytes;
        if (is_moved && pieces.back().second != start)
            std::memmove(memory.data() + pieces.back().second, memory.data() + start, lengths[i]);
        if (is_moved)
            pieces.back().second += lengths[i];
        else
            pieces.emplace_back(start, start + lengths[i]);
        start += rooms[i];
    }
    return pieces;
}

inline nb::object text_of(std::string_view text) {
    nb::object found = nb::steal(PyUnicode_DecodeUTF8(text.data(), ssize_of(text.size()), nullptr));
    if (!found.is_valid()) PyErr_Clear();
    return found;
}

// The tensors of a safetensors header, in the order of their data, and the JSON of its metadata.
// None if the header is not written as usual, or breaks a rule. `kind` is the named tuple
// (name, dtype, shape, start, stop), and `dtypes` has the bits of an element by a dtype's name.
inline nb::object file_entries(nb::bytes text, nb::handle kind, const nb::dict& dtypes) {
    FileEntries found;
    if (!FileHeaderReader({text.c_str(), text.size()}).read(found)) return nb::none();
    const auto is_before = [](const FileEntry& a, const FileEntry& b) {
        return a.start != b.start ? a.start < b.start : a.stop < b.stop;
    };
    if (!std::is_sorted(found.entries.begin(), found.entries.end(), is_before))
        std::stable_sort(found.entries.begin(), found.entries.end(), is_before);
    nb::list entries;
    const nb::object names = nb::steal(PySet_New(nullptr));
    std::string_view dtype;
    nb::object dtype_name, shape;  // those of the entry before, if they are equal
    const FileEntry* before = nullptr;
    uint64_t bits = 0, end = 0;
    for (const FileEntry& entry : found.entries) {
        if (entry.dtype != dtype || bits == 0) {
            dtype = entry.dtype;
            dtype_name = text_of(dtype);
            if (!dtype_name.is_valid()) return nb::none();
            PyObject* const known = PyDict_GetItemWithError(dtypes.ptr(), dtype_name.ptr());
            if (known == nullptr) return nb::none();
            bits = nb::cast<uint64_t>(nb::handle(known));
        }
        const DTypeRow row{static_cast<uint32_t>(bits), 1, 0};
        if (entry.start != end || entry.stop < entry.start || has_too_many_bits(entry.shape, row) ||
            n_elements(entry.shape) * bits != 8 * (entry.stop - entry.start))
            return nb::none();
        end = entry.stop;
        const nb::object name = text_of(entry.name);
        if (!name.is_valid() || PySet_Add(names.ptr(), name.ptr()) != 0) return nb::none();
        if (before == nullptr || before->shape != entry.shape) shape = shape_of(entry.shape);
        before = &entry;
        entries.append(
            tuple_of(kind, nb::make_tuple(name, dtype_name, shape, entry.start, entry.stop)));
    }
    if (static_cast<std::size_t>(PySet_Size(names.ptr())) != found.entries.size())
        return nb::none();
    return nb::make_tuple(entries, nb::bytes(found.metadata.data(), found.metadata.size()));
}

inline void bind_files(nb::module_& m) {
    using namespace nb::literals;
    m.def("rows_of_frames", &rows_of_frames, "names"_a, "lengths"_a);
    m.def("rows_of_tensors", &rows_of_tensors, "names"_a, "numbers"_a, "forms"_a, "kind"_a);
    m.def("close_gaps", &close_gaps, "memory"_a.noconvert(), "rooms"_a, "lengths"_a,
          "max_moved_nbytes"_a);
    m.def("file_entries", &file_entries, "text"_a, "kind"_a, "dtypes"_a);
}

}  // namespace packhorse
