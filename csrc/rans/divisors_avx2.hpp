// The divisors of eight lanes with AVX2: their frequencies, places in the table of slots, and
// reciprocals.
//
// A loop that encodes does hardly anything but load, so it matters how many loads these take.
// Neighbouring lanes have codes four bytes apart. So codes are put in the order of lanes first, and
// those of eight lanes are loaded at once. If there are few enough, each two of them are made one
// number, which leads to an entry for both: then eight lanes take 5 loads, otherwise 9. A code and
// a divisor for each lane would be 16.
#pragma once

#include "common/dispatch.hpp"
#include "rans/encode_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

constexpr uint32_t kMaxPairedCodes = 64;
// Making an entry takes as long as it saves in about three units.
constexpr std::size_t kUnitsOfPair = 8;

// The divisors of all pairs of codes. Entry a + n_codes * b has the lower halves of the divisors of
// a and b, then the upper ones.
struct alignas(64) PairDivisors {
    uint32_t n_codes;
    alignas(64) uint32_t entries[kMaxPairedCodes * kMaxPairedCodes][4];
};

// Whether `n` units gain from pairs.
constexpr bool pairs_pay(uint32_t n_codes, std::size_t n) {
    return n_codes <= kMaxPairedCodes && n >= kUnitsOfPair * n_codes * n_codes;
}

inline void fill_pair_divisors(const RansVectorTables& tables, uint32_t n_codes,
                               PairDivisors& pairs) {
    const auto divisor = [&](uint32_t code) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(tables.divisors + code));
    };
    pairs.n_codes = n_codes;
    auto* to = reinterpret_cast<__m128i*>(pairs.entries);
    for (uint32_t b = 0; b < n_codes; ++b)
        for (uint32_t a = 0; a < n_codes; ++a)
            _mm_store_si128(to++, _mm_unpacklo_epi32(divisor(a), divisor(b)));
}

struct DivisorsAvx2 {
    __m256i freq_start;
    __m256 reciprocal;
};

// Loads the divisors of each lane by themselves, for any number of codes. There are at most
// kSegmentUnits codes.
class CodeDivisorsAvx2 {
  public:
    PACKHORSE_AVX2 CodeDivisorsAvx2(const RansVectorTables& tables, const uint8_t* codes,
                                    std::size_t n_rounds)
        : divisors_(tables.divisors) {
        const __m256i quarters = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
        const __m256i halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (std::size_t i = 0; i < 4 * n_rounds; ++i) {
            const __m256i bytes =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i));
            _mm256_store_si256(
                reinterpret_cast<__m256i*>(codes_) + i,
                _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(bytes, quarters), halves));
        }
    }

    // Loads those of lanes 8 * group to 8 * group + 7 of a quarter of a round.
    PACKHORSE_AVX2 PACKHORSE_INLINE DivisorsAvx2 load(std::size_t round, std::size_t quarter,
                                                      std::size_t group) const {
        const uint64_t eight = codes_[16 * round + 4 * group + quarter];
        auto first = static_cast<uint32_t>(eight), last = static_cast<uint32_t>(eight >> 32);
        keep_in_register(first);
        keep_in_register(last);
        const __m256 even = _mm256_setr_m128(pair(first), pair(last));
        const __m256 odd = _mm256_setr_m128(pair(first >> 16), pair(last >> 16));
        return {_mm256_castps_si256(_mm256_shuffle_ps(even, odd, 0x88)),
                _mm256_shuffle_ps(even, odd, 0xDD)};
    }

  private:
    // The divisors of the two lower codes.
    PACKHORSE_AVX2 PACKHORSE_INLINE __m128 pair(uint32_t codes) const {
        return load_divisor_pair(divisors_, static_cast<uint8_t>(codes),
                                 static_cast<uint8_t>(codes >> 8));
    }

    const uint64_t* divisors_;
    alignas(32) uint64_t codes_[kSegmentUnits / 8];  // those of eight lanes, by group and quarter
};

// Does the same with one load for two lanes.
class PairDivisorsAvx2 {
  public:
    PACKHORSE_AVX2 PairDivisorsAvx2(const PairDivisors& pairs, const uint8_t* codes,
                                    std::size_t n_rounds)
        : entries_(reinterpret_cast<const uint8_t*>(pairs.entries)) {
        const __m256i weights = _mm256_set1_epi16(static_cast<short>(pairs.n_codes << 8 | 1));
        // Neighbouring lanes side by side, then all pairs of a quarter.
        const __m256i lanes = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
        const __m256i quarters = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15));
        const __m256i halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        for (std::size_t i = 0; i < 4 * n_rounds; ++i) {
            const __m256i bytes =
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 32 * i));
            const __m256i places = _mm256_maddubs_epi16(_mm256_shuffle_epi8(bytes, lanes), weights);
            const __m256i offsets = _mm256_shuffle_epi8(_mm256_slli_epi16(places, 4), quarters);
            _mm256_store_si256(reinterpret_cast<__m256i*>(offsets_) + i,
                               _mm256_permutevar8x32_epi32(offsets, halves));
        }
    }

    PACKHORSE_AVX2 PACKHORSE_INLINE DivisorsAvx2 load(std::size_t round, std::size_t quarter,
                                                      std::size_t group) const {
        uint64_t four = offsets_[16 * round + 4 * group + quarter];
        keep_in_register(four);
        const __m256 even = _mm256_setr_m128(entry(static_cast<uint16_t>(four)),
                                             entry(static_cast<uint16_t>(four >> 32)));
        const __m256 odd =
            _mm256_setr_m128(entry(static_cast<uint16_t>(four >> 16)), entry(four >> 48));
        const __m256d a = _mm256_castps_pd(even), b = _mm256_castps_pd(odd);
        return {_mm256_castpd_si256(_mm256_unpacklo_pd(a, b)),
                _mm256_castpd_ps(_mm256_unpackhi_pd(a, b))};
    }

  private:
    PACKHORSE_AVX2 PACKHORSE_INLINE __m128 entry(uint64_t offset) const {
        return _mm_load_ps(reinterpret_cast<const float*>(entries_ + offset));
    }

    const uint8_t* entries_;
    // Where the entries of eight lanes lie, in bytes, 16 bits each.
    alignas(32) uint64_t offsets_[kSegmentUnits / 8];
};

#endif

}  // namespace packhorse
