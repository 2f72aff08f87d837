// Palette coding (docs/format.md, 6.3): codes of up to 4 bits as bit planes, a symbol outside of
// the palette as an escape; and raw bits, which alone (no code bits) drop bits that are always
// zero.
//
// Bit planes are what SIMD compares produce and masked operations consume: 64 units are `code_bits`
// words of 64 bits. Escapes are few by choice of the encoder and are handled one by one.
#pragma once

#include <algorithm>
#include <bit>

#include "dispatch.hpp"
#include "histogram.hpp"
#include "layout.hpp"
#include "symbols.hpp"

namespace packhorse {

struct PaletteModel {
    uint32_t code_bits;
    bool has_escape;
    uint32_t raw_bits;
    uint32_t n_values;
    uint8_t values[16];  // bytes without their raw bits
};

constexpr std::size_t palette_planes_nbytes(uint32_t code_bits, std::size_t n) {
    return code_bits * bit_plane_nbytes(n);
}

// Gives codes that are left over to values outside of the palette, so that loops over it have a
// fixed length.
inline void fill_palette(PaletteModel& model) {
    const uint32_t n_codes = (1u << model.code_bits) - (model.has_escape ? 1 : 0);
    for (uint32_t value = 0; model.n_values < n_codes; ++value) {
        const auto shifted = static_cast<uint8_t>(value << model.raw_bits);
        uint8_t* const end = model.values + model.n_values;
        if (std::find(model.values, end, shifted) == end) model.values[model.n_values++] = shifted;
    }
}

// The cheapest palette of symbols with so many raw bits, if it costs less than `best`, which is
// updated: bits for the histogram's units.
inline void try_palette(const Histogram& histogram, uint32_t raw_bits, uint64_t& best,
                        PaletteModel& model) {
    Histogram symbols;
    const uint32_t n_raw = fold(histogram, raw_bits, symbols);
    const uint64_t raw_cost = uint64_t{symbols.total} * n_raw;
    if (raw_cost + symbols.total >= best) return;
    const uint32_t n_possible = 256u >> raw_bits;
    uint8_t order[256];
    uint32_t n_seen = 0;
    for (uint32_t v = 0; v < n_possible; ++v)
        if (symbols.counts[v] > 0) order[n_seen++] = static_cast<uint8_t>(v);
    std::sort(order, order + n_seen, [&](uint8_t a, uint8_t b) {
        const uint32_t count_a = symbols.counts[a], count_b = symbols.counts[b];
        return count_a != count_b ? count_a > count_b : a < b;
    });
    for (uint32_t bits = 1; bits <= kMaxCodeBits && bits <= 8 - raw_bits; ++bits) {
        const bool all_have_codes = n_possible <= 1u << bits;
        const bool escape = !all_have_codes && (symbols.sampled || n_seen > 1u << bits);
        const uint32_t n_values = std::min(n_seen, (1u << bits) - (escape ? 1 : 0));
        uint64_t covered = 0;
        for (uint32_t i = 0; i < n_values; ++i) covered += symbols.counts[order[i]];
        const uint64_t cost =
            uint64_t{symbols.total} * bits + 8 * (symbols.total - covered) + raw_cost;
        if (cost >= best) continue;
        best = cost;
        model.code_bits = bits;
        model.has_escape = escape;
        model.raw_bits = raw_bits;
        model.n_values = n_values;
        for (uint32_t i = 0; i < n_values; ++i)
            model.values[i] = static_cast<uint8_t>(order[i] << raw_bits);
    }
}

// The bits that are used at all, as they are, if that costs less than `best`.
inline void try_used_bits(const Histogram& histogram, uint64_t& best, PaletteModel& model) {
    Histogram none;
    const uint64_t cost = uint64_t{histogram.total} * fold(histogram, 8, none);
    if (cost >= best) return;
    best = cost;
    model = {0, false, 8, 1, {}};
}

// The cheapest palette for a histogram of bytes; symbols have up to `most_raw_bits` raw bits.
// Returns its estimated bits for the histogram's units.
inline uint64_t choose_palette(const Histogram& histogram, uint32_t most_raw_bits,
                               PaletteModel& model) {
    uint64_t best = ~uint64_t{0};
    // Each raw bit costs one: more of them than the best palette has bits cannot win.
    for (uint32_t raw_bits = 0; raw_bits <= most_raw_bits && raw_bits * histogram.total < best;
         ++raw_bits)
        try_palette(histogram, raw_bits, best, model);
    if (model.code_bits > 0) fill_palette(model);
    std::sort(model.values, model.values + model.n_values);
    try_used_bits(histogram, best, model);
    return best;
}

// Sets code c's bits in the bit planes wherever `mask` says.
template <uint32_t kBits>
PACKHORSE_INLINE void add_code(uint64_t mask, uint32_t c, uint64_t* planes) {
    for (uint32_t j = 0; j < kBits; ++j)
        if (c >> j & 1) planes[j] |= mask;
}

// Writes the bit planes of one block of units, given for each code but the last the set of units
// that have it; returns the escaped set.
template <uint32_t kBits>
PACKHORSE_INLINE uint64_t write_codes(const uint64_t* masks, uint64_t all, bool has_escape,
                                      uint8_t* dst, std::size_t plane_stride) {
    uint64_t planes[kBits] = {};
    uint64_t matched = 0;
#pragma GCC unroll 16
    for (uint32_t c = 0; c < (1u << kBits) - 1; ++c) {
        matched |= masks[c];
        add_code<kBits>(masks[c], c, planes);
    }
    // The last code is a value's or the escape's; either way its bits are all ones.
    const uint64_t last = ~matched & all;
    for (uint32_t j = 0; j < kBits; ++j) store(dst + j * plane_stride, planes[j] | last);
    return has_escape ? last : 0;
}

// How many escapes a block of 64 units has is not to be predicted. Few have more than these, which
// are handled without a branch on each.
constexpr int kFewEscapes = 4;

// Appends the escaped units of a block; `dst` has room for 64.
PACKHORSE_INLINE uint8_t* append_escapes(const uint8_t* src, uint64_t escaped, uint32_t raw_bits,
                                         uint8_t* dst) {
    for (int i = 0; i < kFewEscapes; ++i, escaped &= escaped - 1) {
        *dst = static_cast<uint8_t>(src[std::countr_zero(escaped) & 63] >> raw_bits);
        dst += escaped != 0;
    }
    for (; escaped != 0; escaped &= escaped - 1)
        *dst++ = static_cast<uint8_t>(src[std::countr_zero(escaped)] >> raw_bits);
    return dst;
}

// The units of a block that equal `value` in the bits of `mask`.
PACKHORSE_INLINE uint64_t equal_mask_portable(const uint8_t* src, uint8_t mask, uint8_t value) {
    uint64_t equal = 0;
#if PACKHORSE_X86
    const __m128i wanted = _mm_set1_epi8(static_cast<char>(value));
    const __m128i kept = _mm_set1_epi8(static_cast<char>(mask));
    for (int k = 0; k < 4; ++k) {
        const __m128i units = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + k);
        const __m128i same = _mm_cmpeq_epi8(_mm_and_si128(units, kept), wanted);
        equal |= uint64_t{static_cast<uint32_t>(_mm_movemask_epi8(same))} << (16 * k);
    }
#else
    constexpr uint64_t kEach = 0x0101010101010101, kLowBits = 0x7F7F7F7F7F7F7F7F;
    for (int k = 0; k < 8; ++k) {
        const uint64_t differ = (load<uint64_t>(src + 8 * k) & kEach * mask) ^ kEach * value;
        const uint64_t top_if_zero = ~(((differ & kLowBits) + kLowBits) | differ | kLowBits);
        equal |= collect_bit(top_if_zero, 7) << (8 * k);
    }
#endif
    return equal;
}

