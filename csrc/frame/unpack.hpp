// Unpacks many frames in one call. Chunks of all frames are distributed among workers.
#pragma once

#include <algorithm>
#include <vector>

#include "frame/header.hpp"

namespace packhorse {

// Whether any chunk is coded by Zstandard, which is allowed for whole units only.
inline bool has_zstd(const FrameHeader& header) {
    const Geometry& geometry = header.geometry;
    if (geometry.spec.splits()) return false;
    for (std::size_t chunk = 0; chunk < geometry.n_chunks(); ++chunk)
        if (descriptor_mode(header.table()[chunk * geometry.row_length() + 1]) == Mode::kZstd)
            return true;
    return false;
}

// Whether a frame can be unpacked without anything else: it has no base, no side data, and no chunk
// of Zstandard.
inline bool stands_alone(const FrameHeader& header) {
    return header.base_code == 0 && header.n_row_dims == 0 && !has_zstd(header);
}

// A frame that stands alone, and where its tensor goes.
struct UnpackJob {
    const FrameHeader* header;
    const uint8_t* frame;
    uint8_t* dst;
};

struct UnpackFault {
    Status status = Status::kOk;
    std::size_t job = 0;
    std::size_t chunk = 0;
};

// Frames as tensors, with the places of all their chunks.
class UnpackBatch {
  public:
    explicit UnpackBatch(const std::vector<UnpackJob>& jobs) : jobs_(jobs), starts_{0} {
        offsets_.reserve(jobs.size());
        tensors_.reserve(jobs.size());
        for (const UnpackJob& job : jobs) {
            const FrameHeader& header = *job.header;
            offsets_.push_back(chunk_offsets(header.table(), header.geometry));
            tensors_.push_back({header.geometry,
                                {},
                                {},
                                job.frame + header.text.size(),
                                header.table(),
                                offsets_.back()});
            starts_.push_back(starts_.back() + header.geometry.n_chunks());
            nbytes_ += header.geometry.nbytes();
        }
    }

    std::size_t n_chunks() const { return starts_.back(); }
    std::size_t nbytes() const { return nbytes_; }

    // The job that a chunk belongs to. `last` is the job of an earlier chunk.
    std::size_t job_of(std::size_t item, std::size_t last) const {
        while (starts_[last + 1] <= item) ++last;
        return last;
    }
    std::size_t first_of(std::size_t job) const { return starts_[job]; }
    const EncodedTensor& tensor(std::size_t job) const { return tensors_[job]; }
    uint8_t* dst(std::size_t job) const { return jobs_[job].dst; }

  private:
    const std::vector<UnpackJob>& jobs_;
    std::vector<std::size_t> starts_;  // the first chunk of each job, and the end
    std::vector<std::vector<std::size_t>> offsets_;
    std::vector<EncodedTensor> tensors_;
    std::size_t nbytes_ = 0;
};

// One worker's memory, for the largest chunks of a batch.
struct UnpackWorker {
    explicit UnpackWorker(const UnpackBatch& batch, std::size_t n_jobs) {
        std::size_t n_planes = 1, classed = 0;
        for (std::size_t job = 0; job < n_jobs; ++job) {
            const EncodedTensor& tensor = batch.tensor(job);
            const Geometry& geometry = tensor.geometry;
            n_planes = std::max<std::size_t>(n_planes, geometry.spec.n_planes);
            for (std::size_t chunk = 0; chunk < geometry.n_chunks(); ++chunk)
                if (is_classed(tensor.row(chunk) + 1, geometry.spec.n_planes))
                    classed = std::max(classed, classed_scratch_nbytes(geometry.largest_units(),
                                                                       geometry.spec.n_planes));
        }
        planes.reset(new PlaneDecoder[n_planes]);
        if (classed > 0) whole = Scratch(classed);
    }

    std::unique_ptr<PlaneDecoder[]> planes;
    Scratch whole;
    std::size_t last_job = 0;
};

// With less work, starting a thread takes longer than it saves.
constexpr std::size_t kUnpackedNbytesOfThread = std::size_t{1} << 20;

// Unpacks frames. Returns the first fault, by job and chunk.
inline UnpackFault unpack_many(const std::vector<UnpackJob>& jobs, bool check_crc,
                               std::size_t threads, Isa isa) {
    const UnpackBatch batch(jobs);
    const std::size_t n_items = batch.n_chunks();
    const std::size_t useful = useful_threads(threads, batch.nbytes(), kUnpackedNbytesOfThread);
    const std::size_t n_workers = std::max<std::size_t>(1, std::min(useful, n_items));
    std::vector<UnpackWorker> workers;
    for (std::size_t w = 0; w < n_workers && n_items > 0; ++w)
        workers.emplace_back(batch, jobs.size());
    FirstFault fault;
    std::vector<uint8_t> past_cache;
    for (std::size_t job = 0; job < jobs.size(); ++job)
        past_cache.push_back(
            writes_past_cache(batch.dst(job), batch.tensor(job).geometry.nbytes(), batch.nbytes()));
    parallel_runs(n_items, n_workers, [&](std::size_t w, std::size_t item, std::size_t following) {
        if (fault.is_before(item)) return;
        UnpackWorker& worker = workers[w];
        const std::size_t job = worker.last_job = batch.job_of(item, worker.last_job);
        const EncodedTensor& tensor = batch.tensor(job);
        const std::size_t chunk = item - batch.first_of(job);
        DecodeScratch scratch{worker.planes.get(), worker.whole.get(), nullptr,
                              past_cache[job] != 0};
        if (following < n_items) {
            const std::size_t next = batch.job_of(following, job);
            scratch.next_encoded = batch.tensor(next).chunk(following - batch.first_of(next));
        }
        const Status status =
            decode_plain_chunk(tensor, chunk, check_crc, scratch,
                               batch.dst(job) + chunk * tensor.geometry.chunk_nbytes(), isa);
        if (status != Status::kOk) fault.report(item, status);
    });
    if (fault.status() == Status::kOk) return {};
    const std::size_t job = batch.job_of(fault.chunk(), 0);
    return {fault.status(), job, fault.chunk() - batch.first_of(job)};
}

}  // namespace packhorse
