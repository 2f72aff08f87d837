// One chunk: units in, streams out, and back (docs/format.md, section 5).
//
// Encoding splits the chunk into planes (scratch that stays in L2), picks a mode for each from a
// sample, and writes the streams. Decoding goes through the chunk in blocks small enough for L1:
// each plane yields its next bytes, the block is merged, and so on; stored planes are merged
// straight from the source. Only the end of the chunk waits, because the last bytes of the carrier
// come out of the lanes' final states. Split 0 with units of more than a byte knows stored and
// constant alone; zstd chunks never get here (codecs/zstd.py has them).
#pragma once

#include "histogram.hpp"
#include "palette.hpp"
#include "planes.hpp"
#include "rans_decode.hpp"
#include "rans_encode.hpp"

namespace packhorse {

enum class Level : int { kFast = 1, kDefault = 2, kMax = 3 };

constexpr std::size_t kBlockUnits = 4096;
constexpr std::size_t kMaxCarried = 2 * kMaxLanes * kMaxPlanes;
constexpr std::size_t kPlaneSlack = 64;

// The planes that a chunk of this unit and split has.
inline PlaneSpec plane_spec(uint32_t unit_nbytes, Split split) {
    const uint32_t n_planes = split == Split::kWhole ? 1 : unit_nbytes;
    return {unit_nbytes, n_planes, exponent_shift(unit_nbytes, split)};
}

// Bytes of one item of a plane: 1, or the whole unit under split 0.
inline std::size_t item_nbytes(const PlaneSpec& spec) {
    return spec.n_planes == 1 ? spec.unit_nbytes : 1;
}

constexpr uint32_t make_descriptor(Mode mode, std::size_t nbytes) {
    return static_cast<uint32_t>(mode) << kStreamNbytesBits | static_cast<uint32_t>(nbytes);
}
constexpr Mode descriptor_mode(uint32_t descriptor) {
    return static_cast<Mode>(descriptor >> kStreamNbytesBits);
}
constexpr std::size_t descriptor_nbytes(uint32_t descriptor) {
    return descriptor & kStreamNbytesMask;
}

struct LevelSpec {
    bool entropy;             // rANS allowed
    uint32_t sample_units;    // units looked at for a model
    uint32_t min_saving_log;  // a plane is coded if that saves more than 1 in 2^this
};

constexpr LevelSpec level_spec(Level level) {
    switch (level) {
        case Level::kFast:
            return {false, 4096, 5};
        case Level::kDefault:
            return {true, 16384, 5};
        default:
            return {true, ~0u, 10};
    }
}

// More lanes decode faster; fewer cost less in a small plane (about a byte each).
constexpr uint32_t choose_lanes_log(std::size_t n) {
    return n >= 8192 ? 7 : n >= 1024 ? 4 : 2;
}

struct PlaneChoice {
    Mode mode;
    RansModel rans;
    PaletteModel palette;
};

struct EncodeScratch {
    uint8_t* planes[kMaxPlanes];  // chunk units + kPlaneSlack each
    uint8_t* escapes;             // chunk units
    uint8_t* words;               // two bytes a chunk unit + kPlaneSlack
    RansEncodeTables* tables;
    PlaneChoice choices[kMaxPlanes];
    const uint8_t* next_src = nullptr;  // units that this worker will probably encode next
    bool cold_output = false;  // whether the output goes to memory that is not in the cache
};

inline uint32_t sample_log_for(std::size_t n, uint32_t sample_units) {
    uint32_t log = 0;
    while (log < 5 && (n >> (log + 1)) >= sample_units) ++log;
    return log;
}

// Cost of the histogram's symbols at the plane's entropy, 2^-16 bits. A sample shows too few values
// as too often; the Miller-Madow term, (values - 1) / (2 ln 2) bits, makes up for it.
inline uint64_t entropy_cost(const Histogram& histogram) {
    constexpr uint64_t kBiasCost = 47274;
    uint64_t cost = 0;
    for (uint32_t count : histogram.counts)
        if (count > 0) {
            const uint64_t freq = uint64_t{count} * kProbSum / histogram.total;
            cost += uint64_t{count} * kSymbolCost[freq == 0 ? 1 : freq] + kBiasCost;
        }
    return cost - std::min(cost, kBiasCost);
}

// Scales a cost of the sample (2^-16 bits) to bytes of the plane.
inline std::size_t scale_cost(uint64_t cost, uint32_t total, std::size_t n) {
    return static_cast<std::size_t>((cost >> kCostBits) * n / total / 8);
}

inline bool is_constant(const uint8_t* src, std::size_t n_items, std::size_t item) {
    return std::memcmp(src, src + item, (n_items - 1) * item) == 0;
}

inline std::size_t palette_estimate(const Histogram& histogram, std::size_t n,
                                    PaletteModel& model) {
    const uint64_t bits = choose_palette(histogram, model);
    return kPaletteHeaderNbytes + 8 + bits * n / histogram.total / 8;
}

// Estimated bytes of an rANS stream, or `limit` if it cannot be shorter than that.
inline std::size_t rans_estimate(const Histogram& histogram, std::size_t n, std::size_t limit,
                                 RansModel& model) {
    // What no model can beat: the entropy, and a header for the values that occur.
    const auto n_seen = static_cast<std::size_t>(std::count_if(
        histogram.counts, histogram.counts + 256, [](uint32_t count) { return count > 0; }));
    const std::size_t least = kFreqsOffset +
                              packed_freqs_nbytes(std::min<std::size_t>(n_seen, kBuckets - 1)) +
                              scale_cost(entropy_cost(histogram), histogram.total, n);
    if (least >= limit) return limit;
    const uint64_t cost = choose_model(histogram, model);
    if (model.n_codes < 2) return limit;
    const std::size_t n_lanes = std::size_t{1} << choose_lanes_log(n);
    return kFreqsOffset + packed_freqs_nbytes(model.n_symbols) + 3 * n_lanes +
           scale_cost(cost, histogram.total, n);
}

// Chooses a mode for a plane of `n` units of which `n_there` are at hand: all of them, or a sample.
// Returns the estimated bytes; `n` if the best is to store it.
inline std::size_t choose_mode(const uint8_t* plane, std::size_t n_there, std::size_t n,
                               Level level, PlaneChoice& choice) {
    choice.mode = Mode::kConstant;
    if (is_constant(plane, n_there, 1)) return 1;
    choice.mode = Mode::kStored;
    const LevelSpec spec = level_spec(level);
    const std::size_t worth = n - (n >> spec.min_saving_log);
    Histogram histogram;
    // Mantissas are most of the data and do not compress: a small sample is enough to see that.
    const uint32_t glance = spec.sample_units < 4096 ? spec.sample_units : 4096;
    if (level != Level::kMax) {
        count_bytes(plane, n_there, sample_log_for(n_there, glance), histogram);
        if (scale_cost(entropy_cost(histogram), histogram.total, n) >= worth) return n;
    }
    if (level == Level::kMax || spec.sample_units > glance)
        count_bytes(plane, n_there, sample_log_for(n_there, spec.sample_units), histogram);
    histogram.sampled |= n_there < n;
    std::size_t best = worth;
    const std::size_t palette_nbytes = palette_estimate(histogram, n, choice.palette);
    if (palette_nbytes < best) {
        best = palette_nbytes;
        choice.mode = Mode::kPalette;
    }
    if (spec.entropy) {
        // A palette decodes several times faster: prefer it at about the same size.
        const std::size_t margin = choice.mode == Mode::kPalette ? best / 64 : 0;
        const std::size_t rans_nbytes = rans_estimate(histogram, n, best, choice.rans);
        if (rans_nbytes + margin < best) {
            best = rans_nbytes;
            choice.mode = Mode::kRans;
        }
    }
    return choice.mode == Mode::kStored ? n : best;
}

// Writes an rANS stream of at most `capacity` bytes; `carried` are 2 * n_lanes bytes to hide in the
// states, or null. 0 if it does not fit.
inline std::size_t write_rans(const uint8_t* plane, std::size_t n, const RansModel& model,
                              const uint8_t* carried, EncodeScratch& scratch, uint8_t* dst,
                              std::size_t capacity, Ahead& ahead, Isa isa) {
    const uint32_t lanes_log = choose_lanes_log(n);
    const std::size_t n_lanes = std::size_t{1} << lanes_log;
    fill_encode_tables(model, *scratch.tables);
    uint8_t* const words_end = scratch.words + 2 * n + kPlaneSlack;
    uint8_t* const escapes_end = scratch.escapes + n;
    RansEncoded encoded;
    encoded.words = words_end;
    encoded.escapes = escapes_end;
    for (std::size_t lane = 0; lane < n_lanes; ++lane)
        encoded.states[lane] =
            kStateLowerBound | (carried == nullptr ? 0u : load<uint16_t>(carried + 2 * lane));
    rans_encode(plane, n, model, *scratch.tables, lanes_log, encoded, ahead, isa);
    const auto words_nbytes = static_cast<std::size_t>(words_end - encoded.words);
    const auto n_escapes = static_cast<std::size_t>(escapes_end - encoded.escapes);
    const std::size_t head = kFreqsOffset + packed_freqs_nbytes(model.n_symbols) + 4 * n_lanes;
    const std::size_t nbytes = head + round_up(n_escapes, 2) + words_nbytes;
    if (nbytes >= capacity) return 0;
    dst[0] = static_cast<uint8_t>(lanes_log);
    dst[1] = static_cast<uint8_t>(kProbBits);
    store(dst + 2, uint16_t{0});
    store(dst + 4, static_cast<uint32_t>(n_escapes));
    uint8_t* at = write_model(model, dst + kSymbolMapOffset);
    std::memcpy(at, encoded.states, 4 * n_lanes);
    at += 4 * n_lanes;
    std::memcpy(at, encoded.escapes, n_escapes);
    at += n_escapes;
    if (n_escapes % 2 == 1) *at++ = 0;
    std::memcpy(at, encoded.words, words_nbytes);
    return nbytes;
}

// One stream that is not stored, or 0 if it would not be smaller than the plane.
inline std::size_t write_stream(const uint8_t* plane, std::size_t n, const PlaneChoice& choice,
                                const uint8_t* carried, EncodeScratch& scratch, uint8_t* dst,
                                Ahead& ahead, Isa isa) {
    if (choice.mode == Mode::kConstant) {
        dst[0] = plane[0];
        return 1;
    }
    if (choice.mode == Mode::kPalette) return palette_encode(plane, n, choice.palette, dst, n, isa);
    return write_rans(plane, n, choice.rans, carried, scratch, dst, n, ahead, isa);
}

// Writes all streams for the choices made; on a stream that does not pay, turns its choice to
// stored and returns 0.
inline std::size_t write_streams(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                                 EncodeScratch& scratch, uint8_t* dst, uint32_t* descriptors,
                                 Isa isa) {
    std::size_t n_rans = 0;
    uint32_t carrier = kMaxPlanes;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (scratch.choices[p].mode == Mode::kRans) ++n_rans;
        if (scratch.choices[p].mode == Mode::kStored) carrier = p;
    }
    const std::size_t carried_each = std::size_t{2} << choose_lanes_log(n);
    const std::size_t n_carried = n_rans * carried_each;
    const bool carries = n_carried > 0 && carrier < kMaxPlanes && n >= n_carried;
    std::size_t used = 0;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (scratch.choices[p].mode != Mode::kStored) continue;
        const std::size_t nbytes = n - (carries && p == carrier ? n_carried : 0);
        std::memcpy(dst + used, planes[p], nbytes);
        descriptors[p] = make_descriptor(Mode::kStored, nbytes);
        used += nbytes;
    }
    const uint8_t* carried = carries ? planes[carrier] + n - n_carried : nullptr;
    // While rANS computes, fetch the next chunk's units and the place where its stored planes will
    // probably go: past a third of this plane.
    Ahead ahead;
    if (n_rans > 0 && scratch.next_src != nullptr) {
        ahead.read = reinterpret_cast<uintptr_t>(scratch.next_src);
        ahead.read_step = 128 * spec.unit_nbytes / n_rans;
    }
    if (n_rans > 0 && scratch.cold_output) {
        ahead.write = reinterpret_cast<uintptr_t>(dst + used + n_rans * n / 3);
        ahead.write_step = 128 * used / n / n_rans;
    }
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        PlaneChoice& choice = scratch.choices[p];
        if (choice.mode == Mode::kStored) continue;
        const std::size_t nbytes =
            write_stream(planes[p], n, choice, carried, scratch, dst + used, ahead, isa);
        if (nbytes == 0) {
            choice.mode = Mode::kStored;
            return 0;
        }
        if (carries && choice.mode == Mode::kRans) carried += carried_each;
        descriptors[p] = make_descriptor(choice.mode, nbytes);
        used += nbytes;
    }
    return used;
}

