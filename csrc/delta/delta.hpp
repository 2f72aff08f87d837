// Differences from a base (docs/format.md, 6.6): code that encoding and decoding share. The
// difference of a unit from its base is the number of representable values between them. The unit
// of the base alone decides the class of the difference, and so its model and its shift.
#pragma once

#include <bit>
#include <type_traits>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/symbols.hpp"
#include "rans/model.hpp"

namespace packhorse {

enum class Cast : int { kNone = 0, kToBf16 = 1, kToFp16 = 2 };

// The base of a frame; `units` is null for a frame without a base.
struct Base {
    const uint8_t* units = nullptr;  // of the whole tensor, or from unit `first` on
    bool is_float =
        false;  // whether the frame's units are floats, which are ordered by their values
    Cast cast = Cast::kNone;  // if not kNone, the base's units are F32
    std::size_t first = 0;

    // The address of the base's unit for a unit of the tensor.
    const uint8_t* at(std::size_t unit, uint32_t unit_nbytes) const {
        return units + (unit - first) * (cast == Cast::kNone ? unit_nbytes : 4);
    }
};

template <class Unit>
constexpr uint32_t kUnitBits = 8 * sizeof(Unit);

// The type in which a unit is shifted, so that no bit is lost in an int.
template <class Unit>
using Wide = std::conditional_t<sizeof(Unit) == 8, uint64_t, uint32_t>;

// All ones if the top bit is set, else zero.
template <class Unit>
PACKHORSE_INLINE Unit spread_sign(Unit x) {
    return static_cast<Unit>(static_cast<std::make_signed_t<Unit>>(x) >> (kUnitBits<Unit> - 1));
}

// o(x) of section 6.6, and back.
template <class Unit, bool kFloat>
PACKHORSE_INLINE Unit to_ordered(Unit x) {
    if constexpr (!kFloat) return x;
    constexpr auto top = static_cast<Unit>(Unit{1} << (kUnitBits<Unit> - 1));
    return static_cast<Unit>(x ^ (spread_sign(x) | top));
}

template <class Unit, bool kFloat>
PACKHORSE_INLINE Unit from_ordered(Unit o) {
    if constexpr (!kFloat) return o;
    constexpr auto top = static_cast<Unit>(Unit{1} << (kUnitBits<Unit> - 1));
    return static_cast<Unit>(o ^ (spread_sign(static_cast<Unit>(~o)) | top));
}

template <class Unit, bool kFloat>
PACKHORSE_INLINE uint8_t key_of(Unit b) {
    if constexpr (!kFloat)
        return static_cast<uint8_t>(std::bit_width(static_cast<Unit>(b ^ spread_sign(b))));
    else if constexpr (sizeof(Unit) == 1)
        return static_cast<uint8_t>(b << 1 | b >> 7);
    else
        return static_cast<uint8_t>(b >> (sizeof(Unit) == 8 ? 52 : kUnitBits<Unit> - 9));
}

template <class Unit, bool kFloat>
inline void fill_keys(const uint8_t* base, std::size_t n, uint8_t* __restrict keys, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i)
            keys[i] = key_of<Unit, kFloat>(load<Unit>(base + i * sizeof(Unit)));
    });
}

// Rounds F32 to the nearest value, ties to even.
PACKHORSE_INLINE uint16_t round_to_bf16(uint32_t x) {
    const bool is_nan = (x & 0x7FFFFFFF) > 0x7F800000;
    const auto rounded = static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
    return is_nan ? static_cast<uint16_t>(x >> 16 | 0x40) : rounded;
}

PACKHORSE_INLINE uint16_t round_to_fp16(uint32_t x) {
    const uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)
        return static_cast<uint16_t>(sign | 0x7E00 | (magnitude >> 13 & 0x1FF));
    if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 or more
    // The number of bits that the mantissa, with its leading one, loses.
    const uint32_t exponent = magnitude >> 23;
    const bool is_normal = exponent >= 113;
    const uint32_t drop = is_normal ? 13 : 126 - exponent;
    if (drop > 25) return static_cast<uint16_t>(sign);
    const uint32_t mantissa = is_normal ? magnitude - (112u << 23)
                                        : (magnitude & 0x7FFFFF) | (exponent > 0 ? 0x800000u : 0u);
    const uint32_t half = (1u << (drop - 1)) - 1 + (mantissa >> drop & 1);
    return static_cast<uint16_t>(sign | (mantissa + half) >> drop);
}

