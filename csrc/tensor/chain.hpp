// Decodes a chain: a tensor, and differences from it, one after the other. A range of units goes
// through all links before the next range begins, so it stays in the cache, and no link but the
// last is ever whole.
#pragma once

#include <algorithm>
#include <vector>

#include "tensor/tensor.hpp"

namespace packhorse {

struct ChainResult {
    Status status;
    std::size_t link;   // where the fault is
    std::size_t chunk;  // of this link
};

// Decodes the ranges of a chain, one worker at a time.
class ChainWorker {
  public:
    // `links` begins with the tensor that the others are differences from. Each has the units of
    // the one before it as its base, so only the first names the units of its base.
    ChainWorker(const std::vector<EncodedTensor>& links, std::size_t range_units, Isa isa)
        : links_(links),
          range_units_(range_units),
          isa_(isa),
          unit_nbytes_(links.back().geometry.spec.unit_nbytes) {
        std::size_t n_planes = 1;
        bool classes = false, deltas = false;
        for (const EncodedTensor& link : links) {
            const PlaneSpec& spec = link.geometry.spec;
            n_planes = std::max<std::size_t>(n_planes, spec.n_planes);
            wide_nbytes_ = std::max<std::size_t>(wide_nbytes_, spec.unit_nbytes);
            for (std::size_t chunk = 0; chunk < link.geometry.n_chunks(); ++chunk) {
                classes |= is_classed(link.row(chunk) + 1, spec.n_planes);
                deltas |= is_from_base(descriptor_mode(link.row(chunk)[1]));
            }
        }
        const std::size_t n = std::min(range_units, links.back().geometry.n_units);
        decoder_ = std::make_unique<DecodeWorker>(n, static_cast<uint32_t>(wide_nbytes_), n_planes,
                                                  classes, deltas);
        if (wide_nbytes_ > unit_nbytes_) wide_ = Scratch(n * wide_nbytes_);
    }

    // Decodes a range to its place in `dst`.
    ChainResult decode(std::size_t range, bool check_crc, uint8_t* dst) {
        const std::size_t first = range * range_units_;
        uint8_t* const to = dst + first * unit_nbytes_;
        uint8_t* before = nullptr;
        for (std::size_t i = 0; i < links_.size(); ++i) {
            EncodedTensor link = links_[i];
            const std::size_t chunk_units = link.geometry.chunk_units;
            // A link is decoded over its base, unless its units are shorter.
            uint8_t* const place =
                link.geometry.spec.unit_nbytes == unit_nbytes_ ? to : wide_.get();
            if (i > 0) {
                link.base.units = before;
                link.base.first = first;
            }
            const std::size_t stop = std::min(first + range_units_, link.geometry.n_units);
            for (std::size_t at = first; at < stop; at += chunk_units) {
                const std::size_t chunk = at / chunk_units;
                if (link.base.units == nullptr && is_from_base(descriptor_mode(link.row(chunk)[1])))
                    return {Status::kBadField, i, chunk};
                DecodeScratch scratch{decoder_->planes.get(), decoder_->whole.get(), nullptr};
                const Status status =
                    decode_checked(link, chunk, check_crc, scratch, *decoder_,
                                   place + (at - first) * link.geometry.spec.unit_nbytes, isa_);
                if (status != Status::kOk) return {status, i, chunk};
            }
            before = place;
        }
        return {Status::kOk, 0, 0};
    }

  private:
    const std::vector<EncodedTensor>& links_;
    std::size_t range_units_;
    Isa isa_;
    std::size_t unit_nbytes_;
    std::size_t wide_nbytes_ = 1;  // of the longest unit
    std::unique_ptr<DecodeWorker> decoder_;
    Scratch wide_;  // a range of longer units
};

// Decodes a whole chain to `dst`. All links have the same number of units, units never get longer,
// and tables are checked. The first link has its base if it needs one. Chunks of mode zstd are an
// error here. If several links are damaged, reports the first one of the first range.
inline ChainResult decode_chain(const std::vector<EncodedTensor>& links, uint8_t* dst,
                                bool check_crc, std::size_t threads, Isa isa) {
    const std::size_t n_units = links.back().geometry.n_units;
    if (n_units == 0) return {Status::kOk, 0, 0};
    // Chunks have powers of two of units, so those of all links end where the longest ones end.
    std::size_t range_units = 1;
    for (const EncodedTensor& link : links)
        range_units = std::max(range_units, link.geometry.chunk_units);
    const std::size_t n_ranges = (n_units + range_units - 1) / range_units;
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(threads, n_ranges));
    std::vector<ChainWorker> workers;
    for (std::size_t w = 0; w < n_workers; ++w) workers.emplace_back(links, range_units, isa);
    std::vector<ChainResult> results(n_ranges, {Status::kOk, 0, 0});
    std::atomic<bool> failed{false};
    parallel_for(n_ranges, n_workers, [&](std::size_t w, std::size_t range) {
        if (failed.load(std::memory_order_relaxed)) return;
        results[range] = workers[w].decode(range, check_crc, dst);
        if (results[range].status != Status::kOk) failed = true;
    });
    for (const ChainResult& result : results)
        if (result.status != Status::kOk) return result;
    return {Status::kOk, 0, 0};
}

}  // namespace packhorse