// Split 0, units of more than one byte.
inline std::size_t encode_whole(const uint8_t* src, std::size_t n, std::size_t item, uint8_t* dst,
                                uint32_t* descriptors) {
    const bool constant = is_constant(src, n, item);
    const std::size_t nbytes = constant ? item : n * item;
    std::memcpy(dst, src, nbytes);
    descriptors[0] = make_descriptor(constant ? Mode::kConstant : Mode::kStored, nbytes);
    return nbytes;
}

// Encodes `n` >= 1 units. `dst` has room for round_up(n * unit_nbytes, 64) bytes; returns the
// padded length of the chunk.
inline std::size_t encode_chunk(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                                Level level, EncodeScratch& scratch, uint8_t* dst,
                                uint32_t* descriptors, Isa isa) {
    std::size_t used = 0;
    if (item_nbytes(spec) > 1) {
        used = encode_whole(src, n, spec.unit_nbytes, dst, descriptors);
    } else {
        const uint8_t* planes[kMaxPlanes] = {src};
        if (spec.n_planes > 1) {
            split_planes(src, n, spec, scratch.planes, isa);
            for (uint32_t p = 0; p < spec.n_planes; ++p) planes[p] = scratch.planes[p];
        }
        for (uint32_t p = 0; p < spec.n_planes; ++p)
            choose_mode(planes[p], n, n, level, scratch.choices[p]);
        while (used == 0) used = write_streams(planes, n, spec, scratch, dst, descriptors, isa);
    }
    const std::size_t padded = round_up(used, kFrameAlignment);
    std::memset(dst + used, 0, padded - used);
    return padded;
}

