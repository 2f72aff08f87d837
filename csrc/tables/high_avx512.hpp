// The bits of dense rows above whole bytes, 64 columns at a time, with AVX-512. They go from the
// row to a register: what is stored in parts that differ from what is loaded would be slow.
#pragma once

#include <vector>

#include "tables/dense_avx512.hpp"
#include "tables/triples_portable.hpp"

namespace packhorse {

#if PACKHORSE_X86

// Columns that a plane of `bits` bits has in one slice.
constexpr std::size_t slice_columns(uint32_t bits, std::size_t n) {
    return narrow_nbytes(bits, n);
}

// The lowest of the bits that say which narrow planes there are: slices are as long as its own.
constexpr uint32_t narrowest(uint32_t bits) {
    return bits & (0u - bits);
}

// Slice kSlice of one plane, from the vectors of its bytes.
template <uint32_t kBits, uint32_t kNarrow, uint32_t kSlice>
PACKHORSE_AVX512 PACKHORSE_INLINE __m512i slice_bits(const __m512i* bytes) {
    constexpr uint32_t kVectors = kBits / narrowest(kNarrow);
    constexpr uint32_t kLowest = kBits == 4 ? 0 : kBits == 2 ? kNarrow & 4 : kNarrow & 6;
    const __m512i field = _mm512_set1_epi8((1 << kBits) - 1);
    const __m512i found = _mm512_and_si512(
        _mm512_srli_epi16(bytes[kSlice % kVectors], kBits * (kSlice / kVectors)), field);
    return _mm512_slli_epi16(found, kLowest);
}

template <uint32_t kNarrow, uint32_t kSlice = 0>
PACKHORSE_AVX512 PACKHORSE_INLINE void store_slices(const __m512i* fours, const __m512i* twos,
                                                    const __m512i* ones, uint8_t* dst,
                                                    std::size_t step) {
    __m512i high = _mm512_setzero_si512();
    if constexpr ((kNarrow & 4) != 0) high = slice_bits<4, kNarrow, kSlice>(fours);
    if constexpr ((kNarrow & 2) != 0)
        high = _mm512_or_si512(high, slice_bits<2, kNarrow, kSlice>(twos));
    if constexpr ((kNarrow & 1) != 0)
        high = _mm512_or_si512(high, slice_bits<1, kNarrow, kSlice>(ones));
    _mm512_storeu_si512(dst, high);
    if constexpr ((kSlice + 1) * narrowest(kNarrow) < 8)
        store_slices<kNarrow, kSlice + 1>(fours, twos, ones, dst + step, step);
}

// Writes the bits of all columns, slice by slice: each slice begins at a multiple of 64 bytes.
// Vectors are stored as they are loaded later, so that the processor need not wait for memory.
template <uint32_t kNarrow>
PACKHORSE_AVX512 inline void unpack_slices(const uint8_t* planes, std::size_t n, uint8_t* dst) {
    constexpr uint32_t kFewest = narrowest(kNarrow);
    const std::size_t length = slice_columns(kFewest, n), step = round_up(length, 64);
    const uint8_t* const plane_of_2 = planes + ((kNarrow & 4) != 0 ? narrow_nbytes(4, n) : 0);
    const uint8_t* const plane_of_1 = plane_of_2 + ((kNarrow & 2) != 0 ? narrow_nbytes(2, n) : 0);
    for (std::size_t j = 0; j < length; j += 64) {
        const uint64_t mask = first_columns(length - j);
        __m512i fours[4], twos[2], ones[1];
        if constexpr ((kNarrow & 4) != 0)
            for (uint32_t i = 0; i < 4 / kFewest; ++i)
                fours[i] = _mm512_maskz_loadu_epi8(mask, planes + i * length + j);
        if constexpr ((kNarrow & 2) != 0)
            for (uint32_t i = 0; i < 2 / kFewest; ++i)
                twos[i] = _mm512_maskz_loadu_epi8(mask, plane_of_2 + i * length + j);
        if constexpr ((kNarrow & 1) != 0) ones[0] = _mm512_maskz_loadu_epi8(mask, plane_of_1 + j);
        store_slices<kNarrow>(fours, twos, ones, dst + j, step);
    }
}

// Reads bits of 64 columns at a time from narrow planes. Columns that follow each other lie in
// bytes that follow each other, but where a slice ends: so some loads are put together. Which ones
// is the same for all rows, so it is worked out once.
class NarrowBits512 {
  public:
    // Lists the loads for columns c to c + 63 of n. `bits` says which planes there are.
    void add(uint32_t bits, std::size_t n, std::size_t c) {
        std::size_t plane = 0;
        uint32_t lowest = 0;
        for (const uint32_t width : {4u, 2u, 1u}) {
            if ((bits & width) == 0) continue;
            const std::size_t nbytes = narrow_nbytes(width, n);
            std::size_t slice = c / nbytes, at = c % nbytes;
            for (std::size_t done = 0; done < 64 && slice < 8 / width; ++slice, at = 0) {
                const std::size_t count = std::min(64 - done, nbytes - at);
                const uint64_t field = ((1u << width) - 1) << lowest;
                loads_.push_back(
                    {static_cast<std::ptrdiff_t>(plane + at) - static_cast<std::ptrdiff_t>(done),
                     first_columns(count) << done, (width * slice - lowest) % 64,
                     field * 0x0101010101010101u});
                done += count;
            }
            plane += nbytes;
            lowest += width;
        }
        ends_.push_back(loads_.size());
    }

