// Tables for the codes of bounded messages (docs/format.md, section 13.2): an rANS model for each
// segment that gains from one, and what is built from it for both directions.
//
// Building tables takes as long as coding a small segment, so the tables outlive the message that
// they were made for.
#pragma once

#include <memory>

#include "bounded/decode.hpp"
#include "chunk/choose.hpp"
#include "chunk/chunk.hpp"
#include "common/scratch.hpp"
#include "planes/histogram.hpp"
#include "rans/decode.hpp"
#include "rans/encode.hpp"

namespace packhorse {

constexpr std::size_t kCodedModelHeaderNbytes = 4;

// The model of a segment with its tables. A decoder that is set up for a stream is a copy of
// `decoder`.
struct CodeTable {
    RansModel model;
    RansEncodeTables encode;
    RansDecoder decoder;

    // Whether every byte has a code or becomes an escape.
    bool encodes_all() const {
        return model.has_escape() || model.n_symbols == 256u >> model.raw_bits;
    }
};

inline std::unique_ptr<CodeTable> make_code_table(const RansModel& model) {
    auto table = std::make_unique<CodeTable>();
    table->model = model;
    fill_encode_tables(model, table->encode);
    RansDecoder& decoder = table->decoder;
    decoder.model = model;
    if (model.n_buckets() > 0) {
        build_alias(model, decoder.alias);
        fill_bucket_entries(model, decoder.alias, decoder.buckets);
        fill_bucket_bounds(model.n_buckets(), decoder.buckets, decoder.bounds);
        fill_bucket_parts(model, decoder.alias, decoder.buckets, decoder.parts);
        if (model.n_buckets() == kWideBuckets)
            fill_bucket_halves(decoder.alias, decoder.buckets, decoder.halves);
        else
            fill_pair_tables(decoder.alias, decoder.buckets, decoder.pairs);
    }
    fill_decode_table(model, decoder.alias, decoder.table());
    return table;
}

// Tables made from serialised models, by segment.
class CodeTables {
  public:
    // Throws if the models break a rule.
    CodeTables(const uint8_t* models, std::size_t nbytes, Isa isa)
        : models_(models, models + nbytes), crc_(crc32c(models, nbytes, isa)) {
        std::size_t at = 0;
        while (is_valid_ && at < nbytes) is_valid_ = read_one(at);
    }

    CodeTables(const CodeTables&) = delete;
    CodeTables& operator=(const CodeTables&) = delete;

    bool is_valid() const { return is_valid_; }
    const uint8_t* models() const { return models_.data(); }
    std::size_t models_nbytes() const { return models_.size(); }
    uint32_t crc() const { return crc_; }
    // Null if the codes of a segment have no model.
    const CodeTable* of(std::size_t segment) const {
        return segment < tables_.size() ? tables_[segment].get() : nullptr;
    }

  private:
    // Each model has 4 bytes before it: its length, 0 if there is none; raw bits; and 0.
    bool read_one(std::size_t& at) {
        const std::size_t left = models_.size() - at;
        if (left < kCodedModelHeaderNbytes) return false;
        const uint8_t* const src = models_.data() + at;
        const std::size_t nbytes = load<uint16_t>(src);
        if (src[3] != 0 || src[2] > kMaxRansRawBits) return false;
        if (left - kCodedModelHeaderNbytes < nbytes) return false;
        at += kCodedModelHeaderNbytes + nbytes;
        if (nbytes == 0) {
            tables_.push_back(nullptr);
            return src[2] == 0;
        }
        RansModel model;
        std::size_t used = 0;
        const Status status =
            read_model(src + kCodedModelHeaderNbytes, nbytes, src[2], model, used);
        if (status != Status::kOk || used != nbytes) return false;
        tables_.push_back(make_code_table(model));
        return true;
    }

    std::vector<uint8_t> models_;
    uint32_t crc_;
    bool is_valid_ = true;
    std::vector<std::unique_ptr<CodeTable>> tables_;
};

// Codes of a segment are coded piece by piece.
constexpr uint64_t kCodedPiece = 512 * kBoundedBlock;
constexpr uint64_t kMinCodedLength = 512;  // elements of a segment that gets a model
constexpr uint32_t kMaxCodedBits = 8;

// The codes of a run of elements as bytes; a run begins with a block. `bits` is at most 8.
inline void unpack_codes(const uint8_t* codes, std::size_t n, uint32_t bits, uint8_t* plane,
                         Isa isa) {
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        const uint32_t mask = (1u << bits) - 1;
        for (std::size_t at = 0; at < n; at += kBoundedBlock) {
            const std::size_t here = std::min(n - at, kBoundedBlock);
            const uint8_t* const block = codes + at / 8 * bits;
            for (std::size_t row = 0; row < rows_of(here); ++row) {
                const std::size_t bit = row * bits, word = bit / 32, shift = bit % 32;
                const uint8_t* const low = block + 4 * kBoundedLanes * word;
                // A code may lie in two words.
                const uint8_t* const high = shift + bits > 32 ? low + 4 * kBoundedLanes : low;
                uint8_t* const to = plane + at + row * kBoundedLanes;
                for (std::size_t lane = 0; lane < kBoundedLanes; ++lane) {
                    const uint64_t both = load<uint32_t>(low + 4 * lane) |
                                          uint64_t{load<uint32_t>(high + 4 * lane)} << 32;
                    to[lane] = static_cast<uint8_t>(both >> shift & mask);
                }
            }
        }
    });
}

