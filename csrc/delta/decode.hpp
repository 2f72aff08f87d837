// Decoding a chunk of differences (docs/format.md, 6.6). All tokens are decoded first, class by
// class, and turned into differences in the order by class. Then, block by block, the differences
// are put back in the order of units and added to the base.
#pragma once

#include <algorithm>

#include "delta/order.hpp"
#include "planes/symbols.hpp"
#include "rans/decode.hpp"

namespace packhorse {

// Reads fields of up to 64 bits, from bit 0 of the first byte on.
class BitReader {
  public:
    BitReader() = default;
    BitReader(const uint8_t* src, std::size_t nbytes) : src_(src), n_bits_(8 * nbytes) {}

    // Takes the next `n` bits, at most 64. Gives zero and a fault if there are fewer.
    uint64_t take(uint32_t n) {
        if (n > n_bits_ - at_) {
            is_short_ = true;
            return 0;
        }
        const std::size_t byte = at_ / 8;
        if (n <= 56 && byte + 8 <= n_bits_ / 8) {
            const uint64_t bits = load<uint64_t>(src_ + byte) >> (at_ % 8);
            at_ += n;
            return bits & ((uint64_t{1} << n) - 1);
        }
        return take_slowly(n);
    }

    // Checks that the last byte was reached but not passed, and that its unused bits are zero.
    Status finish() const {
        if (is_short_ || n_bits_ - at_ >= 8) return Status::kExtraBits;
        if (at_ % 8 != 0 && src_[at_ / 8] >> (at_ % 8) != 0) return Status::kReserved;
        return Status::kOk;
    }

  private:
    uint64_t take_slowly(uint32_t n) {
        uint64_t value = 0;
        for (uint32_t done = 0; done < n;) {
            const uint32_t offset = at_ % 8;
            const uint32_t run = std::min(n - done, 8 - offset);
            const uint64_t bits = (src_[at_ / 8] >> offset) & ((1u << run) - 1);
            value |= bits << done;
            done += run;
            at_ += run;
        }
        return value;
    }

    const uint8_t* src_ = nullptr;
    std::size_t n_bits_ = 0;
    std::size_t at_ = 0;
    bool is_short_ = false;
};

struct alignas(64) DeltaDecoder {
    RansDecoder rans;
    DeltaHeader header;
    RansModel models[kMaxDeltaClasses];
    const uint8_t* raw;  // raw bits of the next class
    BitReader extra;
};

constexpr std::size_t delta_row_nbytes(std::size_t nbytes) {
    return round_up(nbytes, 64) + kDeltaSlackNbytes;
}

// Bytes of memory for a chunk: keys, tokens, differences in the order by class, and the base if it
// is cast.
constexpr std::size_t delta_scratch_nbytes(std::size_t n, uint32_t unit_nbytes) {
    return 2 * delta_row_nbytes(n) + delta_row_nbytes(n * unit_nbytes) + delta_row_nbytes(2 * n);
}

// Finds everything behind the header. `src` is the stream.
inline Status open_delta_body(const uint8_t* src, std::size_t nbytes, const DeltaStarts& starts,
                              DeltaDecoder& out) {
    const DeltaRule& rule = out.header.rule;
    std::size_t at = kDeltaModelsOffset;
    bool has_escape = false;
    for (uint32_t c = 0; c < rule.n_classes; ++c) {
        std::size_t used = 0;
        const Status status = read_token_model(src + at, nbytes - at, out.models[c], used);
        if (status != Status::kOk) return status;
        has_escape |= out.models[c].has_escape();
        at += used;
    }
    if (out.header.n_escapes > 0 && !has_escape) return Status::kEscapeCount;
    const std::size_t n_lanes = std::size_t{1} << out.header.lanes_log;
    std::size_t raw = 0;
    for (uint32_t c = 0; c < rule.n_classes; ++c)
        raw += delta_raw_nbytes(starts.count(c), rule.shifts[c]);
    const std::size_t before_words =
        at + 4 * n_lanes + raw + out.header.extra_nbytes + out.header.n_escapes;
    if (nbytes < before_words) return Status::kStreamLength;
    RansDecoder& rans = out.rans;
    rans.lanes_log = out.header.lanes_log;
    std::memcpy(rans.states, src + at, 4 * n_lanes);
    for (std::size_t lane = 0; lane < n_lanes; ++lane)
        if (rans.states[lane] < kStateLowerBound) return Status::kBadField;
    out.raw = src + at + 4 * n_lanes;
    out.extra = BitReader(out.raw + raw, out.header.extra_nbytes);
    rans.escapes = out.raw + raw + out.header.extra_nbytes;
    rans.escapes_end = rans.escapes + out.header.n_escapes;
    for (const uint8_t* escape = rans.escapes; escape < rans.escapes_end; ++escape)
        if (*escape >= kDeltaTokens) return Status::kBadField;
    rans.words = rans.escapes_end;
    rans.words_end = src + nbytes;
    rans.on_padded_copy = false;
    return (rans.words_end - rans.words) % 2 == 0 ? Status::kOk : Status::kStreamLength;
}

// Reads t of section 6.6 for a token that is not direct.
inline uint64_t take_long_token(uint32_t token, BitReader& extra) {
    if (token == kDeltaFullToken) return extra.take(kFullTokenBits);
    const uint32_t length = token - kTokenLengthBias;
    const uint64_t bits = extra.take(length);  // the sign, then m without its highest bit
    const uint64_t m = bits >> 1 | uint64_t{1} << (length - 1);
    return (bits & 1) != 0 ? ~m : m;
}

// Computes the differences of at most kSegment units, from unit `at` on, of a class that has
// `count` units. The raw bits begin at `raw`.
template <class Unit>
inline void join_raw_bits(const uint8_t* tokens, std::size_t n, uint32_t shift, const uint8_t* raw,
                          std::size_t count, std::size_t at, Unit* __restrict out, Isa isa) {
    const uint32_t n_bytes = shift / 8, n_bits = shift % 8;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i)
            out[i] =
                static_cast<Unit>(static_cast<Wide<Unit>>(int{tokens[i]} - kTokenBias) << shift);
    });
    for (uint32_t p = 0; p < n_bytes; ++p) {
        const uint8_t* __restrict plane = raw + p * count + at;
        vectorised(isa, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                out[i] = static_cast<Unit>(out[i] | Wide<Unit>{plane[i]} << (8 * p));
        });
    }
    if (n_bits == 0) return;
    alignas(64) uint8_t part[kSegmentUnitsOfDelta] = {};
    const RawPlanes planes =
        find_raw_planes({n_bits, (1u << n_bits) - 1}, raw + n_bytes * count, count);
    add_raw_bits(planes, at, n, part, isa);
    const uint8_t* const bits = part;
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i)
            out[i] = static_cast<Unit>(out[i] | Wide<Unit>{bits[i]} << (8 * n_bytes));
    });
}

