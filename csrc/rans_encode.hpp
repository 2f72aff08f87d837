// rANS encoding (docs/format.md, 6.4). Runs backwards: last round first, last lane first, words
// written downwards.
//
// Byte values are mapped to codes first, a segment at a time, so that the loops below see small
// dense numbers in L1. All paths compute the exact quotient x / freq (an estimate that is right or
// one too small, then one correction), so all write the same bytes.
//
// Preconditions: every code in `codes` is below model.n_codes; the words buffer has room for one
// word a unit.
#pragma once

#include "dispatch.hpp"
#include "rans_model.hpp"

namespace packhorse {

constexpr uint32_t kRenormShift = 32 - kProbBits;  // a state >= freq << 20 would leave 32 bits

// The encoder's map from position (start of the code + rank) to slot has up to 63 linear runs. To
// hold it in registers instead of looking up 4096 entries, positions are spread over 64 buckets of
// 128 such that no bucket has more than three runs: codes may start anywhere, and gaps do not
// matter.
constexpr uint32_t kSpreadBuckets = 64;
constexpr uint32_t kSpreadLog = 7;
constexpr uint32_t kSpreadSize = 1u << kSpreadLog;

struct SpreadMap {
    // Where the second (bits 0-7) and third run (8-15) begin, and from bit 16 the first delta.
    alignas(64) uint32_t edges[kSpreadBuckets];
    // slot - position mod 4096: deltas of the second (bits 0-11) and third run (12-23).
    alignas(64) uint32_t deltas[kSpreadBuckets];
    // As in RansEncodeTables, with spread positions.
    alignas(64) uint32_t freq_start[kBuckets];
};

struct alignas(64) RansEncodeTables {
    uint32_t freq_start[256];  // freq (bits 0-11), start (12-23)
    uint32_t inverse[256];     // floor(2^32 / freq), for the integer paths
    uint32_t reciprocal[256];  // bits of the largest float <= 1 / freq, for AVX-512
    uint16_t slots[kProbSum];  // position -> slot
    SpreadMap spread;          // the same map for registers, if it fits
    bool has_spread;
};

// Largest float not above 1 / freq; the product's rounding decides, and float * int fits a double
// exactly.
inline uint32_t reciprocal_below(uint32_t freq) {
    const float nearest = 1.0f / static_cast<float>(freq);
    const auto bits = std::bit_cast<uint32_t>(nearest);
    return static_cast<double>(nearest) * freq <= 1.0 ? bits : bits - 1;
}

// The runs of one code, in rank order.
struct CodeRuns {
    uint32_t n;
    uint32_t first_slot[2 * kBuckets];
    uint32_t n_slots[2 * kBuckets];
};

// Whether a code can start here without giving any bucket a fourth run; `n_before` runs are in the
// first bucket already.
inline bool runs_fit(const CodeRuns& runs, uint32_t start, uint32_t n_before) {
    uint32_t bucket = start >> kSpreadLog;
    uint32_t n_in_bucket = n_before;
    uint32_t at = start;
    for (uint32_t i = 0; i < runs.n; ++i) {
        if (at >> kSpreadLog != bucket) {
            bucket = at >> kSpreadLog;
            // The run before reaches into this bucket, unless it ended at the edge.
            n_in_bucket = i > 0 && (at & (kSpreadSize - 1)) != 0 ? 1 : 0;
        }
        if (++n_in_bucket > 3) return false;
        at += runs.n_slots[i];
    }
    return true;
}

// The first place at or after `cursor` where a code fits, or the end of all places. `n_before` runs
// are in the bucket of `cursor`.
inline uint32_t place_runs(const CodeRuns& runs, uint32_t cursor, uint32_t n_before) {
    const uint32_t shared = cursor >> kSpreadLog;
    for (uint32_t start = cursor; start < cursor + 2 * kSpreadSize; ++start)
        if (runs_fit(runs, start, start >> kSpreadLog == shared ? n_before : 0)) return start;
    return kSpreadBuckets * kSpreadSize;
}

// Fills the entries of the buckets that a run covers; `n_runs` counts the runs of each bucket.
inline void spread_run(uint32_t start, uint32_t first_slot, uint32_t n_slots, SpreadMap& map,
                       uint8_t* n_runs) {
    const uint32_t delta = (first_slot - start) & (kProbSum - 1);
    for (uint32_t bucket = start >> kSpreadLog; bucket <= (start + n_slots - 1) >> kSpreadLog;
         ++bucket) {
        const uint32_t offset = start & (kSpreadSize - 1);  // not used for a first run
        switch (n_runs[bucket]++) {
            case 0:  // edges that no offset reaches
                map.edges[bucket] = kSpreadSize | kSpreadSize << 8 | delta << 16;
                map.deltas[bucket] = 0;
                break;
            case 1:
                map.edges[bucket] = (map.edges[bucket] & ~0xFFu) | offset;
                map.deltas[bucket] = delta;
                break;
            default:
                map.edges[bucket] = (map.edges[bucket] & ~0xFF00u) | offset << 8;
                map.deltas[bucket] |= delta << 12;
        }
    }
}

// Fills the map; false if some code finds no place.
inline bool spread_slots(const RansModel& model, const AliasTables& alias, SpreadMap& map) {
    CodeRuns runs[kBuckets];
    for (CodeRuns& code : runs) code.n = 0;
    for_each_run(model, alias, [&](uint32_t code, uint32_t first, uint32_t n, uint32_t) {
        if (n == 0) return;
        CodeRuns& of_code = runs[code];
        const uint32_t last = of_code.n - 1;
        if (of_code.n > 0 && of_code.first_slot[last] + of_code.n_slots[last] == first) {
            of_code.n_slots[last] += n;  // whole buckets of one code, side by side
            return;
        }
        of_code.first_slot[of_code.n] = first;
        of_code.n_slots[of_code.n++] = n;
    });
    uint8_t n_runs[kSpreadBuckets] = {};
    uint32_t cursor = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const bool fresh = (cursor & (kSpreadSize - 1)) == 0;
        uint32_t at = place_runs(runs[c], cursor, fresh ? 0 : n_runs[cursor >> kSpreadLog]);
        if (at + model.freqs[c] > kSpreadBuckets * kSpreadSize) return false;
        map.freq_start[c] = model.freqs[c] | at << kProbBits;
        for (uint32_t i = 0; i < runs[c].n; at += runs[c].n_slots[i++])
            spread_run(at, runs[c].first_slot[i], runs[c].n_slots[i], map, n_runs);
        cursor = at;
    }
    return true;
}

