// Encoding a chunk (docs/format.md, section 5): splitting it into planes (scratch memory that stays
// in L2), choosing a mode for each from a sample, and writing the streams. Under split 0, units of
// more than one byte are only stored or constant. Chunks of zstd never get here: codecs/zstd.py
// codes them.
//
// The source is read once (chunk/intake.hpp). Bytes that are read before that only serve for
// choices that are valid for any bytes.
#pragma once

#include <algorithm>

#include "chunk/choose.hpp"
#include "chunk/chunk.hpp"
#include "chunk/intake.hpp"
#include "rans/encode.hpp"

namespace packhorse {

// One worker's memory. `classes`, `yielded` and `sorted` may be null if nothing is classed.
struct EncodeScratch {
    uint8_t* planes[kMaxPlanes];  // chunk units + kPlaneSlack each
    uint8_t* escapes;             // chunk units
    uint8_t* words;               // two bytes for each chunk unit + kPlaneSlack
    uint8_t* classes;             // chunk units
    uint8_t* yielded;             // chunk units: plane 0 less its prediction
    uint8_t* sorted[2];           // chunk units each: planes 0 and 1 in the order by class
    uint8_t* units;               // the chunk itself, if it is not split
    ClassStarts starts[2];
    RansEncodeMemory* tables;
    PlaneChoice choices[kMaxPlanes];
    const uint8_t* next_src = nullptr;  // units that this worker will probably encode next
    const uint8_t* after = nullptr;     // the same, once the tensor is done
    bool cold_output = false;   // whether the output goes to memory that is not in the cache
    bool others_stored = true;  // whether all planes but the first were stored in the last chunk
};

// The source of an rANS stream: a plane in the order of units, for its raw bits, and the same plane
// in the order of coding.
struct RansSource {
    const uint8_t* plane;
    const uint8_t* units;
    ClassStarts starts;  // a plain stream has one class
};

inline RansSource plain_source(const uint8_t* plane, std::size_t n) {
    return {plane, plane, {{0, n, n, n, n}}};
}

// Writes the fields before the states. Returns their end.
inline uint8_t* write_rans_header(const PlaneChoice& choice, const RawBits& raw, uint32_t lanes_log,
                                  std::size_t n_escapes, uint8_t* dst) {
    dst[0] = static_cast<uint8_t>(lanes_log);
    dst[1] = static_cast<uint8_t>(kProbBits);
    dst[2] = static_cast<uint8_t>(raw.n_bits);
    dst[3] = static_cast<uint8_t>(raw.mask);
    store(dst + 4, static_cast<uint32_t>(n_escapes));
    if (choice.mode == Mode::kRans) return write_model(choice.models[0], dst + kModelOffset);
    write_class_rule(choice.rule, dst);
    dst += kClassedModelsOffset;
    for (uint32_t c = 0; c < choice.rule.n_classes; ++c) dst = write_model(choice.models[c], dst);
    return dst;
}

inline std::size_t rans_header_nbytes(const PlaneChoice& choice) {
    if (choice.mode == Mode::kRans)
        return kModelOffset + model_nbytes(choice.models[0].n_in_range());
    std::size_t nbytes = kClassedModelsOffset;
    for (uint32_t c = 0; c < choice.rule.n_classes; ++c)
        nbytes += model_nbytes(choice.models[c].n_in_range());
    return nbytes;
}

// Writes an rANS stream, plain or classed, of at most `capacity` bytes. `carried` points at 2 *
// n_lanes bytes for the states to carry, or is null. Returns 0 if the stream does not fit.
inline std::size_t write_rans(const RansSource& source, const PlaneChoice& choice,
                              const uint8_t* carried, EncodeScratch& scratch, uint8_t* dst,
                              std::size_t capacity, Ahead& ahead, Isa isa) {
    const std::size_t n = source.starts.at[kMaxClasses];
    const uint32_t lanes_log = choice.lanes_log;
    const std::size_t n_lanes = std::size_t{1} << lanes_log;
    uint8_t* const words_end = scratch.words + 2 * n + kPlaneSlack;
    uint8_t* const escapes_end = scratch.escapes + n;
    RansEncoded encoded;
    encoded.words = words_end;
    encoded.escapes = escapes_end;
    for (std::size_t lane = 0; lane < n_lanes; ++lane)
        encoded.states[lane] =
            kStateLowerBound | (carried == nullptr ? 0u : load<uint16_t>(carried + 2 * lane));
    const uint32_t n_classes = choice.mode == Mode::kRans ? 1 : choice.rule.n_classes;
    for (uint32_t c = n_classes; c-- > 0;) {
        const std::size_t count = source.starts.count(c);
        fill_encode_tables(choice.models[c], count, lanes_log, isa, *scratch.tables);
        rans_encode(source.units + source.starts.at[c], count, choice.models[c], *scratch.tables,
                    lanes_log, encoded, ahead, isa);
    }
    const uint32_t raw_bits = choice.models[0].raw_bits;
    const uint32_t raw_mask = (1u << raw_bits) - 1;
    const RawBits raw{raw_bits, used_bits(source.plane, n, raw_mask)};
    const auto words_nbytes = static_cast<std::size_t>(words_end - encoded.words);
    const auto n_escapes = static_cast<std::size_t>(escapes_end - encoded.escapes);
    const std::size_t nbytes =
        rans_header_nbytes(choice) + 4 * n_lanes + raw_nbytes(raw, n) + n_escapes + words_nbytes;
    if (nbytes >= capacity) return 0;
    uint8_t* at = write_rans_header(choice, raw, lanes_log, n_escapes, dst);
    std::memcpy(at, encoded.states, 4 * n_lanes);
    at = write_raw_bits(source.plane, n, raw, at + 4 * n_lanes, isa);
    std::memcpy(at, encoded.escapes, n_escapes);
    std::memcpy(at + n_escapes, encoded.words, words_nbytes);
    return nbytes;
}

// Writes the stream of plane `p`, which is not stored. Returns 0 if it would not be smaller than
// the plane.
inline std::size_t write_stream(const uint8_t* plane, std::size_t n, uint32_t p,
                                const uint8_t* carried, EncodeScratch& scratch, uint8_t* dst,
                                Ahead& ahead, Isa isa) {
    const PlaneChoice& choice = scratch.choices[p];
    if (choice.mode == Mode::kConstant) {
        dst[0] = plane[0];
        return 1;
    }
    if (choice.mode == Mode::kPalette) return palette_encode(plane, n, choice.palette, dst, n, isa);
    if (choice.mode == Mode::kRans)
        return write_rans(plain_source(plane, n), choice, carried, scratch, dst, n, ahead, isa);
    const bool predicted = choice.rule.source == ClassSource::kPrediction;
    const RansSource source{predicted ? scratch.yielded : plane, scratch.sorted[p],
                            scratch.starts[p]};
    return write_rans(source, choice, carried, scratch, dst, n, ahead, isa);
}

// Marks a plane as stored because its stream does not pay. If it is plane 0, also marks every plane
// that it leads.
inline void drop_choice(uint32_t plane, EncodeScratch& scratch) {
    scratch.choices[plane].mode = Mode::kStored;
    if (plane == 0 && scratch.choices[1].mode == Mode::kClassedRans)
        scratch.choices[1].mode = Mode::kStored;
}

// Writes all streams as chosen. If a stream does not pay, changes its choice to stored and returns
// 0. A plane may already be in `dst`, at the place where it will be stored.
inline std::size_t write_streams(const uint8_t* const* planes, std::size_t n, const PlaneSpec& spec,
                                 EncodeScratch& scratch, uint8_t* dst, uint32_t* descriptors,
                                 Isa isa) {
    std::size_t n_rans = 0;
    uint32_t carrier = kMaxPlanes;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (is_rans(scratch.choices[p].mode)) ++n_rans;
        if (scratch.choices[p].mode == Mode::kStored) carrier = p;
    }
    const std::size_t carried_each = std::size_t{2} << choose_lanes_log(n);
    const std::size_t n_carried = n_rans * carried_each;
    const bool carries = n_carried > 0 && carrier < kMaxPlanes && n >= n_carried;
    std::size_t used = 0;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (scratch.choices[p].mode != Mode::kStored) continue;
        const std::size_t nbytes = n - (carries && p == carrier ? n_carried : 0);
        if (planes[p] != dst + used) std::memcpy(dst + used, planes[p], nbytes);
        descriptors[p] = make_descriptor(Mode::kStored, nbytes);
        used += nbytes;
    }
    const std::size_t stored_nbytes = used;
    // A copy in other memory: if a plane is in `dst` already, its end is where the next stream
    // goes.
    uint8_t end_of_carrier[kMaxPlanes * 2 * kMaxLanes];
    const uint8_t* carried = carries ? &end_of_carrier[0] : nullptr;
    if (carries) std::memcpy(end_of_carrier, planes[carrier] + n - n_carried, n_carried);
    // While rANS computes, fetches the next chunk's units and the memory of the output: the places
    // where this chunk's streams, and after them the next chunk's stored planes, will probably go.
    Ahead ahead;
    if (n_rans > 0 && scratch.next_src != nullptr) {
        ahead.read = reinterpret_cast<uintptr_t>(scratch.next_src);
        ahead.read_step = 128 * spec.unit_nbytes / n_rans;
    }
    if (n_rans > 0 && scratch.cold_output) {
        const std::size_t streams = n_rans * (spec.n_planes == 1 ? n - n / 4 : n / 3);
        ahead.write = reinterpret_cast<uintptr_t>(dst + used);
        ahead.write_step = 128 * (used + streams) / n / n_rans;
    }
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        PlaneChoice& choice = scratch.choices[p];
        if (choice.mode == Mode::kStored) continue;
        const std::size_t nbytes =
            write_stream(planes[p], n, p, carried, scratch, dst + used, ahead, isa);
        if (nbytes == 0) {
            if (carries) std::memcpy(dst + stored_nbytes, end_of_carrier, n_carried);
            drop_choice(p, scratch);
            return 0;
        }
        if (carries && is_rans(choice.mode)) carried += carried_each;
        descriptors[p] = make_descriptor(choice.mode, nbytes);
        used += nbytes;
    }
    return used;
}