inline void cast_units(const uint8_t* src, std::size_t n, Cast cast, uint16_t* __restrict dst,
                       Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        if (cast == Cast::kToBf16) {
            for (std::size_t i = 0; i < n; ++i) dst[i] = round_to_bf16(load<uint32_t>(src + 4 * i));
        } else {
            for (std::size_t i = 0; i < n; ++i) dst[i] = round_to_fp16(load<uint32_t>(src + 4 * i));
        }
    });
}

// Returns the base's units for a chunk: as they are, or cast into `memory`.
inline const uint8_t* chunk_base(const Base& base, std::size_t first, std::size_t n,
                                 uint32_t unit_nbytes, uint8_t* memory, Isa isa) {
    const uint8_t* const units = base.at(first, unit_nbytes);
    if (base.cast == Cast::kNone) return units;
    cast_units(units, n, base.cast, reinterpret_cast<uint16_t*>(memory), isa);
    return memory;
}

// The fields before the models of a delta stream.
struct DeltaRule {
    uint32_t n_classes = 1;
    uint8_t thresholds[kMaxDeltaClasses - 1] = {};
    uint8_t shifts[kMaxDeltaClasses] = {};
};

struct DeltaHeader {
    uint32_t lanes_log;
    std::size_t extra_nbytes;
    std::size_t n_escapes;
    DeltaRule rule;
};

inline void write_delta_header(const DeltaHeader& header, uint8_t* dst) {
    std::memset(dst, 0, kDeltaModelsOffset);
    dst[0] = static_cast<uint8_t>(header.lanes_log);
    dst[1] = static_cast<uint8_t>(kProbBits);
    dst[2] = static_cast<uint8_t>(header.rule.n_classes);
    store(dst + 4, static_cast<uint32_t>(header.extra_nbytes));
    store(dst + 8, static_cast<uint32_t>(header.n_escapes));
    std::memcpy(dst + 16, header.rule.thresholds, kMaxDeltaClasses - 1);
    std::memcpy(dst + 24, header.rule.shifts, kMaxDeltaClasses);
}

inline Status read_delta_rule(const uint8_t* src, uint32_t unit_bits, DeltaRule& rule) {
    rule.n_classes = src[2];
    if (rule.n_classes < 1 || rule.n_classes > kMaxDeltaClasses) return Status::kBadField;
    if (src[3] != 0 || load<uint32_t>(src + 12) != 0) return Status::kReserved;
    for (uint32_t t = 0; t < 8; ++t) {
        const uint8_t cut = src[16 + t];
        if (t + 1 >= rule.n_classes && cut != 0) return Status::kReserved;
        if (t > 0 && t + 1 < rule.n_classes && cut < src[15 + t]) return Status::kBadField;
        if (t < kMaxDeltaClasses - 1) rule.thresholds[t] = cut;
    }
    for (uint32_t c = 0; c < kMaxDeltaClasses; ++c) {
        rule.shifts[c] = src[24 + c];
        if (c >= rule.n_classes && rule.shifts[c] != 0) return Status::kReserved;
        if (rule.shifts[c] >= unit_bits) return Status::kBadField;
    }
    return Status::kOk;
}

// Parses the fields before the models.
inline Status read_delta_header(const uint8_t* src, std::size_t nbytes, uint32_t unit_bits,
                                DeltaHeader& header) {
    if (nbytes < kDeltaModelsOffset) return Status::kStreamLength;
    header.lanes_log = src[0];
    if (header.lanes_log < kMinLanesLog || header.lanes_log > kMaxLanesLog || src[1] != kProbBits)
        return Status::kBadField;
    header.extra_nbytes = load<uint32_t>(src + 4);
    header.n_escapes = load<uint32_t>(src + 8);
    return read_delta_rule(src, unit_bits, header.rule);
}