inline void fill_encode_tables(const RansModel& model, RansEncodeTables& tables) {
    uint32_t start = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t freq = model.freqs[c];
        tables.freq_start[c] = freq | start << kProbBits;
        tables.inverse[c] = freq == 1 ? ~0u : static_cast<uint32_t>((uint64_t{1} << 32) / freq);
        tables.reciprocal[c] = reciprocal_below(freq);
        start += freq;
    }
    AliasTables alias;
    if (model.is_alias()) build_alias(model, alias);
    fill_slot_table(model, alias, tables.slots);
    tables.has_spread = model.is_alias() && spread_slots(model, alias, tables.spread);
}

// How byte values become codes. Consecutive values map by a subtraction, others through a table.
struct CodeMap {
    bool consecutive;
    uint8_t base;
    uint8_t escape_code;
    bool has_escape;
    uint8_t code_of[256];
};

inline void fill_code_map(const RansModel& model, CodeMap& map) {
    map.escape_code = static_cast<uint8_t>(model.n_symbols);
    map.has_escape = model.has_escape();
    map.base = model.symbols[0];
    map.consecutive = model.n_symbols < 256 &&
                      model.symbols[model.n_symbols - 1] - map.base + 1u == model.n_symbols;
    std::memset(map.code_of, map.escape_code, sizeof map.code_of);
    for (uint32_t c = 0; c < model.n_symbols; ++c)
        map.code_of[model.symbols[c]] = static_cast<uint8_t>(c);
}

PACKHORSE_INLINE void map_units(const uint8_t* plane, std::size_t n, const CodeMap& map,
                                uint8_t* __restrict codes) {
    if (map.consecutive) {
        const uint8_t base = map.base, escape_code = map.escape_code;
        for (std::size_t i = 0; i < n; ++i) {
            const auto offset = static_cast<uint8_t>(plane[i] - base);
            codes[i] = offset < escape_code ? offset : escape_code;
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) codes[i] = map.code_of[plane[i]];
    }
}

