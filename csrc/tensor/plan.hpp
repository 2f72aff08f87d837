// Plans that tell kernels on GPUs how to decode chunks: the places of all parts of every coded
// stream, with lane states and tables (src/packhorse/gpu/plans.py says how kernels use them).
//
// A ChunkPlanner reads the payload with the parsers of the decoder and trusts nothing in it. A
// kernel that follows a plan reads only inside the payload and writes only inside its outputs,
// whatever the payload holds, even if it changes later. Kernels check the properties that only
// decoding shows: words, last states, and the number of escapes.
//
// A plan is one piece of memory, which is uploaded as it is. Its parts follow each other: planes,
// palettes, entries, escaped planes; then streams, states and tables of the rANS streams with
// buckets, and then of the rANS streams without. The places of streams, for messages, come last.
#pragma once

#include <memory>
#include <vector>

#include "rans/bucket_tables.hpp"
#include "tensor/tensor.hpp"

namespace packhorse {

constexpr std::size_t kPlanAlignment =
    kMaxLanes;  // of the scratch memory of a plane: the longest round

enum class PlaneSource : int64_t { kPayload = 0, kScratch = 1, kConstant = 2 };

// Rows of 64 bytes, as kernels read them. Offsets are in the payload or in the scratch memory.
// src/packhorse/layout.py names their fields, and tests/codecs/test_layout.py compares the two.
struct PlaneRow {
    int64_t source;
    int64_t offset;      // or the constant
    int64_t n_there;     // units; the rest is carried
    int64_t carried_at;  // in the scratch memory
    int64_t raw_bits;
    int64_t raw_mask;
    int64_t raw_at;  // in the payload
    int64_t unused;
};

struct PaletteRow {
    int64_t codes_at;
    int64_t code_bits;
    int64_t n_units;
    int64_t plane_at;  // in the scratch memory
    int64_t unused[4];
};

struct StreamRow {
    int64_t words_at;
    int64_t n_words;
    int64_t quarter;  // of the lanes
    int64_t n_units;
    int64_t plane_at;    // in the scratch memory
    int64_t carried_at;  // there; -1 if nothing may be carried
    int64_t unused[2];
};

struct EscapedRow {
    int64_t plane_at;  // in the scratch memory
    int64_t n_units;
    int64_t marker;
    int64_t escapes_at;  // in the payload
    int64_t n_escapes;
    int64_t raw_bits;
    int64_t unused[2];
};

struct PlanPlace {
    int64_t chunk;
    int64_t plane;
};

constexpr std::size_t kPlanRowNbytes = 64;
static_assert(sizeof(PlaneRow) == kPlanRowNbytes && sizeof(PaletteRow) == kPlanRowNbytes &&
              sizeof(StreamRow) == kPlanRowNbytes && sizeof(EscapedRow) == kPlanRowNbytes);

// The first fault in a payload.
struct PlanFault {
    Status status = Status::kOk;
    std::size_t chunk = 0;
    uint32_t plane = 0;  // the number of planes if the padding behind them is wrong
    std::size_t at = 0;  // in the payload
};

// The numbers of parts of a plan, and its sizes.
struct PlanShape {
    std::size_t n_palettes;
    std::size_t n_escaped;
    std::size_t n_bucketed;  // rANS streams with buckets
    std::size_t n_plain;     // and without
    uint32_t n_buckets;      // of the tables of the former
    std::size_t scratch_nbytes;
    std::size_t nbytes;  // of the plan
};

class ChunkPlanner {
  public:
    // The tensor has items of one byte, and its offsets (chunk_offsets()) end where the payload
    // does.
    ChunkPlanner(const EncodedTensor& tensor)
        : tensor_(tensor),
          n_planes_(tensor.geometry.spec.n_planes),
          decoder_(new RansDecoder),
          planes_(tensor.geometry.n_chunks() * n_planes_) {}

    // Reads all streams.
    PlanFault read() {
        PlanFault fault;
        for (std::size_t chunk = 0; chunk < tensor_.geometry.n_chunks(); ++chunk) {
            fault.chunk = chunk;
            fault.status = read_chunk(chunk, fault);
            if (fault.status != Status::kOk) return fault;
        }
        place();
        return fault;
    }

