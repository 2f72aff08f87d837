// Opens a frame that an adversary chose, unpacks it with others in one call, and packs what it
// holds again. Nothing may crash; all instruction sets and numbers of threads must give the same
// bytes, or all refuse.
//
// Input: a control byte, and a frame. With bit 0, checksums are corrected, because few inputs would
// have correct ones.
#include "common.hpp"
#include "frame/pack.hpp"
#include "frame/unpack.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxNbytes = 1u << 20;
constexpr std::size_t kCopies = 3;

struct Choices {
    Isa isa;
    std::size_t threads;
    bool corrects;
    Level level;

    explicit Choices(Input& input) {
        const uint32_t bits = input.take(1);
        corrects = (bits & 1) == 1;
        threads = 1 + (bits >> 1 & 3);
        isa = choose_isa(bits >> 3 & 3);
        level = static_cast<Level>(1 + (bits >> 5 & 1));
    }
};

// Corrects the checksum of a header that is as long as it says.
void correct_header(Buffer& frame) {
    if (frame.nbytes() < kFixedHeaderNbytes) return;
    const std::size_t nbytes = load<uint32_t>(frame.data() + 12);
    if (nbytes < kFixedHeaderNbytes || nbytes > frame.nbytes()) return;
    store(frame.data() + kHeaderCrcOffset, uint32_t{0});
    store(frame.data() + kHeaderCrcOffset, crc32c(frame.data(), nbytes, Isa::kPortable));
}

// Corrects the checksums of all chunks, in the header that was read.
void correct_chunks(FrameHeader& header, const Buffer& frame) {
    const std::vector<std::size_t> offsets = chunk_offsets(header.table(), header.geometry);
    for (std::size_t c = 0; c < header.geometry.n_chunks(); ++c)
        store(header.text.data() + header.table_at + 4 * c * header.geometry.row_length(),
              crc32c(frame.data() + header.text.size() + offsets[c], offsets[c + 1] - offsets[c],
                     Isa::kPortable));
}

std::vector<Buffer> tensors_of(const FrameHeader& header, uint8_t poison) {
    return std::vector<Buffer>(kCopies, Buffer(header.geometry.nbytes(), poison));
}

UnpackFault unpack(const FrameHeader& header, const Buffer& frame, std::vector<Buffer>& dsts,
                   std::size_t threads, Isa isa) {
    std::vector<UnpackJob> jobs;
    for (Buffer& dst : dsts) jobs.push_back({&header, frame.data(), dst.data()});
    return unpack_many(jobs, true, threads, isa);
}

struct Packed {
    std::vector<Buffer> frames;
    std::vector<PackJob> jobs;

    Packed(const FrameHeader& header, const Buffer& tensor, const Choices& choices,
           std::size_t threads, Isa isa) {
        const DTypeRow& dtype = *dtype_row(header.dtype_code);
        const Geometry geometry =
            cut_tensor(dtype.unit_nbytes, Split::kFloat, tensor.nbytes(), kChunkNbytes);
        for (std::size_t i = 0; i < kCopies; ++i) {
            PackJob job{tensor.data(), header.dtype_code, header.shape, geometry, nullptr};
            frames.emplace_back(job.frame_capacity(), uint8_t{0xA5});
            job.dst = frames.back().data();
            jobs.push_back(job);
        }
        pack_many(jobs, choices.level, threads, isa);
    }
};

void pack_again(const FrameHeader& header, const Buffer& tensor, const Choices& choices) {
    if (!dtype_row(header.dtype_code)->is_float()) return;
    const Buffer before(tensor);
    Packed plain(header, tensor, choices, 1, Isa::kPortable);
    Packed other(header, tensor, choices, choices.threads, choices.isa);
    claim(tensor.equals(before), "the input is only read");
    for (std::size_t i = 0; i < kCopies; ++i) {
        const std::size_t nbytes = plain.jobs[i].frame_nbytes;
        claim(nbytes == other.jobs[i].frame_nbytes, "all code paths make frames of one length");
        claim(std::equal(plain.frames[i].data(), plain.frames[i].data() + nbytes,
                         other.frames[i].data()),
              "all code paths and numbers of threads write the same frame");
        if (nbytes == 0) continue;
        Buffer exact(nbytes);
        std::copy_n(plain.frames[i].data(), nbytes, exact.data());
        FrameHeader read;
        const HeaderCheck check =
            read_header(exact.data(), nbytes, tensor.nbytes(), read, choices.isa);
        claim(check.fault == HeaderFault::kNone && stands_alone(read), "a new frame can be read");
        claim(read.shape == header.shape, "a frame keeps the shape");
        std::vector<Buffer> back = tensors_of(read, 0x5A);
        claim(unpack(read, exact, back, choices.threads, choices.isa).status == Status::kOk,
              "a new frame can be unpacked");
        claim(back[0].equals(tensor) && back[kCopies - 1].equals(tensor),
              "a new frame has the tensor");
    }
}

void run(Input input) {
    const Choices choices(input);
    Buffer frame(input.nbytes());
    input.take_bytes(frame.data(), frame.nbytes());
    if (choices.corrects) correct_header(frame);
    FrameHeader header, again;
    const HeaderCheck check =
        read_header(frame.data(), frame.nbytes(), kMaxNbytes, header, Isa::kPortable);
    const HeaderCheck other =
        read_header(frame.data(), frame.nbytes(), kMaxNbytes, again, choices.isa);
    claim(check.fault == other.fault && check.at == other.at, "all code paths read alike");
    claim(check.at <= frame.nbytes(), "a fault is inside of the frame");
    if (check.fault != HeaderFault::kNone || !stands_alone(header)) return;
    if (choices.corrects) correct_chunks(header, frame);
    std::vector<Buffer> plain = tensors_of(header, 0xA5), parallel = tensors_of(header, 0x5A);
    const UnpackFault one = unpack(header, frame, plain, 1, Isa::kPortable);
    const UnpackFault two = unpack(header, frame, parallel, choices.threads, choices.isa);
    claim((one.status == Status::kOk) == (two.status == Status::kOk),
          "all code paths accept, or all refuse");
    claim(one.status == Status::kOk || one.job == 0, "the first bad frame is reported");
    if (one.status != Status::kOk) return;
    for (std::size_t i = 0; i < kCopies; ++i)
        claim(plain[i].equals(plain[0]) && parallel[i].equals(plain[0]),
              "all code paths unpack the same bytes");
    pack_again(header, plain[0], choices);
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