// Split 0, units of more than one byte.
inline std::size_t encode_whole(const ChunkSource& source, std::size_t n, std::size_t item,
                                uint8_t* dst, uint32_t* descriptors, Isa isa) {
    source.copy_to(dst, n * item, isa);
    const bool constant = is_constant(dst, n, item);
    const std::size_t nbytes = constant ? item : n * item;
    descriptors[0] = make_descriptor(constant ? Mode::kConstant : Mode::kStored, nbytes);
    return nbytes;
}

// Encodes a chunk of units that all equal `unit`: their planes are constant.
inline std::size_t encode_constant(const uint8_t* unit, const PlaneSpec& spec,
                                   uint8_t* const* planes, uint8_t* dst, uint32_t* descriptors,
                                   Isa isa) {
    split_planes(unit, 1, spec, planes, isa);
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        dst[p] = planes[p][0];
        descriptors[p] = make_descriptor(Mode::kConstant, 1);
    }
    return spec.n_planes;
}

// Changes plane 0 to classed rANS by prediction if that is estimated to be shorter than `nbytes`.
inline void try_prediction(const uint8_t* plane, std::size_t n, std::size_t first,
                           const SideData& side, Level level, std::size_t nbytes,
                           EncodeScratch& scratch, Isa isa) {
    apply_prediction(side, first, n, plane, scratch.classes, scratch.yielded, isa);
    scratch.starts[0] = count_classes(scratch.classes, n, kCutsOfClasses, isa);
    sort_by_class(scratch.yielded, scratch.classes, n, kCutsOfClasses, scratch.starts[0],
                  scratch.sorted[0], isa);
    PlaneChoice candidate;
    candidate.mode = Mode::kClassedRans;
    candidate.rule = {ClassSource::kPrediction, kPredictionClasses, {}};
    const std::size_t estimate = choose_class_models(scratch.sorted[0], scratch.starts[0],
                                                     level_spec(level).sample_units, 0, candidate);
    if (estimate < nbytes) scratch.choices[0] = candidate;
}

