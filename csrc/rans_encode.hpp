// rANS encoding (docs/format.md, 6.4). Runs backwards: last round first, last lane first, words
// written downwards.
//
// Byte values are mapped to codes first, a segment at a time, so that the loops below see small
// dense numbers in L1. All paths come to the exact quotient x / freq, so all write the same bytes:
// scalar ones by an exact reciprocal, vector ones by an estimate that is right or one too small and
// then corrected. The loops for AVX2 and SSE2 are in rans_encode_avx2.hpp and
// rans_encode_portable.hpp.
//
// Preconditions: every code in `codes` is below model.n_codes; the words buffer has room for one
// word a unit.
#pragma once

#include "dispatch.hpp"
#include "rans_encode_avx2.hpp"
#include "rans_encode_portable.hpp"
#include "rans_model.hpp"

namespace packhorse {

constexpr uint32_t kRenormShift = 32 - kProbBits;  // a state >= freq << 20 would leave 32 bits

// A state x < freq * 2^20 times 2^44 / freq, rounded up, is at most x * 2^44 / freq + x: too much
// by less than freq * 2^20 < 2^44 / freq, so x / freq is exact, and the product stays below 2^64.
constexpr uint32_t kInverseBits = 44;

// The encoder's map from position (start of the code + rank) to slot has up to 2 * n_codes - 1
// linear runs in the alias layout. To hold it in registers instead of looking up 4096 entries,
// positions are spread over twice as many buckets as the layout has, each as large, such that no
// bucket has more than two runs or, where that fails, three: codes may start anywhere, and gaps do
// not matter.
constexpr uint32_t kSpreadSum = 2 * kProbSum;

struct SpreadMap {
    uint32_t most_runs;  // in a bucket: 2 or 3; 0 if no map was found
    uint32_t size_log;   // log2 of the positions of a bucket
    // Where the second run begins (bits 0-7), and slot - position mod 4096 of the first (8-19) and
    // the second (20-31).
    alignas(64) uint32_t runs[2 * kWideBuckets];
    // The same of the third run: bits 0-7 and 8-19.
    alignas(64) uint32_t third[2 * kWideBuckets];
    // As in RansEncodeTables, with spread positions.
    alignas(64) uint32_t freq_start[kWideBuckets];

    uint32_t size() const { return 1u << size_log; }
    uint32_t offset_of(uint32_t position) const { return position & (size() - 1); }
};

struct alignas(64) RansEncodeTables {
    uint32_t freq_start[256];  // freq (bits 0-11), start (12-23)
    uint64_t inverse[256];     // 2^44 / freq rounded up, for the scalar path
    uint32_t reciprocal[256];  // bits of the largest float <= 1 / freq, for AVX-512
    uint16_t slots[kProbSum];  // position -> slot
    RansVectorTables vectors;  // for AVX2 and SSE2
    SpreadMap spread;          // the same map for registers, if it fits
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
    uint32_t first_slot[kWideBuckets];
    uint32_t n_slots[kWideBuckets];
};

// The runs of each code; runs that meet are one.
inline void collect_runs(const RansModel& model, const AliasTables& alias, CodeRuns* runs) {
    for (uint32_t c = 0; c < model.n_codes; ++c) runs[c].n = 0;
    for_each_run(model, alias, [&](uint32_t code, uint32_t first, uint32_t n, uint32_t) {
        if (n == 0) return;
        CodeRuns& own = runs[code];
        if (own.n > 0 && own.first_slot[own.n - 1] + own.n_slots[own.n - 1] == first) {
            own.n_slots[own.n - 1] += n;
            return;
        }
        own.first_slot[own.n] = first;
        own.n_slots[own.n++] = n;
    });
}

// Whether a code can start here without giving any bucket more than `most` runs; `n_before` runs
// are in the first bucket already.
inline bool runs_fit(const CodeRuns& runs, uint32_t start, uint32_t n_before, uint32_t most,
                     const SpreadMap& map) {
    uint32_t bucket = start >> map.size_log;
    uint32_t n_in_bucket = n_before;
    uint32_t at = start;
    for (uint32_t i = 0; i < runs.n; ++i) {
        if (at >> map.size_log != bucket) {
            bucket = at >> map.size_log;
            // The run before reaches into this bucket, unless it ended at the edge.
            n_in_bucket = i > 0 && map.offset_of(at) != 0 ? 1 : 0;
        }
        if (++n_in_bucket > most) return false;
        at += runs.n_slots[i];
    }
    return true;
}

// The first place at or after `cursor` where a code fits, or the end of all places. `n_before` runs
// are in the bucket of `cursor`.
inline uint32_t place_runs(const CodeRuns& runs, uint32_t cursor, uint32_t n_before, uint32_t most,
                           const SpreadMap& map) {
    const uint32_t shared = cursor >> map.size_log;
    for (uint32_t start = cursor; start < cursor + 2 * map.size(); ++start)
        if (runs_fit(runs, start, start >> map.size_log == shared ? n_before : 0, most, map))
            return start;
    return kSpreadSum;
}

// Fills the entries of the buckets that a run covers; `n_runs` counts the runs of each bucket.
inline void spread_run(uint32_t start, uint32_t first_slot, uint32_t n_slots, SpreadMap& map,
                       uint8_t* n_runs) {
    const uint32_t delta = (first_slot - start) & (kProbSum - 1);
    for (uint32_t bucket = start >> map.size_log; bucket <= (start + n_slots - 1) >> map.size_log;
         ++bucket) {
        const uint32_t offset = map.offset_of(start);  // not used for a first run
        switch (n_runs[bucket]++) {
            case 0:  // an edge that no offset reaches
                map.runs[bucket] = map.size() | delta << 8;
                if (map.most_runs == 3) map.third[bucket] = map.size();
                break;
            case 1:
                map.runs[bucket] = (map.runs[bucket] & ~0xFFu) | offset | delta << 20;
                break;
            default:
                map.third[bucket] = offset | delta << 8;
        }
    }
}

// Fills the map with at most `most` runs a bucket; false if some code finds no place.
inline bool spread_codes(const RansModel& model, const CodeRuns* runs, uint32_t most,
                         SpreadMap& map) {
    uint8_t n_runs[2 * kWideBuckets + 2] = {};
    map.most_runs = most;
    uint32_t cursor = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        uint32_t at = place_runs(runs[c], cursor, n_runs[cursor >> map.size_log], most, map);
        if (at + model.freqs[c] > kSpreadSum) return false;
        map.freq_start[c] = model.freqs[c] | at << kProbBits;
        for (uint32_t i = 0; i < runs[c].n; at += runs[c].n_slots[i++])
            spread_run(at, runs[c].first_slot[i], runs[c].n_slots[i], map, n_runs);
        cursor = at;
    }
    return true;
}