// A block of 64 units.
template <uint32_t kBits>
PACKHORSE_INLINE uint8_t* palette_encode_block(const uint8_t* src, uint64_t all,
                                               const PaletteModel& model, uint8_t* codes,
                                               std::size_t plane_stride, uint8_t* escapes) {
    const auto symbol_mask = static_cast<uint8_t>(0xFFu << model.raw_bits);
    uint64_t masks[1u << kBits];
    for (uint32_t c = 0; c < (1u << kBits) - 1; ++c)
        masks[c] = equal_mask_portable(src, symbol_mask, model.values[c]) & all;
    const uint64_t escaped = write_codes<kBits>(masks, all, model.has_escape, codes, plane_stride);
    return append_escapes(src, escaped, model.raw_bits, escapes);
}

// Codes full blocks of 64 units, as long as `escapes` stays clear of `escapes_end` by a block;
// returns how many blocks were coded.
template <uint32_t kBits>
std::size_t palette_encode_blocks_portable(const uint8_t* src, std::size_t n_blocks,
                                           const PaletteModel& model, uint8_t* codes,
                                           std::size_t plane_stride, uint8_t*& escapes,
                                           const uint8_t* escapes_end) {
    std::size_t b = 0;
    for (; b < n_blocks && escapes_end - escapes >= 64; ++b)
        escapes = palette_encode_block<kBits>(src + 64 * b, ~uint64_t{0}, model, codes + 8 * b,
                                              plane_stride, escapes);
    return b;
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline
    __attribute__((always_inline)) uint64_t equal_mask_avx2(__m256i low, __m256i high,
                                                            uint8_t value) {
    const __m256i wanted = _mm256_set1_epi8(static_cast<char>(value));
    const auto a = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, wanted)));
    const auto b = static_cast<uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, wanted)));
    return a | uint64_t{b} << 32;
}

