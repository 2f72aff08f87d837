// rANS encoding (docs/format.md, 6.4). It runs backwards: the last round and the last lane come
// first, and words are written downwards.
//
// Byte values are mapped to codes first, a segment at a time, so that the loops below read small
// dense numbers in L1. All paths compute the exact quotient x / freq, so all write the same bytes.
// Loops for 4 and 16 lanes use an exact reciprocal; those for 128 use an estimate that is either
// exact or too small by one, and correct it. The loops for 128 lanes are in
// rans/encode_halves_avx512.hpp, rans/encode_avx512.hpp, rans/encode_avx2.hpp, rans/encode_neon.hpp
// and rans/encode_portable.hpp, and one for 16 lanes is in rans/encode_short_avx512.hpp.
//
// Preconditions: every code in `codes` is below model.n_codes, and the buffer of words has room for
// one word for each unit.
#pragma once

#include <bit>
#include <utility>

#include "common/dispatch.hpp"
#include "rans/codes_avx2.hpp"
#include "rans/divisors_avx2.hpp"
#include "rans/encode_avx2.hpp"
#include "rans/encode_avx512.hpp"
#include "rans/encode_halves_avx512.hpp"
#include "rans/encode_neon.hpp"
#include "rans/encode_portable.hpp"
#include "rans/encode_short_avx512.hpp"
#include "rans/model.hpp"
#include "rans/spread.hpp"
#include "rans/tables_avx512.hpp"

namespace packhorse {

constexpr uint32_t kRenormShift = 32 - kProbBits;  // a state >= freq << 20 would leave 32 bits

// A state x < freq * 2^20 is multiplied by 2^44 / freq, rounded up. The product is at most x * 2^44
// / freq + x, which is too large by less than freq * 2^20 < 2^44 / freq. So x / freq is exact, and
// the product stays below 2^64.
constexpr uint32_t kInverseBits = 44;

struct alignas(64) RansEncodeTables {
    uint32_t freq_start[256];      // freq (bits 0-11), start (12-23)
    uint64_t inverse[256];         // 2^44 / freq rounded up, for few lanes
    uint16_t slots[kProbSum + 3];  // position -> slot; loads take up to eight bytes
    RansVectorTables vectors;      // for 128 lanes
    SpreadMap spread;              // for AVX-512 and NEON, if there is one
#if PACKHORSE_X86
    const PairDivisors* pairs;  // for AVX2; may be null
#elif PACKHORSE_ARM
    SpreadBytes spread_bytes;  // the same as `spread`
#endif
};

// Tables that are filled for one stream after another.
struct RansEncodeMemory : RansEncodeTables {
#if PACKHORSE_X86
    PairDivisors pair_memory;
#endif
};

// For 4 and 16 lanes, with tables.slots.
inline void fill_scalar_tables(const RansModel& model, RansEncodeTables& tables) {
    uint32_t start = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t freq = model.freqs[c];
        tables.freq_start[c] = freq | start << kProbBits;
        tables.inverse[c] = ((uint64_t{1} << kInverseBits) + freq - 1) / freq;
        start += freq;
    }
}

// Whether the loops of a path use maps.
inline bool uses_maps(Isa isa) {
    return PACKHORSE_ARM ? isa >= Isa::kNeon : isa >= Isa::kAvx512;
}

// Whether the loops of a path can use a map.
inline bool has_map(const SpreadMap& map, Isa isa) {
    if (!uses_maps(isa) || !map.found) return false;
    if (PACKHORSE_ARM) return !map.wide;
    return isa >= Isa::kAvx512Vbmi2 || map.is_simple();
}

// Whether a path has a loop for 128 lanes. If not, it needs scalar tables for them.
inline bool has_wide_loop(Isa isa) {
    return PACKHORSE_X86 || isa >= Isa::kNeon;
}

// Looks for a map. Loops find it in the form that they use.
inline void fill_map(const RansModel& model, const AliasTables& alias, RansEncodeTables& tables) {
    spread_slots(model, alias, tables.spread);
#if PACKHORSE_ARM
    if (has_map(tables.spread, Isa::kNeon))
        fill_spread_bytes(tables.spread, model.n_codes, tables.spread_bytes);
#endif
}

// Fills the tables for any number of units, lanes and any path.
inline void fill_encode_tables(const RansModel& model, RansEncodeTables& tables) {
    AliasTables alias;
    tables.spread.found = false;
#if PACKHORSE_X86
    tables.pairs = nullptr;
#endif
    if (model.n_buckets() > 0) {
        build_alias(model, alias);
        fill_map(model, alias, tables);
    }
    fill_slot_table(model, alias, tables.slots);
    fill_vector_tables(model, tables.slots, tables.vectors);
    fill_scalar_tables(model, tables);
}

