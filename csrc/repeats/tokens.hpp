// Tokens say of each row whether it is new or which earlier row it repeats. They are bits, the
// lowest of each byte first:
//
//     0                      a new row: the next of the literals
//     1, class c in 4 bits,  the row that lies 2^c + x rows before, where x are the next c bits
//
// Zeros fill the last 8 bytes up.
#pragma once

#include <bit>

#include "common/layout.hpp"

namespace packhorse {

constexpr std::size_t kMinRowNbytes = 16;
constexpr std::size_t kMaxRowNbytes = 4096;
constexpr uint32_t kDistanceClassBits = 4;
constexpr std::size_t kMaxDistance = (std::size_t{1} << (1 << kDistanceClassBits)) - 1;
constexpr uint32_t kMaxTokenBits = 1 + kDistanceClassBits + (1 << kDistanceClassBits) - 1;

constexpr bool is_row_length(std::size_t nbytes) {
    return kMinRowNbytes <= nbytes && nbytes <= kMaxRowNbytes;
}

// The most bytes that the tokens of some rows take.
constexpr std::size_t max_tokens_nbytes(std::size_t n_rows) {
    return (n_rows * kMaxTokenBits + 63) / 64 * 8 + 8;
}

class TokenWriter {
  public:
    // `dst` has room for `max_tokens_nbytes`.
    explicit TokenWriter(uint8_t* dst) : dst_(dst), at_(dst) {}

    void new_row() { put(0, 1); }

    // `distance`: 1 to kMaxDistance.
    void repeat(std::size_t distance) {
        const auto c = static_cast<uint32_t>(std::bit_width(distance) - 1);
        const uint64_t rest = distance - (std::size_t{1} << c);
        put(1 | c << 1 | rest << (1 + kDistanceClassBits), 1 + kDistanceClassBits + c);
    }

    // Returns the bytes of all tokens.
    std::size_t finish() {
        if (n_bits_ > 0) at_ += 8;  // put() has stored them
        return static_cast<std::size_t>(at_ - dst_);
    }

  private:
    void put(uint64_t bits, uint32_t n) {
        pending_ |= bits << n_bits_;
        store(at_, pending_);
        n_bits_ += n;
        if (n_bits_ < 64) return;
        at_ += 8;
        n_bits_ -= 64;
        pending_ = n_bits_ == 0 ? 0 : bits >> (n - n_bits_);
        store(at_, pending_);
    }

    uint8_t* dst_;
    uint8_t* at_;
    uint64_t pending_ = 0;
    uint32_t n_bits_ = 0;
};

// Past the end, all tokens are those of new rows.
class TokenReader {
  public:
    TokenReader(const uint8_t* src, std::size_t nbytes) : src_(src), nbytes_(nbytes) {}

    // The distance of a repeat; 0 for a new row.
    std::size_t next() {
        const uint64_t bits = peek();
        if ((bits & 1) == 0) {
            ++at_;
            return 0;
        }
        const uint32_t c = bits >> 1 & ((1 << kDistanceClassBits) - 1);
        const uint64_t power = uint64_t{1} << c;
        at_ += 1 + kDistanceClassBits + c;
        return power + (bits >> (1 + kDistanceClassBits) & (power - 1));
    }

    // Whether nothing follows but zeros that fill 8 bytes up.
    bool is_at_end() const {
        if (nbytes_ != (at_ + 63) / 64 * 8) return false;
        return at_ % 64 == 0 || load<uint64_t>(src_ + nbytes_ - 8) >> at_ % 64 == 0;
    }

  private:
    // At least kMaxTokenBits bits.
    uint64_t peek() const {
        const std::size_t byte = at_ / 8;
        uint64_t bits = 0;
        if (byte + 8 <= nbytes_)
            bits = load<uint64_t>(src_ + byte);
        else if (byte < nbytes_)
            std::memcpy(&bits, src_ + byte, nbytes_ - byte);
        return bits >> at_ % 8;
    }

    const uint8_t* src_;
    std::size_t nbytes_;
    std::size_t at_ = 0;  // in bits
};

}  // namespace packhorse
