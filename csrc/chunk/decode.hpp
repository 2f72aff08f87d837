// Decoding a chunk (docs/format.md, section 5), in blocks that are small enough for L1. Each plane
// yields its next bytes, then the block is merged. Stored planes are merged straight from the
// source. Only the end of the chunk has to wait, because the last bytes of the carrier come from
// the lanes' last states. A chunk with classed planes is decoded plane by plane instead, because
// their units come out of order.
#pragma once

#include <algorithm>

#include "chunk/chunk.hpp"
#include "planes/classed.hpp"
#include "planes/palette.hpp"
#include "rans/decode.hpp"

namespace packhorse {

constexpr std::size_t kBlockUnits = 4096;
constexpr std::size_t kMaxCarried = 2 * kMaxLanes * kMaxPlanes;

struct alignas(64) PlaneDecoder {
    RansDecoder rans;
    PaletteDecoder palette;
    ClassRule rule;
    RansModel models[kMaxClasses];  // of a classed stream
    uint8_t buffer[kBlockUnits + kMaxCarried + kPlaneSlack];
    Mode mode;
    const uint8_t* stored;  // mode stored: the stream
    std::size_t nbytes;     // length of the stream
};

struct DecodeScratch {
    PlaneDecoder* planes;                   // one for each plane
    uint8_t* whole;                         // classed_scratch_nbytes(), if any chunk is classed
    const uint8_t* next_encoded = nullptr;  // chunk that this worker will probably decode next
    bool past_cache = false;                // whether blocks may be written past the cache
};

constexpr std::size_t classed_row_nbytes(std::size_t n) {
    return round_up(n, 64) + kClassSlack;
}

// Bytes of memory for a chunk with classed planes: plane 0, and each other plane in the order by
// class. While plane 0 itself is in that order, it uses the memory of plane 1.
constexpr std::size_t classed_scratch_nbytes(std::size_t n, uint32_t n_planes) {
    return std::max(n_planes, 2u) * classed_row_nbytes(n);
}

inline bool is_classed(const uint32_t* descriptors, uint32_t n_planes) {
    for (uint32_t p = 0; p < n_planes; ++p)
        if (descriptor_mode(descriptors[p]) == Mode::kClassedRans) return true;
    return false;
}

// Parses and checks the classed stream of a plane with `n` units.
inline Status classed_open(const uint8_t* src, std::size_t n, PlaneDecoder& plane) {
    RansHeader header;
    Status status = read_rans_header(src, plane.nbytes, header, plane.rans);
    if (status == Status::kOk) status = read_class_rule(src, plane.nbytes, plane.rule);
    if (status != Status::kOk) return status;
    std::size_t at = kClassedModelsOffset;
    bool has_escape = false;
    for (uint32_t c = 0; c < plane.rule.n_classes; ++c) {
        std::size_t used = 0;
        status = read_model(src + at, plane.nbytes - at, header.raw.n_bits, plane.models[c], used);
        if (status != Status::kOk) return status;
        has_escape |= plane.models[c].has_escape();
        at += used;
    }
    if (header.n_escapes > 0 && !has_escape) return Status::kEscapeCount;
    return read_rans_body(src + at, plane.nbytes - at, n, header, plane.rans);
}

// Whether a chunk is one plane that its decoder rotates back itself.
inline bool is_turned(const PlaneDecoder* planes, const PlaneSpec& spec) {
    return spec.n_planes == 1 && planes[0].mode == Mode::kRans;
}

// `turn` is the number of bits by which a plane is rotated to the right if a decoder can do that.
inline Status open_plane(const uint8_t* stream, std::size_t n, uint32_t turn, PlaneDecoder& plane,
                         Isa isa) {
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
            return rans_open(stream, plane.nbytes, n, turn, isa, plane.rans);
        case Mode::kClassedRans:
            return classed_open(stream, n, plane);
        default:
            return Status::kBadField;
    }
}

// Finds the streams in the chunk and opens them. Sets the carrier (kMaxPlanes if there is none) and
// the number of carried bytes.
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
        const uint32_t turn = spec.n_planes == 1 ? spec.rotation : 0;
        const Status status = open_plane(src + at, n, turn, planes[p], isa);
        if (status != Status::kOk) return status;
        if (is_rans(planes[p].mode)) n_carried += std::size_t{2} << planes[p].rans.lanes_log;
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