inline void spread_slots(const RansModel& model, const AliasTables& alias, SpreadMap& map) {
    CodeRuns runs[kWideBuckets];
    collect_runs(model, alias, runs);
    map.size_log = model.n_buckets() == kNarrowBuckets ? 7 : 6;
    if (!spread_codes(model, runs, 2, map) && !spread_codes(model, runs, 3, map)) map.most_runs = 0;
}

inline void fill_encode_tables(const RansModel& model, RansEncodeTables& tables) {
    uint32_t start = 0;
    for (uint32_t c = 0; c < model.n_codes; ++c) {
        const uint32_t freq = model.freqs[c];
        tables.freq_start[c] = freq | start << kProbBits;
        tables.inverse[c] = ((uint64_t{1} << kInverseBits) + freq - 1) / freq;
        tables.reciprocal[c] = reciprocal_below(freq);
        start += freq;
    }
    AliasTables alias;
    if (model.n_buckets() > 0) build_alias(model, alias);
    fill_slot_table(model, alias, tables.slots);
    fill_vector_tables(model, tables.slots, tables.vectors);
    tables.spread.most_runs = 0;
    if (model.n_buckets() > 0) spread_slots(model, alias, tables.spread);
}

// How bytes become codes. Consecutive symbols map by a subtraction, others through a table.
struct CodeMap {
    bool consecutive;
    uint32_t raw_bits;
    uint8_t base;
    uint8_t escape_code;
    bool has_escape;
    uint8_t code_of[256];  // by byte
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
}

// Eight bytes at a time: a vector has no shift of bytes.
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

inline void map_units(const uint8_t* plane, std::size_t n, const CodeMap& map, uint8_t* codes,
                      Isa isa) {
    if (!map.consecutive) {
        for (std::size_t i = 0; i < n; ++i) codes[i] = map.code_of[plane[i]];
        return;
    }
    const uint8_t base = map.base, escape_code = map.escape_code;
    const uint32_t raw_bits = map.raw_bits;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        if (raw_bits > 0) shift_bytes(plane, n, raw_bits, codes);
        subtract_base(raw_bits > 0 ? codes : plane, n, base, escape_code, codes);
    });
}

