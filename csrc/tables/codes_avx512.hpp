// Packs elements of dense rows with AVX-512 and VBMI: codes are looked up by byte.
#pragma once

#include "tables/dense_avx512.hpp"

namespace packhorse {

// The codes of values of at most 8 bits that follow each other, such as exponents: byte i is the
// lowest code of value i, or kNone. Such codes have at most 4 bits.
template <class U>
struct CodeBytes {
    static constexpr uint8_t kNone = 0xFF;

    alignas(64) uint8_t codes[256];
    uint32_t shift = 0;  // of the lowest bit of a value
    bool is_valid = false;

    explicit CodeBytes(const TableElements<U>& table) {
        const auto outside = static_cast<U>(~table.rest_mask());
        if (outside == 0 || table.code_bits > 4) return;
        shift = static_cast<uint32_t>(std::countr_zero(outside));
        if (outside >> shift > 0xFF) return;
        std::fill(std::begin(codes), std::end(codes), kNone);
        for (uint32_t i = 1u << table.code_bits; i-- > 0;) {
            const U value = table.values[i];
            if ((value & static_cast<U>(~outside)) == 0)
                codes[static_cast<std::size_t>(value >> shift)] = static_cast<uint8_t>(i);
        }
        is_valid = true;
    }
};

#if PACKHORSE_X86

// `packed` and `found` have room for n elements, rounded up to whole vectors. `found` is 0 where an
// element has no code, and so is `packed`.
template <class U>
PACKHORSE_AVX512_VBMI2 inline void look_up_codes_avx512(const TableElements<U>& table,
                                                        const CodeBytes<U>& values,
                                                        const uint8_t* src, std::size_t n,
                                                        U* packed, U* found) {
    using V = Lanes512<U>;
    constexpr U kAll = static_cast<U>(~U{0});
    // Other bytes of a lane look up whatever code 0 has.
    constexpr uint64_t kLowBytes = ~uint64_t{0} / ((uint64_t{1} << sizeof(U)) - 1);
    const auto count = [](uint32_t bits) { return _mm_cvtsi32_si128(static_cast<int>(bits)); };
    const U index_bits = static_cast<U>(static_cast<U>(~table.rest_mask()) >> values.shift);
    const U code_bits = static_cast<U>(uint64_t{kAll} << table.rest_bits);
    const __m512i outside = V::broadcast(static_cast<U>(~table.rest_mask()));
    const __m512i moved_mask = V::broadcast(table.moved_mask), none = V::broadcast(0xFF);
    const __m512i sign = V::broadcast(static_cast<U>(table.has_sign ? 1 : 0));
    const __m128i lowest = count(values.shift), moved = count(table.shift);
    const __m128i to_sign = count(table.moved_bits), to_code = count(table.rest_bits);
    const ByteTable512 codes{values.codes, true};
    const __m128i from_sign = count(8 * sizeof(U) - 1);
    for (std::size_t c = 0; c < n; c += V::kCount) {
        const uint64_t mask = first_columns(n - c) & first_columns(V::kCount);
        const __m512i element = V::get(src + sizeof(U) * c, mask);
        const __m512i index = V::right(_mm512_and_si512(element, outside), lowest, index_bits);
        const __m512i code = _mm512_maskz_mov_epi8(kLowBytes, codes[index]);
        const __m512i rest = _mm512_or_si512(
            _mm512_and_si512(V::right(element, moved, kAll), moved_mask),
            V::left(_mm512_and_si512(V::right(element, from_sign, kAll), sign), to_sign, kAll));
        const __m512i whole = _mm512_or_si512(V::left(code, to_code, code_bits), rest);
        const __m512i hit = V::differing(code, none);
        _mm512_storeu_si512(packed + c, _mm512_and_si512(whole, hit));
        _mm512_storeu_si512(found + c, hit);
    }
}

#endif

}  // namespace packhorse