template <uint32_t kBits>
PACKHORSE_AVX2 std::size_t palette_encode_blocks_avx2(const uint8_t* src, std::size_t n_blocks,
                                                      const PaletteModel& model, uint8_t* codes,
                                                      std::size_t plane_stride, uint8_t*& escapes,
                                                      const uint8_t* escapes_end) {
    const __m256i symbol_mask = _mm256_set1_epi8(static_cast<char>(0xFFu << model.raw_bits));
    std::size_t b = 0;
    for (; b < n_blocks && escapes_end - escapes >= 64; ++b) {
        const __m256i low = _mm256_and_si256(
            symbol_mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 64 * b)));
        const __m256i high = _mm256_and_si256(
            symbol_mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 64 * b + 32)));
        uint64_t masks[1u << kBits];
#pragma GCC unroll 16
        for (uint32_t c = 0; c < (1u << kBits) - 1; ++c)
            masks[c] = equal_mask_avx2(low, high, model.values[c]);
        const uint64_t escaped =
            write_codes<kBits>(masks, ~uint64_t{0}, model.has_escape, codes + 8 * b, plane_stride);
        escapes = append_escapes(src + 64 * b, escaped, model.raw_bits, escapes);
    }
    return b;
}

template <uint32_t kBits>
PACKHORSE_AVX512 std::size_t palette_encode_blocks_avx512(const uint8_t* src, std::size_t n_blocks,
                                                          const PaletteModel& model, uint8_t* codes,
                                                          std::size_t plane_stride,
                                                          uint8_t*& escapes,
                                                          const uint8_t* escapes_end) {
    const __m512i symbol_mask = _mm512_set1_epi8(static_cast<char>(0xFFu << model.raw_bits));
    std::size_t b = 0;
    for (; b < n_blocks && escapes_end - escapes >= 64; ++b) {
        const __m512i units = _mm512_and_si512(symbol_mask, _mm512_loadu_si512(src + 64 * b));
        uint64_t masks[1u << kBits];
#pragma GCC unroll 16
        for (uint32_t c = 0; c < (1u << kBits) - 1; ++c)
            masks[c] =
                _mm512_cmpeq_epi8_mask(units, _mm512_set1_epi8(static_cast<char>(model.values[c])));
        const uint64_t escaped =
            write_codes<kBits>(masks, ~uint64_t{0}, model.has_escape, codes + 8 * b, plane_stride);
        escapes = append_escapes(src + 64 * b, escaped, model.raw_bits, escapes);
    }
    return b;
}

