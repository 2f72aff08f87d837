// Decodes a message of bounded codes (docs/format.md, section 13).
#pragma once

#include <atomic>

#include "bounded/encode.hpp"

namespace packhorse {

// Where the escapes of each run begin, counted from the segment's first.
inline void find_escapes(const uint8_t* src, const BoundedMessage& message,
                         std::vector<BoundedRun>& runs) {
    std::size_t before = 0;
    for (BoundedRun& run : runs) {
        const BoundedSegment& segment = message.segments[run.segment];
        if (run.start == 0) before = 0;
        run.n_escapes = before;
        if (!segment.has_counts) continue;
        const uint8_t* const counts = src + segment.counts_at + run.start / kBoundedBlock * 2;
        for (uint64_t b = 0; b < n_bounded_blocks(run.n); ++b)
            before += load<uint16_t>(counts + 2 * b);
    }
}

template <class Element>
inline bool decode_run(const uint8_t* src, const BoundedSegment& segment, const BoundedRun& run,
                       uint8_t* dst, Isa isa) {
    const BoundedEntry& entry = segment.entry;
    const auto by = make_quantiser<Element>(entry.step, entry.center, entry.bound, entry.bits);
    const uint64_t block = run.start / kBoundedBlock;
    const BlocksToDecode blocks{
        src + segment.codes_at + block * block_codes_nbytes(kBoundedBlock, entry.bits), run.n,
        segment.has_counts ? src + segment.counts_at + 2 * block : nullptr,
        src + segment.escapes_at + run.n_escapes * Element::kNbytes,
        dst + (segment.first_element + run.start) * Element::kNbytes};
    return decode_blocks<Element>(blocks, by, isa);
}

// Decodes all elements of a message without a fault to `dst`. Sets the message's fault if codes and
// counts disagree or padding is not zero; the content of `dst` is then undefined.
inline void decode_bounded_message(const uint8_t* src, BoundedMessage& message, uint8_t* dst,
                                   std::size_t threads, Isa isa) {
    const DefaultArithmetic arithmetic;
    std::vector<uint64_t> lengths;
    for (std::size_t s = 0; s < message.segments.size(); ++s) {
        const BoundedSegment& segment = message.segments[s];
        lengths.push_back(segment.entry.n);
        const uint64_t rest = segment.entry.n % kBoundedBlock;
        const uint64_t block = segment.entry.n / kBoundedBlock;
        const uint8_t* const codes =
            src + segment.codes_at + block * block_codes_nbytes(kBoundedBlock, segment.entry.bits);
        if (rest == 0 || padding_is_zero(codes, rest, segment.entry.bits)) continue;
        message.fault = BoundedFault::kReserved;
        message.fault_segment = s;
        return;
    }
    std::vector<BoundedRun> runs = cut_runs(lengths.data(), lengths.size());
    find_escapes(src, message, runs);
    std::atomic<std::size_t> first_wrong{runs.size()};
    with_element(message.header.dtype_code, [&]<class Element>() {
        parallel_for(runs.size(), threads, [&](std::size_t, std::size_t r) {
            const BoundedSegment& segment = message.segments[runs[r].segment];
            if (decode_run<Element>(src, segment, runs[r], dst, isa)) return;
            std::size_t known = first_wrong;
            while (r < known && !first_wrong.compare_exchange_weak(known, r)) {
            }
        });
    });
    if (first_wrong == runs.size()) return;
    message.fault = BoundedFault::kEscapeCount;
    message.fault_segment = runs[first_wrong].segment;
}

}  // namespace packhorse
