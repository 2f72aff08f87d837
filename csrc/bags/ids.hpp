// Ids as bits: lists of numbers of a few bits each, and bitmaps.
#pragma once

#include <algorithm>
#include <bit>

#include "common/layout.hpp"

namespace packhorse {

// Appends numbers to bytes, from the lowest bit on.
class ListWriter {
  public:
    explicit ListWriter(uint8_t* dst) : dst_(dst) {}

    // `n_bits` is at most 32, and `number` has no others.
    void put(uint64_t number, uint32_t n_bits) {
        pending_ |= number << n_pending_;
        n_pending_ += n_bits;
        if (n_pending_ < 32) return;
        store(dst_, static_cast<uint32_t>(pending_));
        dst_ += 4;
        pending_ >>= 32;
        n_pending_ -= 32;
    }

    void finish() {
        for (; n_pending_ > 0; n_pending_ -= std::min(n_pending_, 8u), pending_ >>= 8)
            *dst_++ = static_cast<uint8_t>(pending_);
    }

  private:
    uint8_t* dst_;
    uint64_t pending_ = 0;
    uint32_t n_pending_ = 0;  // below 32
};

class ListReader {
  public:
    ListReader(const uint8_t* src, std::size_t nbytes) : src_(src), end_(src + nbytes) {}

    // The bytes must have `n_bits` more bits, at most 32.
    uint64_t take(uint32_t n_bits) {
        if (n_pending_ < n_bits) refill();
        const uint64_t taken = pending_ & ((uint64_t{1} << n_bits) - 1);
        pending_ >>= n_bits;
        n_pending_ -= n_bits;
        return taken;
    }

  private:
    void refill() {
        if (end_ - src_ >= 4) {
            pending_ |= static_cast<uint64_t>(load<uint32_t>(src_)) << n_pending_;
            src_ += 4;
            n_pending_ += 32;
            return;
        }
        for (; src_ < end_; n_pending_ += 8)
            pending_ |= static_cast<uint64_t>(*src_++) << n_pending_;
    }

    const uint8_t* src_;
    const uint8_t* end_;
    uint64_t pending_ = 0;
    uint32_t n_pending_ = 0;
};

constexpr std::size_t packed_list_nbytes(std::size_t n, uint32_t bits) {
    return (n * bits + 7) / 8;
}

// Packs `bits` bits of each number, 1 to 63, to `packed_list_nbytes` bytes.
inline void pack_list(const int64_t* numbers, std::size_t n, uint32_t bits, uint8_t* dst) {
    const uint32_t low = std::min(bits, 32u), high = bits - low;
    const uint64_t low_mask = (uint64_t{1} << low) - 1, high_mask = (uint64_t{1} << high) - 1;
    ListWriter writer(dst);
    for (std::size_t i = 0; i < n; ++i) {
        const auto number = static_cast<uint64_t>(numbers[i]);
        writer.put(number & low_mask, low);
        if (high > 0) writer.put(number >> 32 & high_mask, high);
    }
    writer.finish();
}

inline void unpack_list(const uint8_t* src, std::size_t n, uint32_t bits, int64_t* numbers) {
    const uint32_t low = std::min(bits, 32u), high = bits - low;
    ListReader reader(src, packed_list_nbytes(n, bits));
    for (std::size_t i = 0; i < n; ++i) {
        uint64_t number = reader.take(low);
        if (high > 0) number |= reader.take(high) << 32;
        numbers[i] = static_cast<int64_t>(number);
    }
}

// Sets the bits of ids in a bitmap of zeros. Returns whether all ids are in it.
inline bool mark_ids(const int64_t* ids, std::size_t n, uint8_t* bitmap, std::size_t nbytes) {
    for (std::size_t i = 0; i < n; ++i) {
        const auto id = static_cast<uint64_t>(ids[i]);
        if (id >= 8 * nbytes) return false;
        bitmap[id / 8] = static_cast<uint8_t>(bitmap[id / 8] | 1u << id % 8);
    }
    return true;
}

// Finds the first `n` ids of a bitmap. Returns how many there are in all.
inline std::size_t find_ids(const uint8_t* bitmap, std::size_t nbytes, std::size_t n,
                            int64_t* ids) {
    std::size_t found = 0;
    for (std::size_t at = 0; at < nbytes; at += 8) {
        uint64_t word = 0;
        std::memcpy(&word, bitmap + at, std::min<std::size_t>(8, nbytes - at));
        for (; word != 0; word &= word - 1, ++found)
            if (found < n) ids[found] = static_cast<int64_t>(8 * at) + std::countr_zero(word);
    }
    return found;
}

}  // namespace packhorse