#endif

template <uint32_t kBits>
std::size_t palette_encode_blocks(const uint8_t* src, std::size_t n_blocks,
                                  const PaletteModel& model, uint8_t* codes,
                                  std::size_t plane_stride, uint8_t*& escapes,
                                  const uint8_t* escapes_end, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        return palette_encode_blocks_avx512<kBits>(src, n_blocks, model, codes, plane_stride,
                                                   escapes, escapes_end);
    if (isa >= Isa::kAvx2)
        return palette_encode_blocks_avx2<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                                 escapes_end);
#endif
    (void)isa;
    return palette_encode_blocks_portable<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                                 escapes_end);
}

// Codes all units; returns the end of the escapes, or null if they do not fit.
template <uint32_t kBits>
uint8_t* palette_encode_units(const uint8_t* src, std::size_t n, const PaletteModel& model,
                              uint8_t* codes, std::size_t plane_stride, uint8_t* escapes,
                              const uint8_t* escapes_end, Isa isa) {
    const std::size_t n_blocks = n / 64;
    if (palette_encode_blocks<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                     escapes_end, isa) < n_blocks)
        return nullptr;
    const std::size_t rest = n % 64;
    if (rest == 0) return escapes;
    if (escapes_end - escapes < 64) return nullptr;
    uint8_t block[64] = {};
    std::memcpy(block, src + 64 * n_blocks, rest);
    return palette_encode_block<kBits>(block, (uint64_t{1} << rest) - 1, model,
                                       codes + 8 * n_blocks, plane_stride, escapes);
}

// The codes of all units, for any number of code bits; as palette_encode_units.
inline uint8_t* palette_encode_codes(const uint8_t* src, std::size_t n, const PaletteModel& model,
                                     uint8_t* codes, uint8_t* escapes, const uint8_t* limit,
                                     Isa isa) {
    const std::size_t stride = bit_plane_nbytes(n);
    switch (model.code_bits) {
        case 0:
            return escapes;
        case 1:
            return palette_encode_units<1>(src, n, model, codes, stride, escapes, limit, isa);
        case 2:
            return palette_encode_units<2>(src, n, model, codes, stride, escapes, limit, isa);
        case 3:
            return palette_encode_units<3>(src, n, model, codes, stride, escapes, limit, isa);
        default:
            return palette_encode_units<4>(src, n, model, codes, stride, escapes, limit, isa);
    }
}

// Writes the stream of `n` units to `dst`; returns its length, or 0 if it may not be shorter than
// `capacity` (a block of 64 bytes is kept clear for escapes).
inline std::size_t palette_encode(const uint8_t* src, std::size_t n, const PaletteModel& model,
                                  uint8_t* dst, std::size_t capacity, Isa isa) {
    const uint32_t raw_mask = (1u << model.raw_bits) - 1;
    const RawBits raw{model.raw_bits, used_bits(src, n, raw_mask)};
    const std::size_t planes_nbytes = palette_planes_nbytes(model.code_bits, n);
    const std::size_t escapes_at = kPaletteHeaderNbytes + planes_nbytes + raw_nbytes(raw, n);
    if (escapes_at >= capacity) return 0;
    uint8_t* const codes = dst + kPaletteHeaderNbytes;
    uint8_t* const escapes = dst + escapes_at;
    const uint8_t* const end =
        palette_encode_codes(src, n, model, codes, escapes, dst + capacity, isa);
    if (end == nullptr) return 0;
    write_raw_bits(src, n, raw, codes + planes_nbytes, isa);
    std::memset(dst, 0, kPaletteHeaderNbytes);
    dst[0] = static_cast<uint8_t>(model.code_bits);
    dst[1] = model.has_escape;
    dst[2] = static_cast<uint8_t>(raw.n_bits);
    dst[3] = static_cast<uint8_t>(raw.mask);
    store(dst + 4, static_cast<uint32_t>(end - escapes));
    for (uint32_t c = 0; c < model.n_values; ++c)
        dst[8 + c] = static_cast<uint8_t>(model.values[c] >> model.raw_bits);
    const auto nbytes = static_cast<std::size_t>(end - dst);
    return nbytes < capacity ? nbytes : 0;
}

