// Rows packed by Invariant Bit Packing (IBP), gathered on a CPU: a rival for the benchmarks of
// tables in host memory. The layout of a row is that of packhorse/reference/ibp.py, which also says
// where it comes from. `ibp.py` beside this file compiles it.
//
// IBP's own code reads rows on GPUs only. This is a reader for a CPU with BMI2, which the authors
// have not written: the bits of a word are put in their places by one instruction.
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

template <class T>
T load(const uint8_t* src) {
    T value;
    std::memcpy(&value, src, sizeof value);
    return value;
}

// What all rows share.
template <class T>
struct Table {
    std::vector<T> others, values;  // bits of a column that are not invariant, and those that are
    std::vector<uint32_t> widths;
    std::size_t n_words, head_nbytes;

    Table(const T* masks, const T* invariant, std::size_t n)
        : others(n), values(invariant, invariant + n), widths(n), n_words(n) {
        for (std::size_t i = 0; i < n; ++i) {
            others[i] = static_cast<T>(~masks[i]);
            widths[i] = static_cast<uint32_t>(__builtin_popcountll(others[i]));
        }
        head_nbytes = ((n + 7) / 8 + sizeof(T) - 1) / sizeof(T) * sizeof(T);
    }

    std::size_t nbytes() const { return n_words * sizeof(T); }
};

// Reads bits, the highest ones of each T first.
template <class T>
struct BitReader {
    static constexpr uint32_t kBits = 8 * sizeof(T);
    const uint8_t* next;
    unsigned __int128 held = 0;
    uint32_t count = 0;

    uint64_t take(uint32_t n) {
        if (count < n) {
            held = held << kBits | load<T>(next);
            next += sizeof(T);
            count += kBits;
        }
        count -= n;
        const uint64_t mask = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
        return static_cast<uint64_t>(held >> count) & mask;
    }
};

// As BitReader, for words of 32 bits, which need no more than 64 bits at once.
template <>
struct BitReader<uint32_t> {
    const uint8_t* next;
    uint64_t held = 0;
    uint32_t count = 0;

    uint64_t take(uint32_t n) {
        if (count < n) {
            held = held << 32 | load<uint32_t>(next);
            next += 4;
            count += 32;
        }
        count -= n;
        return held >> count & ((uint64_t{1} << n) - 1);
    }
};

template <class T>
void unpack_row(const Table<T>& table, const uint8_t* row, uint8_t* dst) {
    BitReader<T> bits{row + table.head_nbytes};
    for (std::size_t i = 0; i < table.n_words; i += 8) {
        const std::size_t stop = i + 8 < table.n_words ? i + 8 : table.n_words;
        uint32_t flags = row[i / 8];
        for (std::size_t c = i; c < stop; ++c, flags >>= 1) {
            T word;
            if ((flags & 1) != 0)
                word = static_cast<T>(table.values[c] |
                                      _pdep_u64(bits.take(table.widths[c]), table.others[c]));
            else
                word = static_cast<T>(bits.take(8 * sizeof(T)));
            std::memcpy(dst + c * sizeof(T), &word, sizeof word);
        }
    }
}

// Packs a row in place of itself. Returns whether it became shorter; otherwise it stays as it is.
template <class T>
bool pack_row(const Table<T>& table, uint8_t* row, std::vector<uint8_t>& scratch) {
    scratch.assign(table.nbytes() + table.head_nbytes + 16, 0);
    uint8_t* next = scratch.data() + table.head_nbytes;
    unsigned __int128 held = 0;
    uint32_t count = 0;
    for (std::size_t c = 0; c < table.n_words; ++c) {
        const T word = load<T>(row + c * sizeof(T));
        const bool agrees = static_cast<T>(word & ~table.others[c]) == table.values[c];
        if (agrees) scratch[c / 8] |= static_cast<uint8_t>(1u << c % 8);
        const uint32_t width = agrees ? table.widths[c] : 8 * sizeof(T);
        const uint64_t kept = agrees ? _pext_u64(word, table.others[c]) : word;
        held = held << width | kept;
        for (count += width; count >= 8 * sizeof(T); count -= 8 * sizeof(T), next += sizeof(T)) {
            const auto full = static_cast<T>(held >> (count - 8 * sizeof(T)));
            std::memcpy(next, &full, sizeof full);
        }
    }
    if (count != 0) {
        const auto last = static_cast<T>(held << (8 * sizeof(T) - count));
        std::memcpy(next, &last, sizeof last);
        next += sizeof(T);
    }
    const auto nbytes = static_cast<std::size_t>(next - scratch.data());
    if (nbytes >= table.nbytes()) return false;
    std::memcpy(row, scratch.data(), nbytes);
    return true;
}

template <class T>
void pack(const T* masks, const T* values, std::size_t n_words, uint8_t* rows, std::size_t n_rows,
          uint8_t* packed) {
    const Table<T> table(masks, values, n_words);
    std::vector<uint8_t> scratch;
    for (std::size_t r = 0; r < n_rows; ++r)
        packed[r] = pack_row(table, rows + r * table.nbytes(), scratch) ? 1 : 0;
}

template <class T>
void gather(const T* masks, const T* values, std::size_t n_words, const uint8_t* rows,
            const uint8_t* packed, const int64_t* ids, std::size_t n, uint8_t* dst) {
    constexpr std::size_t kAhead = 8;
    const Table<T> table(masks, values, n_words);
    const std::size_t nbytes = table.nbytes();
    for (std::size_t i = 0; i < n; ++i) {
        if (i + kAhead < n) {
            const uint8_t* const ahead = rows + static_cast<std::size_t>(ids[i + kAhead]) * nbytes;
            for (std::size_t at = 0; at < nbytes && at < 1024; at += 64)
                __builtin_prefetch(ahead + at);
        }
        const auto id = static_cast<std::size_t>(ids[i]);
        if (packed[id] != 0)
            unpack_row(table, rows + id * nbytes, dst + i * nbytes);
        else
            std::memcpy(dst + i * nbytes, rows + id * nbytes, nbytes);
    }
}

}  // namespace

extern "C" {

void ibp_pack_32(const uint32_t* masks, const uint32_t* values, std::size_t n_words, uint8_t* rows,
                 std::size_t n_rows, uint8_t* packed) {
    pack(masks, values, n_words, rows, n_rows, packed);
}

void ibp_pack_64(const uint64_t* masks, const uint64_t* values, std::size_t n_words, uint8_t* rows,
                 std::size_t n_rows, uint8_t* packed) {
    pack(masks, values, n_words, rows, n_rows, packed);
}

void ibp_gather_32(const uint32_t* masks, const uint32_t* values, std::size_t n_words,
                   const uint8_t* rows, const uint8_t* packed, const int64_t* ids, std::size_t n,
                   uint8_t* dst) {
    gather(masks, values, n_words, rows, packed, ids, n, dst);
}

void ibp_gather_64(const uint64_t* masks, const uint64_t* values, std::size_t n_words,
                   const uint8_t* rows, const uint8_t* packed, const int64_t* ids, std::size_t n,
                   uint8_t* dst) {
    gather(masks, values, n_words, rows, packed, ids, n, dst);
}
}