#if PACKHORSE_X86
// Fills the pairs of divisors, which are made from the vector tables, if a path uses them.
inline void fill_pairs(const RansModel& model, std::size_t n, Isa isa, RansEncodeMemory& tables) {
    if (isa < Isa::kAvx2 || isa >= Isa::kAvx512 || !pairs_pay(model.n_codes, n)) return;
    fill_pair_divisors(tables.vectors, model.n_codes, tables.pair_memory);
    tables.pairs = &tables.pair_memory;
}
#endif

// Fills only the tables that `n` units in 2^lanes_log lanes need on one path: for small chunks that
// takes as long as encoding.
inline void fill_encode_tables(const RansModel& model, std::size_t n, uint32_t lanes_log, Isa isa,
                               RansEncodeMemory& tables) {
    const bool has_rounds = has_wide_loop(isa) && lanes_log == kMaxLanesLog && n >= kMaxLanes;
    const bool has_rest = !has_rounds || n % kMaxLanes != 0;
    AliasTables alias;
    if (model.n_buckets() > 0) build_alias(model, alias);
    tables.spread.found = false;
    if (has_rounds && uses_maps(isa) && model.n_buckets() > 0) fill_map(model, alias, tables);
    const bool mapped = has_map(tables.spread, isa);
    if (mapped && !has_rest) return;
    const RansModel* const of = &model;
    const AliasTables* const parts = &alias;
    uint16_t* const slots = tables.slots;
    vectorised(isa, [=]() PACKHORSE_VECTORISED { fill_slot_table(*of, *parts, slots); });
    if (has_rounds && !mapped) fill_vector_tables(model, tables.slots, tables.vectors);
#if PACKHORSE_X86
    tables.pairs = nullptr;
    if (has_rounds) fill_pairs(model, n, isa, tables);
#endif
    if (has_rest) fill_scalar_tables(model, tables);
}

// Maps bytes to codes: consecutive symbols by a subtraction, others by a table, or by byte shuffles
// with AVX2 (rans/codes_avx2.hpp).
struct CodeMap {
    bool consecutive;
    uint32_t raw_bits;
    uint8_t base;
    uint8_t escape_code;
    bool has_escape;
    uint8_t code_of[256];  // by byte
    // For AVX2: the same by symbol, from `base` on, with the bits of escape_code flipped.
    uint32_t n_tables;  // of 16 symbols
    uint8_t flipped_code_of[256];
};

inline void fill_code_map(const RansModel& model, CodeMap& map) {
    map.raw_bits = model.raw_bits;
    map.escape_code = static_cast<uint8_t>(model.n_symbols);
    map.has_escape = model.has_escape();
    map.base = model.symbols[0];
    map.consecutive = model.n_symbols < 256 && model.n_in_range() == model.n_symbols;
    if (map.consecutive) return;
    std::memset(map.code_of, map.escape_code, sizeof map.code_of);
    const std::size_t n_bytes = std::size_t{1} << model.raw_bits;
    for (uint32_t c = 0; c < model.n_symbols; ++c)
        std::memset(map.code_of + model.symbols[c] * n_bytes, static_cast<int>(c), n_bytes);
    map.n_tables = (model.n_in_range() + 15) / 16;
    std::memset(map.flipped_code_of, 0, sizeof map.flipped_code_of);
    for (uint32_t c = 0; c < model.n_symbols; ++c)
        map.flipped_code_of[model.symbols[c] - map.base] =
            static_cast<uint8_t>(c ^ map.escape_code);
}

// Shifts eight bytes at a time, because vectors cannot shift bytes.
PACKHORSE_INLINE void shift_bytes(const uint8_t* src, std::size_t n, uint32_t right,
                                  uint8_t* __restrict dst) {
    const uint64_t mask = 0x0101010101010101 * (0xFFu >> right);
    std::size_t i = 0;
    for (; i + 8 <= n; i += 8) store(dst + i, load<uint64_t>(src + i) >> right & mask);
    for (; i < n; ++i) dst[i] = static_cast<uint8_t>(src[i] >> right);
}