// Decodes units [first, first + n) of a plane that is not classed, into its buffer or into
// `direct`. `adds_raw` says whether raw bits of rANS are added to them.
inline Status next_units(PlaneDecoder& plane, std::size_t first, std::size_t n, bool adds_raw,
                         uint8_t* direct, const uint8_t*& out, Ahead& ahead, Isa isa) {
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
        default: {
            const Status status = rans_decode(plane.rans, n, dst, ahead, isa);
            if (status == Status::kOk && adds_raw) add_raw_bits(plane.rans.raw, first, n, dst, isa);
            return status;
        }
    }
}

inline Status next_block(PlaneDecoder* planes, std::size_t first, std::size_t n,
                         const PlaneSpec& spec, const uint8_t** sources, uint8_t* dst, Ahead& ahead,
                         Isa isa) {
    uint8_t* const direct = spec.n_planes == 1 ? dst : nullptr;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        const Status status = next_units(planes[p], first, n, true, direct, sources[p], ahead, isa);
        if (status != Status::kOk) return status;
    }
    return Status::kOk;
}

// Whether whole blocks can be merged past the cache.
inline bool merges_past_cache(const PlaneDecoder* planes, const PlaneSpec& spec, const uint8_t* dst,
                              Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return can_merge_past_cache_avx512(spec, dst);
    if (isa < Isa::kAvx2 || reinterpret_cast<uintptr_t>(dst) % 16 != 0) return false;
    if (spec.unit_nbytes == 1) return is_turned(planes, spec);
    return spec.unit_nbytes == 2 || spec.unit_nbytes == 4;
#else
    (void)planes, (void)spec, (void)dst, (void)isa;
    return false;
#endif
}

// Decodes a whole block and merges it past the cache. With AVX2, raw bits of plane 0 are added on
// the way.
inline Status write_block_past_cache(PlaneDecoder* planes, std::size_t first, const PlaneSpec& spec,
                                     uint8_t* dst, Ahead& ahead, Isa isa) {
    const RawPlanes none{};
    const bool adds_late = isa < Isa::kAvx512 && planes[0].mode == Mode::kRans &&
                           spec.unit_nbytes <= 2 && planes[0].rans.raw.n <= kMaxRawPlanes;
    const uint8_t* sources[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        const Status status = next_units(planes[p], first, kBlockUnits, p > 0 || !adds_late,
                                         nullptr, sources[p], ahead, isa);
        if (status != Status::kOk) return status;
    }
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512)
        merge_past_cache_avx512(sources, kBlockUnits, spec, dst);
    else
        merge_past_cache_avx2(sources, adds_late ? planes[0].rans.raw : none, first, kBlockUnits,
                              spec, dst);
#else
    (void)none, (void)dst;
#endif
    return Status::kOk;
}

// Closes the streams. `carried` receives the carried bytes, in the order of planes.
inline Status close_planes(PlaneDecoder* planes, const PlaneSpec& spec, bool carries,
                           uint8_t* carried) {
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        Status status = Status::kOk;
        if (planes[p].mode == Mode::kPalette) status = palette_close(planes[p].palette);
        if (is_rans(planes[p].mode)) {
            status = rans_close(planes[p].rans, carries, carried);
            carried += std::size_t{2} << planes[p].rans.lanes_log;
        }
        if (status != Status::kOk) return status;
    }
    return Status::kOk;
}

// While the coded planes of this chunk are decoded, fetches the next chunk's bytes and the memory
// that merging will write soon, unless `dst` is null.
inline Ahead decode_ahead(const uint8_t* next_encoded, const PlaneDecoder* planes, std::size_t n,
                          const PlaneSpec& spec, uint8_t* dst) {
    std::size_t n_computing = 0, nbytes = 0;
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (is_rans(planes[p].mode) || planes[p].mode == Mode::kPalette) ++n_computing;
        nbytes += planes[p].nbytes;
    }
    Ahead ahead;
    if (n_computing == 0) return ahead;
    if (next_encoded != nullptr) {
        ahead.read = reinterpret_cast<uintptr_t>(next_encoded);
        ahead.read_step = 128 * nbytes / n / n_computing;
    }
    if (dst == nullptr) return ahead;
    ahead.write = reinterpret_cast<uintptr_t>(dst + 2 * kBlockUnits * spec.unit_nbytes);
    ahead.write_step = 128 * spec.unit_nbytes / n_computing;
    return ahead;
}

