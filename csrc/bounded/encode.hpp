// Encodes a message of bounded codes (docs/format.md, section 13): all its segments in one call.
//
// Codes have their places from the start, so threads write them where they belong. Escapes do not:
// each run of blocks collects its own, and they are joined at the end.
#pragma once

#include <new>

#include "bounded/message.hpp"
#include "common/parallel.hpp"

namespace packhorse {

// A run of blocks of one segment, for one thread.
constexpr uint64_t kBoundedRun = 128 * kBoundedBlock;

struct BoundedRun {
    std::size_t segment;
    uint64_t start;  // in the segment
    uint64_t n;
    std::size_t n_escapes;
};

inline std::vector<BoundedRun> cut_runs(const uint64_t* lengths, std::size_t n_segments) {
    std::vector<BoundedRun> runs;
    for (std::size_t s = 0; s < n_segments; ++s)
        for (uint64_t at = 0; at < lengths[s]; at += kBoundedRun)
            runs.push_back({s, at, std::min(kBoundedRun, lengths[s] - at), 0});
    return runs;
}

// The bytes of a message of the fixed form.
inline std::size_t fixed_bounded_nbytes(const SegmentSpec& spec, std::size_t element_nbytes) {
    return bounded_head_nbytes(1) + segment_codes_nbytes(spec.n, static_cast<uint32_t>(spec.bits)) +
           counts_nbytes(n_bounded_blocks(spec.n)) + n_bounded_slots(spec.n) * element_nbytes;
}

// The most bytes of a message: every element is an escape.
inline std::size_t max_bounded_nbytes(const std::vector<SegmentSpec>& specs,
                                      std::size_t element_nbytes) {
    uint64_t nbytes = bounded_head_nbytes(specs.size()), n_counts = 0;
    for (const SegmentSpec& spec : specs) {
        nbytes += segment_codes_nbytes(spec.n, static_cast<uint32_t>(spec.bits)) +
                  spec.n * element_nbytes;
        n_counts += n_bounded_blocks(spec.n);
    }
    return nbytes + counts_nbytes(n_counts);
}

struct BoundedEncoding {
    BoundedFault fault = BoundedFault::kNone;
    std::size_t segment = 0;  // that has the fault
    std::size_t nbytes = 0;   // of the message
    uint64_t n_escapes = 0;   // of a segment with too many for the fixed form
};

// How a caller wants a message.
struct BoundedRequest {
    BoundedHeader header;
    uint64_t seed;
    uint32_t doublings;  // of the bound, in the fixed form
    std::size_t threads;
};

template <class Element>
class BoundedEncoder {
  public:
    using Real = typename Element::Real;

    BoundedEncoder(const uint8_t* src, const std::vector<SegmentSpec>& specs,
                   const BoundedRequest& request, uint8_t* dst, Isa isa)
        : src_(src), specs_(specs), request_(request), dst_(dst), isa_(isa) {}

    BoundedEncoding encode() {
        BoundedEncoding result = plan();
        if (result.fault != BoundedFault::kNone) return result;
        encode_runs();
        return finish();
    }

  private:
    BoundedEncoding plan() {
        BoundedEncoding result;
        uint64_t at = bounded_head_nbytes(specs_.size());
        for (std::size_t s = 0; s < specs_.size(); ++s) {
            const SegmentSpec& spec = specs_[s];
            BoundedSegment segment{};
            BoundedEntry& entry = segment.entry;
            result.fault =
                plan_segment<Element>(spec, request_.header.rounding, entry.center, entry.step);
            result.segment = s;
            if (result.fault != BoundedFault::kNone) return result;
            entry.n = spec.n;
            entry.bound = spec.bound;
            entry.bits = static_cast<uint32_t>(spec.bits);
            entry.doublings = request_.doublings;
            segment.codes_at = at;
            segment.counts_at = n_counts_;
            segment.first_element = n_elements_;
            at += segment_codes_nbytes(entry.n, entry.bits);
            n_counts_ += n_bounded_blocks(entry.n);
            n_elements_ += entry.n;
            lengths_.push_back(entry.n);
            segments_.push_back(segment);
        }
        counts_start_ = at;
        return result;
    }