// Codes of `n` bytes; symbols without a code are written downwards from `escapes`, last first.
// Returns the first of them.
inline uint8_t* map_codes(const uint8_t* plane, std::size_t n, const CodeMap& map, uint8_t* codes,
                          uint8_t* escapes, Isa isa) {
    map_units(plane, n, map, codes, isa);
    if (!map.has_escape) return escapes;
    const uint8_t* end = codes + n;
    while (const void* at =
               memrchr(codes, map.escape_code, static_cast<std::size_t>(end - codes))) {
        end = static_cast<const uint8_t*>(at);
        *--escapes = static_cast<uint8_t>(plane[end - codes] >> map.raw_bits);
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
    const auto quotient =
        static_cast<uint32_t>(uint64_t{state} * tables.inverse[code] >> kInverseBits);
    state = quotient << kProbBits | tables.slots[start + state - quotient * freq];
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
    if (lanes_log == kMaxLanesLog)
        return encode_rounds_wide_avx2(codes, n_rounds, tables.vectors, states, words, ahead);
    return encode_rounds(codes, n_rounds, lanes_log, tables, states, words);
}

// How a vector of codes finds its tables: codes and the map to slots in registers, with at most two
// or three runs a bucket; codes in registers and slots looked up; or all looked up. Narrow tables
// are for 32 codes, wide ones for 64.
enum class EncodeTables {
    kNarrowTwoRuns,
    kNarrowThreeRuns,
    kNarrow,
    kWideTwoRuns,
    kWideThreeRuns,
    kWide,
    kMemory
};

constexpr bool is_wide(EncodeTables tables) {
    return tables >= EncodeTables::kWideTwoRuns && tables <= EncodeTables::kWide;
}
constexpr bool has_third_run(EncodeTables tables) {
    return tables == EncodeTables::kNarrowThreeRuns || tables == EncodeTables::kWideThreeRuns;
}
constexpr bool is_spread(EncodeTables tables) {
    return tables == EncodeTables::kNarrowTwoRuns || tables == EncodeTables::kWideTwoRuns ||
           has_third_run(tables);
}

// 64 entries in four registers.
PACKHORSE_AVX512 inline __attribute__((always_inline)) __m512i
look_up_64_avx512(const __m512i* table, __m512i index, __mmask16 in_upper_half) {
    return _mm512_mask_blend_epi32(in_upper_half,
                                   _mm512_permutex2var_epi32(table[0], index, table[1]),
                                   _mm512_permutex2var_epi32(table[2], index, table[3]));
}

// 128 entries in eight registers.
PACKHORSE_AVX512 inline __attribute__((always_inline)) __m512i
look_up_128_avx512(const __m512i* table, __m512i index, __mmask16 in_odd_half) {
    const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(64));
    return _mm512_mask_blend_epi32(upper, look_up_64_avx512(table, index, in_odd_half),
                                   look_up_64_avx512(table + 4, index, in_odd_half));
}

template <EncodeTables kTables>
struct EncodeRegistersAvx512 {
    static constexpr unsigned kSizeLog = is_wide(kTables) ? 6 : 7;
    static constexpr int kCodeRegisters = is_wide(kTables) ? 4 : 2;
    static constexpr int kRunRegisters = is_spread(kTables) ? 2 * kCodeRegisters : 1;
    static constexpr int kThirdRegisters = has_third_run(kTables) ? kRunRegisters : 1;
    __m512i freq_start[kCodeRegisters];
    __m512i reciprocal[kCodeRegisters];
    __m512i runs[kRunRegisters], third[kThirdRegisters];

    PACKHORSE_AVX512 explicit EncodeRegistersAvx512(const RansEncodeTables& tables) {
        const uint32_t* from = is_spread(kTables) ? tables.spread.freq_start : tables.freq_start;
        for (int h = 0; h < kCodeRegisters; ++h) {
            freq_start[h] = _mm512_load_si512(from + 16 * h);
            reciprocal[h] = _mm512_load_si512(tables.reciprocal + 16 * h);
        }
        for (int h = 0; h < kRunRegisters; ++h)
            runs[h] = _mm512_load_si512(tables.spread.runs + 16 * h);
        for (int h = 0; h < kThirdRegisters; ++h)
            third[h] = _mm512_load_si512(tables.spread.third + 16 * h);
    }

    // freq and start of each code, and the bits of its reciprocal.
    PACKHORSE_AVX512 inline __attribute__((always_inline)) void look_up(
        __m512i codes, __m512i& freq_starts, __m512i& reciprocals) const {
        if constexpr (kCodeRegisters == 4) {
            const __mmask16 upper = _mm512_test_epi32_mask(codes, _mm512_set1_epi32(32));
            freq_starts = look_up_64_avx512(freq_start, codes, upper);
            reciprocals = look_up_64_avx512(reciprocal, codes, upper);
        } else {
            freq_starts = _mm512_permutex2var_epi32(freq_start[0], codes, freq_start[1]);
            reciprocals = _mm512_permutex2var_epi32(reciprocal[0], codes, reciprocal[1]);
        }
    }

    PACKHORSE_AVX512 static inline __attribute__((always_inline)) __m512i
    look_up_runs(const __m512i* table, __m512i bucket, __mmask16 odd_half) {
        if constexpr (is_wide(kTables))
            return look_up_128_avx512(table, bucket, odd_half);
        else
            return look_up_64_avx512(table, bucket, odd_half);
    }