inline Status decode_by_blocks(std::size_t n, uint32_t carrier, std::size_t n_carried,
                               const PlaneSpec& spec, const DecodeScratch& scratch, uint8_t* dst,
                               Isa isa) {
    PlaneDecoder* const planes = scratch.planes;
    Status status = Status::kOk;
    const uint8_t* sources[kMaxPlanes];
    const std::size_t n_early = (n - n_carried) / kBlockUnits * kBlockUnits;
    const bool merges = spec.splits() && !is_turned(planes, spec);
    const bool past_cache = scratch.past_cache && merges_past_cache(planes, spec, dst, isa);
    Ahead ahead = decode_ahead(scratch.next_encoded, planes, n, spec, past_cache ? nullptr : dst);
    for (std::size_t at = 0; at < n_early && status == Status::kOk; at += kBlockUnits) {
        uint8_t* const to = dst + at * spec.unit_nbytes;
        if (past_cache) {
            status = write_block_past_cache(planes, at, spec, to, ahead, isa);
            continue;
        }
        status = next_block(planes, at, kBlockUnits, spec, sources, to, ahead, isa);
        if (status == Status::kOk && merges) merge_planes(sources, kBlockUnits, spec, to, isa);
    }
#if PACKHORSE_X86
    if (past_cache) _mm_sfence();  // so that other threads see the output
#endif
    if (status != Status::kOk) return status;
    const std::size_t rest = n - n_early;
    if (rest > 0)
        status = next_block(planes, n_early, rest, spec, sources, dst + n_early * spec.unit_nbytes,
                            ahead, isa);
    if (status != Status::kOk) return status;
    uint8_t carried[kMaxCarried];
    status = close_planes(planes, spec, n_carried > 0, carried);
    if (status != Status::kOk || rest == 0 || !merges) return status;
    if (n_carried > 0) {
        PlaneDecoder& plane = planes[carrier];
        std::memcpy(plane.buffer, plane.stored + n_early, rest - n_carried);
        std::memcpy(plane.buffer + rest - n_carried, carried, n_carried);
        sources[carrier] = plane.buffer;
    }
    merge_planes(sources, rest, spec, dst + n_early * spec.unit_nbytes, isa);
    return Status::kOk;
}

// A classed plane while a chunk is decoded: its units in the order by class, the cuts of its
// classes, and the next unit of each class to put back in order.
struct SortedPlane {
    uint8_t* units;
    ClassCuts cuts;
    const uint8_t* next[kMaxClasses];
};

// The units of a block, which begins at unit `first` of the tensor, and the source of their
// classes.
struct ClassBlock {
    std::size_t first;
    std::size_t n;
    const SideData& side;
    const uint8_t* lead;
};

// Returns the keys of a block. `memory` receives the keys of a prediction.
inline const uint8_t* block_keys(const ClassBlock& block, const ClassRule& rule, uint8_t* memory,
                                 Isa isa) {
    if (rule.source != ClassSource::kPrediction) return block.lead;
    predict_keys(block.side, block.first, block.n, memory, isa);
    return memory;
}

// Decodes all units of a classed plane, class by class.
inline Status decode_sorted(PlaneDecoder& plane, const ClassStarts& starts, SortedPlane& sorted,
                            Ahead& ahead, Isa isa) {
    for (uint32_t c = 0; c < plane.rule.n_classes; ++c) {
        plane.rans.model = plane.models[c];
        build_rans_tables(plane.rans, isa);
        const Status status =
            rans_decode(plane.rans, starts.count(c), sorted.units + starts.at[c], ahead, isa);
        if (status != Status::kOk) return status;
    }
    for (uint32_t c = 0; c < kMaxClasses; ++c) sorted.next[c] = sorted.units + starts.at[c];
    return Status::kOk;
}

// Puts a block of a classed plane in the order of units, as its stream yields it.
inline void unsort_block(PlaneDecoder& plane, SortedPlane& sorted, const ClassBlock& block,
                         std::size_t at, uint8_t* dst, Isa isa) {
    alignas(64) uint8_t memory[kBlockUnits];
    const uint8_t* keys = block_keys(block, plane.rule, memory, isa);
    unsort_by_class(sorted.next, keys, block.n, sorted.cuts, dst, isa);
    add_raw_bits(plane.rans.raw, at, block.n, dst, isa);
}