PACKHORSE_INLINE void subtract_base(const uint8_t* symbols, std::size_t n, uint8_t base,
                                    uint8_t escape_code, uint8_t* codes) {
    for (std::size_t i = 0; i < n; ++i) {
        const auto offset = static_cast<uint8_t>(symbols[i] - base);
        codes[i] = offset < escape_code ? offset : escape_code;
    }
}

// Maps bytes to codes. Returns false if surely none of them is the escape.
inline bool map_units(const uint8_t* plane, std::size_t n, const CodeMap& map, uint8_t* codes,
                      Isa isa) {
    const uint8_t base = map.base, escape_code = map.escape_code;
    const uint32_t raw_bits = map.raw_bits;
    std::size_t done = 0;
#if PACKHORSE_X86
    bool escaped = false;
    const SymbolRange range{raw_bits, base, escape_code};
    if (map.consecutive && isa >= Isa::kAvx512) {
        done = subtract_base_avx512(plane, n, raw_bits, base, escape_code, codes, escaped);
    } else if (map.consecutive && isa >= Isa::kAvx2) {
        done = subtract_base_avx2(plane, n, range, codes, escaped);
    } else if (isa >= Isa::kAvx512Vbmi2) {
        done = look_up_vbmi2(plane, n, map.code_of, codes);
        escaped = true;
    } else if (isa >= Isa::kAvx2) {
        done =
            look_up_codes_avx2(plane, n, range, map.flipped_code_of, map.n_tables, codes, escaped);
    }
    if (done == n) return escaped;
#endif
    if (!map.consecutive) {
        for (; done < n; ++done) codes[done] = map.code_of[plane[done]];
        return true;
    }
    const uint8_t* const rest = plane + done;
    const std::size_t n_rest = n - done;
    uint8_t* const dst = codes + done;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        if (raw_bits > 0) shift_bytes(rest, n_rest, raw_bits, dst);
        subtract_base(raw_bits > 0 ? dst : rest, n_rest, base, escape_code, dst);
    });
    return true;
}

// The last of `n` bytes that equals `wanted`, or null. Only some C libraries have memrchr.
inline const uint8_t* find_last(const uint8_t* bytes, std::size_t n, uint8_t wanted) {
#if defined(__linux__)
    return static_cast<const uint8_t*>(memrchr(bytes, wanted, n));
#else
    const uint64_t each = 0x0101010101010101, low_bits = 0x7F * each;
    for (; n >= 8; n -= 8) {
        const uint64_t differ = load<uint64_t>(bytes + n - 8) ^ each * wanted;
        // Zero if all bytes differ: the top bit of each byte that is equal.
        const uint64_t equal = ~(((differ & low_bits) + low_bits) | differ | low_bits);
        if (equal != 0) return bytes + n - 1 - std::countl_zero(equal) / 8;
    }
    while (n > 0)
        if (bytes[--n] == wanted) return bytes + n;
    return nullptr;
#endif
}

// Maps `n` bytes to codes. Symbols without a code are written downwards from `escapes`, the last
// one first. Returns the address of the first.
inline uint8_t* map_codes(const uint8_t* plane, std::size_t n, const CodeMap& map, uint8_t* codes,
                          uint8_t* escapes, Isa isa) {
    const bool escaped = map_units(plane, n, map, codes, isa);
    if (!map.has_escape || !escaped) return escapes;
    const uint8_t* end = codes + n;
    while (const uint8_t* at =
               find_last(codes, static_cast<std::size_t>(end - codes), map.escape_code)) {
        end = at;
        *--escapes = static_cast<uint8_t>(plane[end - codes] >> map.raw_bits);
    }
    return escapes;
}

// Encodes one unit: emits a word below `words` if the state is too large, then adds the unit to it.
PACKHORSE_INLINE void encode_step(uint32_t& state, uint32_t code, const RansEncodeTables& tables,
                                  uint8_t*& words) {
    const uint32_t freq = tables.freq_start[code] & (kProbSum - 1);
    const uint32_t start = tables.freq_start[code] >> kProbBits;
    store(words - 2, static_cast<uint16_t>(state));  // kept only if the pointer moves
    const bool emit = state >> kRenormShift >= freq;
    words -= 2 * std::size_t{emit};
    // Kept in a register, this is selected without a branch, which no predictor could guess.
    uint32_t dividend = emit ? state >> 16 : state;
    keep_in_register(dividend);
    const auto quotient =
        static_cast<uint32_t>(uint64_t{dividend} * tables.inverse[code] >> kInverseBits);
    state = quotient << kProbBits | tables.slots[start + dividend - quotient * freq];
}

