// Packs many tensors that need no plan (frame/plain.hpp) to frames, in one call.
//
// A worker packs whole tensors, straight to their places. Only the chunks of long tensors are
// distributed among workers, so that none of them waits for the others at the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "common/xxh3_short.hpp"
#include "frame/header.hpp"
#include "frame/plain.hpp"
#include "frame/short.hpp"

namespace packhorse {

// A tensor to be packed. `dst` has room for frame_capacity() bytes, and does not overlap `src`.
struct PackJob {
    const uint8_t* src;
    uint32_t dtype_code;
    std::vector<uint64_t> shape;
    Geometry geometry;  // cut_tensor() of it
    uint8_t* dst;
    std::size_t frame_nbytes = 0;  // the result; 0 if the tensor needs a plan

    std::size_t header_nbytes() const {
        return frame_header_nbytes(shape.size(), geometry.n_chunks(), geometry.spec.n_planes, 0,
                                   false);
    }
    std::size_t frame_capacity() const {
        return header_nbytes() + round_up(geometry.nbytes(), kFrameAlignment);
    }
};

// The state of a tensor while it is packed.
class PackTask {
  public:
    PackTask(PackJob& job, Level level)
        : job_(job),
          level_(level),
          left_(job.geometry.n_chunks()),
          hashes_(16 * n_leaves(job.geometry.nbytes()) + kXxh3LongMinNbytes) {}

    // Packs all of a short tensor that is no float.
    void work_short(EncodeWorker& worker, Isa isa) {
        job_.frame_nbytes = pack_short(job_.src, job_.dtype_code, job_.shape, job_.geometry, level_,
                                       worker, job_.dst, isa);
    }

    // Packs a chunk, or all chunks if `n_workers` is 1, and writes the header after the last one.
    void work(std::size_t chunk, std::size_t n_workers, EncodeWorker& worker, Isa isa) {
        EncodeContext context;
        context.level = level_;
        const EncodeOutput output{job_.dst + job_.header_nbytes(), table(), leaves()};
        const std::size_t stop = n_workers == 1 ? job_.geometry.n_chunks() : chunk + 1;
        const std::size_t first = n_workers == 1 ? 0 : chunk;
        for (std::size_t c = first; c < stop; ++c)
            encode_in_place(job_.src + c * job_.geometry.chunk_nbytes(), job_.geometry, context,
                            output, c, n_workers, worker, ordered_, isa);
        if (left_.fetch_sub(stop - first) != stop - first) return;
        if (is_looked_at_whole(job_.geometry) && !were_weights(worker)) return;
        finish(isa);
    }

    bool is_plain = false;

  private:
    uint32_t* table() {
        return reinterpret_cast<uint32_t*>(job_.dst + kFixedHeaderNbytes + 8 * job_.shape.size());
    }

    ContentLeaves leaves() {
        return {hashes_.data(), hashes_.data() + 16 * n_leaves(job_.geometry.nbytes())};
    }

    // The encoder's looks at a short tensor.
    bool were_weights(const EncodeWorker& worker) const {
        std::size_t looks[kMaxPlanes];
        for (uint32_t p = 0; p < job_.geometry.spec.n_planes; ++p)
            looks[p] = worker.scratch.choices[p].look_nbytes;
        return look_like_weights(looks, job_.geometry.n_units, job_.geometry);
    }

    void finish(Isa isa) {
        const std::size_t nbytes = job_.geometry.nbytes(), n = n_leaves(nbytes);
        const std::size_t last = nbytes - (n - 1) * kContentLeafNbytes;
        if (last < kXxh3LongMinNbytes)
            xxh3_128(leaves().tail, last, leaves().digests + 16 * (n - 1), isa);
        uint8_t* const hash = job_.dst + kContentHashOffset;
        if (n == 1)
            std::memcpy(hash, leaves().digests, 16);
        else
            xxh3_128(leaves().digests, 16 * n, hash, isa);
        job_.frame_nbytes = job_.header_nbytes() + ordered_.used();
        write_plain_header({job_.dtype_code, level_, job_.shape, job_.geometry, job_.frame_nbytes},
                           job_.header_nbytes(), job_.dst, isa);
    }

    PackJob& job_;
    Level level_;
    OrderedOutput ordered_;
    std::atomic<std::size_t> left_;  // chunks
    std::vector<uint8_t> hashes_;    // of the leaves, and room for a last short leaf
};

// One worker's memory, for tensors of all unit lengths of a batch. Everything is allocated before
// the work begins, because workers wait for each other and cannot give up.
class PackWorker {
  public:
    explicit PackWorker(const std::vector<PackJob>& jobs, bool owns_output) {
        std::optional<Geometry> largest[kKinds];
        for (const PackJob& job : jobs) {
            std::optional<Geometry>& most = largest[kind_of(job.geometry)];
            const bool splits =
                job.geometry.spec.splits() || (most.has_value() && most->spec.splits());
            if (!most.has_value() || job.geometry.largest_units() > most->largest_units())
                most = job.geometry;
            // Bytes that are split need more memory than others.
            if (splits && !most->spec.splits()) most->spec = plane_spec(1, Split::kFloat);
        }
        for (uint32_t kind = 0; kind < kKinds; ++kind)
            if (largest[kind].has_value())
                workers_[kind] =
                    std::make_unique<EncodeWorker>(*largest[kind], false, false, owns_output);
    }

