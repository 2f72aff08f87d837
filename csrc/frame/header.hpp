// The header of a frame: read with distrust, and written (docs/format.md, section 2).
//
// read_header() copies a header, checks the copy in the order of the document, and uses no field
// before its check. It never looks at the payload.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "common/checksum.hpp"
#include "frame/dtypes.hpp"
#include "tensor/tensor.hpp"

namespace packhorse {

// The last mode of a version of the frame.
constexpr Mode last_mode_of(uint32_t version) {
    constexpr Mode last[] = {Mode::kDelta, Mode::kSparseDelta, Mode::kMatches, Mode::kNibbles};
    return last[version - 1];
}

// The first version that has all modes of a frame without a base. Units that are split have none of
// the newer ones.
inline uint32_t first_version(const uint32_t* table, const Geometry& geometry) {
    if (geometry.split != Split::kWhole) return 1;
    Mode last = Mode::kStored;
    for (std::size_t chunk = 0; chunk < geometry.n_chunks(); ++chunk)
        last = std::max(last, descriptor_mode(table[chunk * geometry.row_length() + 1]));
    uint32_t version = 1;
    while (last > last_mode_of(version)) ++version;
    return version;
}

// What is wrong with a header, in the order of the checks. src/packhorse/layout.py has the same
// numbers.
enum class HeaderFault : int {
    kNone = 0,
    kFixedPart = 1,
    kMagic = 2,
    kVersionZero = 3,
    kVersion = 4,
    kFlags = 5,
    kDtype = 6,
    kSplit = 7,
    kDims = 8,
    kChunkLog = 9,
    kHeaderLength = 10,
    kCutOff = 11,
    kChecksum = 12,
    kOverflow = 13,
    kPartialByte = 14,
    kChunks = 15,
    kLimit = 16,
    kReserved = 17,
    kBaseDtype = 18,
    kBaseCast = 19,
    kBaseSum = 20,
    kBaseReserved = 21,
    kHalfSide = 22,
    kSidePlace = 23,
    kSideLength = 24,
    kSideStream = 25,
    kPadding = 26,
    kUnknownMode = 27,
    kDescriptor = 28,
    kFrameLength = 29,
    kFrameCutOff = 30,
    kTrailing = 31,
};

struct HeaderCheck {
    HeaderFault fault = HeaderFault::kNone;
    std::size_t at = 0;     // the byte where it was found
    uint64_t found = 0;     // what was found there
    uint64_t expected = 0;  // what would fit, or another number for the message
};

// A header that was checked.
struct FrameHeader {
    std::vector<uint8_t> text;  // all its bytes
    uint32_t dtype_code = 0;
    uint32_t level = 0;
    std::vector<uint64_t> shape;
    Geometry geometry{1, 0, kMinChunkLog, 0};
    std::size_t frame_nbytes = 0;
    bool has_sum = false;
    uint32_t base_code = 0;  // 0: the frame has no base
    std::size_t base_at = 0;
    std::size_t table_at = 0;
    uint32_t n_row_dims = 0;
    uint32_t side_descriptor = 0;
    std::size_t side_at = 0;

    const uint8_t* content_hash() const { return text.data() + kContentHashOffset; }
    // Fields of a header begin at multiples of four bytes.
    const uint32_t* table() const {
        return reinterpret_cast<const uint32_t*>(text.data() + table_at);
    }
};

// The bytes of a header, padding included.
constexpr std::size_t frame_header_nbytes(std::size_t n_dims, std::size_t n_chunks,
                                          std::size_t n_planes, std::size_t side_nbytes,
                                          bool has_base) {
    return round_up(kFixedHeaderNbytes + 8 * n_dims + (has_base ? kBaseBlockNbytes : 0) +
                        4 * n_chunks * (1 + n_planes) + side_nbytes,
                    kFrameAlignment);
}

// Multiplies sizes, all of which are counted as 1 at least, so that a dimension of zero cannot hide
// an overflow. Returns 2^63 or more if the product is that large.
inline uint64_t product_of(const uint64_t* sizes, std::size_t n) {
    constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
    uint64_t product = 1;
    for (std::size_t i = 0; i < n; ++i)
        if (__builtin_mul_overflow(product, std::max<uint64_t>(sizes[i], 1), &product)) return kMax;
    return product;
}

// Whether a tensor has 2^63 bits or more.
inline bool has_too_many_bits(const std::vector<uint64_t>& shape, const DTypeRow& dtype) {
    constexpr uint64_t kMaxBits = uint64_t{1} << 63;
    uint64_t bits = 0;
    return __builtin_mul_overflow(product_of(shape.data(), shape.size()), uint64_t{dtype.bits},
                                  &bits) ||
           bits >= kMaxBits;
}

// The elements of a shape whose product does not overflow.
inline uint64_t n_elements(const std::vector<uint64_t>& shape) {
    uint64_t numel = 1;
    for (const uint64_t size : shape) numel *= size;
    return numel;
}

class HeaderReader {
  public:
    HeaderReader(const uint8_t* src, std::size_t nbytes, std::size_t max_nbytes,
                 FrameHeader& header, Isa isa)
        : src_(src), nbytes_(nbytes), max_nbytes_(max_nbytes), header_(header), isa_(isa) {}