// Whether the source of a classed plane's classes is known when that plane is decoded.
inline bool class_source_is_there(const PlaneDecoder* planes, uint32_t p, const SideData& side) {
    if (planes[p].rule.source == ClassSource::kPrediction) return p == 0 && side.rows != nullptr;
    return p > 0 && planes[0].mode != Mode::kStored;
}

// Decodes a chunk with classed planes. The units of each class must be counted before they can be
// decoded. So plane 0, which may lead others, is first decoded as a whole. Then each classed plane
// is decoded in the order of its classes. Finally, all planes are put in order and merged, block by
// block.
class ClassedChunk {
  public:
    ClassedChunk(DecodeScratch& scratch, std::size_t n_units, std::size_t first_unit,
                 const PlaneSpec& plane_spec, const SideData& side_data, Isa code_path)
        : planes_(scratch.planes),
          n_(n_units),
          first_(first_unit),
          spec_(plane_spec),
          side_(side_data),
          isa_(code_path),
          lead_(scratch.whole) {
        for (uint32_t p = 0; p < spec_.n_planes; ++p)
            sorted_[p].units = scratch.whole + std::max(p, 1u) * classed_row_nbytes(n_);
    }

    Status decode(uint32_t carrier, std::size_t n_carried, Ahead& ahead, uint8_t* dst) {
        Status status = decode_lead(ahead);
        for (uint32_t p = 1; p < spec_.n_planes && status == Status::kOk; ++p)
            if (planes_[p].mode == Mode::kClassedRans)
                status = decode_classes(p, ahead);
            else if (planes_[p].mode != Mode::kStored)
                status = decode_plain(p, sorted_[p].units, ahead);
        if (status != Status::kOk) return status;
        uint8_t carried[kMaxCarried];
        status = close_planes(planes_, spec_, n_carried > 0, carried);
        if (status != Status::kOk) return status;
        if (n_carried > 0) complete_carrier(carrier, carried, n_carried);
        for (std::size_t at = 0; at < n_; at += kBlockUnits)
            merge_block(at, std::min(kBlockUnits, n_ - at), dst + at * spec_.unit_nbytes);
        return Status::kOk;
    }

  private:
    // Decodes plane 0 to `lead_`, as its stream yields it.
    Status decode_lead(Ahead& ahead) {
        if (planes_[0].mode == Mode::kStored) return Status::kOk;
        if (planes_[0].mode != Mode::kClassedRans) return decode_plain(0, lead_, ahead);
        const Status status = decode_classes(0, ahead);
        if (status != Status::kOk) return status;
        for (std::size_t at = 0; at < n_; at += kBlockUnits)
            unsort_block(planes_[0], sorted_[0], block(at), at, lead_ + at, isa_);
        return Status::kOk;
    }

    Status decode_plain(uint32_t p, uint8_t* dst, Ahead& ahead) {
        const uint8_t* ignored;
        return next_units(planes_[p], 0, n_, true, dst, ignored, ahead, isa_);
    }

    Status decode_classes(uint32_t p, Ahead& ahead) {
        if (!class_source_is_there(planes_, p, side_)) return Status::kBadField;
        sorted_[p].cuts = class_cuts(planes_[p].rule);
        const bool predicted = planes_[p].rule.source == ClassSource::kPrediction;
        const ClassStarts starts = predicted ? count_predicted(side_, first_, n_, isa_)
                                             : count_classes(lead_, n_, sorted_[p].cuts, isa_);
        return decode_sorted(planes_[p], starts, sorted_[p], ahead, isa_);
    }

    ClassBlock block(std::size_t at) const {
        return {first_ + at, std::min(kBlockUnits, n_ - at), side_, lead_ + at};
    }

    // Stored planes are merged from the source, except the carrier, which lacks its end there.
    void complete_carrier(uint32_t carrier, const uint8_t* carried, std::size_t n_carried) {
        uint8_t* const whole = carrier == 0 ? lead_ : sorted_[carrier].units;
        std::memcpy(whole, planes_[carrier].stored, n_ - n_carried);
        std::memcpy(whole + n_ - n_carried, carried, n_carried);
        planes_[carrier].stored = whole;
    }