    // Call this once all streams were read.
    PlanShape shape() const {
        const std::size_t n_bucketed = streams_.size() - n_plain_;
        const std::size_t table = 3 * sizeof(uint32_t) * n_buckets_;
        const std::size_t n_rows =
            planes_.size() + palettes_.size() + escaped_.size() + streams_.size();
        const std::size_t nbytes = n_rows * kPlanRowNbytes + palettes_.size() * kEntriesNbytes +
                                   streams_.size() * sizeof(uint32_t) * kMaxLanes +
                                   n_bucketed * table + n_plain_ * sizeof(uint32_t) * kProbSum +
                                   (escaped_.size() + streams_.size()) * sizeof(PlanPlace);
        return {palettes_.size(), escaped_.size(), n_bucketed, n_plain_,
                n_buckets_,       scratch_nbytes_, nbytes};
    }

    // Writes shape().nbytes bytes to memory that is aligned to 8 bytes.
    void write(uint8_t* dst) const {
        Writer out{dst};
        out.add(planes_);
        for (const Palette& palette : palettes_) out.add(palette.row);
        for (const Palette& palette : palettes_) out.add(palette.entries);
        for (const Escaped& plane : escaped_) out.add(plane.row);
        write_group(false, out);
        write_group(true, out);
        for (const Escaped& plane : escaped_) out.add(plane.place);
        for (const bool plain : {false, true})
            for (const Stream& stream : streams_)
                if (stream.is_plain() == plain) out.add(stream.place);
    }

  private:
    static constexpr std::size_t kEntriesNbytes = 1u << kMaxCodeBits;

    struct Palette {
        PaletteRow row;
        uint8_t entries[kEntriesNbytes];
        PlanPlace place;
    };

    struct Stream {
        StreamRow row;
        uint32_t states[kMaxLanes];  // lane g * quarter + t at [g][t]
        RansModel model;
        PlanPlace place;

        bool is_plain() const { return model.n_buckets() == 0; }
    };

    struct Escaped {
        EscapedRow row;
        PlanPlace place;
        bool is_of_palette;
        std::size_t owner;  // its palette or stream
    };

    struct Writer {
        uint8_t* at;

        template <class T>
        void add(const T& value) {
            std::memcpy(at, &value, sizeof value);
            at += sizeof value;
        }
        template <class T>
        void add(const std::vector<T>& rows) {
            if (!rows.empty()) std::memcpy(at, rows.data(), rows.size() * sizeof(T));
            at += rows.size() * sizeof(T);
        }
    };

    int64_t offset_of(const uint8_t* in_payload) const { return in_payload - tensor_.payload; }
    PlaneRow& plane_row(const PlanPlace& place) {
        return planes_[static_cast<std::size_t>(place.chunk) * n_planes_ +
                       static_cast<std::size_t>(place.plane)];
    }

    // Section 5 of docs/format.md: stored streams come first, and the last of them may lack what
    // rANS streams carry.
    Status read_chunk(std::size_t chunk, PlanFault& fault) {
        const uint32_t* const descriptors = tensor_.row(chunk) + 1;
        const std::size_t n = tensor_.geometry.units_of(chunk);
        std::size_t at = tensor_.offsets[chunk], stored_at[kMaxPlanes];
        for (uint32_t p = 0; p < n_planes_; ++p) {
            stored_at[p] = at;
            if (descriptor_mode(descriptors[p]) == Mode::kStored)
                at += descriptor_nbytes(descriptors[p]);
        }
        std::size_t n_carried = 0;
        for (uint32_t p = 0; p < n_planes_; ++p) {
            if (descriptor_mode(descriptors[p]) == Mode::kStored) continue;
            fault.plane = p;
            fault.at = at;
            const PlanPlace place{static_cast<int64_t>(chunk), p};
            const Status status = read_stream(descriptors[p], at, n, place, n_carried);
            if (status != Status::kOk) return status;
            at += descriptor_nbytes(descriptors[p]);
        }
        for (uint32_t p = 0; p < n_planes_; ++p) {
            if (descriptor_mode(descriptors[p]) != Mode::kStored) continue;
            fault.plane = p;
            fault.at = stored_at[p];
            const std::size_t nbytes = descriptor_nbytes(descriptors[p]);
            const bool lends = nbytes + n_carried == n && is_last_stored(descriptors, p);
            if (nbytes != n && !lends) return Status::kStreamLength;
            planes_[chunk * n_planes_ + p] = {static_cast<int64_t>(PlaneSource::kPayload),
                                              static_cast<int64_t>(stored_at[p]),
                                              static_cast<int64_t>(nbytes),
                                              0,
                                              0,
                                              0,
                                              0,
                                              0};
        }
        fault.plane = n_planes_;
        fault.at = at;
        const uint8_t* const end = tensor_.payload + tensor_.offsets[chunk + 1];
        const bool is_zero =
            std::all_of(tensor_.payload + at, end, [](uint8_t b) { return b == 0; });
        return is_zero ? Status::kOk : Status::kReserved;
    }