struct alignas(64) PlaneDecoder {
    RansDecoder rans;
    PaletteDecoder palette;
    uint8_t buffer[kBlockUnits + kMaxCarried + kPlaneSlack];
    Mode mode;
    const uint8_t* stored;  // mode stored: the stream
    std::size_t nbytes;     // length of the stream
};

struct DecodeScratch {
    PlaneDecoder* planes;                   // one for each plane
    const uint8_t* next_encoded = nullptr;  // chunk that this worker will probably decode next
};

inline Status open_plane(const uint8_t* stream, std::size_t n, PlaneDecoder& plane, Isa isa) {
    switch (plane.mode) {
        case Mode::kStored:
            plane.stored = stream;
            return Status::kOk;
        case Mode::kConstant:
            if (plane.nbytes != 1) return Status::kStreamLength;
            std::memset(plane.buffer, stream[0], sizeof plane.buffer);
            return Status::kOk;
        case Mode::kPalette:
            return palette_open(stream, plane.nbytes, n, plane.palette);
        case Mode::kRans:
            return rans_open(stream, plane.nbytes, isa, plane.rans);
        default:
            return Status::kBadField;
    }
}

// Finds the streams in the chunk and opens them; sets the carrier (kMaxPlanes for none) and the
// bytes carried.
inline Status open_planes(const uint8_t* src, const uint32_t* descriptors, std::size_t n,
                          const PlaneSpec& spec, PlaneDecoder* planes, uint32_t& carrier,
                          std::size_t& n_carried, Isa isa) {
    carrier = kMaxPlanes;
    std::size_t at = 0;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        planes[p].mode = descriptor_mode(descriptors[p]);
        planes[p].nbytes = descriptor_nbytes(descriptors[p]);
        if (planes[p].mode != Mode::kStored) continue;
        carrier = p;
        planes[p].stored = src + at;
        at += planes[p].nbytes;
    }
    n_carried = 0;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (planes[p].mode == Mode::kStored) continue;
        const Status status = open_plane(src + at, n, planes[p], isa);
        if (status != Status::kOk) return status;
        if (planes[p].mode == Mode::kRans) n_carried += std::size_t{2} << planes[p].rans.lanes_log;
        at += planes[p].nbytes;
    }
    for (uint32_t p = 0; p < spec.n_planes; ++p)
        if (planes[p].mode == Mode::kStored && p != carrier && planes[p].nbytes != n)
            return Status::kStreamLength;
    if (carrier == kMaxPlanes || planes[carrier].nbytes == n) {
        n_carried = 0;
        return Status::kOk;
    }
    const bool fits = n_carried > 0 && n >= n_carried && planes[carrier].nbytes == n - n_carried;
    return fits ? Status::kOk : Status::kStreamLength;
}