// Changes plane 1 to classed rANS led by plane 0, whose stream yields `lead`, if that is estimated
// to be shorter than `nbytes`.
inline void try_lead(const uint8_t* lead, const uint8_t* plane, std::size_t n, Level level,
                     std::size_t nbytes, EncodeScratch& scratch, Isa isa) {
    const LevelSpec spec = level_spec(level);
    const std::size_t most = nbytes - (nbytes >> spec.lead_saving_log);
    JointHistogram joint;
    count_jointly(lead, plane, n, sample_log_for(n, spec.lead_sample_units), joint);
    PlaneChoice candidate;
    candidate.mode = Mode::kClassedRans;
    candidate.rule = {};
    const uint64_t cost = choose_thresholds(joint, candidate.rule);
    if (scale_cost(cost, joint.total, n) + kLedRawBits * n / 8 >= most) return;
    const ClassCuts cuts = class_cuts(candidate.rule);
    scratch.starts[1] = count_classes(lead, n, cuts, isa);
    sort_by_class(plane, lead, n, cuts, scratch.starts[1], scratch.sorted[1], isa);
    const std::size_t estimate = choose_class_models(
        scratch.sorted[1], scratch.starts[1], spec.lead_sample_units, kLedRawBits, candidate);
    if (estimate < most) scratch.choices[1] = candidate;
}

