// Palette coding (docs/format.md, 6.3): codes of up to 4 bits as bit planes, an escape for each
// symbol outside of the palette, and raw bits. With raw bits and no code bits, a palette just drops
// bits that are always zero.
// SIMD comparisons produce bit planes, and masked operations consume them: the codes of 64 units
// are `code_bits` words of 64 bits. The encoder chooses palettes with few escapes, which are
// handled
// one by one.
#pragma once

#include <algorithm>
#include <bit>

#include "common/dispatch.hpp"
#include "common/layout.hpp"
#include "planes/histogram.hpp"
#include "planes/palette_avx2.hpp"
#include "planes/palette_avx512.hpp"
#include "planes/palette_neon.hpp"
#include "planes/palette_portable.hpp"
#include "planes/symbols.hpp"

namespace packhorse {

constexpr std::size_t palette_planes_nbytes(uint32_t code_bits, std::size_t n) {
    return code_bits * bit_plane_nbytes(n);
}

// Gives unused codes to values outside of the palette, so that loops over the palette have a fixed
// length.
inline void fill_palette(PaletteModel& model) {
    const uint32_t n_codes = (1u << model.code_bits) - (model.has_escape ? 1 : 0);
    for (uint32_t value = 0; model.n_values < n_codes; ++value) {
        const auto shifted = static_cast<uint8_t>(value << model.raw_bits);
        uint8_t* const end = model.values + model.n_values;
        if (std::find(model.values, end, shifted) == end) model.values[model.n_values++] = shifted;
    }
}

// The most common symbols that a palette can hold, the commonest first.
struct RankedSymbols {
    uint32_t n;
    uint8_t symbols[1 << kMaxCodeBits];
    uint32_t counts[1 << kMaxCodeBits];
};

// Each rank is the number of larger keys: that takes no branch.
inline void rank_symbols(const SymbolCounts& symbols, RankedSymbols& ranked) {
    constexpr uint32_t kMost = 1 << kMaxCodeBits;
    SymbolCounts common;
    const bool drops = symbols.n > kMost;
    if (drops) drop_rare(symbols, kMost, common);
    const SymbolCounts& from = drops ? common : symbols;
    ranked.n = from.n;
    int32_t keys[kMost], ranks[kMost] = {};
    for (uint32_t i = 0; i < kMost; ++i)
        keys[i] = i < from.n ? static_cast<int32_t>(rank_key(from, i)) : -1;
    for (uint32_t i = 0; i < kMost; ++i)
        for (uint32_t j = 0; j < kMost; ++j) ranks[j] += keys[i] > keys[j] ? 1 : 0;
    for (uint32_t i = 0; i < from.n; ++i) {
        ranked.symbols[ranks[i]] = from.symbols[i];
        ranked.counts[ranks[i]] = from.counts[i];
    }
}

// Finds the cheapest palette of symbols with `raw_bits` raw bits. If it costs less than `best`, in
// bits for the histogram's units, updates `best`.
inline void try_palette(const SymbolCounts& bytes, uint32_t raw_bits, uint64_t& best,
                        PaletteModel& model) {
    const uint32_t used = bits_in_use(bytes) & ((1u << raw_bits) - 1);
    const uint64_t raw_cost = uint64_t{bytes.total} * static_cast<uint32_t>(std::popcount(used));
    if (raw_cost + bytes.total >= best) return;
    SymbolCounts folded;
    if (raw_bits > 0) fold(bytes, raw_bits, folded);
    const SymbolCounts& symbols = raw_bits > 0 ? folded : bytes;
    const uint32_t n_possible = 256u >> raw_bits;
    RankedSymbols ranked;
    rank_symbols(symbols, ranked);
    for (uint32_t bits = 1; bits <= kMaxCodeBits && bits <= 8 - raw_bits; ++bits) {
        const bool all_have_codes = n_possible <= 1u << bits;
        const bool escape = !all_have_codes && (symbols.sampled || symbols.n > 1u << bits);
        const uint32_t n_values = std::min(symbols.n, (1u << bits) - (escape ? 1 : 0));
        uint64_t covered = 0;
        for (uint32_t i = 0; i < n_values; ++i) covered += ranked.counts[i];
        const uint64_t cost =
            uint64_t{symbols.total} * bits + 8 * (symbols.total - covered) + raw_cost;
        if (cost >= best) continue;
        best = cost;
        model.code_bits = bits;
        model.has_escape = escape;
        model.raw_bits = raw_bits;
        model.n_values = n_values;
        for (uint32_t i = 0; i < n_values; ++i)
            model.values[i] = static_cast<uint8_t>(ranked.symbols[i] << raw_bits);
    }
}

// Tries a palette that only stores, as they are, the bits that are ever set. Uses it if it costs
// less than `best`. A sample may have missed bits, and a single unit with another bit costs a whole
// bit plane, so `all_bits` reads all units. It is called only if the sample is cheap.
template <class AllBits>
inline void try_used_bits(const SymbolCounts& bytes, const AllBits& all_bits, uint64_t& best,
                          PaletteModel& model) {
    const auto cost_of = [&](uint32_t used) {
        return uint64_t{bytes.total} * static_cast<uint32_t>(std::popcount(used));
    };
    if (cost_of(bits_in_use(bytes)) >= best) return;
    const uint64_t cost = cost_of(all_bits());
    if (cost >= best) return;
    best = cost;
    model = {0, false, 8, 1, {}};
}

// Finds the cheapest palette for a plane, of symbols with up to `most_raw_bits` raw bits. Returns
// its estimated bits for the units that were counted. `all_bits` returns the bits that are set in
// any unit.
template <class AllBits>
inline uint64_t choose_palette(const SymbolCounts& bytes, uint32_t most_raw_bits,
                               const AllBits& all_bits, PaletteModel& model) {
    uint64_t best = ~uint64_t{0};
    // Each raw bit costs one bit a unit, so a palette with more raw bits than the best cost cannot
    // win.
    for (uint32_t raw_bits = 0; raw_bits <= most_raw_bits && raw_bits * bytes.total < best;
         ++raw_bits)
        try_palette(bytes, raw_bits, best, model);
    if (model.code_bits > 0) fill_palette(model);
    std::sort(model.values, model.values + model.n_values);
    try_used_bits(bytes, all_bits, best, model);
    return best;
}

template <uint32_t kBits>
std::size_t palette_encode_blocks(const uint8_t* src, std::size_t n_blocks,
                                  const PaletteModel& model, uint8_t* codes,
                                  std::size_t plane_stride, uint8_t*& escapes,
                                  const uint8_t* escapes_end, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        return palette_encode_blocks_avx512<kBits>(src, n_blocks, model, codes, plane_stride,
                                                   escapes, escapes_end);
    if (isa >= Isa::kAvx2)
        return palette_encode_blocks_avx2<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                                 escapes_end);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        return palette_encode_blocks_neon<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                                 escapes_end);
