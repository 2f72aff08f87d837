// Where the bytes of many tensors of Python lie, found out in one call. A tensor that is not as
// plain as most are stays unknown here; Python looks at it itself, and may put() what it finds.
#pragma once

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "bind/arguments.hpp"
#include "frame/header.hpp"

namespace packhorse {

// The bytes of a tensor in C order, without gaps.
struct View {
    uint8_t* data = nullptr;
    std::size_t nbytes = 0;
    uint32_t code = 0;  // of the dtype; 0 for bytes that are no tensor
    std::vector<uint64_t> shape;
    bool is_known = false;
    bool is_writable = false;
};

// A buffer of Python. Its owner can neither free nor resize it before it is released.
class HeldBuffer {
  public:
    HeldBuffer() = default;
    HeldBuffer(const HeldBuffer&) = delete;
    HeldBuffer& operator=(const HeldBuffer&) = delete;
    ~HeldBuffer() {
        if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
    }

    // Whether an object has a buffer whose elements lie in C order.
    bool take(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, flags) == 0) return true;
        PyErr_Clear();
        buffer_.obj = nullptr;
        return false;
    }
    const Py_buffer& get() const { return buffer_; }

  private:
    Py_buffer buffer_{};
};

constexpr Py_ssize_t ssize_of(std::size_t n) {
    return static_cast<Py_ssize_t>(n);
}

inline nb::tuple shape_of(const std::vector<uint64_t>& sizes) {
    nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(sizes.size())));
    for (std::size_t d = 0; d < sizes.size(); ++d)
        PyTuple_SetItem(shape.ptr(), static_cast<Py_ssize_t>(d),
                        PyLong_FromUnsignedLongLong(sizes[d]));
    return nb::borrow<nb::tuple>(shape);
}

class Views {
  public:
    explicit Views(std::size_t n) : views_(n) {}
    Views(Views&&) = default;
    Views(const Views&) = delete;

    std::size_t size() const { return views_.size(); }
    const View& operator[](std::size_t i) const { return views_[i]; }
    View& at(std::size_t i) { return views_[i]; }

    // Notes a buffer as the bytes of tensor i, which has none yet. Returns nullptr if the object
    // has none of this kind.
    const Py_buffer* hold(std::size_t i, nb::handle object, int flags) {
        if (buffers_ == nullptr) buffers_ = std::make_unique<HeldBuffer[]>(size());
        HeldBuffer& held = buffers_[i];
        if (!held.take(object, flags)) return nullptr;
        const Py_buffer& buffer = held.get();
        View& view = views_[i];
        view.data = static_cast<uint8_t*>(buffer.buf);
        view.nbytes = static_cast<std::size_t>(buffer.len);
        view.is_writable = buffer.readonly == 0;
        return &buffer;
    }
    // Tensors of these numbers, as long as these views live.
    Views part(const std::vector<std::size_t>& numbers) const {
        Views found(numbers.size());
        for (std::size_t k = 0; k < numbers.size(); ++k) {
            require(numbers[k] < size(), "there is no such tensor");
            found.views_[k] = views_[numbers[k]];
        }
        return found;
    }
    void keep(nb::handle owner) { owners_.push_back(nb::borrow(owner)); }

  private:
    std::vector<View> views_;
    std::unique_ptr<HeldBuffer[]> buffers_;  // one for each tensor, or none
    std::vector<nb::object> owners_;
};

// The length of a tensor; the largest number if there is no such tensor.
inline std::size_t tensor_nbytes(uint32_t code, const std::vector<uint64_t>& shape) {
    const DTypeRow* const dtype = dtype_row(code);
    if (dtype == nullptr || shape.size() > kMaxDims || has_too_many_bits(shape, *dtype))
        return std::numeric_limits<std::size_t>::max();
    const uint64_t bits = n_elements(shape) * dtype->bits;
    return bits % 8 == 0 ? bits / 8 : std::numeric_limits<std::size_t>::max();
}