// Codes of `n` byte values; those without a code are written downwards from `escapes`, last first.
// Returns the first of them.
inline uint8_t* map_codes(const uint8_t* plane, std::size_t n, const CodeMap& map, uint8_t* codes,
                          uint8_t* escapes) {
    map_units(plane, n, map, codes);
    if (!map.has_escape) return escapes;
    const uint8_t* end = codes + n;
    while (const void* at =
               memrchr(codes, map.escape_code, static_cast<std::size_t>(end - codes))) {
        end = static_cast<const uint8_t*>(at);
        *--escapes = plane[end - codes];
    }
    return escapes;
}

// One unit: emits a word below `words` if the state is too large for it, then takes the unit in.
PACKHORSE_INLINE void encode_step(uint32_t& state, uint32_t code, const RansEncodeTables& tables,
                                  uint8_t*& words) {
    const uint32_t freq = tables.freq_start[code] & (kProbSum - 1);
    const uint32_t start = tables.freq_start[code] >> kProbBits;
    store(words - 2, static_cast<uint16_t>(state));  // kept only if the pointer moves
    // Arithmetic instead of branches: no predictor guesses these.
    const uint32_t emit = state >> kRenormShift >= freq;
    words -= 2 * emit;
    state >>= 16 * emit;
    uint32_t quotient = static_cast<uint32_t>(uint64_t{state} * tables.inverse[code] >> 32);
    uint32_t remainder = state - quotient * freq;
    const uint32_t low = remainder >= freq;
    quotient += low;
    remainder -= freq & (0 - low);
    state = quotient << kProbBits | tables.slots[start + remainder];
}

// A round of `n` <= n_lanes units, for any number of lanes.
PACKHORSE_INLINE void encode_round(const uint8_t* codes, std::size_t n, uint32_t lanes_log,
                                   const RansEncodeTables& tables, uint32_t* states,
                                   uint8_t*& words) {
    const uint32_t quarter_log = lanes_log - 2;
    for (uint32_t lane = 1u << lanes_log; lane-- > 0;) {
        const uint32_t position = 4 * (lane & ((1u << quarter_log) - 1)) + (lane >> quarter_log);
        if (position < n) encode_step(states[lane], codes[position], tables, words);
    }
}

PACKHORSE_INLINE uint8_t* encode_rounds(const uint8_t* codes, std::size_t n_rounds,
                                        uint32_t lanes_log, const RansEncodeTables& tables,
                                        uint32_t* states, uint8_t* words) {
    for (std::size_t r = n_rounds; r-- > 0;)
        encode_round(codes + (r << lanes_log), std::size_t{1} << lanes_log, lanes_log, tables,
                     states, words);
    return words;
}

inline uint8_t* encode_rounds_portable(const uint8_t* codes, std::size_t n_rounds,
                                       uint32_t lanes_log, const RansEncodeTables& tables,
                                       uint32_t* states, uint8_t* words) {
    return encode_rounds(codes, n_rounds, lanes_log, tables, states, words);
}

#if PACKHORSE_X86

PACKHORSE_AVX2 inline uint8_t* encode_rounds_avx2(const uint8_t* codes, std::size_t n_rounds,
                                                  uint32_t lanes_log,
                                                  const RansEncodeTables& tables, uint32_t* states,
                                                  uint8_t* words) {
    return encode_rounds(codes, n_rounds, lanes_log, tables, states, words);
}

// How a vector of codes finds its tables: all in registers (spread positions), codes in registers
// and slots looked up, or all looked up.
enum class EncodeTables { kSpread, kNarrow, kWide };

struct EncodeRegistersAvx512 {
    __m512i freq_start[2];
    __m512 reciprocal[2];
    __m512i edges[4], deltas[4];

    PACKHORSE_AVX512 EncodeRegistersAvx512(const RansEncodeTables& tables, bool is_spread) {
        const uint32_t* from = is_spread ? tables.spread.freq_start : tables.freq_start;
        for (int h = 0; h < 2; ++h) {
            freq_start[h] = _mm512_load_si512(from + 16 * h);
            reciprocal[h] = _mm512_castsi512_ps(_mm512_load_si512(tables.reciprocal + 16 * h));
        }
        for (int h = 0; h < 4; ++h) {
            edges[h] = _mm512_load_si512(tables.spread.edges + 16 * h);
            deltas[h] = _mm512_load_si512(tables.spread.deltas + 16 * h);
        }
    }
};