#endif
    (void)isa;
    return palette_encode_blocks_portable<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                                 escapes_end);
}

// Codes all units; returns the end of the escapes, or null if they do not fit.
template <uint32_t kBits>
uint8_t* palette_encode_units(const uint8_t* src, std::size_t n, const PaletteModel& model,
                              uint8_t* codes, std::size_t plane_stride, uint8_t* escapes,
                              const uint8_t* escapes_end, Isa isa) {
    const std::size_t n_blocks = n / 64;
    if (palette_encode_blocks<kBits>(src, n_blocks, model, codes, plane_stride, escapes,
                                     escapes_end, isa) < n_blocks)
        return nullptr;
    const std::size_t rest = n % 64;
    if (rest == 0) return escapes;
    if (escapes_end - escapes < 64) return nullptr;
    uint8_t block[64] = {};
    std::memcpy(block, src + 64 * n_blocks, rest);
    return palette_encode_block<kBits>(block, (uint64_t{1} << rest) - 1, model,
                                       codes + 8 * n_blocks, plane_stride, escapes);
}

// Codes all units for any number of code bits, as palette_encode_units() does.
inline uint8_t* palette_encode_codes(const uint8_t* src, std::size_t n, const PaletteModel& model,
                                     uint8_t* codes, uint8_t* escapes, const uint8_t* limit,
                                     Isa isa) {
    const std::size_t stride = bit_plane_nbytes(n);
    switch (model.code_bits) {
        case 0:
            return escapes;
        case 1:
            return palette_encode_units<1>(src, n, model, codes, stride, escapes, limit, isa);
        case 2:
            return palette_encode_units<2>(src, n, model, codes, stride, escapes, limit, isa);
        case 3:
            return palette_encode_units<3>(src, n, model, codes, stride, escapes, limit, isa);
        default:
            return palette_encode_units<4>(src, n, model, codes, stride, escapes, limit, isa);
    }
}