// Chooses the modes of all planes of a chunk that begins at unit `first` of the tensor.
inline void choose_modes(const uint8_t* const* planes, std::size_t n, std::size_t first,
                         const PlaneSpec& spec, const SideData& side, Level level,
                         EncodeScratch& scratch, Isa isa) {
    std::size_t nbytes[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p)
        nbytes[p] = choose_mode(planes[p], n, n, spec.n_planes, level, scratch.choices[p]);
    PlaneChoice& leading = scratch.choices[0];
    if (side.rows != nullptr && leading.mode != Mode::kConstant)
        try_prediction(planes[0], n, first, side, level, nbytes[0], scratch, isa);
    // Decoding by classes takes time, so below `max` it is used only where prediction has slowed
    // decoding already.
    if (spec.n_planes == 1 || (level != Level::kMax && leading.mode != Mode::kClassedRans)) return;
    if (is_rans(leading.mode) || leading.mode == Mode::kPalette)
        try_lead(leading.mode == Mode::kClassedRans ? scratch.yielded : planes[0], planes[1], n,
                 level, nbytes[1], scratch, isa);
}

// Whether a chunk that is not split will be stored as it is.
inline bool is_stored_whole(const uint8_t* src, std::size_t n, const PlaneSpec& spec, Level level) {
    if (spec.splits()) return false;
    if (item_nbytes(spec) > 1) return !is_constant(src, n, spec.unit_nbytes);
    PlaneChoice choice;
    return choose_mode(src, n, n, spec.n_planes, level, choice) >= n;
}

// Moves planes that were split into the output to their scratch memory.
inline void set_aside(uint8_t** planes, std::size_t n, const PlaneSpec& spec,
                      const EncodeScratch& scratch) {
    for (uint32_t p = 1; p < spec.n_planes; ++p) {
        if (planes[p] == scratch.planes[p]) continue;
        std::memcpy(scratch.planes[p], planes[p], n);
        planes[p] = scratch.planes[p];
    }
}

// Encodes units that are split. If mantissas are noise, all planes but the first are stored, side
// by side at the beginning of the chunk. If they were stored in the previous chunk, the planes of
// this chunk are split directly into that place.
inline std::size_t encode_split(const ChunkSource& source, std::size_t n, std::size_t first,
                                const PlaneSpec& spec, const SideData& side, Level level,
                                EncodeScratch& scratch, uint8_t* dst, uint32_t* descriptors,
                                Isa isa) {
    uint8_t* planes[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p)
        planes[p] = p > 0 && scratch.others_stored ? dst + (p - 1) * n : scratch.planes[p];
    source.split_to(n, spec, planes, isa);
    choose_modes(planes, n, first, spec, side, level, scratch, isa);
    scratch.others_stored = scratch.choices[0].mode != Mode::kStored;
    for (uint32_t p = 1; p < spec.n_planes; ++p)
        scratch.others_stored &= scratch.choices[p].mode == Mode::kStored;
    if (!scratch.others_stored) set_aside(planes, n, spec, scratch);
    std::size_t used = write_streams(planes, n, spec, scratch, dst, descriptors, isa);
    while (used == 0) {
        set_aside(planes, n, spec, scratch);
        used = write_streams(planes, n, spec, scratch, dst, descriptors, isa);
    }
    return used;
}