    void merge_block(std::size_t at, std::size_t n, uint8_t* dst) {
        const uint8_t* sources[kMaxPlanes];
        for (uint32_t p = 1; p < spec_.n_planes; ++p) {
            sources[p] =
                planes_[p].mode == Mode::kStored ? planes_[p].stored + at : sorted_[p].units + at;
            if (planes_[p].mode != Mode::kClassedRans) continue;
            unsort_block(planes_[p], sorted_[p], block(at), at, planes_[p].buffer, isa_);
            sources[p] = planes_[p].buffer;
        }
        sources[0] = planes_[0].mode == Mode::kStored ? planes_[0].stored + at : lead_ + at;
        if (planes_[0].mode == Mode::kClassedRans) {
            add_prediction(side_, first_ + at, n, lead_ + at, isa_);
        }
        merge_planes(sources, n, spec_, dst, isa_);
    }

    PlaneDecoder* planes_;
    std::size_t n_, first_;
    const PlaneSpec& spec_;
    const SideData& side_;
    Isa isa_;
    uint8_t* lead_;
    SortedPlane sorted_[kMaxPlanes];
};

inline Status decode_planes(const uint8_t* src, const uint32_t* descriptors, std::size_t n,
                            std::size_t first, const PlaneSpec& spec, const SideData& side,
                            DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    uint32_t carrier = kMaxPlanes;
    std::size_t n_carried = 0;
    const Status status =
        open_planes(src, descriptors, n, spec, scratch.planes, carrier, n_carried, isa);
    if (status != Status::kOk) return status;
    if (is_classed(descriptors, spec.n_planes)) {
        Ahead ahead = decode_ahead(scratch.next_encoded, scratch.planes, n, spec, dst);
        return ClassedChunk(scratch, n, first, spec, side, isa)
            .decode(carrier, n_carried, ahead, dst);
    }
    return decode_by_blocks(n, carrier, n_carried, spec, scratch, dst, isa);
}

// Writes `n` items that all equal the one at `item`. Writing long runs of one byte is faster than
// any way that reads memory.
inline void fill_items(const uint8_t* item, std::size_t item_nbytes, std::size_t n, uint8_t* dst) {
    if (is_constant(item, item_nbytes, 1)) {
        std::memset(dst, item[0], n * item_nbytes);
        return;
    }
    uint8_t pattern[1024];
    for (std::size_t at = 0; at < sizeof pattern; at += item_nbytes)
        std::memcpy(pattern + at, item, item_nbytes);
    const std::size_t nbytes = n * item_nbytes;
    for (std::size_t at = 0; at < nbytes; at += sizeof pattern)
        std::memcpy(dst + at, pattern, std::min(sizeof pattern, nbytes - at));
}

// Decodes a chunk whose planes are all constant: one unit, again and again.
inline Status decode_constant(const uint8_t* src, const uint32_t* descriptors, std::size_t n,
                              const PlaneSpec& spec, uint8_t* dst, Isa isa) {
    const uint8_t* planes[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p) {
        if (descriptor_nbytes(descriptors[p]) != 1) return Status::kStreamLength;
        planes[p] = src + p;
    }
    uint8_t unit[8] = {src[0]};
    if (spec.splits()) merge_planes(planes, 1, spec, unit, isa);
    fill_items(unit, spec.unit_nbytes, n, dst);
    return Status::kOk;
}

inline bool all_constant(const uint32_t* descriptors, uint32_t n_planes) {
    for (uint32_t p = 0; p < n_planes; ++p)
        if (descriptor_mode(descriptors[p]) != Mode::kConstant) return false;
    return true;
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
    fill_items(src, item, n, dst);
    return Status::kOk;
}

// Decodes a chunk of `n` >= 1 units, which begins at unit `first` of the tensor. The length of
// `src` is the sum of the lengths in the descriptors; the caller has checked this. Writes n *
// unit_nbytes bytes.
inline Status decode_chunk(const uint8_t* src, const uint32_t* descriptors, std::size_t n,
                           std::size_t first, const PlaneSpec& spec, const SideData& side,
                           DecodeScratch& scratch, uint8_t* dst, Isa isa) {
    if (item_nbytes(spec) > 1) return decode_whole(src, descriptors[0], n, spec.unit_nbytes, dst);
    if (all_constant(descriptors, spec.n_planes))
        return decode_constant(src, descriptors, n, spec, dst, isa);
    return decode_planes(src, descriptors, n, first, spec, side, scratch, dst, isa);
}

}  // namespace packhorse