    PACKHORSE_AVX512 inline __attribute__((always_inline)) __m512i slot_of(__m512i position) const {
        const __m512i byte = _mm512_set1_epi32(0xFF);
        const __m512i bucket = _mm512_srli_epi32(position, kSizeLog);
        const __mmask16 odd_half = _mm512_test_epi32_mask(bucket, _mm512_set1_epi32(32));
        const __m512i run = look_up_runs(runs, bucket, odd_half);
        const __m512i offset = _mm512_and_si512(position, _mm512_set1_epi32((1 << kSizeLog) - 1));
        const __mmask16 in_second = _mm512_cmpge_epu32_mask(offset, _mm512_and_si512(run, byte));
        __m512i delta = _mm512_srli_epi32(run, 8);  // bits above the twelve do no harm
        delta = _mm512_mask_srli_epi32(delta, in_second, run, 20);
        if constexpr (has_third_run(kTables)) {
            const __m512i last = look_up_runs(third, bucket, odd_half);
            const __mmask16 in_third =
                _mm512_cmpge_epu32_mask(offset, _mm512_and_si512(last, byte));
            delta = _mm512_mask_srli_epi32(delta, in_third, last, 8);
        }
        return _mm512_and_si512(_mm512_add_epi32(position, delta), _mm512_set1_epi32(kProbSum - 1));
    }
};

// 16 lanes, one unit each; `codes` holds one code in each 32-bit element.
template <EncodeTables kTables>
PACKHORSE_AVX512 inline __attribute__((always_inline)) void encode_step_avx512(
    __m512i& state, __m512i codes, const EncodeRegistersAvx512<kTables>& registers,
    const RansEncodeTables& tables, uint8_t*& words) {
    constexpr int kTowardZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    __m512i freq_start, reciprocal_bits;
    if constexpr (kTables == EncodeTables::kMemory) {
        freq_start = look_up_avx512(tables.freq_start, codes);
        reciprocal_bits = look_up_avx512(tables.reciprocal, codes);
    } else {
        registers.look_up(codes, freq_start, reciprocal_bits);
    }
    const __m512 reciprocal = _mm512_castsi512_ps(reciprocal_bits);
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
    if constexpr (is_spread(kTables))
        slot = registers.slot_of(slot);
    else if constexpr (kTables != EncodeTables::kMemory)  // where slots are positions
        slot = look_up_avx512(tables.slots, slot);
    state = _mm512_or_si512(_mm512_slli_epi32(quotient, kProbBits), slot);
}

// Rounds of 128 lanes: eight registers of states, two of codes (each 32-bit element has four
// neighbouring units).
template <EncodeTables kTables>
PACKHORSE_AVX512 inline uint8_t* encode_rounds_avx512(const uint8_t* codes, std::size_t n_rounds,
                                                      const RansEncodeTables& tables,
                                                      uint32_t* states, uint8_t* words,
                                                      Ahead& shared_ahead) {
    const EncodeRegistersAvx512<kTables> registers(tables);
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
    const auto run = [&](auto rounds) {
        return rounds(codes, n_rounds, tables, states, words, ahead);
    };
    const bool narrow = model.n_buckets() == kNarrowBuckets;
    if (model.n_buckets() == 0) return run(encode_rounds_avx512<EncodeTables::kMemory>);
    switch (tables.spread.most_runs) {
        case 2:
            return narrow ? run(encode_rounds_avx512<EncodeTables::kNarrowTwoRuns>)
                          : run(encode_rounds_avx512<EncodeTables::kWideTwoRuns>);
        case 3:
            return narrow ? run(encode_rounds_avx512<EncodeTables::kNarrowThreeRuns>)
                          : run(encode_rounds_avx512<EncodeTables::kWideThreeRuns>);
        default:
            return narrow ? run(encode_rounds_avx512<EncodeTables::kNarrow>)
                          : run(encode_rounds_avx512<EncodeTables::kWide>);
    }
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
        return encode_rounds_avx2(codes, n_rounds, lanes_log, tables, states, words, ahead);
#endif
    (void)isa;
    (void)model;
    return encode_rounds_portable(codes, n_rounds, lanes_log, tables, states, words, ahead);
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
        encoded.escapes = map_codes(plane + begin, run, map, codes, encoded.escapes, isa);
        const std::size_t n_rounds = run >> lanes_log;
        const std::size_t done = n_rounds << lanes_log;
        encode_round(codes + done, run - done, lanes_log, tables, encoded.states, encoded.words);
        encoded.words = encode_full_rounds(codes, n_rounds, model, tables, lanes_log,
                                           encoded.states, encoded.words, ahead, isa);
        end = begin;
    }
}

}  // namespace packhorse