// Units [first, first + n) of a plane, decoded into its buffer or, if it alone makes the units,
// into `direct`.
inline Status next_units(PlaneDecoder& plane, std::size_t first, std::size_t n, uint8_t* direct,
                         const uint8_t*& out, Ahead& ahead, Isa isa) {
    uint8_t* const dst = direct != nullptr ? direct : plane.buffer;
    out = dst;
    switch (plane.mode) {
        case Mode::kStored:
            out = plane.stored + first;
            if (direct != nullptr) std::memcpy(direct, out, n);
            return Status::kOk;
        case Mode::kConstant:
            if (direct != nullptr) std::memset(direct, plane.buffer[0], n);
            return Status::kOk;
        case Mode::kPalette:
            return palette_decode(plane.palette, first, n, dst, ahead, isa);
        default:
            return rans_decode(plane.rans, n, dst, ahead, isa);
    }
}

inline Status next_block(PlaneDecoder* planes, std::size_t first, std::size_t n,
                         const PlaneSpec& spec, const uint8_t** sources, uint8_t* dst, Ahead& ahead,
                         Isa isa) {
    uint8_t* const direct = spec.n_planes == 1 ? dst : nullptr;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        const Status status = next_units(planes[p], first, n, direct, sources[p], ahead, isa);
        if (status != Status::kOk) return status;
    }
    return Status::kOk;
}

