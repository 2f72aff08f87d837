// Reads a source into the encoder's own memory. Every byte is read once, and the content hash and
// the streams are both made from that copy. So a frame always decodes to the bytes that its hash
// identifies, even if the source is written to meanwhile.
#pragma once

#include <algorithm>

#include "chunk/intake_avx2.hpp"
#include "chunk/intake_avx512.hpp"
#include "common/copy.hpp"
#include "planes/planes.hpp"

namespace packhorse {

// The number of bytes that are hashed, split or cast at a time, so that they stay in L1.
constexpr std::size_t kIntakeNbytes = 4 * kXxh3BlockNbytes;

// Where the hashes of a tensor's leaves go, 16 bytes each; null if nothing is to be hashed. A last
// leaf that is too short for the long form of XXH3 is copied to `tail`, which has room for it, and
// the caller hashes it.
struct ContentLeaves {
    uint8_t* digests = nullptr;
    uint8_t* tail = nullptr;

    // The rest of the leaves, from byte `at` on, where a leaf begins.
    ContentLeaves from(std::size_t at) const {
        if (digests == nullptr) return {};
        return {digests + at / kContentLeafNbytes * 16, tail};
    }
};

// Copies the hashes of `nbytes` bytes, to use them for equal bytes elsewhere.
inline void copy_leaves(const ContentLeaves& from, std::size_t nbytes, const ContentLeaves& to) {
    const std::size_t last = nbytes % kContentLeafNbytes;
    std::memcpy(to.digests, from.digests,
                (nbytes + kContentLeafNbytes - 1) / kContentLeafNbytes * 16);
    if (0 < last && last < kXxh3LongMinNbytes) std::memcpy(to.tail, from.tail, last);
}

// Copies blocks and adds the copy to a hash.
inline void take_blocks_each(const uint8_t* src, std::size_t n_blocks, uint8_t* dst,
                             Xxh3Accumulator& acc, Isa isa) {
    for (std::size_t at = 0; at < n_blocks * kXxh3BlockNbytes; at += kXxh3BlockNbytes) {
        std::memcpy(dst + at, src + at, kXxh3BlockNbytes);
        seal(dst);
        xxh3_blocks(acc, dst + at, 1, isa);
    }
}

inline void take_blocks(const uint8_t* src, std::size_t n_blocks, uint8_t* dst,
                        Xxh3Accumulator& acc, Isa isa) {
#if PACKHORSE_X86
    if (isa >= Isa::kAvx512) return take_blocks_avx512(src, n_blocks, dst, acc);
    if (isa >= Isa::kAvx2) return take_blocks_avx2(src, n_blocks, dst, acc);
#endif
    take_blocks_each(src, n_blocks, dst, acc, isa);
}

// Copies and hashes consecutive pieces, leaf after leaf. A piece does not cross the end of a leaf,
// and every piece but the last of a leaf has whole blocks.
class LeafHasher {
  public:
    LeafHasher(const ContentLeaves& leaves, std::size_t nbytes, Isa isa)
        : leaves_(leaves), left_(nbytes), isa_(isa) {
        begin_leaf();
    }

    // Takes the next piece. Up to 64 bytes of the previous copy are in front of `dst`.
    void take(const uint8_t* src, std::size_t nbytes, uint8_t* dst) {
        const std::size_t n_blocks =
            std::min(nbytes / kXxh3BlockNbytes, (in_leaf_ - 1) / kXxh3BlockNbytes);
        const std::size_t done = n_blocks * kXxh3BlockNbytes;
        take_blocks(src, n_blocks, dst, acc_, isa_);
        in_leaf_ -= nbytes;
        if (in_leaf_ == 0) {
            std::memcpy(dst + done, src + done, nbytes - done);
            end_leaf(dst, nbytes);
        }
        seal(dst);
    }

  private:
    void begin_leaf() {
        acc_ = {};
        leaf_nbytes_ = in_leaf_ = std::min(kContentLeafNbytes, left_);
    }

    void end_leaf(const uint8_t* piece, std::size_t nbytes) {
        seal(piece);
        if (leaf_nbytes_ >= kXxh3LongMinNbytes)
            xxh3_finish(acc_, piece + nbytes, leaf_nbytes_, leaves_.digests, isa_);
        else
            std::memcpy(leaves_.tail, piece, nbytes);
        leaves_.digests += 16;
        left_ -= leaf_nbytes_;
        begin_leaf();
    }