    HeaderCheck read() {
        HeaderCheck check = read_fixed();
        if (ok(check)) check = read_shape();
        if (ok(check)) check = read_base();
        if (ok(check)) check = read_side();
        return ok(check) ? read_rest() : check;
    }

  private:
    static bool ok(const HeaderCheck& check) { return check.fault == HeaderFault::kNone; }
    static HeaderCheck fail(HeaderFault fault, std::size_t at, uint64_t found = 0,
                            uint64_t expected = 0) {
        return {fault, at, found, expected};
    }

    // Everything up to the checksum.
    HeaderCheck read_fixed() {
        if (nbytes_ < kFixedHeaderNbytes)
            return fail(HeaderFault::kFixedPart, nbytes_, nbytes_, kFixedHeaderNbytes);
        uint8_t fixed[kFixedHeaderNbytes];
        std::memcpy(fixed, src_, kFixedHeaderNbytes);
        seal(fixed);
        if (load<uint32_t>(fixed) != kFrameMagicNumber)
            return fail(HeaderFault::kMagic, 0, load<uint32_t>(fixed));
        version_ = fixed[4];
        if (version_ == 0) return fail(HeaderFault::kVersionZero, 4);
        if (version_ > kFrameVersion)
            return fail(HeaderFault::kVersion, 4, version_, kFrameVersion);
        flags_ = load<uint16_t>(fixed + 8);
        if ((flags_ & ~(kFlagBase | kFlagSum)) != 0)
            return fail(HeaderFault::kFlags, 8, flags_, kFlagBase | kFlagSum);
        header_.dtype_code = fixed[5];
        dtype_ = dtype_row(fixed[5]);
        if (dtype_ == nullptr) return fail(HeaderFault::kDtype, 5, fixed[5]);
        split_ = fixed[7];
        if (!dtype_->allows(split_)) return fail(HeaderFault::kSplit, 7, split_);
        n_dims_ = fixed[6];
        if (n_dims_ > kMaxDims) return fail(HeaderFault::kDims, 6, n_dims_, kMaxDims);
        chunk_log_ = fixed[11];
        if (chunk_log_ < kMinChunkLog || chunk_log_ > kMaxChunkLog ||
            uint64_t{dtype_->unit_nbytes} << chunk_log_ > kMaxChunkNbytes)
            return fail(HeaderFault::kChunkLog, 11, chunk_log_);
        header_.level = fixed[10];
        header_.frame_nbytes = load<uint64_t>(fixed + 16);
        header_.n_row_dims = fixed[kSideFieldsOffset];
        header_.side_descriptor = load<uint32_t>(fixed + kSideFieldsOffset + 4);
        n_chunks_ = load<uint32_t>(fixed + 40);
        n_planes_ = plane_spec(dtype_->unit_nbytes, static_cast<Split>(split_)).n_planes;
        const std::size_t header_nbytes = load<uint32_t>(fixed + 12);
        if (header_nbytes != frame_header_nbytes(n_dims_, n_chunks_, n_planes_,
                                                 descriptor_nbytes(header_.side_descriptor),
                                                 has_base()))
            return fail(HeaderFault::kHeaderLength, 12, header_nbytes);
        if (nbytes_ < header_nbytes)
            return fail(HeaderFault::kCutOff, nbytes_, nbytes_, header_nbytes);
        header_.text.assign(src_, src_ + header_nbytes);
        std::memcpy(header_.text.data(), fixed, kFixedHeaderNbytes);
        const uint32_t crc = load<uint32_t>(fixed + kHeaderCrcOffset);
        store(header_.text.data() + kHeaderCrcOffset, uint32_t{0});
        const bool is_right = crc32c(header_.text.data(), header_nbytes, isa_) == crc;
        store(header_.text.data() + kHeaderCrcOffset, crc);
        return is_right ? HeaderCheck{} : fail(HeaderFault::kChecksum, kHeaderCrcOffset);
    }

