// Times the C++ core alone, without Python; `benchmarks/core.py` compiles and runs this program.
//
//     core SOURCE PLANE UNIT_NBYTES SPLIT CHUNK_LOG LEVEL ISA ROUNDS
//
// SOURCE is a file of elements, which are encoded as one tensor; PLANE is a file of bytes, one
// plane of one chunk, which stays in the cache. Every round trip is checked bit for bit, and
// against the portable loops, before it is timed. The program prints a line for each operation that
// it timed: its name, the number of bytes to compute speeds from, and the processor seconds of each
// round. It runs one thread.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

#include "tensor/single_plane.hpp"

namespace packhorse {
namespace {

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "%s\n", what.c_str());
    std::exit(1);
}

std::vector<uint8_t> read_file(const char* path) {
    std::FILE* file = std::fopen(path, "rb");
    if (file == nullptr || std::fseek(file, 0, SEEK_END) != 0)
        fail(std::string(path) + ": no file");
    std::vector<uint8_t> bytes(static_cast<std::size_t>(std::ftell(file)));
    std::rewind(file);
    const bool is_whole = std::fread(bytes.data(), 1, bytes.size(), file) == bytes.size();
    std::fclose(file);
    if (!is_whole || bytes.empty()) fail(std::string(path) + ": nothing to read");
    return bytes;
}

// Calls `work` once untimed and `rounds` times timed, and prints its line.
template <typename Work>
void time_rounds(const char* name, std::size_t nbytes, int rounds, Work work) {
    work();
    std::printf("%s %zu", name, nbytes);
    for (int round = 0; round < rounds; ++round) {
        const std::clock_t begun = std::clock();
        work();
        std::printf(" %.9g", static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC);
    }
    std::printf("\n");
}

// A tensor and its encoded form, with everything that this program needs from the core for tensors.
class Tensor {
  public:
    Tensor(const std::vector<uint8_t>& source, const Geometry& geometry, Level level)
        : source_(source),
          geometry_(geometry),
          level_(level),
          payload_(round_up(source.size(), kFrameAlignment), 0xA5),
          decoded_(source.size(), 0x5A),
          table_(geometry.n_chunks() * geometry.row_length()),
          digests_(16 * n_leaves(source.size())),
          tail_(kXxh3LongMinNbytes) {}

    void encode(Isa isa) {
        EncodeContext context;
        context.level = level_;
        const EncodeOutput output{payload_.data(), table_.data(), {digests_.data(), tail_.data()}};
        nbytes_ = encode_tensor(source_.data(), geometry_, context, output, 1, isa);
        offsets_ = chunk_offsets(table_.data(), geometry_);
    }

    void decode(bool check_crc, Isa isa) {
        const EncodedTensor tensor{geometry_, {}, {}, payload_.data(), table_.data(), offsets_};
        const DecodeResult result =
            decode_tensor(tensor, 0, decoded_.data(), decoded_.size(), check_crc, 1, isa);
        if (result.status != Status::kOk) fail("the encoded tensor is refused");
    }

    void hash(Isa isa) { hash_leaves(source_.data(), source_.size(), digests_.data(), isa); }

    uint32_t sum(Isa isa) const {
        uint32_t all = 0;
        for (std::size_t chunk = 0; chunk + 1 < offsets_.size(); ++chunk)
            all ^= crc32c(payload_.data() + offsets_[chunk], offsets_[chunk + 1] - offsets_[chunk],
                          isa);
        return all;
    }

    void copy() { std::memcpy(decoded_.data(), source_.data(), source_.size()); }

    void prove(Isa isa) {
        encode(Isa::kPortable);
        const std::vector<uint8_t> payload(payload_.begin(), payload_.begin() + nbytes_);
        const std::vector<uint32_t> table = table_;
        encode(isa);
        if (table != table_ || payload.size() != nbytes_ ||
            !std::equal(payload.begin(), payload.end(), payload_.begin()))
            fail("the code paths write different bytes");
        decode(true, isa);
        if (decoded_ != source_) fail("the decoded tensor differs from the encoded one");
    }

    std::size_t packed_nbytes() const { return nbytes_ + 4 * table_.size(); }

  private:
    const std::vector<uint8_t>& source_;
    Geometry geometry_;
    Level level_;
    std::vector<uint8_t> payload_, decoded_;
    std::vector<uint32_t> table_;
    std::vector<uint8_t> digests_, tail_;
    std::vector<std::size_t> offsets_;
    std::size_t nbytes_ = 0;
};

void time_tensor(Tensor& tensor, std::size_t nbytes, int rounds, Isa isa) {
    tensor.prove(isa);
    std::printf("packed %zu\n", tensor.packed_nbytes());
    time_rounds("copy", nbytes, rounds, [&] { tensor.copy(); });
    time_rounds("encode", nbytes, rounds, [&] { tensor.encode(isa); });
    time_rounds("decode", nbytes, rounds, [&] { tensor.decode(true, isa); });
    time_rounds("decode-unchecked", nbytes, rounds, [&] { tensor.decode(false, isa); });
    time_rounds("hash", nbytes, rounds, [&] { tensor.hash(isa); });
    volatile uint32_t kept = 0;  // otherwise the compiler would not compute the sum
    time_rounds("crc", nbytes, rounds, [&] { kept = tensor.sum(isa); });
}

// A round is this many calls, because one call takes hardly more than a tick of the clock.
constexpr int kCalls = 20;

void time_plane(const std::vector<uint8_t>& plane, int rounds, Isa isa) {
    std::vector<uint8_t> stream(plane.size()), back(plane.size());
    std::size_t nbytes = 0;
    const auto encode = [&] {
        nbytes = encode_single_plane(plane.data(), plane.size(), Mode::kRans, stream.data(), isa);
    };
    const auto decode = [&] {
        decode_single_plane(stream.data(), nbytes, Mode::kRans, back.data(), back.size(), isa);
    };
    encode();
    if (nbytes == 0) return;  // noise, which rANS does not make smaller
    decode();
    if (back != plane) fail("a decoded plane differs from the plane");
    const auto often = [](const auto& call) {
        return [&call] {
            for (int i = 0; i < kCalls; ++i) call();
        };
    };
    time_rounds("plane-encode", kCalls * plane.size(), rounds, often(encode));
    time_rounds("plane-decode", kCalls * plane.size(), rounds, often(decode));
}

int run(char** words) {
    const std::vector<uint8_t> source = read_file(words[1]), plane = read_file(words[2]);
    const auto unit_nbytes = static_cast<uint32_t>(std::atoi(words[3]));
    const int split = std::atoi(words[4]), rounds = std::atoi(words[8]);
    const auto chunk_log = static_cast<uint32_t>(std::atoi(words[5]));
    const auto level = static_cast<Level>(std::atoi(words[6]));
    const auto isa = static_cast<Isa>(std::atoi(words[7]));
    if (!has_isa(std::atoi(words[7]))) fail("this processor has no such code path");
    const char* fault = geometry_fault(unit_nbytes, split, chunk_log, source.size());
    if (fault != nullptr) fail(fault);
    const Geometry geometry(unit_nbytes, split, chunk_log, source.size());
    Tensor tensor(source, geometry, level);
    time_tensor(tensor, source.size(), rounds, isa);
    time_plane(plane, rounds, isa);
    return 0;
}

}  // namespace
}  // namespace packhorse

int main(int n_words, char** words) {
    if (n_words != 9) packhorse::fail("eight arguments are needed: see the top of core.cpp");
    return packhorse::run(words);
}