// Encodes a round of `n` <= n_lanes units, for any number of lanes.
PACKHORSE_INLINE void encode_round(const uint8_t* codes, std::size_t n, uint32_t lanes_log,
                                   const RansEncodeTables& tables, uint32_t* states,
                                   uint8_t*& words) {
    const uint32_t quarter_log = lanes_log - 2;
    for (uint32_t lane = 1u << lanes_log; lane-- > 0;) {
        const uint32_t position = 4 * (lane & ((1u << quarter_log) - 1)) + (lane >> quarter_log);
        if (position < n) encode_step(states[lane], codes[position], tables, words);
    }
}

// Encodes full rounds of few lanes. Every lane has instructions of its own: in a loop over lanes, a
// processor would take the state of each for that of the lane before and wait for it.
template <std::size_t... kReverse>
PACKHORSE_INLINE uint8_t* encode_few_lanes(const uint8_t* codes, std::size_t n_rounds,
                                           const RansEncodeTables& tables, uint32_t* states,
                                           uint8_t* words, std::index_sequence<kReverse...>) {
    constexpr std::size_t kLanes = sizeof...(kReverse), kQuarter = kLanes / 4;
    uint32_t x[kLanes];
    std::memcpy(x, states, sizeof x);
    for (std::size_t r = n_rounds; r-- > 0;) {
        const uint8_t* const round = codes + r * kLanes;
        const auto encode_lane = [&](std::size_t lane) PACKHORSE_VECTORISED {
            encode_step(x[lane], round[4 * (lane % kQuarter) + lane / kQuarter], tables, words);
        };
        (encode_lane(kLanes - 1 - kReverse), ...);
    }
    std::memcpy(states, x, sizeof x);
    return words;
}

PACKHORSE_INLINE uint8_t* encode_rounds(const uint8_t* codes, std::size_t n_rounds,
                                        uint32_t lanes_log, const RansEncodeTables& tables,
                                        uint32_t* states, uint8_t* words) {
    if (lanes_log == 2)
        return encode_few_lanes(codes, n_rounds, tables, states, words,
                                std::make_index_sequence<4>());
    if (lanes_log == 4)
        return encode_few_lanes(codes, n_rounds, tables, states, words,
                                std::make_index_sequence<16>());
    for (std::size_t r = n_rounds; r-- > 0;)
        encode_round(codes + (r << lanes_log), std::size_t{1} << lanes_log, lanes_log, tables,
                     states, words);
    return words;
}

inline uint8_t* encode_rounds_portable(const uint8_t* codes, std::size_t n_rounds,
                                       uint32_t lanes_log, const RansEncodeTables& tables,
                                       uint32_t* states, uint8_t* words, Ahead& ahead) {
#if PACKHORSE_X86
    if (lanes_log == kMaxLanesLog)
        return encode_rounds_wide_portable(codes, n_rounds, tables.vectors, states, words, ahead);
#endif
    (void)ahead;
    return encode_rounds(codes, n_rounds, lanes_log, tables, states, words);
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline uint8_t* encode_rounds_avx2(const uint8_t* codes, std::size_t n_rounds,
                                                  uint32_t lanes_log,
                                                  const RansEncodeTables& tables, uint32_t* states,
                                                  uint8_t* words, Ahead& ahead) {
    if (lanes_log != kMaxLanesLog)
        return encode_rounds(codes, n_rounds, lanes_log, tables, states, words);
    if (tables.pairs == nullptr)
        return encode_rounds_wide_avx2(CodeDivisorsAvx2(tables.vectors, codes, n_rounds), n_rounds,
                                       tables.vectors.slots, states, words, ahead);
    return encode_rounds_wide_avx2(PairDivisorsAvx2(*tables.pairs, codes, n_rounds), n_rounds,
                                   tables.vectors.slots, states, words, ahead);
}

// Encodes rounds of 128 lanes.
inline uint8_t* encode_rounds_avx512_any(const uint8_t* codes, std::size_t n_rounds,
                                         const RansModel& model, const RansEncodeTables& tables,
                                         uint32_t* states, uint8_t* words, Ahead& ahead, Isa isa) {
    if (has_map(tables.spread, isa))
        return isa >= Isa::kAvx512Vbmi2 ? encode_rounds_spread_vbmi2_any(
                                              codes, n_rounds, tables.spread, states, words, ahead)
                                        : encode_rounds_spread_avx512(
                                              codes, n_rounds, tables.spread, states, words, ahead);
    switch (model.n_buckets()) {
        case kNarrowBuckets:
            return encode_rounds_wide_avx512<false>(codes, n_rounds, tables.vectors, states, words,
                                                    ahead);
        case kWideBuckets:
            return encode_rounds_wide_avx512<true>(codes, n_rounds, tables.vectors, states, words,
                                                   ahead);
        default:
            return encode_rounds_avx2(codes, n_rounds, kMaxLanesLog, tables, states, words, ahead);
    }
}

#endif

inline uint8_t* encode_full_rounds(const uint8_t* codes, std::size_t n_rounds,
                                   const RansModel& model, const RansEncodeTables& tables,
                                   uint32_t lanes_log, uint32_t* states, uint8_t* words,
                                   Ahead& ahead, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512 && lanes_log == kMaxLanesLog)
        return encode_rounds_avx512_any(codes, n_rounds, model, tables, states, words, ahead, isa);
    if (isa >= Isa::kAvx512Vbmi2 && lanes_log == kShortLanesLog && model.n_codes <= kNarrowBuckets)
        return encode_rounds_short_vbmi2(codes, n_rounds, tables.freq_start, tables.inverse,
                                         tables.slots, states, words);
    if (isa >= Isa::kAvx2)
        return encode_rounds_avx2(codes, n_rounds, lanes_log, tables, states, words, ahead);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon && lanes_log == kMaxLanesLog) {
        if (has_map(tables.spread, isa))
            return encode_rounds_neon(codes, n_rounds, SpreadTablesNeon{tables.spread_bytes},
                                      states, words, ahead);
        return encode_rounds_neon(codes, n_rounds, VectorTablesNeon{tables.vectors}, states, words,
                                  ahead);
    }