// Writes the stream of `n` units to `dst`. Returns its length, or 0 if it might not be shorter than
// `capacity` (a block of 64 bytes is kept free for escapes).
inline std::size_t palette_encode(const uint8_t* src, std::size_t n, const PaletteModel& model,
                                  uint8_t* dst, std::size_t capacity, Isa isa) {
    const uint32_t raw_mask = (1u << model.raw_bits) - 1;
    const RawBits raw{model.raw_bits, used_bits(src, n, raw_mask)};
    const std::size_t planes_nbytes = palette_planes_nbytes(model.code_bits, n);
    const std::size_t escapes_at = kPaletteHeaderNbytes + planes_nbytes + raw_nbytes(raw, n);
    if (escapes_at >= capacity) return 0;
    uint8_t* const codes = dst + kPaletteHeaderNbytes;
    uint8_t* const escapes = dst + escapes_at;
    const uint8_t* const end =
        palette_encode_codes(src, n, model, codes, escapes, dst + capacity, isa);
    if (end == nullptr) return 0;
    write_raw_bits(src, n, raw, codes + planes_nbytes, isa);
    std::memset(dst, 0, kPaletteHeaderNbytes);
    dst[0] = static_cast<uint8_t>(model.code_bits);
    dst[1] = model.has_escape;
    dst[2] = static_cast<uint8_t>(raw.n_bits);
    dst[3] = static_cast<uint8_t>(raw.mask);
    store(dst + 4, static_cast<uint32_t>(end - escapes));
    for (uint32_t c = 0; c < model.n_values; ++c)
        dst[8 + c] = static_cast<uint8_t>(model.values[c] >> model.raw_bits);
    const auto nbytes = static_cast<std::size_t>(end - dst);
    return nbytes < capacity ? nbytes : 0;
}

inline Status palette_open(const uint8_t* src, std::size_t nbytes, std::size_t n,
                           PaletteDecoder& out) {
    if (nbytes < kPaletteHeaderNbytes) return Status::kStreamLength;
    out.code_bits = src[0];
    out.has_escape = src[1] != 0;
    if (out.code_bits > kMaxCodeBits || src[1] > (out.code_bits > 0 ? 1 : 0))
        return Status::kBadField;
    RawBits raw;
    const Status status = parse_raw_bits(src[2], src[3], kMaxPaletteRawBits, raw);
    if (status != Status::kOk) return status;
    out.raw_bits = raw.n_bits;
    const std::size_t n_escapes = load<uint32_t>(src + 4);
    if (n_escapes > 0 && !out.has_escape) return Status::kEscapeCount;
    for (uint32_t c = (1u << out.code_bits) - (out.has_escape ? 1 : 0); c < 16; ++c)
        if (src[8 + c] != 0) return Status::kReserved;
    const std::size_t planes_nbytes = palette_planes_nbytes(out.code_bits, n);
    const std::size_t before_escapes = kPaletteHeaderNbytes + planes_nbytes + raw_nbytes(raw, n);
    if (nbytes != before_escapes + n_escapes) return Status::kStreamLength;
    out.planes = src + kPaletteHeaderNbytes;
    out.plane_stride = bit_plane_nbytes(n);
    out.raw = find_raw_planes(raw, out.planes + planes_nbytes, n);
    out.escapes = src + before_escapes;
    out.escapes_end = src + nbytes;
    if (!symbols_fit(src + 8, 16, raw) || !symbols_fit(out.escapes, n_escapes, raw))
        return Status::kBadField;
    for (uint32_t c = 0; c < 16; ++c)
        out.values[c] = static_cast<uint8_t>(src[8 + c] << raw.n_bits);
    return Status::kOk;
}