// Reads a model of tokens as a model of symbols with two raw bits, because there are 64 of either.
inline Status read_token_model(const uint8_t* src, std::size_t nbytes, RansModel& model,
                               std::size_t& used) {
    const Status status = read_model(src, nbytes, 2, model, used);
    model.raw_bits = 0;
    if (status == Status::kOk) set_escape_byte(model);
    return status;
}

constexpr std::size_t delta_raw_nbytes(std::size_t n, uint32_t shift) {
    return shift / 8 * n + shift % 8 * bit_plane_nbytes(n);
}

constexpr int kTokenBias = kDeltaDirectTokens / 2;
// Tokens that are not direct have this bit set.
constexpr uint8_t kLongBit = kDeltaDirectTokens;
static_assert(kDeltaTokens == 2 * kDeltaDirectTokens);
// Stands for such a token while differences are cut. No token has this bit.
constexpr uint8_t kLongMark = 0x80;
constexpr uint32_t kTokenLengthBias = 27;  // token - this: bits of m
constexpr uint32_t kFullTokenBits = 64;

#if PACKHORSE_X86
PACKHORSE_AVX2 inline uint64_t marks_avx2(const uint8_t* bytes, __m256i mark) {
    uint32_t halves[2];
    for (int h = 0; h < 2; ++h) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes) + h);
        const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(x, mark), mark);
        halves[h] = static_cast<uint32_t>(_mm256_movemask_epi8(is_set));
    }
    return halves[0] | uint64_t{halves[1]} << 32;
}

template <class Visit>
PACKHORSE_AVX2 inline std::size_t visit_marked_avx2(const uint8_t* bytes, std::size_t n,
                                                    uint8_t mark, Visit visit) {
    const __m256i marks = _mm256_set1_epi8(static_cast<char>(mark));
    std::size_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (uint64_t set = marks_avx2(bytes + i, marks); set != 0; set &= set - 1)
            visit(i + static_cast<std::size_t>(std::countr_zero(set)));
    return i;
}
#endif

// Calls visit(i) for each of `n` bytes that has the bit `mark`, in order. `visit` is marked
// PACKHORSE_VECTORISED.
template <class Visit>
PACKHORSE_INLINE void for_each_marked(const uint8_t* bytes, std::size_t n, uint8_t mark, Isa isa,
                                      Visit visit) {
    std::size_t i = 0;
#if PACKHORSE_X86
    if (isa >= Isa::kAvx2) i = visit_marked_avx2(bytes, n, mark, visit);
#elif PACKHORSE_ARM
    for (; isa >= Isa::kNeon && i + 64 <= n; i += 64)
        for (uint64_t set = marks_neon(bytes + i, mark); set != 0; set &= set - 1)
            visit(i + static_cast<std::size_t>(std::countr_zero(set)));
#endif
    (void)isa;
    const uint64_t marks = uint64_t{0x0101010101010101} * mark;
    for (; i + 8 <= n; i += 8)
        for (uint64_t set = load<uint64_t>(bytes + i) & marks; set != 0; set &= set - 1)
            visit(i + static_cast<std::size_t>(std::countr_zero(set)) / 8);
    for (; i < n; ++i)
        if ((bytes[i] & mark) != 0) visit(i);
}

// Calls work.template operator()<Unit, is_float>() for units of this length.
template <class Work>
inline auto with_units(uint32_t unit_nbytes, bool is_float, const Work& work) {
    switch (unit_nbytes) {
        case 1:
            return is_float ? work.template operator()<uint8_t, true>()
                            : work.template operator()<uint8_t, false>();
        case 2:
            return is_float ? work.template operator()<uint16_t, true>()
                            : work.template operator()<uint16_t, false>();
        case 4:
            return is_float ? work.template operator()<uint32_t, true>()
                            : work.template operator()<uint32_t, false>();
        default:
            return is_float ? work.template operator()<uint64_t, true>()
                            : work.template operator()<uint64_t, false>();
    }
}

constexpr uint32_t extra_bits_of(uint32_t token) {
    return token < kDeltaDirectTokens ? 0
           : token == kDeltaFullToken ? kFullTokenBits
                                      : token - kTokenLengthBias;
}

}  // namespace packhorse