#endif
    (void)isa;
    (void)model;
    return encode_rounds_portable(codes, n_rounds, lanes_log, tables, states, words, ahead);
}

// The output of rans_encode(): words and escapes, both written downwards, and the last states.
struct RansEncoded {
    uint32_t states[kMaxLanes];
    uint8_t* words;
    uint8_t* escapes;
};

// Calls encode(codes, n) for the codes of each segment of `n` units, from its end. units(begin,
// run) gives the units of a segment, until it is called again.
template <class Units, class Encode>
PACKHORSE_INLINE void for_each_segment(const Units& units, std::size_t n, const RansModel& model,
                                       RansEncoded& encoded, Isa isa, Encode encode) {
    CodeMap map;
    fill_code_map(model, map);
    alignas(64) uint8_t codes[kSegmentUnits];
    for (std::size_t end = n; end > 0;) {
        const std::size_t begin = (end - 1) / kSegmentUnits * kSegmentUnits;
        const std::size_t run = end - begin;
        encoded.escapes = map_codes(units(begin, run), run, map, codes, encoded.escapes, isa);
        encode(static_cast<const uint8_t*>(codes), run);
        end = begin;
    }
}

inline void encode_segment(const uint8_t* codes, std::size_t run, const RansModel& model,
                           const RansEncodeTables& tables, uint32_t lanes_log, RansEncoded& encoded,
                           Ahead& ahead, Isa isa) {
    const std::size_t n_rounds = run >> lanes_log;
    const std::size_t done = n_rounds << lanes_log;
    if (done < run)
        encode_round(codes + done, run - done, lanes_log, tables, encoded.states, encoded.words);
    encoded.words = encode_full_rounds(codes, n_rounds, model, tables, lanes_log, encoded.states,
                                       encoded.words, ahead, isa);
}

// Encodes units, segment by segment from the end. The caller sets `encoded` to the start states of
// the lanes and to the ends of two buffers, which have room for a word and a byte for each unit.
template <class Units>
inline void rans_encode_from(const Units& units, std::size_t n, const RansModel& model,
                             const RansEncodeTables& tables, uint32_t lanes_log,
                             RansEncoded& encoded, Ahead& ahead, Isa isa) {
    for_each_segment(units, n, model, encoded, isa, [&](const uint8_t* codes, std::size_t run) {
        encode_segment(codes, run, model, tables, lanes_log, encoded, ahead, isa);
    });
}

// Does the same for the units of a plane.
inline void rans_encode(const uint8_t* plane, std::size_t n, const RansModel& model,
                        const RansEncodeTables& tables, uint32_t lanes_log, RansEncoded& encoded,
                        Ahead& ahead, Isa isa) {
    rans_encode_from([=](std::size_t begin, std::size_t) { return plane + begin; }, n, model,
                     tables, lanes_log, encoded, ahead, isa);
}

}  // namespace packhorse