// 64 entries in four registers.
PACKHORSE_AVX512 inline __attribute__((always_inline)) __m512i
look_up_64_avx512(const __m512i* table, __m512i index, __mmask16 in_upper_half) {
    return _mm512_mask_blend_epi32(in_upper_half,
                                   _mm512_permutex2var_epi32(table[0], index, table[1]),
                                   _mm512_permutex2var_epi32(table[2], index, table[3]));
}

PACKHORSE_AVX512 inline __attribute__((always_inline)) __m512i
spread_to_slot_avx512(__m512i position, const EncodeRegistersAvx512& registers) {
    const __m512i byte = _mm512_set1_epi32(0xFF);
    const __m512i bucket = _mm512_srli_epi32(position, kSpreadLog);  // permutes use five bits of it
    const __mmask16 upper = _mm512_test_epi32_mask(bucket, _mm512_set1_epi32(32));
    const __m512i edges = look_up_64_avx512(registers.edges, bucket, upper);
    const __m512i deltas = look_up_64_avx512(registers.deltas, bucket, upper);
    const __m512i offset = _mm512_and_si512(position, _mm512_set1_epi32(kSpreadSize - 1));
    const __mmask16 second = _mm512_cmpge_epu32_mask(offset, _mm512_and_si512(edges, byte));
    const __mmask16 third =
        _mm512_cmpge_epu32_mask(offset, _mm512_and_si512(_mm512_srli_epi32(edges, 8), byte));
    __m512i delta = _mm512_mask_mov_epi32(_mm512_srli_epi32(edges, 16), second, deltas);
    delta = _mm512_mask_srli_epi32(delta, third, deltas, 12);
    return _mm512_and_si512(_mm512_add_epi32(position, delta), _mm512_set1_epi32(kProbSum - 1));
}

// 16 lanes, one unit each; `codes` holds one code in each 32-bit element.
template <EncodeTables kTables>
PACKHORSE_AVX512 inline __attribute__((always_inline)) void encode_step_avx512(
    __m512i& state, __m512i codes, const EncodeRegistersAvx512& registers,
    const RansEncodeTables& tables, uint8_t*& words) {
    constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    __m512i freq_start;
    __m512 reciprocal;
    if constexpr (kTables == EncodeTables::kWide) {
        freq_start = look_up_avx512(tables.freq_start, codes);
        reciprocal = _mm512_castsi512_ps(look_up_avx512(tables.reciprocal, codes));
    } else {
        freq_start =
            _mm512_permutex2var_epi32(registers.freq_start[0], codes, registers.freq_start[1]);
        reciprocal =
            _mm512_permutex2var_ps(registers.reciprocal[0], codes, registers.reciprocal[1]);
    }
    const __m512i freq = _mm512_and_si512(freq_start, _mm512_set1_epi32(kProbSum - 1));
    const __m512i start = _mm512_srli_epi32(freq_start, kProbBits);
    const __mmask16 emit = _mm512_cmpge_epu32_mask(_mm512_srli_epi32(state, kRenormShift), freq);
    const auto n_words = static_cast<uint32_t>(__builtin_popcount(emit));
    words -= 2 * n_words;
    _mm256_mask_storeu_epi16(words, static_cast<__mmask16>((1u << n_words) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(emit, state)));
    state = _mm512_mask_srli_epi32(state, emit, state, 16);
    // state < freq * 2^20, so the quotient is below 2^20 and three roundings towards zero take less
    // than one off it.
    const __m512 estimate =
        _mm512_mul_round_ps(_mm512_cvt_roundepu32_ps(state, kTowardZero), reciprocal, kTowardZero);
    __m512i quotient = _mm512_cvttps_epi32(estimate);
    __m512i remainder = _mm512_sub_epi32(state, _mm512_mullo_epi32(quotient, freq));
    const __mmask16 low = _mm512_cmpge_epu32_mask(remainder, freq);
    quotient = _mm512_mask_add_epi32(quotient, low, quotient, _mm512_set1_epi32(1));
    remainder = _mm512_mask_sub_epi32(remainder, low, remainder, freq);
    __m512i slot = _mm512_add_epi32(start, remainder);
    if constexpr (kTables == EncodeTables::kSpread) slot = spread_to_slot_avx512(slot, registers);
    if constexpr (kTables == EncodeTables::kNarrow) slot = look_up_avx512(tables.slots, slot);
    state = _mm512_or_si512(_mm512_slli_epi32(quotient, kProbBits), slot);
}

