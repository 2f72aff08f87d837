// Decodes a stream of any mode, chosen by an adversary. Nothing may crash, and all instruction sets
// must give the same bytes, or all refuse.
//
// Input: instruction set (1 byte), mode (1), length of the plane (3), the stream.
#include "common.hpp"
#include "tensor/single_plane.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxUnits = 1u << 17;

void run(Input input) {
    const Isa isa = choose_isa(input.take(1));
    const auto mode = static_cast<Mode>(input.take(1) & 7);  // unknown modes too
    const std::size_t n = 1 + input.take(3) % kMaxUnits;
    Buffer stream(input.nbytes());
    input.take_bytes(stream.data(), stream.nbytes());
    if (stream.nbytes() > kStreamNbytesMask) return;
    Buffer plane(n, 0xA5), again(n, 0x5A);
    const Status status =
        decode_single_plane(stream.data(), stream.nbytes(), mode, plane.data(), n, Isa::kPortable);
    const Status other =
        decode_single_plane(stream.data(), stream.nbytes(), mode, again.data(), n, isa);
    claim((status == Status::kOk) == (other == Status::kOk),
          "both code paths accept, or both refuse");
    claim(status != Status::kOk || plane.equals(again), "all code paths decode the same bytes");
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
