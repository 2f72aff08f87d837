// Maps bytes to codes with AVX2, 32 bytes at a time.
#pragma once

#include "common/dispatch.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The symbols of a model that have codes: a range, and what does not belong to it.
struct SymbolRange {
    uint32_t raw_bits;
    uint8_t base;         // the first symbol
    uint8_t escape_code;  // of all bytes without a code of their own
};

// Maps bytes to what `map` makes of their symbols less the first one. Sets `escaped` if there is an
// escape. Returns how many.
template <class Map>
PACKHORSE_AVX2 PACKHORSE_INLINE std::size_t map_symbols_avx2(const uint8_t* bytes, std::size_t n,
                                                             const SymbolRange& range,
                                                             uint8_t* codes, bool& escaped,
                                                             Map map) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(range.raw_bits));
    const __m256i kept = _mm256_set1_epi8(static_cast<char>(0xFF >> range.raw_bits));
    const __m256i first = _mm256_set1_epi8(static_cast<char>(range.base));
    const __m256i escape = _mm256_set1_epi8(static_cast<char>(range.escape_code));
    __m256i any = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + i));
        const __m256i symbols = _mm256_and_si256(_mm256_srl_epi16(loaded, shift), kept);
        const __m256i found = map(_mm256_sub_epi8(symbols, first), escape);
        any = _mm256_or_si256(any, _mm256_cmpeq_epi8(found, escape));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i), found);
    }
    escaped |= _mm256_testz_si256(any, any) == 0;
    return i;
}

// Maps consecutive symbols.
PACKHORSE_AVX2 inline std::size_t subtract_base_avx2(const uint8_t* bytes, std::size_t n,
                                                     const SymbolRange& range, uint8_t* codes,
                                                     bool& escaped) {
    struct Clamp {
        PACKHORSE_AVX2 PACKHORSE_INLINE __m256i operator()(__m256i offset, __m256i escape) const {
            return _mm256_min_epu8(offset, escape);
        }
    };
    return map_symbols_avx2(bytes, n, range, codes, escaped, Clamp());
}

// Maps symbols by tables of 16: `code_of[i]`, for i below 16 * n_tables, is the code of the symbol
// base + i, with the bits of the escape's code flipped. Symbols beyond the tables are escapes.
PACKHORSE_AVX2 inline std::size_t look_up_codes_avx2(const uint8_t* bytes, std::size_t n,
                                                     const SymbolRange& range,
                                                     const uint8_t* code_of, uint32_t n_tables,
                                                     uint8_t* codes, bool& escaped) {
    const __m256i sixteen = _mm256_set1_epi8(16);
    // A shuffle gives zero where the top bit of an index is set. A sum with this has it unset only
    // for 0 to 15.
    const __m256i lift = _mm256_set1_epi8(0x70);
    return map_symbols_avx2(
        bytes, n, range, codes, escaped, [=](__m256i offset, __m256i escape) PACKHORSE_AVX2 {
            __m256i flipped = _mm256_setzero_si256();
            for (uint32_t t = 0; t < n_tables; ++t) {
                const __m256i table = _mm256_broadcastsi128_si256(
                    _mm_loadu_si128(reinterpret_cast<const __m128i*>(code_of + 16 * t)));
                flipped = _mm256_or_si256(
                    flipped, _mm256_shuffle_epi8(table, _mm256_adds_epu8(offset, lift)));
                offset = _mm256_sub_epi8(offset, sixteen);
            }
            return _mm256_xor_si256(flipped, escape);
        });
}

#endif

}  // namespace packhorse