// Rounds of 128 lanes: eight registers of states, two of codes (each 32-bit element has four
// neighbouring units).
template <EncodeTables kTables>
PACKHORSE_AVX512 inline uint8_t* encode_rounds_avx512(const uint8_t* codes, std::size_t n_rounds,
                                                      const RansEncodeTables& tables,
                                                      uint32_t* states, uint8_t* words,
                                                      Ahead& shared_ahead) {
    const EncodeRegistersAvx512 registers(tables, kTables == EncodeTables::kSpread);
    Ahead ahead = shared_ahead;
    const __m512i byte = _mm512_set1_epi32(0xFF);
    __m512i lanes[8];
    for (int k = 0; k < 8; ++k) lanes[k] = _mm512_loadu_si512(states + 16 * k);
    for (std::size_t r = n_rounds; r-- > 0;) {
        ahead.step();
        const __m512i units[2] = {_mm512_loadu_si512(codes + 128 * r),
                                  _mm512_loadu_si512(codes + 128 * r + 64)};
#pragma GCC unroll 8
        for (int k = 7; k >= 0; --k) {
            const __m512i code = _mm512_and_si512(
                _mm512_srli_epi32(units[k & 1], 8 * static_cast<unsigned>(k >> 1)), byte);
            encode_step_avx512<kTables>(lanes[k], code, registers, tables, words);
        }
    }
    for (int k = 0; k < 8; ++k) _mm512_storeu_si512(states + 16 * k, lanes[k]);
    shared_ahead = ahead;
    return words;
}

inline uint8_t* encode_rounds_avx512_any(const uint8_t* codes, std::size_t n_rounds,
                                         const RansModel& model, const RansEncodeTables& tables,
                                         uint32_t* states, uint8_t* words, Ahead& ahead) {
    if (!model.is_alias())
        return encode_rounds_avx512<EncodeTables::kWide>(codes, n_rounds, tables, states, words,
                                                         ahead);
    if (!tables.has_spread)
        return encode_rounds_avx512<EncodeTables::kNarrow>(codes, n_rounds, tables, states, words,
                                                           ahead);
    return encode_rounds_avx512<EncodeTables::kSpread>(codes, n_rounds, tables, states, words,
                                                       ahead);
}

#endif

inline uint8_t* encode_full_rounds(const uint8_t* codes, std::size_t n_rounds,
                                   const RansModel& model, const RansEncodeTables& tables,
                                   uint32_t lanes_log, uint32_t* states, uint8_t* words,
                                   Ahead& ahead, Isa isa) {
#if PACKHORSE_X86
    if (isa == Isa::kAvx512 && lanes_log == kMaxLanesLog)
        return encode_rounds_avx512_any(codes, n_rounds, model, tables, states, words, ahead);
    if (isa >= Isa::kAvx2)
        return encode_rounds_avx2(codes, n_rounds, lanes_log, tables, states, words);
#endif
    (void)ahead;
    (void)isa;
    (void)model;
    return encode_rounds_portable(codes, n_rounds, lanes_log, tables, states, words);
}

constexpr std::size_t kSegmentUnits = 4096;  // codes of a segment stay in L1

// What rans_encode wrote, both downwards: words and escapes, and the final states.
struct RansEncoded {
    uint32_t states[kMaxLanes];
    uint8_t* words;
    uint8_t* escapes;
};

// Encodes a plane, segment by segment from its end. `encoded` comes with the start states of the
// lanes and the ends of two buffers, with room for a word and a byte a unit.
inline void rans_encode(const uint8_t* plane, std::size_t n, const RansModel& model,
                        const RansEncodeTables& tables, uint32_t lanes_log, RansEncoded& encoded,
                        Ahead& ahead, Isa isa) {
    CodeMap map;
    fill_code_map(model, map);
    alignas(64) uint8_t codes[kSegmentUnits];
    for (std::size_t end = n; end > 0;) {
        const std::size_t begin = (end - 1) / kSegmentUnits * kSegmentUnits;
        const std::size_t run = end - begin;
        encoded.escapes = map_codes(plane + begin, run, map, codes, encoded.escapes);
        const std::size_t n_rounds = run >> lanes_log;
        const std::size_t done = n_rounds << lanes_log;
        encode_round(codes + done, run - done, lanes_log, tables, encoded.states, encoded.words);
        encoded.words = encode_full_rounds(codes, n_rounds, model, tables, lanes_log,
                                           encoded.states, encoded.words, ahead, isa);
        end = begin;
    }
}

}  // namespace packhorse
