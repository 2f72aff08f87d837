// Decoding a chunk of differences (docs/format.md, 6.6). All tokens are decoded first, class by
// class. Then, block by block, tokens and raw bits are put back in the order of units, joined to
// differences and added to the base.
#pragma once

#include <algorithm>

#include "delta/differences.hpp"
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

// Bytes of memory for a chunk: keys, rows in the order by class, differences whose tokens are not
// direct, and the base if it is cast.
constexpr std::size_t delta_scratch_nbytes(std::size_t n, uint32_t unit_nbytes) {
    return (2 + unit_nbytes) * delta_row_nbytes(n) + delta_row_nbytes(n * unit_nbytes) +
           delta_row_nbytes(2 * n);
}

// Where the base's units of a chunk go if they are cast.
inline uint8_t* delta_cast_memory(uint8_t* memory, std::size_t n, uint32_t unit_nbytes) {
    return memory + (2 + unit_nbytes) * delta_row_nbytes(n) + delta_row_nbytes(n * unit_nbytes);
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

// Lists the differences of a class whose tokens are not direct, without their raw bits.
template <class Unit>
inline void list_long_tokens(const uint8_t* tokens, std::size_t n, uint32_t shift, BitReader& extra,
                             Unit* out, Isa isa) {
    for_each_marked_byte(tokens, n, kLongBit, isa, [&](uint8_t token) PACKHORSE_VECTORISED {
        *out++ = static_cast<Unit>(take_long_token(token, extra) << shift);
    });
}

// Whether units of a class may have tokens that are not direct.
inline bool has_long_tokens(const RansModel& model) {
    const uint8_t* const end = model.symbols + model.n_symbols;
    return model.has_escape() ||
           std::any_of(model.symbols, end, [](uint8_t token) { return (token & kLongBit) != 0; });
}

// Turns bit planes into bytes.
inline void join_bit_planes(const uint8_t* planes, std::size_t n, uint32_t n_bits, uint8_t* dst,
                            Isa isa) {
    const RawPlanes raw = find_raw_planes({n_bits, (1u << n_bits) - 1}, planes, n);
    for (std::size_t at = 0; at < n; at += kDeltaBlockUnits) {
        const std::size_t part = std::min(kDeltaBlockUnits, n - at);
        std::memset(dst + at, 0, part);
        add_raw_bits(raw, at, part, dst + at, isa);
    }
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
          differences_(reinterpret_cast<Unit*>(memory + (2 + sizeof(Unit)) * delta_row_nbytes(n))) {
        for (uint32_t p = 0; p < 1 + sizeof(Unit); ++p)
            rows_[p] = memory + (1 + p) * delta_row_nbytes(n);
    }

    // `dst` may be `base`.
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
        const uint32_t n_rows = DeltaRowCounts(rule).most;
        for (uint32_t c = 0; c < rule.n_classes; ++c) {
            decoder_.rans.model = decoder_.models[c];
            build_rans_tables(decoder_.rans, isa_);
            uint8_t* const tokens = rows_[0] + starts.at[c];
            const Status status = rans_decode(decoder_.rans, starts.count(c), tokens, ahead, isa_);
            if (status != Status::kOk) return status;
            if (has_long_tokens(decoder_.models[c]))
                list_long_tokens(tokens, starts.count(c), rule.shifts[c], decoder_.extra,
                                 differences_ + starts.at[c], isa_);
            take_raw_bits(starts.at[c], starts.count(c), rule.shifts[c], n_rows);
        }
        uint8_t ignored[2 * kMaxLanes];
        const Status status = rans_close(decoder_.rans, false, ignored);
        return status == Status::kOk ? decoder_.extra.finish() : status;
    }

    // Moves the raw bits of a class of `n` units, which begins at `at`, to the rows. Bytes that the
    // class lacks are zero.
    void take_raw_bits(std::size_t at, std::size_t n, uint32_t shift, uint32_t n_rows) {
        const uint32_t n_bytes = shift / 8, n_bits = shift % 8;
        for (uint32_t p = 1; p <= n_bytes; ++p, decoder_.raw += n)
            std::memcpy(rows_[p] + at, decoder_.raw, n);
        if (n_bits > 0) {
            join_bit_planes(decoder_.raw, n, n_bits, rows_[1 + n_bytes] + at, isa_);
            decoder_.raw += n_bits * bit_plane_nbytes(n);
        }
        // Vectors add nothing for them, but units that do not fill one move one by one.
        const std::size_t done = isa_ >= Isa::kAvx2 && n > 64 ? n - 64 : 0;
        for (uint32_t p = 1 + n_bytes + (n_bits > 0 ? 1 : 0); p < n_rows; ++p)
            std::memset(rows_[p] + at + done, 0, n - done);
    }

    void merge(const DeltaStarts& starts, const uint8_t* base, uint8_t* dst) {
        const DeltaRule& rule = decoder_.header.rule;
        const DeltaRowCounts counts(rule);
        const ClassOfKey classes(rule);
        const Unit* next[kMaxDeltaClasses];
        for (uint32_t c = 0; c < kMaxDeltaClasses; ++c) next[c] = differences_ + starts.at[c];
        ClassRows<const uint8_t> rows;
        std::copy(std::begin(rows_), std::end(rows_), std::begin(rows.at));
        std::copy_n(starts.at, kMaxDeltaClasses, rows.next);
        BlockRows block;
        for (std::size_t at = 0; at < n_; at += kDeltaBlockUnits) {
            const std::size_t n = std::min(kDeltaBlockUnits, n_ - at);
            const uint8_t* const keys = keys_ + at;
            uint8_t* const out = dst + at * sizeof(Unit);
            unsort_rows(rows, keys, n, rule, counts, block, isa_);
            join_differences<Unit, kFloat>(block, counts.most, n, base + at * sizeof(Unit), out,
                                           isa_);
            for_each_scattered(
                block.at[0], n, kLongBit, isa_, [&](std::size_t i) PACKHORSE_VECTORISED {
                    uint8_t* const unit = out + i * sizeof(Unit);
                    const Unit so_far = to_ordered<Unit, kFloat>(load<Unit>(unit));
                    const Unit rest = *next[classes.of[keys[i]]]++;
                    store(unit, from_ordered<Unit, kFloat>(static_cast<Unit>(so_far + rest)));
                });
        }
    }

    DeltaDecoder& decoder_;
    std::size_t n_;
    Isa isa_;
    uint8_t* keys_;
    uint8_t* rows_[kMaxDeltaRows] = {};
    Unit* differences_;
};

// Decodes a chunk of `n` >= 1 units, which begins at unit `first` of the tensor. `memory` has
// delta_scratch_nbytes(). `dst` may be the chunk's units in the base, if they are not cast.
inline Status decode_delta(const uint8_t* stream, std::size_t nbytes, std::size_t n,
                           std::size_t first, uint32_t unit_nbytes, const Base& base,
                           DeltaDecoder& decoder, uint8_t* memory, uint8_t* dst, Isa isa) {
    const uint8_t* const units =
        chunk_base(base, first, n, unit_nbytes, delta_cast_memory(memory, n, unit_nbytes), isa);
    if (nbytes == 0) {
        if (dst != units) std::memcpy(dst, units, n * unit_nbytes);
        return Status::kOk;
    }
    return with_units(unit_nbytes, base.is_float, [&]<class Unit, bool kFloat>() {
        return DeltaChunkDecoder<Unit, kFloat>(decoder, n, memory, isa)
            .decode(stream, nbytes, units, dst);
    });
}

}  // namespace packhorse