// Closes the streams; the carried bytes go to `carried`, in plane order.
inline Status close_planes(PlaneDecoder* planes, const PlaneSpec& spec, bool carries,
                           uint8_t* carried) {
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        Status status = Status::kOk;
        if (planes[p].mode == Mode::kPalette) status = palette_close(planes[p].palette);
        if (planes[p].mode == Mode::kRans) {
            status = rans_close(planes[p].rans, carries, carried);
            carried += std::size_t{2} << planes[p].rans.lanes_log;
        }
        if (status != Status::kOk) return status;
    }
    return Status::kOk;
}

// While the computing planes of this chunk decode, fetch the next chunk's bytes, and the memory
// that merging will write soon.
inline Ahead decode_ahead(const uint8_t* next_encoded, const PlaneDecoder* planes, std::size_t n,
                          const PlaneSpec& spec, uint8_t* dst) {
    std::size_t n_computing = 0, nbytes = 0;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (planes[p].mode == Mode::kRans || planes[p].mode == Mode::kPalette) ++n_computing;
        nbytes += planes[p].nbytes;
    }
    Ahead ahead;
    if (n_computing == 0) return ahead;
    if (next_encoded != nullptr) {
        ahead.read = reinterpret_cast<uintptr_t>(next_encoded);
        ahead.read_step = 128 * nbytes / n / n_computing;
    }
    ahead.write = reinterpret_cast<uintptr_t>(dst + 2 * kBlockUnits * spec.unit_nbytes);
    ahead.write_step = 128 * spec.unit_nbytes / n_computing;
    return ahead;
}

