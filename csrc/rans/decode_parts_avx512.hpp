// Decoding rounds of 128 lanes with AVX-512, VBMI and VBMI2, and at most 64 codes (docs/format.md,
// 6.4). Nothing is looked up in memory.
//
// A state is kept as two halves of 16 bits, `high` and `low`, so that a register holds 32 lanes.
// The products are 16-bit ones, as in rans/decode_portable.hpp: with f16 = 16 * freq,
//     freq * (x >> 12) + rank = f16 * high + (f16 * (low & 0xF000) >> 16) + rank,
// where the last two terms are below 2^16, so their sum with the low half of the product carries at
// most once. The number of a slot's part follows from a look-up and a sum, without a comparison,
// because masks take longer than anything else here.
#pragma once

#include "common/dispatch.hpp"
#include "rans/decoder.hpp"

namespace packhorse {

#if PACKHORSE_X86

constexpr std::size_t kRegisterLanes = 32;

// Orders of 16-bit elements of two registers, for permutes.
struct alignas(64) HalfOrders {
    uint16_t even[32], odd[32];                 // lower and upper halves of 32-bit elements
    uint16_t lower_pairs[32], upper_pairs[32];  // interleaves the registers
};

constexpr HalfOrders make_half_orders() {
    HalfOrders orders{};
    for (uint16_t i = 0; i < 32; ++i) {
        orders.even[i] = static_cast<uint16_t>(2 * i);
        orders.odd[i] = static_cast<uint16_t>(2 * i + 1);
        orders.lower_pairs[i] = static_cast<uint16_t>(i / 2 + 32 * (i % 2));
        orders.upper_pairs[i] = static_cast<uint16_t>(orders.lower_pairs[i] + 16);
    }
    return orders;
}

inline constexpr HalfOrders kHalfOrders = make_half_orders();

PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE __m512i pick_halves(__m512i a, const uint16_t* order,
                                                            __m512i b) {
    return _mm512_permutex2var_epi16(a, _mm512_load_si512(order), b);
}

struct LanesVbmi2 {
    __m512i high[4], low[4];

    PACKHORSE_AVX512_VBMI2 explicit LanesVbmi2(const uint32_t* states) {
        for (std::size_t k = 0; k < 4; ++k) {
            const __m512i a = _mm512_load_si512(states + kRegisterLanes * k);
            const __m512i b = _mm512_load_si512(states + kRegisterLanes * k + 16);
            low[k] = pick_halves(a, kHalfOrders.even, b);
            high[k] = pick_halves(a, kHalfOrders.odd, b);
        }
    }

    PACKHORSE_AVX512_VBMI2 void store_to(uint32_t* states) const {
        for (std::size_t k = 0; k < 4; ++k) {
            uint32_t* const at = states + kRegisterLanes * k;
            _mm512_store_si512(at, pick_halves(low[k], kHalfOrders.lower_pairs, high[k]));
            _mm512_store_si512(at + 16, pick_halves(low[k], kHalfOrders.upper_pairs, high[k]));
        }
    }
};

// What the tables say about 32 lanes.
struct FoundVbmi2 {
    __m512i slot, f16, bias;
};

// Decodes 32 lanes.
PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void step_vbmi2(__m512i& high, __m512i& low,
                                                        const FoundVbmi2& found,
                                                        const uint8_t*& words) {
    const __m512i rank = _mm512_add_epi16(found.slot, found.bias);
    const __m512i middle = _mm512_xor_si512(low, found.slot);
    const __m512i rest = _mm512_add_epi16(_mm512_mulhi_epu16(middle, found.f16), rank);
    const __m512i sum = _mm512_add_epi16(_mm512_mullo_epi16(high, found.f16), rest);
    const __mmask32 carry = _mm512_cmplt_epu16_mask(sum, rest);
    const __m512i product = _mm512_mulhi_epu16(high, found.f16);
    const __m512i next = _mm512_mask_sub_epi16(product, carry, product, _mm512_set1_epi16(-1));
    const __mmask32 need = _mm512_testn_epi16_mask(next, next);
    high = _mm512_mask_mov_epi16(next, need, sum);
    low = _mm512_mask_expand_epi16(sum, need, _mm512_loadu_si512(words));
    words += 2 * static_cast<std::size_t>(__builtin_popcount(need));
}

// The parts of 32 buckets in registers, as elements of 16 bits.
class NarrowPartsVbmi2 {
  public:
    PACKHORSE_AVX512_VBMI2 explicit NarrowPartsVbmi2(const BucketParts& parts)
        : lift_(_mm512_load_si512(parts.lift)) {
        for (std::size_t h = 0; h < 2; ++h) {
            f16_[h] = _mm512_load_si512(parts.f16 + 32 * h);
            bias_[h] = _mm512_load_si512(parts.bias + 32 * h);
            const __m512i unit = _mm512_cvtepu8_epi16(
                _mm256_load_si256(reinterpret_cast<const __m256i*>(parts.unit + 32 * h)));
            unit_[h] = _mm512_or_si512(unit, _mm512_slli_epi16(unit, 8));
        }
    }