    ContentLeaves leaves_;
    std::size_t left_;
    Isa isa_;
    Xxh3Accumulator acc_;
    std::size_t leaf_nbytes_ = 0;
    std::size_t in_leaf_ = 0;
};

// Brings bytes into the cache. The hardware prefetcher follows a plain run of reads, but loses
// track if much is written in between.
inline void touch(const uint8_t* src, std::size_t nbytes) {
    uint32_t sum = 0;
    for (std::size_t at = 0; at < nbytes; at += 64) sum += src[at];
    asm volatile("" : : "r"(sum));
}

// Calls visit(piece, at, nbytes) for all bytes of a source that begins with a leaf, piece by piece
// and in order. A piece is a copy that is valid during the call.
template <class Visit>
inline void visit_source(const uint8_t* src, std::size_t nbytes, const ContentLeaves& leaves,
                         Isa isa, const Visit& visit) {
    alignas(64) uint8_t memory[kXxh3StripeNbytes + kIntakeNbytes];
    uint8_t* const piece = memory + kXxh3StripeNbytes;
    if (leaves.digests == nullptr) {
        for (std::size_t at = 0; at < nbytes; at += kIntakeNbytes) {
            const std::size_t n = std::min(kIntakeNbytes, nbytes - at);
            std::memcpy(piece, src + at, n);
            seal(piece);
            visit(static_cast<const uint8_t*>(piece), at, n);
        }
        return;
    }
    std::memset(memory + kIntakeNbytes, 0, kXxh3StripeNbytes);
    LeafHasher hasher(leaves, nbytes, isa);
    for (std::size_t at = 0; at < nbytes; at += kIntakeNbytes) {
        const std::size_t n = std::min(kIntakeNbytes, nbytes - at);
        std::memcpy(memory, memory + kIntakeNbytes, kXxh3StripeNbytes);
        hasher.take(src + at, n, piece);
        visit(static_cast<const uint8_t*>(piece), at, n);
    }
}

// Splits units into planes, from a given place on.
inline void split_planes_at(const uint8_t* src, std::size_t n, const PlaneSpec& spec,
                            uint8_t* const* planes, std::size_t first, Isa isa) {
    uint8_t* to[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p) to[p] = planes[p] + first;
    split_planes(src, n, spec, to, isa);
}

#if PACKHORSE_X86

// Splits a leaf that is long enough to be hashed. Its first unit goes to place `first` of the
// planes.
inline void split_leaf_avx512(const uint8_t* src, std::size_t nbytes, const PlaneSpec& spec,
                              uint8_t* const* planes, std::size_t first, uint8_t* digest, Isa isa) {
    // The last line of the blocks, and after it the bytes behind the blocks.
    alignas(64) uint8_t memory[kXxh3StripeNbytes + kXxh3BlockNbytes];
    uint8_t* const rest = memory + kXxh3StripeNbytes;
    Xxh3Accumulator acc;
    const std::size_t n_blocks = xxh3_n_blocks(nbytes), done = n_blocks * kXxh3BlockNbytes;
    uint8_t* to[kMaxPlanes];
    for (uint32_t p = 0; p < spec.n_planes; ++p) to[p] = planes[p] + first;
    split_blocks_hashed_any(src, n_blocks, spec, to, acc, memory);
    std::memcpy(rest, src + done, nbytes - done);
    seal(memory);
    xxh3_finish(acc, rest + (nbytes - done), nbytes, digest, isa);
    split_planes_at(rest, (nbytes - done) / spec.unit_nbytes, spec, to, done / spec.unit_nbytes,
                    isa);
}

#endif

// Copies a source that begins with a leaf.
inline void take_in(const uint8_t* src, std::size_t nbytes, uint8_t* dst,
                    const ContentLeaves& leaves, Isa isa) {
    if (leaves.digests == nullptr) {
        std::memcpy(dst, src, nbytes);
        seal(dst);
        return;
    }
    LeafHasher hasher(leaves, nbytes, isa);
    for (std::size_t at = 0; at < nbytes; at += kContentLeafNbytes)
        hasher.take(src + at, std::min(kContentLeafNbytes, nbytes - at), dst + at);
}

// The units of a chunk. A chunk begins where a leaf of its tensor begins.
struct ChunkSource {
    const uint8_t* units;
    const ContentLeaves* leaves;  // null for a copy that was hashed already

    // Copies all units to memory of the caller.
    void copy_to(uint8_t* dst, std::size_t nbytes, Isa isa) const {
        if (leaves == nullptr)
            std::memcpy(dst, units, nbytes);
        else
            take_in(units, nbytes, dst, *leaves, isa);
    }

    // Calls visit(piece, at, nbytes) for the bytes from `start` on, where a leaf begins, to `stop`,
    // piece by piece and in order.
    template <class Visit>
    void visit(std::size_t start, std::size_t stop, Isa isa, const Visit& visit) const {
        if (leaves == nullptr) return visit(units + start, start, stop - start);
        visit_source(units + start, stop - start, leaves->from(start), isa,
                     [&](const uint8_t* piece, std::size_t at, std::size_t nbytes) {
                         visit(piece, start + at, nbytes);
                     });
    }

    // Splits `n` units into planes, as split_planes() does.
    void split_to(std::size_t n, const PlaneSpec& spec, uint8_t* const* planes, Isa isa) const {
        const std::size_t unit = spec.unit_nbytes, nbytes = n * unit;
        std::size_t done = 0;
        if (leaves != nullptr) touch(units, nbytes);
#if PACKHORSE_X86
        if (leaves != nullptr && has_hashed_split(spec, isa))
            for (; nbytes - done >= kXxh3LongMinNbytes;
                 done += std::min(kContentLeafNbytes, nbytes - done))
                split_leaf_avx512(units + done, std::min(kContentLeafNbytes, nbytes - done), spec,
                                  planes, done / unit, leaves->from(done).digests, isa);
#endif
        visit(done, nbytes, isa, [&](const uint8_t* piece, std::size_t at, std::size_t n_piece) {
            split_planes_at(piece, n_piece / unit, spec, planes, at / unit, isa);
        });
    }
};

}  // namespace packhorse