    // The bits of the columns that were added as number `i`; those beyond the last one are
    // anything.
    PACKHORSE_AVX512 PACKHORSE_INLINE __m512i get(const uint8_t* planes, std::size_t i) const {
        __m512i found = _mm512_setzero_si512();
        for (std::size_t k = i == 0 ? 0 : ends_[i - 1]; k < ends_[i]; ++k) {
            const Load& load = loads_[k];
            const __m512i bytes = _mm512_maskz_loadu_epi8(load.mask, planes + load.offset);
            const __m512i turned = _mm512_rorv_epi64(bytes, broadcast(load.rotate));
            // found | (turned & field)
            found = _mm512_ternarylogic_epi64(found, turned, broadcast(load.field), 0xF8);
        }
        return found;
    }

  private:
    struct Load {
        std::ptrdiff_t offset;  // of what would be column 0 of the 64
        uint64_t mask;
        uint64_t rotate;  // to the right: bits that leave their byte are not in the field
        uint64_t field;
    };

    PACKHORSE_AVX512 PACKHORSE_INLINE static __m512i broadcast(uint64_t value) {
        return _mm512_set1_epi64(static_cast<int64_t>(value));
    }

    std::vector<Load> loads_;
    std::vector<std::size_t> ends_;
};

// The codes of 64 triples. A triple is below 1,000, so quotients are products of 16 bits, and ten
// times a quotient is added up from bytes.
struct Triples64 {
    __m512i codes[3];

    PACKHORSE_AVX512 PACKHORSE_INLINE Triples64(__m512i low, __m512i top) {
        const __m512i a = tenth(_mm512_unpacklo_epi8(low, top));
        const __m512i b = tenth(_mm512_unpackhi_epi8(low, top));
        const __m512i tens = _mm512_packus_epi16(a, b);  // below 100
        codes[0] = _mm512_sub_epi8(low, ten_times(tens));
        codes[2] = _mm512_packus_epi16(tenth(a), tenth(b));
        codes[1] = _mm512_sub_epi8(tens, ten_times(codes[2]));
    }

  private:
    PACKHORSE_AVX512 PACKHORSE_INLINE static __m512i tenth(__m512i x) {
        return _mm512_mulhi_epu16(x, _mm512_set1_epi16(6554));
    }

