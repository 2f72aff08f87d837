// The numbers that bounded codes are computed with (docs/format.md, section 13): F32 for elements
// of 16 and 32 bits, and F64 for those of 64.
#pragma once

#include <algorithm>
#include <cfenv>
#include <type_traits>
#include <vector>

#include "common/dispatch.hpp"
#include "common/layout.hpp"

namespace packhorse {

// The default floating-point environment for the time of a call: rounding to nearest, and subnormal
// numbers. Another library may have asked the processor to treat them as zero. Threads that start
// meanwhile inherit it.
class DefaultArithmetic {
  public:
    DefaultArithmetic() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    DefaultArithmetic(const DefaultArithmetic&) = delete;
    DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;
    ~DefaultArithmetic() { std::fesetenv(&before_); }

  private:
    std::fenv_t before_;
};

// What the coder computes with. `kMagic` is 1.5 times the number whose spacing is 1: a number of
// small magnitude that is added to it is rounded to an integer, which is in the low bits of the
// sum.
struct Single {
    using Real = float;
    using Int = int32_t;
    using Unsigned = uint32_t;
    static constexpr int kDigits = 24;
    static constexpr int kMinExponent = -149;  // of the smallest number
    static constexpr int kMaxExponent = 127;
    static constexpr float kMagic = 12582912.0f;
    static constexpr float kMax = 3.40282346638528859812e+38f;
};

struct Double {
    using Real = double;
    using Int = int64_t;
    using Unsigned = uint64_t;
    static constexpr int kDigits = 53;
    static constexpr int kMinExponent = -1074;
    static constexpr int kMaxExponent = 1023;
    static constexpr double kMagic = 6755399441055744.0;
    static constexpr double kMax = 1.79769313486231570815e+308;
};

// The types of elements.
struct ElementF16 : Single {
    static constexpr std::size_t kNbytes = 2;
    static constexpr double kLargest = 65504;
};

struct ElementBF16 : Single {
    static constexpr std::size_t kNbytes = 2;
    static constexpr double kLargest = 0x1.FEp127;
};

struct ElementF32 : Single {
    static constexpr std::size_t kNbytes = 4;
    static constexpr double kLargest = kMax;
};

struct ElementF64 : Double {
    static constexpr std::size_t kNbytes = 8;
    static constexpr double kLargest = kMax;
};

// Calls work.operator()<Element>() for a dtype code of docs/format.md, section 3. Returns false if
// elements of that dtype cannot be coded.
template <class Work>
bool with_element(uint32_t dtype_code, const Work& work) {
    switch (dtype_code) {
        case kF16Code:
            work.template operator()<ElementF16>();
            return true;
        case kBF16Code:
            work.template operator()<ElementBF16>();
            return true;
        case kF32Code:
            work.template operator()<ElementF32>();
            return true;
        case kF64Code:
            work.template operator()<ElementF64>();
            return true;
        default:
            return false;
    }
}

enum class Rounding : uint32_t { kNearest = 0, kStochastic = 1 };

// How a segment is coded, in the numbers of the coder.
template <class Real>
struct Quantiser {
    Real center;
    Real step;
    Real inverse;  // 1 / step, for the encoder
    Real inner;    // the encoder accepts a rounded difference up to this
    Real outer;    // and an exact one up to this
    int32_t most;  // codes stand for -most to most steps
    uint32_t bits;
};

constexpr int32_t most_steps(uint32_t bits) {
    return (int32_t{1} << (bits - 1)) - 1;
}
constexpr uint32_t zero_code(uint32_t bits) {
    return uint32_t{1} << (bits - 1);
}

// The key of a segment's counters: the finisher of SplitMix64 (Steele, Lea, Flood: "Fast splittable
// pseudorandom number generators", OOPSLA 2014).
inline uint32_t counter_key(uint64_t seed, uint64_t segment) {
    uint64_t x = seed + (segment + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>(x ^ x >> 31);
}

// Where the random bits of a row come from; nothing for rounding to the nearest.
struct Counter {
    uint32_t key;
    uint32_t index;  // of the row's first element in its segment
};

// Words that a row of lanes takes: `n_rows` codes of `bits` in each lane.
constexpr std::size_t lane_words(std::size_t n_rows, uint32_t bits) {
    return (n_rows * bits + 31) / 32;
}

constexpr std::size_t rows_of(std::size_t n) {
    return (n + kBoundedLanes - 1) / kBoundedLanes;
}

// Bytes of the codes of a block of `n` elements, or of all blocks of a segment.
constexpr std::size_t block_codes_nbytes(std::size_t n, uint32_t bits) {
    return 4 * kBoundedLanes * lane_words(rows_of(n), bits);
}

constexpr uint64_t n_bounded_blocks(uint64_t n) {
    return (n + kBoundedBlock - 1) / kBoundedBlock;
}

constexpr uint64_t segment_codes_nbytes(uint64_t n, uint32_t bits) {
    const uint64_t whole = n / kBoundedBlock;
    return whole * block_codes_nbytes(kBoundedBlock, bits) +
           block_codes_nbytes(n % kBoundedBlock, bits);
}

// The codes of a block, one by one, in the order of its elements; in L1.
struct alignas(64) PlainCodes {
    uint32_t codes[kBoundedBlock];
};

// The elements of some blocks of a segment, and what their codes, counts and escapes are written
// to. Only the last block may have fewer than 512. Work ends early once there are more than
// `max_escapes`.
struct BlocksToEncode {
    const uint8_t* src;
    std::size_t n;
    Counter counter;
    uint8_t* codes;
    uint16_t* counts;
    std::vector<uint8_t>* escapes;
    std::size_t max_escapes;
};

// The codes, counts and escapes of some blocks, and where their elements go. `counts` is null if no
// block has escapes; what the other counts sum to is there.
struct BlocksToDecode {
    const uint8_t* codes;
    std::size_t n;
    const uint8_t* counts;
    const uint8_t* escapes;
    uint8_t* dst;
};

}  // namespace packhorse
