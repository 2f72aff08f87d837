// Turns blocks of 64 units into palette codes and back with the baseline's instructions; also has
// the code that all paths share.
#pragma once

#include <bit>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/symbols.hpp"

namespace packhorse {

struct PaletteModel {
    uint32_t code_bits;
    bool has_escape;
    uint32_t raw_bits;
    uint32_t n_values;
    uint8_t values[16];  // bytes without their raw bits

    uint8_t symbol_mask() const { return static_cast<uint8_t>(0xFFu << raw_bits); }
};

// Sets the bits of code c in the bit planes, for the units of `mask`.
template <uint32_t kBits>
PACKHORSE_INLINE void add_code(uint64_t mask, uint32_t c, uint64_t* planes) {
    for (uint32_t j = 0; j < kBits; ++j)
        if (c >> j & 1) planes[j] |= mask;
}

// Writes the bit planes of one block, given the set of units of each code but the last. Returns the
// set of escaped units.
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
    // The last code is that of a value or of the escape. Either way its bits are all ones.
    const uint64_t last = ~matched & all;
    for (uint32_t j = 0; j < kBits; ++j) store(dst + j * plane_stride, planes[j] | last);
    return has_escape ? last : 0;
}

// No branch predictor guesses how many escapes a block of 64 units has. So this number of escapes
// is handled without a branch for each; few blocks have more.
constexpr int kFewEscapes = 4;

// Appends the escaped units of a block. `dst` has room for 64.
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

// Finds the units of a block that equal `value` in the bits of `mask`.
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
    uint64_t masks[1u << kBits];
    for (uint32_t c = 0; c < (1u << kBits) - 1; ++c)
        masks[c] = equal_mask_portable(src, model.symbol_mask(), model.values[c]) & all;
    const uint64_t escaped = write_codes<kBits>(masks, all, model.has_escape, codes, plane_stride);
    return append_escapes(src, escaped, model.raw_bits, escapes);
}

// Codes full blocks of 64 units as long as a block of room is left between `escapes` and
// `escapes_end`. Returns how many blocks were coded.
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

// Looks up the values of 64 units by their bit planes. An escape gets whatever the palette has for
// its code.
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
    // SSE2 cannot look up bytes, so 16 of them at a time are compared with each code in turn.
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

// Decodes full blocks of 64 units from `first` on, as long as there are escapes. Returns how many.
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

}  // namespace packhorse