    void encode_runs() {
        counts_.resize(n_counts_);
        runs_ = cut_runs(lengths_.data(), lengths_.size());
        escapes_.resize(runs_.size());
        const bool is_fixed = request_.header.form == BoundedForm::kFixed;
        const std::size_t most = is_fixed ? n_bounded_slots(lengths_[0]) : ~std::size_t{0};
        parallel_for(runs_.size(), request_.threads, [&](std::size_t, std::size_t r) {
            BoundedRun& run = runs_[r];
            const BoundedSegment& segment = segments_[run.segment];
            const BoundedEntry& entry = segment.entry;
            const auto by =
                make_quantiser<Element>(entry.step, entry.center, entry.bound, entry.bits);
            const uint64_t first = segment.first_element + run.start;
            const uint64_t block = run.start / kBoundedBlock;
            const BlocksToEncode blocks{
                src_ + first * Element::kNbytes,
                run.n,
                {counter_key(request_.seed, run.segment), static_cast<uint32_t>(run.start)},
                dst_ + segment.codes_at + block * block_codes_nbytes(kBoundedBlock, entry.bits),
                counts_.data() + segment.counts_at + block,
                &escapes_[r],
                most};
            run.n_escapes = request_.header.rounding == Rounding::kNearest
                                ? encode_blocks<Element, Rounding::kNearest>(blocks, by, isa_)
                                : encode_blocks<Element, Rounding::kStochastic>(blocks, by, isa_);
        });
    }

    BoundedEncoding finish() {
        for (const BoundedRun& run : runs_) segments_[run.segment].entry.n_escapes += run.n_escapes;
        const bool is_fixed = request_.header.form == BoundedForm::kFixed;
        if (is_fixed && segments_[0].entry.n_escapes > n_bounded_slots(segments_[0].entry.n))
            return {BoundedFault::kEscapes, 0, 0};
        uint8_t* end = write_escapes(write_counts(is_fixed));
        if (is_fixed) {
            const BoundedEntry& entry = segments_[0].entry;
            const std::size_t unused =
                (n_bounded_slots(entry.n) - entry.n_escapes) * Element::kNbytes;
            std::memset(end, 0, unused);
            end += unused;
        }
        const auto nbytes = static_cast<std::size_t>(end - dst_);
        write_table();
        seal_message(request_.header, dst_, nbytes, isa_);
        return {BoundedFault::kNone, 0, nbytes};
    }

    // Writes the counts of segments that have any. Returns their end, with their padding.
    uint8_t* write_counts(bool always) {
        uint64_t n_written = 0;
        for (const BoundedSegment& segment : segments_) {
            if (!always && segment.entry.n_escapes == 0) continue;
            const uint64_t n = n_bounded_blocks(segment.entry.n);
            if (n == 0) continue;
            std::memcpy(dst_ + counts_start_ + 2 * n_written, counts_.data() + segment.counts_at,
                        2 * n);
            n_written += n;
        }
        uint8_t* const end = dst_ + counts_start_ + 2 * n_written;
        const std::size_t padding = counts_nbytes(n_written) - 2 * n_written;
        std::memset(end, 0, padding);
        return end + padding;
    }

    // Writes the escapes of all runs. Returns their end.
    uint8_t* write_escapes(uint8_t* to) {
        for (const std::vector<uint8_t>& escapes : escapes_)
            to = std::copy(escapes.begin(), escapes.end(), to);
        return to;
    }

    void write_table() {
        uint8_t* to = dst_ + kBoundedHeaderNbytes;
        for (const BoundedSegment& segment : segments_) {
            write_entry(segment.entry, to);
            to += kBoundedEntryNbytes;
        }
        std::memset(to, 0,
                    static_cast<std::size_t>(dst_ + bounded_head_nbytes(specs_.size()) - to));
    }

    const uint8_t* src_;
    const std::vector<SegmentSpec>& specs_;
    const BoundedRequest& request_;
    uint8_t* dst_;
    Isa isa_;
    std::vector<BoundedSegment> segments_;
    std::vector<uint64_t> lengths_;
    std::vector<uint16_t> counts_;
    std::vector<BoundedRun> runs_;
    std::vector<std::vector<uint8_t>> escapes_;  // by run
    uint64_t n_counts_ = 0;
    uint64_t n_elements_ = 0;
    std::size_t counts_start_ = 0;
};

// Encodes the elements at `src` to `dst`, which has room for max_bounded_nbytes(), or for
// fixed_bounded_nbytes() in the fixed form. The dtype of the request is one of this section.
inline BoundedEncoding encode_bounded_message(const uint8_t* src,
                                              const std::vector<SegmentSpec>& specs,
                                              const BoundedRequest& request, uint8_t* dst,
                                              Isa isa) {
    const DefaultArithmetic arithmetic;
    BoundedEncoding result;
    with_element(request.header.dtype_code, [&]<class Element>() {
        result = BoundedEncoder<Element>(src, specs, request, dst, isa).encode();
    });
    return result;
}

}  // namespace packhorse