struct alignas(64) PaletteDecoder {
    uint8_t values[16];  // symbols, shifted to their place
    uint32_t code_bits;
    uint32_t raw_bits;
    bool has_escape;
    const uint8_t* planes;
    std::size_t plane_stride;
    const uint8_t* escapes;
    const uint8_t* escapes_end;
    RawPlanes raw;
};

inline Status palette_open(const uint8_t* src, std::size_t nbytes, std::size_t n,
                           PaletteDecoder& out) {
    if (nbytes < kPaletteHeaderNbytes) return Status::kStreamLength;
    out.code_bits = src[0];
    out.has_escape = src[1] != 0;
    if (out.code_bits > kMaxCodeBits || src[1] > (out.code_bits > 0 ? 1 : 0))
        return Status::kBadField;
    RawBits raw;
    const Status status = parse_raw_bits(src[2], src[3], kMaxPaletteRawBits, raw);
    if (status != Status::kOk) return status;
    out.raw_bits = raw.n_bits;
    const std::size_t n_escapes = load<uint32_t>(src + 4);
    if (n_escapes > 0 && !out.has_escape) return Status::kEscapeCount;
    for (uint32_t c = (1u << out.code_bits) - (out.has_escape ? 1 : 0); c < 16; ++c)
        if (src[8 + c] != 0) return Status::kReserved;
    const std::size_t planes_nbytes = palette_planes_nbytes(out.code_bits, n);
    const std::size_t before_escapes = kPaletteHeaderNbytes + planes_nbytes + raw_nbytes(raw, n);
    if (nbytes != before_escapes + n_escapes) return Status::kStreamLength;
    out.planes = src + kPaletteHeaderNbytes;
    out.plane_stride = bit_plane_nbytes(n);
    out.raw = find_raw_planes(raw, out.planes + planes_nbytes, n);
    out.escapes = src + before_escapes;
    out.escapes_end = src + nbytes;
    if (!symbols_fit(src + 8, 16, raw) || !symbols_fit(out.escapes, n_escapes, raw))
        return Status::kBadField;
    for (uint32_t c = 0; c < 16; ++c)
        out.values[c] = static_cast<uint8_t>(src[8 + c] << raw.n_bits);
    return Status::kOk;
}

// Values of 64 units from their bit planes; an escape gets what its code finds in the palette.
template <uint32_t kBits>
PACKHORSE_INLINE void palette_values_portable(const uint64_t* planes, const uint8_t* values,
                                              uint8_t* dst) {
    uint8_t codes[64];
    for (uint32_t k = 0; k < 8; ++k) {
        uint64_t eight = 0;
        for (uint32_t j = 0; j < kBits; ++j) eight |= kSpreadBits[planes[j] >> (8 * k) & 0xFF] << j;
        store(codes + 8 * k, eight);
    }
#if PACKHORSE_X86
    // SSE2 cannot look up bytes, but compares 16 of them with each code in turn.
    for (uint32_t k = 0; k < 4; ++k) {
        const __m128i code = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes) + k);
        __m128i found = _mm_setzero_si128();
#pragma GCC unroll 16
        for (uint32_t c = 0; c < 1u << kBits; ++c) {
            const __m128i same = _mm_cmpeq_epi8(code, _mm_set1_epi8(static_cast<char>(c)));
            const __m128i value = _mm_set1_epi8(static_cast<char>(values[c]));
            found = _mm_or_si128(found, _mm_and_si128(same, value));
        }
        _mm_storeu_si128(reinterpret_cast<__m128i*>(dst) + k, found);
    }
