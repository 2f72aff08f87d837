// What targets claim of tensors that are packed to frames without a plan from Python.
#pragma once

#include "common.hpp"
#include "frame/pack.hpp"
#include "frame/unpack.hpp"

namespace packhorse::fuzz {

constexpr std::size_t kCopies = 3;  // of a tensor, in one call

struct PackChoices {
    Isa isa;
    std::size_t threads;
    Level level;
};

inline std::vector<Buffer> tensors_of(const FrameHeader& header, uint8_t poison) {
    return std::vector<Buffer>(kCopies, Buffer(header.geometry.nbytes(), poison));
}

inline UnpackFault unpack(const FrameHeader& header, const Buffer& frame, std::vector<Buffer>& dsts,
                          std::size_t threads, Isa isa) {
    std::vector<UnpackJob> jobs;
    for (Buffer& dst : dsts) jobs.push_back({&header, frame.data(), dst.data()});
    return unpack_many(jobs, true, threads, isa);
}

// The frames of copies of a tensor.
struct Packed {
    std::vector<Buffer> frames;
    std::vector<PackJob> jobs;

    Packed(uint32_t dtype_code, const std::vector<uint64_t>& shape, const Buffer& tensor,
           const PackChoices& choices) {
        const DTypeRow& dtype = *dtype_row(dtype_code);
        const Geometry geometry =
            cut_tensor(dtype.unit_nbytes, dtype.last_split(), tensor.nbytes(), kChunkNbytes);
        for (std::size_t i = 0; i < kCopies; ++i) {
            PackJob job{tensor.data(), dtype_code, shape, geometry, nullptr};
            frames.emplace_back(job.frame_capacity(), uint8_t{0xA5});
            job.dst = frames.back().data();
            jobs.push_back(job);
        }
        pack_many(jobs, choices.level, choices.threads, choices.isa);
    }
};

// Packs a tensor of floats, or a short one of another dtype. All code paths must write the same
// frame, which must give the tensor back, or all must leave the tensor to a plan.
inline void claim_packing(uint32_t dtype_code, const std::vector<uint64_t>& shape,
                          const Buffer& tensor, const PackChoices& choices) {
    const Buffer before(tensor);
    const Packed plain(dtype_code, shape, tensor, {Isa::kPortable, 1, choices.level});
    const Packed other(dtype_code, shape, tensor, choices);
    claim(tensor.equals(before), "the input is only read");
    const std::size_t nbytes = plain.jobs[0].frame_nbytes;
    Buffer frame(nbytes);
    std::copy_n(plain.frames[0].data(), nbytes, frame.data());
    for (const Packed* packed : {&plain, &other})
        for (std::size_t i = 0; i < kCopies; ++i)
            claim(packed->jobs[i].frame_nbytes == nbytes &&
                      std::equal(frame.data(), frame.data() + nbytes, packed->frames[i].data()),
                  "all code paths and numbers of threads write the same frame, for each copy");
    if (nbytes == 0) return;
    FrameHeader read;
    const HeaderCheck check = read_header(frame.data(), nbytes, tensor.nbytes(), read, choices.isa);
    claim(check.fault == HeaderFault::kNone && stands_alone(read), "a new frame can be read");
    claim(read.dtype_code == dtype_code && read.shape == shape, "a frame keeps dtype and shape");
    std::vector<Buffer> back = tensors_of(read, 0x5A);
    claim(unpack(read, frame, back, choices.threads, choices.isa).status == Status::kOk,
          "a new frame can be unpacked");
    for (const Buffer& copy : back) claim(copy.equals(tensor), "a new frame has the tensor");
}

}  // namespace packhorse::fuzz