    bool is_last_stored(const uint32_t* descriptors, uint32_t plane) const {
        for (uint32_t p = plane + 1; p < n_planes_; ++p)
            if (descriptor_mode(descriptors[p]) == Mode::kStored) return false;
        return true;
    }

    Status read_stream(uint32_t descriptor, std::size_t at, std::size_t n, const PlanPlace& place,
                       std::size_t& n_carried) {
        const uint8_t* const src = tensor_.payload + at;
        const std::size_t nbytes = descriptor_nbytes(descriptor);
        switch (descriptor_mode(descriptor)) {
            case Mode::kConstant:
                if (nbytes != 1) return Status::kStreamLength;
                plane_row(place) = {static_cast<int64_t>(PlaneSource::kConstant),
                                    src[0],
                                    static_cast<int64_t>(n),
                                    0,
                                    0,
                                    0,
                                    0,
                                    0};
                return Status::kOk;
            case Mode::kPalette:
                return read_palette(src, nbytes, n, place);
            case Mode::kRans:
                return read_rans(src, nbytes, n, place, n_carried);
            default:
                return Status::kBadField;
        }
    }

    // Notes a plane in the scratch memory. Its place there is known only after all streams were
    // read.
    void note_plane(const PlanPlace& place, std::size_t n, uint32_t raw_bits, uint32_t raw_mask,
                    const uint8_t* raw_planes) {
        plane_row(place) = {static_cast<int64_t>(PlaneSource::kScratch),
                            0,
                            static_cast<int64_t>(n),
                            0,
                            raw_bits,
                            raw_mask,
                            offset_of(raw_planes),
                            0};
    }

    Status read_palette(const uint8_t* src, std::size_t nbytes, std::size_t n,
                        const PlanPlace& place) {
        PaletteDecoder found;
        const Status status = palette_open(src, nbytes, n, found);
        if (status != Status::kOk) return status;
        const auto units = static_cast<int64_t>(n);
        Palette palette{{offset_of(found.planes), found.code_bits, units, 0, {}}, {}, place};
        const uint8_t marker = free_value(found);
        const uint32_t n_own = (1u << found.code_bits) - (found.has_escape ? 1 : 0);
        for (uint32_t code = 0; code < kEntriesNbytes; ++code)
            palette.entries[code] = code < n_own ? found.values[code] : marker;
        note_plane(place, n, found.raw_bits, src[3], found.raw.planes);
        if (found.has_escape)
            escaped_.push_back({{0,
                                 units,
                                 marker,
                                 offset_of(found.escapes),
                                 found.escapes_end - found.escapes,
                                 found.raw_bits,
                                 {}},
                                place,
                                true,
                                palettes_.size()});
        palettes_.push_back(palette);
        return Status::kOk;
    }

    // Returns a byte that no code stands for. Values have no raw bits, so a byte with raw bits is
    // free.
    static uint8_t free_value(const PaletteDecoder& palette) {
        if (palette.raw_bits > 0) return 1;
        uint32_t value = 0;
        while (std::find(palette.values, palette.values + kEntriesNbytes, value) !=
               palette.values + kEntriesNbytes)
            ++value;
        return static_cast<uint8_t>(value);
    }