    PACKHORSE_AVX512 PACKHORSE_INLINE static __m512i ten_times(__m512i x) {
        const __m512i twice = _mm512_add_epi8(x, x), four_times = _mm512_add_epi8(twice, twice);
        return _mm512_add_epi8(_mm512_add_epi8(four_times, four_times), twice);
    }
};

// The high bits of rows of a shape.
class HighBits512 {
  public:
    explicit HighBits512(const TableShape& shape)
        : kept_(shape.narrow_bits()),
          n_(shape.n_columns),
          n_triples_(shape.n_triples()),
          planes_offset_(n_ * shape.n_whole()),
          triples_offset_(shape.triples_offset()) {
        for (std::size_t i = 0; i < n_triples_; i += 64) {
            tops_.add(2, n_triples_, i);
            for (std::size_t k = 0; k < 3; ++k)
                if (const std::size_t c = i + k * n_triples_; c < n_) kept_bits_.add(kept_, n_, c);
        }
    }

    // Calls put(column, mask, high) for 64 columns at a time: `mask` says which of them there are.
    // Where no bits lie above whole bytes, `high` is the last whole byte.
    // `scratch` is memory for slices: n_columns bytes, and a vector more for each of 8 slices.
    template <class Put>
    PACKHORSE_AVX512 PACKHORSE_INLINE void for_each(const uint8_t* row, uint8_t* scratch,
                                                    const Put& put) const {
        const uint8_t* const planes = row + planes_offset_;
        if (n_triples_ == 0 && kept_ == 0) {
            for (std::size_t c = 0; c < n_; c += 64) {
                const uint64_t mask = first_columns(n_ - c);
                put(c, mask, _mm512_maskz_loadu_epi8(mask, planes - n_ + c));
            }
            return;
        }
        if (n_triples_ == 0) {
            const std::size_t n = n_;
            with_narrow(kept_, [=]<uint32_t kNarrow>() PACKHORSE_AVX512 {
                unpack_slices<kNarrow>(planes, n, scratch);
            });
            const std::size_t length = slice_columns(narrowest(kept_), n);
            for (std::size_t first = 0; first < n; first += length)
                for (std::size_t j = 0; j < length && first + j < n; j += 64, scratch += 64)
                    put(first + j, first_columns(std::min(length - j, n - first - j)),
                        _mm512_loadu_si512(scratch));
            return;
        }
        const uint8_t* const low = row + triples_offset_;
        const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(kept_));
        std::size_t block = 0;
        for (std::size_t i = 0; i < n_triples_; i += 64) {
            const uint64_t mask = first_columns(n_triples_ - i);
            const Triples64 triples(_mm512_maskz_loadu_epi8(mask, low + i),
                                    tops_.get(low + n_triples_, i / 64));
#pragma GCC unroll 3
            for (std::size_t k = 0; k < 3; ++k) {
                const std::size_t c = i + k * n_triples_;
                if (c >= n_) return;
                // Codes have 4 bits and 4 are kept at most, so no shift leaves its byte.
                __m512i high = _mm512_sll_epi16(triples.codes[k], shift);
                if (kept_ != 0) high = _mm512_or_si512(high, kept_bits_.get(planes, block++));
                put(c, mask & first_columns(n_ - c), high);
            }
        }
    }

  private:
    uint32_t kept_;  // bits below the codes of triples
    std::size_t n_, n_triples_, planes_offset_, triples_offset_;
    NarrowBits512 kept_bits_;
    NarrowBits512 tops_;  // of the triples, above their low bytes
};

// Writes the high bits as bytes.
PACKHORSE_AVX512 inline void unpack_high_avx512(const HighBits512& bits, const uint8_t* row,
                                                uint8_t* scratch, uint8_t* high) {
    bits.for_each(row, scratch, [=](std::size_t c, uint64_t mask, __m512i bytes) PACKHORSE_AVX512 {
        _mm512_mask_storeu_epi8(high + c, mask, bytes);
    });
}

#endif

}  // namespace packhorse