// Completes the differences whose tokens are not direct.
template <class Unit>
inline void take_long_tokens(const uint8_t* tokens, std::size_t n, uint32_t shift, BitReader& extra,
                             Unit* out, Isa isa) {
    const uint64_t low_bits = (uint64_t{1} << shift) - 1;
    for_each_marked(tokens, n, kLongBit, isa, [&](std::size_t i) PACKHORSE_VECTORISED {
        const uint64_t t = take_long_token(tokens[i], extra);
        out[i] = static_cast<Unit>(t << shift | (out[i] & low_bits));
    });
}

// Computes all differences of a class.
template <class Unit>
inline void build_differences(const uint8_t* tokens, std::size_t count, uint32_t shift,
                              DeltaDecoder& decoder, Unit* out, Isa isa) {
    for (std::size_t at = 0; at < count; at += kSegmentUnitsOfDelta) {
        const std::size_t n = std::min(kSegmentUnitsOfDelta, count - at);
        join_raw_bits(tokens + at, n, shift, decoder.raw, count, at, out + at, isa);
        take_long_tokens(tokens + at, n, shift, decoder.extra, out + at, isa);
    }
    decoder.raw += delta_raw_nbytes(count, shift);
}

// Computes the differences of a narrow class whose tokens are not direct, one after the other.
template <class Unit>
inline void list_long_tokens(const uint8_t* tokens, std::size_t n, BitReader& extra, Unit* out,
                             Isa isa) {
    for_each_marked(tokens, n, kLongBit, isa, [&](std::size_t i) PACKHORSE_VECTORISED {
        *out++ = static_cast<Unit>(take_long_token(tokens[i], extra));
    });
}

template <class Unit, bool kFloat>
inline void add_differences(const uint8_t* base, const Unit* differences, std::size_t n,
                            uint8_t* __restrict dst, Isa isa) {
    vectorised(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t i = 0; i < n; ++i) {
            const Unit o = to_ordered<Unit, kFloat>(load<Unit>(base + i * sizeof(Unit)));
            store(dst + i * sizeof(Unit),
                  from_ordered<Unit, kFloat>(static_cast<Unit>(o + differences[i])));
        }
    });
}

// The steps of decoding a chunk. `memory` has delta_scratch_nbytes().
template <class Unit, bool kFloat>
class DeltaChunkDecoder {
  public:
    DeltaChunkDecoder(DeltaDecoder& decoder, std::size_t n, uint8_t* memory, Isa isa)
        : decoder_(decoder),
          n_(n),
          isa_(isa),
          keys_(memory),
          tokens_(memory + delta_row_nbytes(n)),
          differences_(reinterpret_cast<Unit*>(memory + 2 * delta_row_nbytes(n))) {}