// The inverse. Codes behind the n-th are 0 in `plane`, up to a whole row.
inline void pack_codes(const uint8_t* plane, std::size_t n, uint32_t bits, uint8_t* codes,
                       Isa isa) {
    vectorised_wide(isa, [=]() PACKHORSE_VECTORISED {
        for (std::size_t at = 0; at < n; at += kBoundedBlock) {
            const std::size_t here = std::min(n - at, kBoundedBlock);
            uint8_t* const block = codes + at / 8 * bits;
            uint64_t pending[kBoundedLanes] = {};
            uint32_t n_pending = 0;
            uint8_t* to = block;
            for (std::size_t row = 0; row < rows_of(here); ++row) {
                const uint8_t* const from = plane + at + row * kBoundedLanes;
                for (std::size_t lane = 0; lane < kBoundedLanes; ++lane)
                    pending[lane] |= uint64_t{from[lane]} << n_pending;
                n_pending += bits;
                if (n_pending < 32 && row + 1 < rows_of(here)) continue;
                for (std::size_t lane = 0; lane < kBoundedLanes; ++lane) {
                    store(to + 4 * lane, static_cast<uint32_t>(pending[lane]));
                    pending[lane] >>= 32;
                }
                to += 4 * kBoundedLanes;
                const bool is_last = row + 1 == rows_of(here);
                if (is_last && n_pending > 32)
                    for (std::size_t lane = 0; lane < kBoundedLanes; ++lane)
                        store(to + 4 * lane, static_cast<uint32_t>(pending[lane]));
                n_pending -= std::min(n_pending, 32u);
            }
        }
    });
}

inline uint8_t* append_model(const RansModel* model, std::vector<uint8_t>& models) {
    const std::size_t nbytes = model == nullptr ? 0 : model_nbytes(model->n_in_range());
    const std::size_t at = models.size();
    models.resize(at + kCodedModelHeaderNbytes + nbytes);
    uint8_t* const to = models.data() + at;
    std::memset(to, 0, kCodedModelHeaderNbytes);
    if (model == nullptr) return to;
    store(to, static_cast<uint16_t>(nbytes));
    to[2] = static_cast<uint8_t>(model->raw_bits);
    write_model(*model, to + kCodedModelHeaderNbytes);
    return to;
}

// Unpacks codes of blocks that are spread evenly over a segment, as many as a piece has at most.
// Returns how many codes there are.
inline std::size_t sample_codes(const uint8_t* codes, uint64_t n, uint32_t bits, uint8_t* plane,
                                Isa isa) {
    if (n <= kCodedPiece) {
        unpack_codes(codes, n, bits, plane, isa);
        return n;
    }
    constexpr uint64_t kBlocks = kCodedPiece / kBoundedBlock;
    const uint64_t n_blocks = n / kBoundedBlock;
    for (uint64_t b = 0; b < kBlocks; ++b) {
        const uint64_t block = b * n_blocks / kBlocks;
        unpack_codes(codes + block * block_codes_nbytes(kBoundedBlock, bits), kBoundedBlock, bits,
                     plane + b * kBoundedBlock, isa);
    }
    return kCodedPiece;
}

// Chooses a model for each segment of a message that gains from one, and serialises them. Values
// that do not occur become escapes of the model, because later messages may have them.
inline std::vector<uint8_t> choose_code_models(const uint8_t* src, const BoundedMessage& message,
                                               Isa isa) {
    const Scratch plane(kCodedPiece + kPlaneSlack);
    std::vector<uint8_t> models;
    for (const BoundedSegment& segment : message.segments) {
        const uint32_t bits = segment.entry.bits;
        if (bits > kMaxCodedBits || segment.entry.n < kMinCodedLength) {
            append_model(nullptr, models);
            continue;
        }
        const std::size_t n =
            sample_codes(src + segment.codes_at, segment.entry.n, bits, plane.get(), isa);
        Histogram histogram;
        count_bytes(plane.get(), n, 0, histogram);
        histogram.sampled = true;
        SymbolCounts symbols;
        list_symbols(histogram, symbols);
        RansModel model;
        const std::size_t nbytes = choose_model(symbols, n, model);
        append_model(nbytes < n * bits / 8 ? &model : nullptr, models);
    }
    return models;
}

}  // namespace packhorse