#else
    for (uint32_t i = 0; i < 64; ++i) dst[i] = values[codes[i]];
#endif
}

// Patches the escaped units of a block.
PACKHORSE_INLINE const uint8_t* take_escapes(const uint8_t* escapes, uint64_t escaped,
                                             uint32_t raw_bits, uint8_t* dst) {
    for (; escaped != 0; escaped &= escaped - 1)
        dst[std::countr_zero(escaped)] = static_cast<uint8_t>(*escapes++ << raw_bits);
    return escapes;
}

template <uint32_t kBits>
PACKHORSE_INLINE uint64_t load_codes(const PaletteDecoder& decoder, std::size_t first,
                                     uint64_t* planes) {
    uint64_t escaped = decoder.has_escape ? ~uint64_t{0} : 0;
    for (uint32_t j = 0; j < kBits; ++j) {
        planes[j] = load<uint64_t>(decoder.planes + j * decoder.plane_stride + first / 8);
        escaped &= planes[j];
    }
    return escaped;
}

// Full blocks of 64 units from `first` on, while the escapes last; returns how many were decoded.
template <uint32_t kBits>
std::size_t palette_decode_blocks_portable(PaletteDecoder& decoder, std::size_t first,
                                           std::size_t n_blocks, uint8_t* dst) {
    const uint8_t* escapes = decoder.escapes;
    std::size_t b = 0;
    for (; b < n_blocks; ++b) {
        uint64_t planes[kBits];
        const uint64_t escaped = load_codes<kBits>(decoder, first + 64 * b, planes);
        if (decoder.escapes_end - escapes < std::popcount(escaped)) break;
        palette_values_portable<kBits>(planes, decoder.values, dst + 64 * b);
        escapes = take_escapes(escapes, escaped, decoder.raw_bits, dst + 64 * b);
    }
    decoder.escapes = escapes;
    return b;
}

#if PACKHORSE_X86

template <uint32_t kBits>
PACKHORSE_AVX2 inline
    __attribute__((always_inline)) void palette_values_avx2(const uint64_t* planes,
                                                            const uint8_t* palette, uint8_t* dst) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(palette)));
    const __m256i byte_of_bit =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
    for (int h = 0; h < 2; ++h) {
        __m256i code = _mm256_setzero_si256();
        for (uint32_t j = 0; j < kBits; ++j) {
            const __m256i spread = _mm256_shuffle_epi8(
                _mm256_set1_epi32(static_cast<int>(planes[j] >> (32 * h))), byte_of_bit);
            const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
            code = _mm256_or_si256(
                code, _mm256_and_si256(is_set, _mm256_set1_epi8(static_cast<char>(1 << j))));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst) + h, _mm256_shuffle_epi8(values, code));
    }
}

template <uint32_t kBits>
PACKHORSE_AVX2 std::size_t palette_decode_blocks_avx2(PaletteDecoder& decoder, std::size_t first,
                                                      std::size_t n_blocks, uint8_t* dst,
                                                      Ahead& ahead) {
    const uint8_t* escapes = decoder.escapes;
    std::size_t b = 0;
    for (; b < n_blocks; ++b) {
        uint64_t planes[kBits];
        const uint64_t escaped = load_codes<kBits>(decoder, first + 64 * b, planes);
        if (decoder.escapes_end - escapes < __builtin_popcountll(escaped)) break;
        if (b % 2 == 0) ahead.step();
        palette_values_avx2<kBits>(planes, decoder.values, dst + 64 * b);
        escapes = take_escapes(escapes, escaped, decoder.raw_bits, dst + 64 * b);
    }
    decoder.escapes = escapes;
    return b;
}