    HeaderCheck read_shape() {
        const uint8_t* const text = header_.text.data();
        header_.shape.resize(n_dims_);
        if (n_dims_ > 0) std::memcpy(header_.shape.data(), text + kFixedHeaderNbytes, 8 * n_dims_);
        if (has_too_many_bits(header_.shape, *dtype_))
            return fail(HeaderFault::kOverflow, kFixedHeaderNbytes);
        const uint64_t numel = n_elements(header_.shape);
        if (numel * dtype_->bits % 8 != 0)
            return fail(HeaderFault::kPartialByte, kFixedHeaderNbytes, numel);
        const std::size_t nbytes = numel * dtype_->bits / 8;
        header_.geometry =
            Geometry(dtype_->unit_nbytes, static_cast<int>(split_), chunk_log_, nbytes);
        if (n_chunks_ != header_.geometry.n_chunks())
            return fail(HeaderFault::kChunks, 40, n_chunks_, header_.geometry.n_chunks());
        if (nbytes > max_nbytes_)
            return fail(HeaderFault::kLimit, kFixedHeaderNbytes, nbytes, max_nbytes_);
        const bool is_zero = text[kSideFieldsOffset + 1] == 0 && text[kSideFieldsOffset + 2] == 0 &&
                             text[kSideFieldsOffset + 3] == 0;
        return is_zero ? HeaderCheck{} : fail(HeaderFault::kReserved, kSideFieldsOffset + 1);
    }

    HeaderCheck read_base() {
        header_.has_sum = (flags_ & kFlagSum) != 0;
        header_.base_at = kFixedHeaderNbytes + 8 * n_dims_;
        header_.table_at = header_.base_at + (has_base() ? kBaseBlockNbytes : 0);
        header_.side_at = header_.table_at + 4 * n_chunks_ * (1 + n_planes_);
        if (!has_base()) return {};
        const uint8_t* const base = header_.text.data() + header_.base_at;
        const std::size_t code_at = header_.base_at + 16;
        header_.base_code = base[16];
        if (dtype_row(base[16]) == nullptr) return fail(HeaderFault::kBaseDtype, code_at, base[16]);
        if (!is_allowed_base(header_.dtype_code, base[16]))
            return fail(HeaderFault::kBaseCast, code_at, base[16]);
        if (header_.has_sum && base[16] != header_.dtype_code)
            return fail(HeaderFault::kBaseSum, code_at, base[16]);
        const bool has_check = load<uint32_t>(base + 20) != 0;
        if (base[17] != 0 || base[18] != 0 || base[19] != 0 || (has_check && !header_.has_sum))
            return fail(HeaderFault::kBaseReserved, code_at + 1);
        return {};
    }

    // What the header says about side data, but not their stream.
    HeaderCheck read_side() {
        const uint32_t n_row_dims = header_.n_row_dims;
        if ((n_row_dims == 0) != (header_.side_descriptor == 0))
            return fail(HeaderFault::kHalfSide, kSideFieldsOffset);
        if (n_row_dims == 0) return {};
        if (header_.geometry.split != Split::kFloat || n_row_dims >= n_dims_ ||
            header_.geometry.n_units == 0)
            return fail(HeaderFault::kSidePlace, kSideFieldsOffset, n_row_dims);
        const uint64_t n_rows = product_of(header_.shape.data(), n_row_dims);
        const uint64_t n_side = n_rows + header_.geometry.n_units / n_rows;
        if (n_side > kMaxSideNbytes)
            return fail(HeaderFault::kSideLength, kSideFieldsOffset, n_side);
        const Mode mode = descriptor_mode(header_.side_descriptor);
        const std::size_t nbytes = descriptor_nbytes(header_.side_descriptor);
        const bool is_allowed = mode == Mode::kPalette || mode == Mode::kRans ||
                                (mode == Mode::kStored && nbytes == n_side);
        return is_allowed ? HeaderCheck{} : fail(HeaderFault::kSideStream, kSideFieldsOffset + 4);
    }