// Encodes units of one byte that are not split.
inline std::size_t encode_bytes(const ChunkSource& source, std::size_t n, const PlaneSpec& spec,
                                Level level, EncodeScratch& scratch, uint8_t* dst,
                                uint32_t* descriptors, Isa isa) {
    const uint8_t* planes[kMaxPlanes] = {source.units};
    if (source.leaves != nullptr) {
        source.copy_to(scratch.units, n, isa);
        planes[0] = scratch.units;
    }
    choose_modes(planes, n, 0, spec, {}, level, scratch, isa);
    std::size_t used = 0;
    while (used == 0) used = write_streams(planes, n, spec, scratch, dst, descriptors, isa);
    return used;
}

// Writes `n` bytes, each equal to the one `unit` bytes before it.
inline void repeat_unit(const uint8_t* from, std::size_t unit, uint8_t* dst, std::size_t n) {
    for (std::size_t at = 0; at < n; at += unit) std::memcpy(dst + at, from, unit);
}

// Encodes units that are split and seem to be equal: comparing them is faster than splitting them
// and checking each plane. As soon as one differs, they are copied to the output, which has room
// for them.
inline std::size_t encode_likely_constant(const ChunkSource& source, std::size_t n,
                                          std::size_t first, const PlaneSpec& spec,
                                          const SideData& side, Level level, EncodeScratch& scratch,
                                          uint8_t* dst, uint32_t* descriptors, Isa isa) {
    const std::size_t unit = spec.unit_nbytes;
    uint8_t value[kMaxPlanes];
    bool constant = true;
    source.visit(0, n * unit, isa, [&](const uint8_t* piece, std::size_t at, std::size_t nbytes) {
        if (at == 0) std::memcpy(value, piece, unit);
        if (constant && std::memcmp(piece, value, unit) == 0 &&
            is_constant(piece, nbytes / unit, unit))
            return;
        if (constant) repeat_unit(value, unit, dst, at);
        constant = false;
        std::memcpy(dst + at, piece, nbytes);
    });
    if (constant) {
        for (uint32_t p = 0; p < spec.n_planes; ++p) scratch.choices[p].look_nbytes = 0;
        return encode_constant(value, spec, scratch.planes, dst, descriptors, isa);
    }
    scratch.others_stored =
        false;  // planes must not be split into the memory that holds their units
    return encode_split({dst, nullptr}, n, first, spec, side, level, scratch, dst, descriptors,
                        isa);
}

// This number of equal units suggests that a chunk is constant.
constexpr std::size_t kConstantGlance = 1024;

// Encodes `n` >= 1 units, which begin at unit `first` of the tensor. `dst` has room for round_up(n
// * unit_nbytes, 64) bytes. Returns the padded length of the chunk.
inline std::size_t encode_chunk(const ChunkSource& source, std::size_t n, std::size_t first,
                                const PlaneSpec& spec, const SideData& side, Level level,
                                EncodeScratch& scratch, uint8_t* dst, uint32_t* descriptors,
                                Isa isa) {
    std::size_t used = 0;
    if (item_nbytes(spec) > 1)
        used = encode_whole(source, n, spec.unit_nbytes, dst, descriptors, isa);
    else if (spec.splits() &&
             is_constant(source.units, std::min(n, kConstantGlance), spec.unit_nbytes))
        used = encode_likely_constant(source, n, first, spec, side, level, scratch, dst,
                                      descriptors, isa);
    else if (spec.splits())
        used = encode_split(source, n, first, spec, side, level, scratch, dst, descriptors, isa);
    else
        used = encode_bytes(source, n, spec, level, scratch, dst, descriptors, isa);
    const std::size_t padded = round_up(used, kFrameAlignment);
    std::memset(dst + used, 0, padded - used);
    return padded;
}

}  // namespace packhorse