    // Decodes a round.
    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void decode(LanesVbmi2& lanes, const uint8_t*& words,
                                                        uint8_t* dst) const {
        __m512i units[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            const __m512i slot = _mm512_and_si512(lanes.low[k], _mm512_set1_epi16(kProbSum - 1));
            const __m512i lift =
                _mm512_permutexvar_epi16(_mm512_srli_epi16(lanes.low[k], 7), lift_);
            const __m512i part = _mm512_srli_epi16(_mm512_add_epi16(slot, lift), 7);
            const FoundVbmi2 found{slot, _mm512_permutex2var_epi16(f16_[0], part, f16_[1]),
                                   _mm512_permutex2var_epi16(bias_[0], part, bias_[1])};
            units[k] = _mm512_permutex2var_epi16(unit_[0], part, unit_[1]);
            step_vbmi2(lanes.high[k], lanes.low[k], found, words);
        }
        // Register k has the units at positions k mod 4, each of them twice.
        const __m512i even = _mm512_set1_epi16(0xFF);
        const __m512i first = _mm512_ternarylogic_epi32(even, units[0], units[1], 0xCA);
        const __m512i second = _mm512_ternarylogic_epi32(even, units[2], units[3], 0xCA);
        _mm512_storeu_si512(dst, pick_halves(first, kHalfOrders.lower_pairs, second));
        _mm512_storeu_si512(dst + 64, pick_halves(first, kHalfOrders.upper_pairs, second));
    }

  private:
    __m512i lift_, f16_[2], bias_[2], unit_[2];
};

// Where the units of a round lie in the bytes of two registers, each of which has 8 units of one
// quarter of the lanes, then 8 of the next quarter, and so on.
struct alignas(64) UnitOrder {
    uint8_t place[2][64];
};

constexpr UnitOrder make_unit_order() {
    UnitOrder order{};
    for (uint32_t at = 0; at < kMaxLanes; ++at) {
        const uint32_t lane = at / 4, quarter = at % 4;
        order.place[at / 64][at % 64] = static_cast<uint8_t>(64 * (quarter / 2) + 16 * (lane / 8) +
                                                             8 * (quarter % 2) + lane % 8);
    }
    return order;
}

inline constexpr UnitOrder kUnitOrder = make_unit_order();

// The parts of 64 buckets in registers, as bytes: a permute looks up 64 lanes in a table of 128.
class WidePartsVbmi2 {
  public:
    PACKHORSE_AVX512_VBMI2 explicit WidePartsVbmi2(const BucketParts& parts) {
        for (std::size_t h = 0; h < 2; ++h) {
            lift_[h] = _mm512_load_si512(parts.lift + 32 * h);
            cut_bytes(parts.f16 + 64 * h, f16_low_[h], f16_high_[h]);
            cut_bytes(parts.bias + 64 * h, bias_low_[h], bias_high_[h]);
            unit_[h] = _mm512_load_si512(parts.unit + 64 * h);
        }
    }