// A name that lives as long as the process. Python finds an attribute faster by such a name than by
// text.
inline nb::handle lasting_name(const char* text) {
    PyObject* const name = PyUnicode_InternFromString(text);
    if (name == nullptr) throw nb::python_error();
    return name;
}

// The codes of dtypes, by the objects that a framework has for them. Most tensors have the dtype of
// the one before.
class DTypeCodes {
  public:
    explicit DTypeCodes(const nb::dict& codes) : codes_(codes) {}

    // The code of a tensor's dtype; 0 if it has none.
    uint32_t of(nb::handle tensor) {
        static const nb::handle kName = lasting_name("dtype");
        nb::object dtype = tensor.attr(kName);
        if (dtype.is(last_)) return code_;
        PyObject* const found = PyDict_GetItemWithError(codes_.ptr(), dtype.ptr());
        if (found == nullptr) PyErr_Clear();
        code_ = found == nullptr ? 0 : nb::cast<uint32_t>(nb::handle(found));
        last_ = std::move(dtype);
        return code_;
    }

  private:
    const nb::dict& codes_;
    nb::object last_;
    uint32_t code_ = 0;
};

// Arrays of NumPy. `kind` is their type, and `codes` has the codes of dtypes whose elements have no
// gaps between them. Arrays of a subclass stay unknown.
inline Views views_of_arrays(const nb::list& arrays, nb::handle kind, const nb::dict& codes) {
    Views views(arrays.size());
    DTypeCodes codes_of(codes);
    for (std::size_t i = 0; i < views.size(); ++i) {
        const nb::handle array = arrays[i];
        if (!array.type().is(kind)) continue;
        const uint32_t code = codes_of.of(array);
        if (code == 0) continue;
        const Py_buffer* const buffer = views.hold(i, array, PyBUF_ND);
        if (buffer == nullptr) continue;
        View& view = views.at(i);
        view.code = code;
        view.shape.assign(buffer->shape, buffer->shape + buffer->ndim);
        view.is_known = tensor_nbytes(code, view.shape) == view.nbytes;
    }
    return views;
}

// The functions that a framework offers for its tensors by DLPack's exchange interface: a version,
// an older table, and five functions, the fourth of which describes a tensor that its owner keeps.
struct ExchangeTable {
    uint32_t major, minor;
    void* older;
    void* others[3];
    int (*describe)(void* tensor, nb::dlpack::dltensor* found);
    void* stream;
};

// Whether the elements of a tensor lie in C order, without gaps.
inline bool is_dense(const nb::dlpack::dltensor& tensor) {
    if (tensor.strides == nullptr) return true;
    int64_t stride = 1;
    bool is_dense = true;
    for (int32_t d = tensor.ndim; d-- > 0;) {
        if (tensor.shape[d] == 0) return true;
        if (tensor.shape[d] != 1 && tensor.strides[d] != stride) is_dense = false;
        stride *= tensor.shape[d];
    }
    return is_dense;
}

// Whether a storage of PyTorch has all bytes of a tensor; others may have made it shorter.
inline bool lies_in(const View& view, const nb::object& storage) {
    static const nb::handle kStart = lasting_name("data_ptr"), kNbytes = lasting_name("nbytes");
    const auto start = nb::cast<uint64_t>(storage.attr(kStart)());
    const auto nbytes = nb::cast<uint64_t>(storage.attr(kNbytes)());
    const auto at = reinterpret_cast<uint64_t>(view.data);
    return start != 0 && at >= start && at - start <= nbytes &&
           view.nbytes <= nbytes - (at - start);
}