    EncodeWorker& for_tensor(const Geometry& geometry) { return *workers_[kind_of(geometry)]; }

  private:
    static constexpr uint32_t kKinds = 4;  // units have 1, 2, 4 or 8 bytes

    static uint32_t kind_of(const Geometry& geometry) {
        return static_cast<uint32_t>(std::countr_zero(geometry.spec.unit_nbytes));
    }

    // Not in place: malloc takes pieces of 128 KiB and more from the system, in each call anew.
    std::unique_ptr<EncodeWorker> workers_[kKinds];
};

// What a worker does at a time: a tensor, or a chunk of a tensor that workers share.
struct PackItem {
    std::size_t job;
    std::size_t chunk;
    bool is_shared;
};

// With less work, starting a thread and copying its output takes longer than it saves.
constexpr std::size_t kPackedNbytesOfThread = std::size_t{1} << 19;

inline std::size_t sum_nbytes(const std::vector<PackJob>& jobs) {
    std::size_t total = 0;
    for (const PackJob& job : jobs) total += job.geometry.nbytes();
    return total;
}

// The work for all tensors. Shared tensors come first, and the shortest ones of the others last, so
// that all workers end at about the same time.
inline std::vector<PackItem> share_out(const std::vector<PackJob>& jobs, std::size_t threads) {
    constexpr std::size_t kSharesOfThread = 16;
    const std::size_t total = sum_nbytes(jobs);
    std::vector<PackItem> items;
    const auto is_shared = [&](const PackJob& job) {
        return threads > 1 && job.geometry.n_chunks() > 1 &&
               job.geometry.nbytes() > total / (kSharesOfThread * threads);
    };
    for (std::size_t j = 0; j < jobs.size(); ++j)
        for (std::size_t c = 0; is_shared(jobs[j]) && c < jobs[j].geometry.n_chunks(); ++c)
            items.push_back({j, c, true});
    const std::size_t n_shared = items.size();
    for (std::size_t j = 0; j < jobs.size(); ++j)
        if (!is_shared(jobs[j])) items.push_back({j, 0, false});
    const auto nbytes = [&](const PackItem& item) { return jobs[item.job].geometry.nbytes(); };
    if (threads > 1)
        std::stable_sort(
            items.begin() + static_cast<std::ptrdiff_t>(n_shared), items.end(),
            [&](const PackItem& a, const PackItem& b) { return nbytes(a) > nbytes(b); });
    return items;
}

// Packs tensors of floats, and short ones of other dtypes, and notes the length of each frame in
// its job. The bytes do not depend on `threads`.
inline void pack_many(std::vector<PackJob>& jobs, Level level, std::size_t threads, Isa isa) {
    // Short tensors are looked at while they are encoded.
    const auto is_plain_job = [&](const PackJob& job) {
        if (is_looked_at_whole(job.geometry) && level != Level::kMax) return true;
        return is_plain(job.src, *dtype_row(job.dtype_code), job.shape, job.geometry, level, isa);
    };
    const std::size_t useful = useful_threads(threads, sum_nbytes(jobs), kPackedNbytesOfThread);
    const std::vector<PackItem> items = share_out(jobs, useful);
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(useful, items.size()));
    std::deque<PackTask> tasks;
    for (PackJob& job : jobs) tasks.emplace_back(job, level);
    for (const PackItem& item : items)  // before any worker meets one of the chunks
        if (item.is_shared && item.chunk == 0)
            tasks[item.job].is_plain = is_plain_job(jobs[item.job]);
    std::vector<PackWorker> workers;
    for (std::size_t w = 0; w < n_workers; ++w)
        workers.emplace_back(jobs, !items.empty() && items.front().is_shared);
    parallel_for(items.size(), n_workers, [&](std::size_t w, std::size_t i) {
        const PackItem& item = items[i];
        PackTask& task = tasks[item.job];
        if (!dtype_row(jobs[item.job].dtype_code)->is_float())
            return task.work_short(workers[w].for_tensor(jobs[item.job].geometry), isa);
        if (!item.is_shared) task.is_plain = is_plain_job(jobs[item.job]);
        EncodeWorker& worker = workers[w].for_tensor(jobs[item.job].geometry);
        const bool more = !item.is_shared && i + n_workers < items.size();
        worker.scratch.after = more ? jobs[items[i + n_workers].job].src : nullptr;
        if (task.is_plain) task.work(item.chunk, item.is_shared ? n_workers : 1, worker, isa);
    });
}

}  // namespace packhorse