    Status decode(const uint8_t* stream, std::size_t nbytes, const uint8_t* base, uint8_t* dst) {
        Status status = read_delta_header(stream, nbytes, kUnitBits<Unit>, decoder_.header);
        if (status != Status::kOk) return status;
        fill_keys<Unit, kFloat>(base, n_, keys_, isa_);
        const DeltaStarts starts = count_delta_classes(keys_, n_, decoder_.header.rule, isa_);
        status = open_delta_body(stream, nbytes, starts, decoder_);
        Ahead ahead;
        ahead.write = reinterpret_cast<uintptr_t>(dst);
        ahead.write_step = 128 * sizeof(Unit);
        ahead.read = reinterpret_cast<uintptr_t>(base + n_ * sizeof(Unit));
        ahead.read_step = 128 * sizeof(Unit);
        if (status == Status::kOk) status = decode_classes(starts, ahead);
        if (status != Status::kOk) return status;
        merge(starts, base, dst);
        return Status::kOk;
    }

  private:
    Status decode_classes(const DeltaStarts& starts, Ahead& ahead) {
        const DeltaRule& rule = decoder_.header.rule;
        const uint32_t n_wide = first_narrow_class(rule);
        for (uint32_t c = 0; c < rule.n_classes; ++c) {
            decoder_.rans.model = decoder_.models[c];
            build_rans_tables(decoder_.rans, isa_);
            uint8_t* const tokens = tokens_ + starts.at[c];
            const Status status = rans_decode(decoder_.rans, starts.count(c), tokens, ahead, isa_);
            if (status != Status::kOk) return status;
            Unit* const differences = differences_ + starts.at[c];
            if (c < n_wide) {
                build_differences(tokens, starts.count(c), rule.shifts[c], decoder_, differences,
                                  isa_);
                std::memset(tokens, kLongBit, starts.count(c));
            } else {
                list_long_tokens(tokens, starts.count(c), decoder_.extra, differences, isa_);
            }
        }
        uint8_t ignored[2 * kMaxLanes];
        const Status status = rans_close(decoder_.rans, false, ignored);
        return status == Status::kOk ? decoder_.extra.finish() : status;
    }

    void merge(const DeltaStarts& starts, const uint8_t* base, uint8_t* dst) {
        const DeltaRule& rule = decoder_.header.rule;
        const DeltaMoves moves(rule, isa_);
        const ClassOfKey classes(rule);
        const Unit* next[kMaxDeltaClasses];
        const uint8_t* next_tokens[kMaxDeltaClasses];
        for (uint32_t c = 0; c < kMaxDeltaClasses; ++c) {
            next[c] = differences_ + starts.at[c];
            next_tokens[c] = tokens_ + starts.at[c];
        }
        alignas(64) Unit block[kDeltaBlockUnits] = {};
        alignas(64) uint8_t tokens[kDeltaBlockUnits] = {};
        for (std::size_t at = 0; at < n_; at += kDeltaBlockUnits) {
            const std::size_t n = std::min(kDeltaBlockUnits, n_ - at);
            const uint8_t* const keys = keys_ + at;
            if (moves.bytes.first < rule.n_classes) {
                if (moves.units.last > 0) std::memset(tokens, 0, n);  // no marks of another block
                unsort_tokens(next_tokens, keys, n, rule, moves.bytes, classes, tokens, isa_);
                widen_tokens(tokens, n, block);
            }
            if (moves.units.last > 0)
                unsort_units(next, keys, n, rule, moves.units, classes, block, isa_);
            for_each_marked(tokens, n, kLongBit, isa_, [&](std::size_t i) PACKHORSE_VECTORISED {
                block[i] = *next[classes.of[keys[i]]]++;
            });
            add_differences<Unit, kFloat>(base + at * sizeof(Unit), block, n,
                                          dst + at * sizeof(Unit), isa_);
        }
    }

    // Computes the differences of direct tokens without raw bits.
    void widen_tokens(const uint8_t* tokens, std::size_t n, Unit* __restrict out) {
        vectorised(isa_, [=]() PACKHORSE_VECTORISED {
            for (std::size_t i = 0; i < n; ++i)
                out[i] = static_cast<Unit>(Wide<Unit>{tokens[i]} - Wide<Unit>{kTokenBias});
        });
    }

    DeltaDecoder& decoder_;
    std::size_t n_;
    Isa isa_;
    uint8_t* keys_;
    uint8_t* tokens_;
    Unit* differences_;
};

// Decodes a chunk of `n` >= 1 units, which begins at unit `first` of the tensor. `memory` has
// delta_scratch_nbytes().
inline Status decode_delta(const uint8_t* stream, std::size_t nbytes, std::size_t n,
                           std::size_t first, uint32_t unit_nbytes, const Base& base,
                           DeltaDecoder& decoder, uint8_t* memory, uint8_t* dst, Isa isa) {
    uint8_t* const cast_memory =
        memory + 2 * delta_row_nbytes(n) + delta_row_nbytes(n * unit_nbytes);
    const uint8_t* const units = chunk_base(base, first, n, unit_nbytes, cast_memory, isa);
    if (nbytes == 0) {
        std::memcpy(dst, units, n * unit_nbytes);
        return Status::kOk;
    }
    return with_units(unit_nbytes, base.is_float, [&]<class Unit, bool kFloat>() {
        return DeltaChunkDecoder<Unit, kFloat>(decoder, n, memory, isa)
            .decode(stream, nbytes, units, dst);
    });
}

}  // namespace packhorse
