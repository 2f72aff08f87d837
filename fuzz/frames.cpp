// Opens a frame that an adversary chose, unpacks it with others in one call, and packs what it
// holds again. Nothing may crash; all instruction sets and numbers of threads must give the same
// bytes, or all refuse.
//
// Input: a control byte, and a frame. With bit 0, checksums are corrected, because few inputs would
// have correct ones.
#include "packing.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxNbytes = 1u << 20;

struct Choices : PackChoices {
    bool corrects;

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
    const DTypeRow& dtype = *dtype_row(header.dtype_code);
    if (dtype.is_float() || is_short(dtype, plain[0].nbytes()))
        claim_packing(header.dtype_code, header.shape, plain[0], choices);
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
