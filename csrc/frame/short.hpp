// Packs short tensors that are no floats, without a plan: each way to code them is tried on the
// whole tensor, which takes less time than planning. Integers of several bytes become planes,
// nibbles or matches, and bytes in which nothing repeats become planes or nibbles. Other bytes are
// left to plans (src/packhorse/codecs/plan.py), because Zstandard packs many of them best. A tensor
// that fits the padding of a chunk is stored.
#pragma once

#include <memory>

#include "common/xxh3_short.hpp"
#include "frame/plain.hpp"
#include "matches/glance.hpp"

namespace packhorse {

constexpr std::size_t kShortNbytes = std::size_t{1} << 16;
// Estimates of nibbles are off by less than one part in this, so that no shorter stream is missed.
constexpr std::size_t kAbout = 64;

// Whether pack_short() tries to pack a tensor of `nbytes` bytes.
inline bool is_short(const DTypeRow& dtype, std::size_t nbytes) {
    return !dtype.is_float() && nbytes > 0 && nbytes <= kShortNbytes;
}

// One way to pack a short tensor: the row of its table, and its payload.
struct ShortWay {
    Split split;
    uint32_t row[1 + kMaxPlanes];
    const uint8_t* payload;
    std::size_t payload_nbytes;  // padded
    std::size_t header_nbytes;

    std::size_t frame_nbytes() const { return header_nbytes + payload_nbytes; }

    // How the tensor is cut. It has one chunk, but chunks are as long as in longer tensors.
    Geometry cut(const Geometry& tensor) const {
        const Mode mode = descriptor_mode(row[1]);
        const std::size_t chunk = mode == Mode::kMatches   ? kMaxChunkNbytes
                                  : mode == Mode::kNibbles ? kNibbleChunkNbytes
                                                           : kChunkNbytes;
        return cut_tensor(tensor.spec.unit_nbytes, split, tensor.nbytes(), chunk);
    }
};

// Finds the best way to pack a tensor of integers.
class ShortPacker {
  public:
    ShortPacker(const uint8_t* src, const Geometry& geometry, std::size_t n_dims, Level level,
                EncodeWorker& worker, Isa isa)
        : geometry_(geometry),
          nbytes_(geometry.nbytes()),
          n_dims_(n_dims),
          level_(level),
          worker_(worker),
          isa_(isa),
          room_(round_up(nbytes_, kFrameAlignment) + kPlaneSlack),
          memory_(new uint8_t[4 * room_]) {
        // All ways, and the content hash, are made from one copy.
        std::memcpy(memory_.get(), src, nbytes_);
        seal(memory_.get());
        std::memset(memory_.get() + nbytes_, 0, room_ - nbytes_);
    }

    const uint8_t* units() const { return memory_.get(); }

    // Returns false if a plan may find a better way.
    bool find(ShortWay& best) {
        best = make_way(Split::kWhole, units());
        best.row[1] = make_descriptor(Mode::kStored, nbytes_);
        best.payload_nbytes = round_up(nbytes_, kFrameAlignment);
        if (nbytes_ <= kFrameAlignment) return true;
        const uint32_t unit_nbytes = geometry_.spec.unit_nbytes;
        const ShortWay planes = by_planes();
        const std::size_t used = stream_sum(planes.row + 1, geometry_.spec.n_planes);
        const bool tries_matches =
            (unit_nbytes > 1 && 8 * used <= 7 * nbytes_) ||
            glance_for_matches(units(), geometry_.n_units, unit_nbytes, used, isa_);
        // At level fast, Zstandard is all there is against bytes of many values.
        if (unit_nbytes == 1 && (tries_matches || level_ == Level::kFast)) return false;
        take_if_shorter(planes, 0, best);
        if (2 * used >= nbytes_) take_if_shorter(by_nibbles(used + used / kAbout), 0, best);
        // Matches are slower, so they must save 1/25, as in plans.
        if (tries_matches) take_if_shorter(by_matches(), best.frame_nbytes() / 25, best);
        return true;
    }

  private:
    static void take_if_shorter(const ShortWay& way, std::size_t must_save, ShortWay& best) {
        if (way.frame_nbytes() + must_save < best.frame_nbytes()) best = way;
    }

    uint8_t* room(std::size_t i) const { return memory_.get() + i * room_; }

    ShortWay make_way(Split split, const uint8_t* payload) const {
        const uint32_t n_planes = split == Split::kWhole ? 1 : geometry_.spec.n_planes;
        return {split, {}, payload, 0, frame_header_nbytes(n_dims_, 1, n_planes, 0, false)};
    }

    ShortWay by_planes() {
        ShortWay way = make_way(geometry_.split, room(1));
        worker_.scratch.next_src = nullptr;
        worker_.scratch.cold_output = false;
        way.payload_nbytes = encode_chunk({units(), nullptr}, geometry_.n_units, 0, geometry_.spec,
                                          {}, level_, worker_.scratch, room(1), way.row + 1, isa_);
        return way;
    }

    ShortWay by_matches() {
        ShortWay way = make_way(Split::kWhole, room(2));
        way.payload_nbytes =
            encode_matched({units(), nullptr}, geometry_.n_units, geometry_.spec.unit_nbytes,
                           level_, room(2), way.row + 1, isa_);
        return way;
    }

    // Stores the tensor if nibbles seem to take `most` bytes.
    ShortWay by_nibbles(std::size_t most) {
        ShortWay way = make_way(Split::kWhole, room(3));
        way.payload_nbytes =
            encode_nibbles({units(), nullptr}, geometry_.n_units, geometry_.spec.unit_nbytes, most,
                           level_, room(3), way.row + 1, isa_);
        return way;
    }

    Geometry geometry_;
    std::size_t nbytes_;
    std::size_t n_dims_;
    Level level_;
    EncodeWorker& worker_;
    Isa isa_;
    std::size_t room_;
    std::unique_ptr<uint8_t[]> memory_;  // little
};

// Packs a tensor for which is_short() holds to a frame. `geometry` is cut_tensor() of it by its
// last split. Returns the length of the frame; 0 if the tensor needs a plan.
inline std::size_t pack_short(const uint8_t* src, uint32_t dtype_code,
                              const std::vector<uint64_t>& shape, const Geometry& geometry,
                              Level level, EncodeWorker& worker, uint8_t* dst, Isa isa) {
    ShortPacker packer(src, geometry, shape.size(), level, worker, isa);
    ShortWay way;
    if (!packer.find(way)) return 0;
    const Geometry cut = way.cut(geometry);
    way.row[0] = crc32c(way.payload, way.payload_nbytes, isa);
    std::memcpy(dst + kFixedHeaderNbytes + 8 * shape.size(), way.row, 4 * cut.row_length());
    std::memcpy(dst + way.header_nbytes, way.payload, way.payload_nbytes);
    xxh3_128(packer.units(), geometry.nbytes(), dst + kContentHashOffset, isa);
    write_plain_header({dtype_code, level, shape, cut, way.frame_nbytes()}, way.header_nbytes, dst,
                       isa);
    return way.frame_nbytes();
}

}  // namespace packhorse