    // Decodes a round.
    PACKHORSE_AVX512_VBMI2 PACKHORSE_INLINE void decode(LanesVbmi2& lanes, const uint8_t*& words,
                                                        uint8_t* dst) const {
        __m512i units[2];
#pragma GCC unroll 2
        for (int g = 0; g < 2; ++g) {
            __m512i *high = lanes.high + 2 * g, *low = lanes.low + 2 * g;
            __m512i slot[2], part[2];
            for (int i = 0; i < 2; ++i) {
                slot[i] = _mm512_and_si512(low[i], _mm512_set1_epi16(kProbSum - 1));
                const __m512i lift =
                    _mm512_permutex2var_epi16(lift_[0], _mm512_srli_epi16(low[i], 6), lift_[1]);
                part[i] = _mm512_srli_epi16(_mm512_add_epi16(slot[i], lift), 6);
            }
            // Packing and unpacking both work in quarters of registers, so they match.
            const __m512i both = _mm512_packus_epi16(part[0], part[1]);
            const __m512i f16[2] = {look_up(f16_low_, both), look_up(f16_high_, both)};
            const __m512i bias[2] = {look_up(bias_low_, both), look_up(bias_high_, both)};
            units[g] = look_up(unit_, both);
            step_vbmi2(high[0], low[0],
                       {slot[0], _mm512_unpacklo_epi8(f16[0], f16[1]),
                        _mm512_unpacklo_epi8(bias[0], bias[1])},
                       words);
            step_vbmi2(high[1], low[1],
                       {slot[1], _mm512_unpackhi_epi8(f16[0], f16[1]),
                        _mm512_unpackhi_epi8(bias[0], bias[1])},
                       words);
        }
        for (int h = 0; h < 2; ++h)
            _mm512_storeu_si512(dst + 64 * h,
                                _mm512_permutex2var_epi8(
                                    units[0], _mm512_load_si512(kUnitOrder.place[h]), units[1]));
    }

  private:
    PACKHORSE_AVX512_VBMI2 static PACKHORSE_INLINE __m512i look_up(const __m512i* table,
                                                                   __m512i part) {
        return _mm512_permutex2var_epi8(table[0], part, table[1]);
    }

    // Takes the lower and the upper bytes of 64 numbers.
    PACKHORSE_AVX512_VBMI2 static void cut_bytes(const uint16_t* numbers, __m512i& low,
                                                 __m512i& high) {
        __m256i part[2][2];
        for (int i = 0; i < 2; ++i) {
            const __m512i some = _mm512_load_si512(numbers + 32 * i);
            part[0][i] = _mm512_cvtepi16_epi8(some);
            part[1][i] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(some, 8));
        }
        low = _mm512_inserti64x4(_mm512_castsi256_si512(part[0][0]), part[0][1], 1);
        high = _mm512_inserti64x4(_mm512_castsi256_si512(part[1][0]), part[1][1], 1);
    }

    __m512i lift_[2], f16_low_[2], f16_high_[2], bias_low_[2], bias_high_[2], unit_[2];
};

// Decodes rounds of 128 lanes. The caller knows that there are 128 words for each round, and one
// register of words more.
template <class Parts>
PACKHORSE_AVX512_VBMI2 inline void decode_rounds_vbmi2(RansDecoder& decoder, std::size_t n_rounds,
                                                       uint8_t* dst, Ahead& shared_ahead) {
    const Parts parts(decoder.parts);
    LanesVbmi2 lanes(decoder.states);
    Ahead ahead = shared_ahead;
    const uint8_t* words = decoder.words;
    for (std::size_t r = 0; r < n_rounds; ++r, dst += kMaxLanes) {
        ahead.step();
        parts.decode(lanes, words, dst);
    }
    lanes.store_to(decoder.states);
    shared_ahead = ahead;
    decoder.words = words;
}

#endif

}  // namespace packhorse
