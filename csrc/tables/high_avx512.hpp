// The bits of dense rows above whole bytes, 64 columns at a time, with AVX-512. They go from the
// row to a register: what is stored in parts that differ from what is loaded would be slow.
#pragma once

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

// Narrow planes of n columns, of which any 64 that follow each other are read.
class NarrowBits512 {
  public:
    NarrowBits512(uint32_t bits, std::size_t n) : bits_(bits) {
        std::size_t offset = 0;
        for (uint32_t i = 0; i < 3; ++i) {
            const uint32_t width = 4u >> i;
            if ((bits & width) == 0) continue;
            const std::size_t nbytes = narrow_nbytes(width, n);
            planes_[i] = {offset, nbytes, ((uint64_t{1} << 32) + nbytes - 1) / nbytes};
            offset += nbytes;
        }
    }

    // The bits of columns c to c + 63; those beyond the last one are anything.
    PACKHORSE_AVX512 PACKHORSE_INLINE __m512i at(const uint8_t* src, std::size_t c) const {
        __m512i found = _mm512_setzero_si512();
        if ((bits_ & 4) != 0) found = part<4>(planes_[0], src, c);
        if ((bits_ & 2) != 0) {
            const __m512i twos = part<2>(planes_[1], src, c);
            found = (bits_ & 4) != 0 ? _mm512_or_si512(found, _mm512_slli_epi16(twos, 4)) : twos;
        }
        if ((bits_ & 1) != 0) {
            const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(bits_ & 6));
            found = _mm512_or_si512(found, _mm512_sll_epi16(part<1>(planes_[2], src, c), shift));
        }
        return found;
    }

  private:
    struct Plane {
        std::size_t offset, nbytes;
        uint64_t inverse;  // of nbytes, times 2^32
    };

    // Columns that follow each other are in bytes that follow each other, but where a slice ends.
    template <uint32_t kBits>
    PACKHORSE_AVX512 PACKHORSE_INLINE static __m512i part(const Plane& plane, const uint8_t* src,
                                                          std::size_t c) {
        const __m512i field = _mm512_set1_epi8((1 << kBits) - 1);
        std::size_t slice = c * plane.inverse >> 32;
        std::size_t at = c - slice * plane.nbytes;
        __m512i found = _mm512_setzero_si512();
        for (std::size_t done = 0; done < 64 && slice < 8 / kBits; ++slice) {
            const std::size_t count = std::min(64 - done, plane.nbytes - at);
            const uint64_t mask = first_columns(count) << done;
            const __m512i bytes = _mm512_maskz_loadu_epi8(mask, src + plane.offset + at - done);
            const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(kBits * slice));
            found = _mm512_or_si512(found, _mm512_and_si512(_mm512_srl_epi16(bytes, shift), field));
            done += count;
            at = 0;
        }
        return found;
    }

    uint32_t bits_;
    Plane planes_[3]{};
};

// The codes of 64 triples.
struct Triples64 {
    __m512i codes[3];

    PACKHORSE_AVX512 PACKHORSE_INLINE Triples64(__m512i low, __m512i top) {
        const Halves a(_mm512_unpacklo_epi8(low, top)), b(_mm512_unpackhi_epi8(low, top));
        for (std::size_t k = 0; k < 3; ++k) codes[k] = _mm512_packus_epi16(a.codes[k], b.codes[k]);
    }

  private:
    // Numbers below 1024 are divided by products of 16 bits.
    struct Halves {
        __m512i codes[3];

        PACKHORSE_AVX512 PACKHORSE_INLINE explicit Halves(__m512i triples) {
            codes[2] = _mm512_mulhi_epu16(triples, _mm512_set1_epi16(656));  // / 100
            const __m512i two =
                _mm512_sub_epi16(triples, _mm512_mullo_epi16(codes[2], _mm512_set1_epi16(100)));
            codes[1] = _mm512_mulhi_epu16(two, _mm512_set1_epi16(6554));  // / 10
            codes[0] = _mm512_sub_epi16(two, _mm512_mullo_epi16(codes[1], _mm512_set1_epi16(10)));
        }
    };
};

// The high bits of rows of a shape.
class HighBits512 {
  public:
    explicit HighBits512(const TableShape& shape)
        : kept_(shape.narrow_bits()),
          n_(shape.n_columns),
          n_triples_(shape.n_triples()),
          planes_offset_(n_ * shape.n_whole()),
          triples_offset_(shape.triples_offset()),
          narrow_(kept_, n_),
          tops_(2, std::max<std::size_t>(n_triples_, 1)) {}

    // Calls put(column, mask, high) for 64 columns at a time: `mask` says which of them there are.
    // `scratch` is memory for slices: n_columns bytes, and a vector more for each of 8 slices.
    template <class Put>
    PACKHORSE_AVX512 PACKHORSE_INLINE void for_each(const uint8_t* row, uint8_t* scratch,
                                                    const Put& put) const {
        const uint8_t* const planes = row + planes_offset_;
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
        for (std::size_t i = 0; i < n_triples_; i += 64) {
            const uint64_t mask = first_columns(n_triples_ - i);
            const Triples64 triples(_mm512_maskz_loadu_epi8(mask, low + i),
                                    tops_.at(low + n_triples_, i));
            for (std::size_t k = 0; k < 3; ++k) {
                const std::size_t c = i + k * n_triples_;
                if (c >= n_) return;
                // Codes have 4 bits and 4 are kept at most, so no shift leaves its byte.
                __m512i high = _mm512_sll_epi16(triples.codes[k], shift);
                if (kept_ != 0) high = _mm512_or_si512(high, narrow_.at(planes, c));
                put(c, mask & first_columns(n_ - c), high);
            }
        }
    }

  private:
    uint32_t kept_;  // bits below the codes of triples
    std::size_t n_, n_triples_, planes_offset_, triples_offset_;
    NarrowBits512 narrow_;  // of the columns
    NarrowBits512 tops_;    // of the triples
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
