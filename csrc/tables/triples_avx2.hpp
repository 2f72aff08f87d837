// Triples with AVX2, 32 at a time: 96 columns.
#pragma once

#include "tables/bytes_avx2.hpp"
#include "tables/triples_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// The codes of 32 triples. A triple is below 1,000, so quotients are products of 16 bits, and ten
// times a quotient is added up from bytes.
struct Triples32 {
    __m256i first, second, third;

    PACKHORSE_AVX2 PACKHORSE_INLINE Triples32(const TripleSpan& span, std::size_t j) {
        const __m256i low = load(span.low + j), top = load(span.top + j);
        const __m256i a = tenth(_mm256_unpacklo_epi8(low, top));
        const __m256i b = tenth(_mm256_unpackhi_epi8(low, top));
        const __m256i tens = _mm256_packus_epi16(a, b);  // below 100
        first = _mm256_sub_epi8(low, ten_times(tens));
        third = _mm256_packus_epi16(tenth(a), tenth(b));
        second = _mm256_sub_epi8(tens, ten_times(third));
    }

    PACKHORSE_AVX2 static __m256i load(const uint8_t* src) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    }

  private:
    PACKHORSE_AVX2 PACKHORSE_INLINE static __m256i tenth(__m256i x) {
        return _mm256_mulhi_epu16(x, _mm256_set1_epi16(6554));
    }

    PACKHORSE_AVX2 PACKHORSE_INLINE static __m256i ten_times(__m256i x) {
        const __m256i twice = _mm256_add_epi8(x, x), four_times = _mm256_add_epi8(twice, twice);
        return _mm256_add_epi8(_mm256_add_epi8(four_times, four_times), twice);
    }
};

// As put_codes_portable(), from the first triple on. Returns the first triple that is left. Codes
// have at most 4 bits, and so do the bits that are kept, so no shift leaves its byte.
PACKHORSE_AVX2 inline std::size_t put_codes_avx2(const TripleSpan& span, uint32_t kept,
                                                 uint8_t* high) {
    const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(kept));
    std::size_t i = 0;
    for (; i + 32 <= span.n_full(); i += 32) {
        const Triples32 codes(span, i);
        const auto put = [&](std::size_t column, __m256i code) PACKHORSE_AVX2 {
            auto* const to = reinterpret_cast<__m256i*>(high + column);
            _mm256_storeu_si256(
                to, _mm256_or_si256(_mm256_loadu_si256(to), _mm256_sll_epi16(code, shift)));
        };
        put(i, codes.first);
        put(i + span.count, codes.second);
        put(i + 2 * span.count, codes.third);
    }
    return i;
}

// As make_triples_portable(), from the first triple on. Returns the first triple that is left.
PACKHORSE_AVX2 inline std::size_t make_triples_avx2(uint8_t* codes, std::size_t count,
                                                    uint8_t* low) {
    const __m256i byte = _mm256_set1_epi16(0xFF), tens = _mm256_set1_epi16(0x0A01);
    const __m256i hundreds = _mm256_set1_epi16(100), zero = _mm256_setzero_si256();
    std::size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        const __m256i first = Triples32::load(codes + i);
        const __m256i second = Triples32::load(codes + i + count);
        const __m256i third = Triples32::load(codes + i + 2 * count);
        const __m256i a =
            _mm256_add_epi16(_mm256_maddubs_epi16(_mm256_unpacklo_epi8(first, second), tens),
                             _mm256_mullo_epi16(_mm256_unpacklo_epi8(third, zero), hundreds));
        const __m256i b =
            _mm256_add_epi16(_mm256_maddubs_epi16(_mm256_unpackhi_epi8(first, second), tens),
                             _mm256_mullo_epi16(_mm256_unpackhi_epi8(third, zero), hundreds));
        _mm256_storeu_si256(
            reinterpret_cast<__m256i*>(low + i),
            _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + i),
                            _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8)));
    }
    return i;
}

// Joins the columns of full triples, of which there are 32 at least: the last ones may be written
// twice. `whole` is the first plane of rests.
template <class U, uint32_t kWhole>
PACKHORSE_AVX2 inline void join_triples_avx2(const TripleSpan& span, const uint8_t* whole,
                                             const ValueBytes& values, uint8_t* dst) {
    const ByteJoinerAvx2<U, kWhole> joiner(values, span.n);
    const std::size_t n_full = span.n_full();
    for (std::size_t next = 0; next < n_full; next += 32) {
        const std::size_t i = std::min(next, n_full - 32);
        const Triples32 codes(span, i);
        const auto put = [&](std::size_t column, __m256i code) PACKHORSE_AVX2 {
            joiner.put(code, whole + column, dst + sizeof(U) * column);
        };
        put(i, codes.first);
        put(i + span.count, codes.second);
        put(i + 2 * span.count, codes.third);
    }
}

#endif

}  // namespace packhorse