template <uint32_t kBits>
PACKHORSE_AVX512 std::size_t palette_decode_blocks_avx512(PaletteDecoder& decoder,
                                                          std::size_t first, std::size_t n_blocks,
                                                          uint8_t* dst, Ahead& ahead) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(decoder.values)));
    const uint8_t* escapes = decoder.escapes;
    std::size_t b = 0;
    for (; b < n_blocks; ++b) {
        uint64_t planes[kBits];
        const uint64_t escaped = load_codes<kBits>(decoder, first + 64 * b, planes);
        if (decoder.escapes_end - escapes < __builtin_popcountll(escaped)) break;
        if (b % 2 == 0) ahead.step();
        __m512i code = _mm512_setzero_si512();
        for (uint32_t j = 0; j < kBits; ++j)
            code = _mm512_mask_add_epi8(code, planes[j], code,
                                        _mm512_set1_epi8(static_cast<char>(1 << j)));
        _mm512_storeu_si512(dst + 64 * b, _mm512_shuffle_epi8(values, code));
        escapes = take_escapes(escapes, escaped, decoder.raw_bits, dst + 64 * b);
    }
    decoder.escapes = escapes;
    return b;
}

#endif

template <uint32_t kBits>
std::size_t palette_decode_blocks(PaletteDecoder& decoder, std::size_t first, std::size_t n_blocks,
                                  uint8_t* dst, Ahead& ahead, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        return palette_decode_blocks_avx512<kBits>(decoder, first, n_blocks, dst, ahead);
    if (isa >= Isa::kAvx2)
        return palette_decode_blocks_avx2<kBits>(decoder, first, n_blocks, dst, ahead);
#endif
    (void)ahead;
    (void)isa;
    return palette_decode_blocks_portable<kBits>(decoder, first, n_blocks, dst);
}

template <uint32_t kBits>
Status palette_decode_units(PaletteDecoder& decoder, std::size_t first, std::size_t n, uint8_t* dst,
                            Ahead& ahead, Isa isa) {
    const std::size_t n_blocks = n / 64;
    if (palette_decode_blocks<kBits>(decoder, first, n_blocks, dst, ahead, isa) < n_blocks)
        return Status::kEscapeCount;
    const std::size_t rest = n % 64;
    if (rest == 0) return Status::kOk;
    uint64_t planes[kBits];
    const uint64_t escaped =
        load_codes<kBits>(decoder, first + 64 * n_blocks, planes) & ((uint64_t{1} << rest) - 1);
    if (decoder.escapes_end - decoder.escapes < std::popcount(escaped)) return Status::kEscapeCount;
    uint8_t block[64];
    palette_values_portable<kBits>(planes, decoder.values, block);
    decoder.escapes = take_escapes(decoder.escapes, escaped, decoder.raw_bits, block);
    std::memcpy(dst + 64 * n_blocks, block, rest);
    return Status::kOk;
}

inline Status palette_decode_codes(PaletteDecoder& decoder, std::size_t first, std::size_t n,
                                   uint8_t* dst, Ahead& ahead, Isa isa) {
    switch (decoder.code_bits) {
        case 0:
            std::memset(dst, decoder.values[0], n);
            return Status::kOk;
        case 1:
            return palette_decode_units<1>(decoder, first, n, dst, ahead, isa);
        case 2:
            return palette_decode_units<2>(decoder, first, n, dst, ahead, isa);
        case 3:
            return palette_decode_units<3>(decoder, first, n, dst, ahead, isa);
        default:
            return palette_decode_units<4>(decoder, first, n, dst, ahead, isa);
    }
}

// The `n` units from `first` on; `first` is a multiple of 64, and so is `n` except at the end of
// the plane.
inline Status palette_decode(PaletteDecoder& decoder, std::size_t first, std::size_t n,
                             uint8_t* dst, Ahead& ahead, Isa isa) {
    const Status status = palette_decode_codes(decoder, first, n, dst, ahead, isa);
    if (status == Status::kOk) add_raw_bits(decoder.raw, first, n, dst, isa);
    return status;
}

inline Status palette_close(const PaletteDecoder& decoder) {
    return decoder.escapes == decoder.escapes_end ? Status::kOk : Status::kEscapeCount;
}

}  // namespace packhorse