    HeaderCheck read_rest() {
        const std::size_t end = header_.side_at + descriptor_nbytes(header_.side_descriptor);
        const auto padding = header_.text.begin() + static_cast<std::ptrdiff_t>(end);
        if (std::any_of(padding, header_.text.end(), [](uint8_t byte) { return byte != 0; }))
            return fail(HeaderFault::kPadding, end);
        const TableCheck table = check_descriptors(header_.table(), header_.geometry, has_base(),
                                                   last_mode_of(version_));
        const std::size_t at =
            header_.table_at + 4 * (table.chunk * (n_planes_ + 1) + 1 + table.plane);
        if (table.fault == TableFault::kUnknownMode)
            return fail(HeaderFault::kUnknownMode, at, table.chunk, table.plane);
        if (table.fault != TableFault::kNone)
            return fail(HeaderFault::kDescriptor, at, table.chunk, table.plane);
        const std::size_t nbytes = header_.frame_nbytes;
        if (nbytes != header_.text.size() + table.payload_nbytes)
            return fail(HeaderFault::kFrameLength, 16, nbytes,
                        header_.text.size() + table.payload_nbytes);
        if (nbytes_ < nbytes) return fail(HeaderFault::kFrameCutOff, nbytes_, nbytes_, nbytes);
        if (nbytes_ > nbytes) return fail(HeaderFault::kTrailing, nbytes, nbytes_ - nbytes);
        return {};
    }

    bool has_base() const { return (flags_ & kFlagBase) != 0; }

    const uint8_t* src_;
    std::size_t nbytes_;
    std::size_t max_nbytes_;
    FrameHeader& header_;
    Isa isa_;
    const DTypeRow* dtype_ = nullptr;
    uint32_t version_ = 0, flags_ = 0, split_ = 0, n_dims_ = 0, chunk_log_ = 0;
    std::size_t n_chunks_ = 0, n_planes_ = 0;
};

// Reads the header of the frame that the `nbytes` at `src` are. The tensor has at most `max_nbytes`
// bytes. `header` is complete if there is no fault.
inline HeaderCheck read_header(const uint8_t* src, std::size_t nbytes, std::size_t max_nbytes,
                               FrameHeader& header, Isa isa) {
    return HeaderReader(src, nbytes, max_nbytes, header, isa).read();
}

// What the header of a frame without side data and without a base says.
struct PlainHeader {
    uint32_t dtype_code;
    Level level;
    const std::vector<uint64_t>& shape;
    const Geometry& geometry;
    std::size_t frame_nbytes;
};

// Writes a header to `dst`, whose bytes [table_at, ...) already hold the table and whose bytes at
// kContentHashOffset hold the content hash.
inline void write_plain_header(const PlainHeader& header, std::size_t header_nbytes, uint8_t* dst,
                               Isa isa) {
    const std::size_t n_dims = header.shape.size();
    const std::size_t table_at = kFixedHeaderNbytes + 8 * n_dims;
    const std::size_t table_end =
        table_at + 4 * header.geometry.n_chunks() * header.geometry.row_length();
    store(dst, kFrameMagicNumber);
    dst[4] = static_cast<uint8_t>(
        first_version(reinterpret_cast<const uint32_t*>(dst + table_at), header.geometry));
    dst[5] = static_cast<uint8_t>(header.dtype_code);
    dst[6] = static_cast<uint8_t>(n_dims);
    dst[7] = static_cast<uint8_t>(header.geometry.split);
    store(dst + 8, uint16_t{0});
    dst[10] = static_cast<uint8_t>(header.level);
    dst[11] = static_cast<uint8_t>(header.geometry.chunk_log());
    store(dst + 12, static_cast<uint32_t>(header_nbytes));
    store(dst + 16, uint64_t{header.frame_nbytes});
    store(dst + 40, static_cast<uint32_t>(header.geometry.n_chunks()));
    store(dst + kHeaderCrcOffset, uint32_t{0});
    store(dst + kSideFieldsOffset, uint64_t{0});
    if (n_dims > 0) std::memcpy(dst + kFixedHeaderNbytes, header.shape.data(), 8 * n_dims);
    std::memset(dst + table_end, 0, header_nbytes - table_end);
    store(dst + kHeaderCrcOffset, crc32c(dst, header_nbytes, isa));
}

}  // namespace packhorse
