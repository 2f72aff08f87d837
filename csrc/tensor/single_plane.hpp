// One plane as a stream of its own, for benchmarks, tests and fuzz targets.
#pragma once

#include "tensor/tensor.hpp"

namespace packhorse {

// Encodes one plane of 1 to 2 Mi units in the given mode (palette or rANS), with nothing carried.
// `dst` has room for `n` bytes. Returns the length of the stream, or 0 if it would not be smaller
// than the plane.
inline std::size_t encode_single_plane(const uint8_t* src, std::size_t n, Mode mode, uint8_t* dst,
                                       Isa isa) {
    EncodeWorker worker(Geometry(1, 0, kMaxChunkLog, n), false, false, false);
    uint8_t* const plane = worker.scratch.units;
    std::memcpy(plane, src, n);
    seal(plane);
    Histogram histogram;
    count_bytes(plane, n, 0, histogram);
    SymbolCounts symbols;
    list_symbols(histogram, symbols);
    PlaneChoice& choice = worker.scratch.choices[0];
    choice.mode = mode;
    if (mode == Mode::kPalette)
        choose_palette(
            symbols, level_spec(Level::kFast).palette_raw_bits,
            [&] { return bits_in_use(symbols); }, choice.palette);
    else if (choose_model(symbols, n, choice.models[0]) == ~std::size_t{0})
        return 0;
    choice.lanes_log = choose_lanes_log(n);
    Ahead nothing;
    return write_stream(plane, n, 0, nullptr, worker.scratch, dst, nothing, isa);
}

// Decodes a stream below 16 MiB to a plane of 1 to 2 Mi units.
inline Status decode_single_plane(const uint8_t* stream, std::size_t nbytes, Mode mode,
                                  uint8_t* dst, std::size_t n, Isa isa) {
    const auto plane = std::make_unique<PlaneDecoder>();
    DecodeScratch scratch{plane.get(), nullptr, nullptr};
    const uint32_t descriptor = make_descriptor(mode, nbytes);
    return decode_chunk(stream, &descriptor, n, 0, plane_spec(1, Split::kWhole), {}, scratch, dst,
                        isa);
}

}  // namespace packhorse
