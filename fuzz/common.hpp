// Code that the fuzz targets of the core share: fields taken from the input, memory that the
// sanitizers can guard, and claims.
//
// An input is a few bytes of choices (instruction set, threads, how a tensor is cut) and then data.
// Nothing here depends on the layout of a stream, so the targets survive changes of the format.
// make_corpus.py makes their seeds with the library.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "tensor/estimate.hpp"

namespace packhorse::fuzz {

// Checks a claim that must hold for any input. It replaces assert(), which a build may leave out.
inline void claim(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "claim broken: %s\n", what);
    std::abort();
}

// Takes little-endian fields from the front of the input. Gives zeros once the input has ended.
class Input {
  public:
    Input(const uint8_t* data, std::size_t nbytes) : data_(data), nbytes_(nbytes) {}

    uint32_t take(std::size_t n_bytes) {
        uint32_t value = 0;
        for (std::size_t i = 0; i < n_bytes && nbytes_ > 0; ++i, --nbytes_)
            value |= uint32_t{*data_++} << (8 * i);
        return value;
    }

    // Copies at most `capacity` bytes; returns how many there were.
    std::size_t take_bytes(uint8_t* dst, std::size_t capacity) {
        const std::size_t n = std::min(capacity, nbytes_);
        if (n > 0) std::memcpy(dst, data_, n);
        data_ += n;
        nbytes_ -= n;
        return n;
    }

    const uint8_t* data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

  private:
    const uint8_t* data_;
    std::size_t nbytes_;
};

// A buffer on the heap of exactly the length that was requested, so that AddressSanitizer reports
// any access beyond it. It is filled with `poison`: two buffers with different poison show if a
// decoder leaves a byte unwritten.
class Buffer {
  public:
    explicit Buffer(std::size_t nbytes, uint8_t poison = 0, std::size_t misalign = 0)
        : memory_(new uint8_t[nbytes + misalign]), misalign_(misalign), nbytes_(nbytes) {
        std::fill(memory_.get(), memory_.get() + nbytes + misalign, poison);
    }

    Buffer(const Buffer& other) : Buffer(other.nbytes_) {
        std::copy(other.data(), other.data() + nbytes_, data());
    }
    Buffer(Buffer&&) = default;
    Buffer& operator=(Buffer&&) = default;

    uint8_t* data() { return memory_.get() + misalign_; }
    const uint8_t* data() const { return memory_.get() + misalign_; }
    std::size_t nbytes() const { return nbytes_; }
    bool equals(const Buffer& other) const {
        return nbytes_ == other.nbytes_ && std::equal(data(), data() + nbytes_, other.data());
    }

  private:
    std::unique_ptr<uint8_t[]> memory_;
    std::size_t misalign_;
    std::size_t nbytes_;
};

// Changes bytes of buffers, as an input of breaks says: which buffer (1 byte), place (2),
// difference (1). Returns whether any byte was changed.
inline bool break_buffers(Input& breaks, std::vector<Buffer>& buffers) {
    bool broken = false;
    while (breaks.nbytes() > 0) {
        Buffer& buffer = buffers[breaks.take(1) % buffers.size()];
        const std::size_t place = breaks.take(2);
        const auto difference = static_cast<uint8_t>(breaks.take(1));
        if (buffer.nbytes() == 0) continue;
        buffer.data()[place % buffer.nbytes()] ^= difference;
        broken = true;
    }
    return broken;
}

// Chooses one of the instruction sets of this machine. Each of them has its own loops.
inline Isa choose_isa(uint32_t choice) {
    auto isa = static_cast<int>(choice % static_cast<uint32_t>(kIsaCount));
    while (!has_isa(isa)) isa = (isa + 1) % kIsaCount;
    return static_cast<Isa>(isa);
}

// Room for the hashes of a tensor's leaves.
class Leaves {
  public:
    explicit Leaves(std::size_t nbytes)
        : digests_(16 * n_leaves(nbytes)), tail_(kXxh3LongMinNbytes - 1) {}

    ContentLeaves view() { return {digests_.data(), tail_.data()}; }
    bool operator==(const Leaves&) const = default;

  private:
    std::vector<uint8_t> digests_;
    std::vector<uint8_t> tail_;
};

// How the input cuts a tensor, and what kind of base it has. The caller checks fault().
struct Cut {
    uint32_t unit_nbytes;
    int split;
    uint32_t chunk_log;
    bool has_base;
    bool is_float;
    Cast cast;

    explicit Cut(Input& input) {
        const uint32_t choice = input.take(1);
        unit_nbytes = 1u << (choice & 3);
        split = static_cast<int>(choice >> 2 & 7);
        chunk_log = input.take(1) % (kMaxChunkLog + 1);
        has_base = choice >> 5 & 1;
        is_float = choice >> 6 & 1;
        const bool casts = choice >> 7 && unit_nbytes == 2 && is_float;
        cast = !casts ? Cast::kNone : chunk_log % 2 == 0 ? Cast::kToBf16 : Cast::kToFp16;
    }