// Notes where a tensor of PyTorch lies, if it is dense and in memory of the host. The memory that
// it has now is kept, whatever becomes of the tensor.
inline void find_tensor(Views& views, std::size_t i, nb::handle tensor, uint32_t code,
                        const ExchangeTable& api) {
    static const nb::handle kStorage = lasting_name("untyped_storage");
    const nb::object storage = tensor.attr(kStorage)();
    nb::dlpack::dltensor found;
    if (api.describe(tensor.ptr(), &found) != 0) throw nb::python_error();
    if (found.device.device_type != nb::device::cpu::value || found.ndim < 0 || !is_dense(found))
        return;
    View& view = views.at(i);
    view.data = static_cast<uint8_t*>(found.data) + found.byte_offset;
    view.shape.assign(found.shape, found.shape + found.ndim);
    view.code = code;
    view.nbytes = tensor_nbytes(code, view.shape);
    view.is_writable = true;
    views.keep(storage);
    view.is_known = view.nbytes == 0 || lies_in(view, storage);
}

// Tensors of PyTorch. `kinds` are types whose tensors are plain, `table` is what they offer,
// `codes` has the codes of dtypes, and `is_negated` tells whether the elements of a tensor are
// those of its memory with the other sign.
inline Views views_of_tensors(const nb::list& tensors, const nb::tuple& kinds,
                              const nb::capsule& table, const nb::dict& codes,
                              nb::handle is_negated) {
    Views views(tensors.size());
    const auto* const api = static_cast<const ExchangeTable*>(table.data());
    if (api == nullptr || api->major != 1 || api->describe == nullptr) return views;
    DTypeCodes codes_of(codes);
    for (std::size_t i = 0; i < views.size(); ++i) {
        const nb::object tensor = tensors[i];
        const bool is_plain = std::any_of(kinds.begin(), kinds.end(),
                                          [&](nb::handle kind) { return kind.is(tensor.type()); });
        if (!is_plain) continue;
        const uint32_t code = codes_of.of(tensor);
        if (code == 0 || nb::cast<bool>(is_negated(tensor))) continue;
        try {
            find_tensor(views, i, tensor, code, *api);
        } catch (const nb::python_error&) {
            continue;  // such as a sparse tensor, which has no storage
        }
    }
    return views;
}

// Buffers of plain bytes: of tensors of these dtypes and shapes, or without those, of no tensors.
inline Views views_of_buffers(const nb::list& buffers, const std::vector<uint32_t>& codes,
                              const std::vector<std::vector<uint64_t>>& shapes) {
    require(codes.size() == shapes.size() && (codes.empty() || codes.size() == buffers.size()),
            "each buffer needs a dtype and a shape");
    Views views(buffers.size());
    for (std::size_t i = 0; i < views.size(); ++i) {
        const Py_buffer* const buffer = views.hold(i, buffers[i], PyBUF_ND | PyBUF_FORMAT);
        if (buffer == nullptr) continue;
        // Other formats may be references to objects.
        const bool is_bytes = buffer->format == nullptr || std::strcmp(buffer->format, "B") == 0;
        View& view = views.at(i);
        view.is_known = is_bytes;
        if (codes.empty()) continue;
        view.code = codes[i];
        view.shape = shapes[i];
        view.is_known = is_bytes && tensor_nbytes(view.code, view.shape) == view.nbytes;
    }
    return views;
}

// Consecutive parts of one writable buffer.
inline Views views_of_rooms(nb::handle memory, const std::vector<std::size_t>& lengths) {
    Views views(lengths.size());
    if (lengths.empty()) return views;
    require(views.hold(0, memory, PyBUF_SIMPLE | PyBUF_WRITABLE) != nullptr,
            "the memory must be a writable buffer");
    uint8_t* const data = views[0].data;
    const std::size_t nbytes = views[0].nbytes;
    std::size_t start = 0;
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        require(lengths[i] <= nbytes - start, "the memory is too short");
        View& view = views.at(i);
        view.data = data + start;
        view.nbytes = lengths[i];
        view.is_known = view.is_writable = true;
        start += lengths[i];
    }
    return views;
}

}  // namespace packhorse