    Status read_rans(const uint8_t* src, std::size_t nbytes, std::size_t n, const PlanPlace& place,
                     std::size_t& n_carried) {
        const Status status = rans_read(src, nbytes, n, *decoder_);
        if (status != Status::kOk) return status;
        const RansDecoder& found = *decoder_;
        const uint32_t n_lanes = 1u << found.lanes_log;
        const auto units = static_cast<int64_t>(n);
        streams_.emplace_back();
        Stream& stream = streams_.back();
        stream.row = {offset_of(found.words),
                      (found.words_end - found.words) / 2,
                      n_lanes / 4,
                      units,
                      0,
                      -1,
                      {}};
        std::fill_n(stream.states, kMaxLanes, kStateLowerBound);
        for (uint32_t lane = 0; lane < n_lanes; ++lane)
            stream.states[lane / (n_lanes / 4) * (kMaxLanes / 4) + lane % (n_lanes / 4)] =
                found.states[lane];
        stream.model = found.model;
        stream.place = place;
        note_plane(place, n, found.model.raw_bits, src[3], found.raw.planes);
        if (found.model.has_escape())
            escaped_.push_back({{0,
                                 units,
                                 found.model.escape_byte,
                                 offset_of(found.escapes),
                                 found.escapes_end - found.escapes,
                                 found.model.raw_bits,
                                 {}},
                                place,
                                false,
                                streams_.size() - 1});
        if (stream.is_plain())
            ++n_plain_;
        else
            n_buckets_ = std::max(n_buckets_, stream.model.n_buckets());
        n_carried += 2 * n_lanes;
        return Status::kOk;
    }

    // Assigns scratch memory to palettes, to streams, and to the bytes that streams carry.
    void place() {
        for (Palette& palette : palettes_) palette.row.plane_at = take_plane(palette.place);
        for (Stream& stream : streams_) stream.row.plane_at = take_plane(stream.place);
        std::stable_partition(escaped_.begin(), escaped_.end(),
                              [](const Escaped& plane) { return plane.is_of_palette; });
        for (Escaped& plane : escaped_)
            plane.row.plane_at = plane.is_of_palette ? palettes_[plane.owner].row.plane_at
                                                     : streams_[plane.owner].row.plane_at;
        auto stream = streams_.begin();
        auto carried_at = static_cast<int64_t>(scratch_nbytes_);
        for (std::size_t chunk = 0; chunk < tensor_.geometry.n_chunks() && !streams_.empty();
             ++chunk) {
            const bool lends = place_carried(chunk, carried_at);
            for (;
                 stream != streams_.end() && static_cast<std::size_t>(stream->place.chunk) == chunk;
                 ++stream) {
                if (lends) stream->row.carried_at = carried_at;
                carried_at += 8 * stream->row.quarter;
            }
        }
        scratch_nbytes_ = round_up(static_cast<std::size_t>(carried_at), kPlanAlignment);
    }

    int64_t take_plane(const PlanPlace& place) {
        PlaneRow& row = plane_row(place);
        row.offset = static_cast<int64_t>(scratch_nbytes_);
        scratch_nbytes_ += round_up(static_cast<std::size_t>(row.n_there), kPlanAlignment);
        return row.offset;
    }

    // Notes in the stored planes of a chunk where the carried bytes are. Returns whether a plane
    // needs these bytes.
    bool place_carried(std::size_t chunk, int64_t carried_at) {
        bool lends = false;
        for (uint32_t p = 0; p < n_planes_; ++p) {
            PlaneRow& row = planes_[chunk * n_planes_ + p];
            if (row.source != static_cast<int64_t>(PlaneSource::kPayload)) continue;
            row.carried_at = carried_at;
            lends |= static_cast<std::size_t>(row.n_there) < tensor_.geometry.units_of(chunk);
        }
        return lends;
    }

    void write_group(bool plain, Writer& out) const {
        for (const Stream& stream : streams_)
            if (stream.is_plain() == plain) out.add(stream.row);
        for (const Stream& stream : streams_)
            if (stream.is_plain() == plain) out.add(stream.states);
        for (const Stream& stream : streams_) {
            if (stream.is_plain() != plain) continue;
            auto* const table = reinterpret_cast<uint32_t*>(out.at);
            if (plain)
                fill_decode_table(stream.model, AliasTables{}, table);
            else
                write_bucket_table(stream.model, n_buckets_, table);
            out.at += sizeof(uint32_t) * (plain ? kProbSum : 3 * n_buckets_);
        }
    }

    const EncodedTensor& tensor_;
    uint32_t n_planes_;
    std::unique_ptr<RansDecoder> decoder_;  // of the stream that is being read
    std::vector<PlaneRow> planes_;
    std::vector<Palette> palettes_;
    std::vector<Stream> streams_;
    std::vector<Escaped> escaped_;
    std::size_t n_plain_ = 0;
    uint32_t n_buckets_ = 0;
    std::size_t scratch_nbytes_ = 0;
};

}  // namespace packhorse