    const char* fault(std::size_t nbytes) const {
        return geometry_fault(unit_nbytes, split, chunk_log, nbytes);
    }
    Geometry geometry(std::size_t nbytes) const {
        return Geometry(unit_nbytes, split, chunk_log, nbytes);
    }
};

// xorshift64: noise that a run can repeat.
inline uint64_t next_noise(uint64_t& state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

// Which bits of a tensor are noise, and in one of how many units: a mask (8 bytes), a stride (2).
struct Noise {
    uint64_t mask;
    std::size_t stride;

    explicit Noise(Input& input) {
        const uint64_t low = input.take(4);
        mask = uint64_t{input.take(4)} << 32 | low;
        stride = 1 + input.take(2);
    }
};

// A tensor that repeats what is left of the input, with noise on top: a few hundred bytes alone
// never fill the lanes and blocks of large chunks.
inline Buffer make_tensor(Input& input, std::size_t nbytes, uint32_t unit_nbytes,
                          const Noise& noise) {
    Buffer tensor(nbytes);
    const std::size_t pattern = input.nbytes();
    for (std::size_t i = 0; pattern > 0 && i < nbytes; ++i)
        tensor.data()[i] = input.data()[i % pattern];
    uint64_t state = 0x9E3779B97F4A7C15;
    const std::size_t step = noise.stride * unit_nbytes;
    for (std::size_t i = 0; noise.mask != 0 && i + unit_nbytes <= nbytes; i += step) {
        const uint64_t bits = next_noise(state) & noise.mask;
        for (uint32_t b = 0; b < unit_nbytes; ++b)
            tensor.data()[i + b] ^= static_cast<uint8_t>(bits >> (8 * b));
    }
    return tensor;
}

// A base for a tensor, or none. If the tensor's units are known, the base has these units, with
// noise in the bits of a mask in one of every `stride` units.
class BaseUnits {
  public:
    BaseUnits(const Cut& cut, const Geometry& geometry, const uint8_t* units, uint64_t mask,
              std::size_t stride)
        : cut_(cut), values_(0) {
        if (!cut.has_base || geometry.n_units == 0) return;
        const std::size_t unit = cut.cast == Cast::kNone ? cut.unit_nbytes : 4;
        values_ = Buffer(geometry.n_units * unit);
        uint64_t state = 0x2545F4914F6CDD1D;
        for (std::size_t i = 0; i < geometry.n_units; ++i) {
            uint8_t bytes[8] = {};
            // For a cast, the BF16 is the upper half of the F32.
            if (units != nullptr)
                std::memcpy(bytes + (unit - cut.unit_nbytes), units + i * cut.unit_nbytes,
                            cut.unit_nbytes);
            uint64_t value = load<uint64_t>(bytes);
            if (i % stride == 0) value ^= next_noise(state) & mask;
            std::memcpy(values_.data() + i * unit, &value, unit);
        }
    }

    const Buffer& values() const { return values_; }
    Base view() const {
        return {values_.nbytes() > 0 ? values_.data() : nullptr, cut_.is_float, cut_.cast};
    }

  private:
    Cut cut_;
    Buffer values_;
};

// Side data for a tensor, or none: rows (2 bytes), the number of values that follow (2), the
// values. If there are too few values, they are repeated.
class Side {
  public:
    Side(Input& input, const Geometry& geometry) : n_rows_(input.take(2)), values_(0) {
        Buffer given(std::min<std::size_t>(input.take(2), input.nbytes()));
        input.take_bytes(given.data(), given.nbytes());
        if (n_rows_ == 0 || geometry.n_units == 0 || geometry.n_units % n_rows_ != 0) return;
        const std::size_t nbytes = n_rows_ + geometry.n_units / n_rows_;
        if (side_fault(geometry, nbytes, n_rows_) != nullptr) return;
        values_ = Buffer(nbytes);
        for (std::size_t i = 0; i < nbytes && given.nbytes() > 0; ++i)
            values_.data()[i] = given.data()[i % given.nbytes()];
    }

    // The values that an encoder would choose for a tensor, instead of the pattern.
    void fit(const uint8_t* src, const Geometry& geometry, Isa isa) {
        if (values_.nbytes() == 0) return;
        const std::size_t n_columns = geometry.n_units / n_rows_;
        fill_side({src, n_rows_, n_columns, 1, n_columns * geometry.spec.unit_nbytes},
                  geometry.spec, values_.data(), isa);
    }

    const Buffer& values() const { return values_; }
    SideData view() const { return view_side(values_.data(), values_.nbytes(), n_rows_); }

  private:
    std::size_t n_rows_;
    Buffer values_;
};

}  // namespace packhorse::fuzz