template <uint32_t kBits>
std::size_t palette_decode_blocks(PaletteDecoder& decoder, std::size_t first, std::size_t n_blocks,
                                  uint8_t* dst, Ahead& ahead, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        return palette_decode_blocks_avx512<kBits>(decoder, first, n_blocks, dst, ahead);
    if (isa >= Isa::kAvx2)
        return palette_decode_blocks_avx2<kBits>(decoder, first, n_blocks, dst, ahead);
#elif PACKHORSE_ARM
    if (isa >= Isa::kNeon)
        return palette_decode_blocks_neon<kBits>(decoder, first, n_blocks, dst, ahead);
#endif
    (void)ahead;
    (void)isa;
    return palette_decode_blocks_portable<kBits>(decoder, first, n_blocks, dst);
}

template <uint32_t kBits>
Status palette_decode_units(PaletteDecoder& decoder, std::size_t first, std::size_t n, uint8_t* dst,
                            Ahead& ahead, Isa isa) {
    const std::size_t n_blocks = n / 64;
    if (palette_decode_blocks<kBits>(decoder, first, n_blocks, dst, ahead, isa) < n_blocks)
        return Status::kEscapeCount;
    const std::size_t rest = n % 64;
    if (rest == 0) return Status::kOk;
    uint64_t planes[kBits];
    const uint64_t escaped =
        load_codes<kBits>(decoder, first + 64 * n_blocks, planes) & ((uint64_t{1} << rest) - 1);
    if (decoder.escapes_end - decoder.escapes < std::popcount(escaped)) return Status::kEscapeCount;
    uint8_t block[64];
    palette_values_portable<kBits>(planes, decoder.values, block);
    decoder.escapes = take_escapes(decoder.escapes, escaped, decoder.raw_bits, block);
    std::memcpy(dst + 64 * n_blocks, block, rest);
    return Status::kOk;
}

inline Status palette_decode_codes(PaletteDecoder& decoder, std::size_t first, std::size_t n,
                                   uint8_t* dst, Ahead& ahead, Isa isa) {
    switch (decoder.code_bits) {
        case 0:
            std::memset(dst, decoder.values[0], n);
            return Status::kOk;
        case 1:
            return palette_decode_units<1>(decoder, first, n, dst, ahead, isa);
        case 2:
            return palette_decode_units<2>(decoder, first, n, dst, ahead, isa);
        case 3:
            return palette_decode_units<3>(decoder, first, n, dst, ahead, isa);
        default:
            return palette_decode_units<4>(decoder, first, n, dst, ahead, isa);
    }
}

// Decodes the `n` units from `first` on. `first` is a multiple of 64, and so is `n` except at the
// end of the plane.
inline Status palette_decode(PaletteDecoder& decoder, std::size_t first, std::size_t n,
                             uint8_t* dst, Ahead& ahead, Isa isa) {
    const Status status = palette_decode_codes(decoder, first, n, dst, ahead, isa);
    if (status == Status::kOk) add_raw_bits(decoder.raw, first, n, dst, isa);
    return status;
}

inline Status palette_close(const PaletteDecoder& decoder) {
    return decoder.escapes == decoder.escapes_end ? Status::kOk : Status::kEscapeCount;
}

}  // namespace packhorse