inline Status decode_planes(const uint8_t* src, const uint32_t* descriptors, std::size_t n,
                            const PlaneSpec& spec, DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    PlaneDecoder* const planes = scratch.planes;
    uint32_t carrier = kMaxPlanes;
    std::size_t n_carried = 0;
    Status status = open_planes(src, descriptors, n, spec, planes, carrier, n_carried, isa);
    if (status != Status::kOk) return status;
    const uint8_t* sources[kMaxPlanes];
    const std::size_t n_early = (n - n_carried) / kBlockUnits * kBlockUnits;
    Ahead ahead = decode_ahead(scratch.next_encoded, planes, n, spec, dst);
    for (std::size_t at = 0; at < n_early && status == Status::kOk; at += kBlockUnits) {
        status = next_block(planes, at, kBlockUnits, spec, sources, dst + at * spec.unit_nbytes,
                            ahead, isa);
        if (status == Status::kOk && spec.n_planes > 1)
            merge_planes(sources, kBlockUnits, spec, dst + at * spec.unit_nbytes, isa);
    }
    if (status != Status::kOk) return status;
    const std::size_t rest = n - n_early;
    if (rest > 0)
        status = next_block(planes, n_early, rest, spec, sources, dst + n_early * spec.unit_nbytes,
                            ahead, isa);
    if (status != Status::kOk) return status;
    uint8_t carried[kMaxCarried];
    status = close_planes(planes, spec, n_carried > 0, carried);
    if (status != Status::kOk || rest == 0 || spec.n_planes == 1) return status;
    if (n_carried > 0) {
        PlaneDecoder& plane = planes[carrier];
        std::memcpy(plane.buffer, plane.stored + n_early, rest - n_carried);
        std::memcpy(plane.buffer + rest - n_carried, carried, n_carried);
        sources[carrier] = plane.buffer;
    }
    merge_planes(sources, rest, spec, dst + n_early * spec.unit_nbytes, isa);
    return Status::kOk;
}

inline Status decode_whole(const uint8_t* src, uint32_t descriptor, std::size_t n, std::size_t item,
                           uint8_t* dst) {
    const Mode mode = descriptor_mode(descriptor);
    const std::size_t nbytes = descriptor_nbytes(descriptor);
    if (mode == Mode::kStored && nbytes == n * item) {
        std::memcpy(dst, src, nbytes);
        return Status::kOk;
    }
    if (mode != Mode::kConstant || nbytes != item) return Status::kStreamLength;
    for (std::size_t i = 0; i < n; ++i) std::memcpy(dst + i * item, src, item);
    return Status::kOk;
}

// Decodes a chunk of `n` >= 1 units. `src` holds the sum of the descriptors' lengths (the caller
// has checked); writes n * unit_nbytes bytes.
inline Status decode_chunk(const uint8_t* src, const uint32_t* descriptors, std::size_t n,
                           const PlaneSpec& spec, DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    if (item_nbytes(spec) > 1) return decode_whole(src, descriptors[0], n, spec.unit_nbytes, dst);
    return decode_planes(src, descriptors, n, spec, scratch, dst, isa);
}

}  // namespace packhorse
