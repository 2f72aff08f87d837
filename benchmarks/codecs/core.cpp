// Times the C++ core alone, without Python; `benchmarks/core.py` compiles and runs this program.
//
//     core SOURCE PLANE UNIT_NBYTES SPLIT CHUNK_LOG LEVEL ISA ROUNDS
//     core SOURCE - UNIT_NBYTES SPLIT CHUNK_LOG LEVEL ISA ROUNDS
//
// SOURCE is a file of elements, which are encoded as one tensor; PLANE is a file of bytes, one
// plane of one chunk, which stays in the cache. Every round trip is checked bit for bit, and
// against the portable loops, before it is timed. The program prints a line for each operation that
// it timed: its name, the number of bytes to compute speeds from, and the processor seconds of each
// round. It runs one thread.
//
// With "-" for a plane, it times the stages of encoding instead, at level default, and prints for
// each its name and the best seconds of a round; before them the chunks, and the cycles a second.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

#include "../common/files.hpp"
#include "tensor/single_plane.hpp"

namespace packhorse {
namespace {

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

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Cycles a second, from a chain of products: each takes three cycles on the processors that we
// know.
double cycles_a_second() {
    double best = 1;
    uint64_t x = 3;
    for (int round = 0; round < 20; ++round) {
        const double begun = now();
        for (int i = 0; i < 100'000; ++i) {
            x *= x;
            asm volatile("" : "+r"(x));
        }
        best = std::min(best, now() - begun);
    }
    return 300'000 / best;
}

// What encode_chunk() does to planes that are coded by plain rANS or stored, stage by stage. The
// stages are the functions of the core; only the order in which they are called is repeated here.
class StageClock {
  public:
    enum Stage {
        kSplit,
        kLook,
        kCount,
        kPalette,
        kModel,
        kTables,
        kCodes,
        kRounds,
        kRaw,
        kCopy,
        kChecksum,
        kStages
    };

    StageClock(const std::vector<uint8_t>& source, const Geometry& geometry, Isa isa)
        : source_(source),
          geometry_(geometry),
          isa_(isa),
          worker_(geometry, false, false, false),
          payload_(round_up(source.size(), kFrameAlignment) + kFrameAlignment),
          digests_(16 * n_leaves(source.size())),
          tail_(kXxh3LongMinNbytes) {}

    // The seconds of each stage for the whole tensor.
    std::vector<double> round() {
        seconds_.assign(kStages, 0);
        std::size_t used = 0;
        for (std::size_t chunk = 0; chunk < geometry_.n_chunks(); ++chunk)
            used += encode(chunk, payload_.data() + used);
        return seconds_;
    }

  private:
    std::size_t encode(std::size_t chunk, uint8_t* dst) {
        const std::size_t n = geometry_.units_of(chunk), at = chunk * geometry_.chunk_nbytes();
        const PlaneSpec& spec = geometry_.spec;
        const ContentLeaves leaves = ContentLeaves{digests_.data(), tail_.data()}.from(at);
        uint8_t* planes[kMaxPlanes];
        for (uint32_t p = 0; p < spec.n_planes; ++p)
            planes[p] = p > 0 ? dst + (p - 1) * n : worker_.scratch.planes[p];
        begun_ = now();
        ChunkSource{source_.data() + at, &leaves}.split_to(n, spec, planes, isa_);
        end(kSplit);
        std::size_t used = (spec.n_planes - 1) * n;
        for (uint32_t p = 0; p < spec.n_planes; ++p)
            if (choose(planes[p], n, worker_.scratch.choices[p]))
                used += write(planes[p], n, worker_.scratch.choices[p], dst + used);
        const std::size_t padded = round_up(std::min(used, n * spec.unit_nbytes), kFrameAlignment);
        checksum_ = checksum_ ^ crc32c(dst, padded, isa_);
        end(kChecksum);
        return padded;
    }

    // Whether the plane is coded.
    bool choose(const uint8_t* plane, std::size_t n, PlaneChoice& choice) {
        const LevelSpec spec = level_spec(Level::kDefault);
        const std::size_t worth = n - (n >> spec.min_saving_log);
        Histogram histogram;
        count_bytes(plane, n, sample_log_for(n, kGlanceUnits), histogram);
        const bool is_noise = scale_cost(entropy_cost(histogram), histogram.total, n) >= worth;
        end(kLook);
        if (is_noise) return false;
        count_bytes(plane, n, sample_log_for(n, spec.sample_units), histogram);
        SymbolCounts symbols;
        list_symbols(histogram, symbols);
        end(kCount);
        palette_estimate(
            symbols, n, spec.palette_raw_bits, [&] { return bits_in_use(symbols); },
            choice.palette);
        end(kPalette);
        choice.mode = Mode::kRans;
        const std::size_t nbytes = rans_estimate(symbols, n, 2, worth, choice);
        end(kModel);
        return nbytes < worth;
    }

    std::size_t write(const uint8_t* plane, std::size_t n, const PlaneChoice& choice,
                      uint8_t* dst) {
        const RansModel& model = choice.models[0];
        const uint32_t lanes_log = choice.lanes_log;
        RansEncodeMemory& tables = *worker_.scratch.tables;
        fill_encode_tables(model, n, lanes_log, isa_, tables);
        end(kTables);
        uint8_t* const words_end = worker_.scratch.words + 2 * n + kPlaneSlack;
        uint8_t* const escapes_end = worker_.scratch.escapes + n;
        RansEncoded encoded{{}, words_end, escapes_end};
        std::fill(std::begin(encoded.states), std::end(encoded.states), kStateLowerBound);
        const auto units = [=](std::size_t begin, std::size_t) { return plane + begin; };
        for_each_segment(
            units, n, model, encoded, isa_, [&](const uint8_t* codes, std::size_t run) {
                end(kCodes);
                encode_segment(codes, run, model, tables, lanes_log, encoded, ahead_, isa_);
                end(kRounds);
            });
        const RawBits raw{model.raw_bits, used_bits(plane, n, (1u << model.raw_bits) - 1)};
        const auto n_escapes = static_cast<std::size_t>(escapes_end - encoded.escapes);
        const auto words_nbytes = static_cast<std::size_t>(words_end - encoded.words);
        uint8_t* at = write_rans_header(choice, raw, lanes_log, n_escapes, dst);
        std::memcpy(at, encoded.states, std::size_t{4} << lanes_log);
        at = write_raw_bits(plane, n, raw, at + (std::size_t{4} << lanes_log), isa_);
        end(kRaw);
        std::memcpy(at, encoded.escapes, n_escapes);
        std::memcpy(at + n_escapes, encoded.words, words_nbytes);
        end(kCopy);
        return static_cast<std::size_t>(at - dst) + n_escapes + words_nbytes;
    }

    void end(Stage stage) {
        const double time = now();
        seconds_[stage] += time - begun_;
        begun_ = time;
    }

    const std::vector<uint8_t>& source_;
    const Geometry& geometry_;
    Isa isa_;
    EncodeWorker worker_;
    std::vector<uint8_t> payload_, digests_, tail_;
    std::vector<double> seconds_;
    Ahead ahead_;
    double begun_ = 0;
    volatile uint32_t checksum_ = 0;
};

constexpr const char* kStageNames[StageClock::kStages] = {
    "split-and-hash", "first-look", "histogram", "palette", "model",   "tables",
    "codes",          "rounds",     "raw-bits",  "copy",    "checksum"};

// Times the stages of a tensor, and whole calls for it. Small tensors are encoded often enough that
// a round takes about a millisecond.
void time_stages(const std::vector<uint8_t>& source, const Geometry& geometry, int rounds,
                 Isa isa) {
    const std::size_t calls = std::max<std::size_t>(1, 4'000'000 / source.size());
    StageClock clock(source, geometry, isa);
    Tensor tensor(source, geometry, Level::kDefault);
    std::vector<double> best(StageClock::kStages, 1e9);
    double whole = 1e9;
    for (int round = 0; round < rounds; ++round) {
        std::vector<double> sums(StageClock::kStages, 0);
        for (std::size_t call = 0; call < calls; ++call) {
            const std::vector<double> seconds = clock.round();
            for (std::size_t s = 0; s < sums.size(); ++s) sums[s] += seconds[s];
        }
        const std::clock_t begun = std::clock();
        for (std::size_t call = 0; call < calls; ++call) tensor.encode(isa);
        whole = std::min(whole, static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC);
        for (std::size_t s = 0; s < sums.size(); ++s) best[s] = std::min(best[s], sums[s]);
    }
    std::printf("chunks %zu\ncycles %.9g\n", geometry.n_chunks(), cycles_a_second());
    for (std::size_t s = 0; s < best.size(); ++s)
        std::printf("%s %.9g\n", kStageNames[s], best[s] / static_cast<double>(calls));
    std::printf("whole-call %.9g\n", whole / static_cast<double>(calls));
}

int run(char** words) {
    const bool stages = std::string(words[2]) == "-";
    const std::vector<uint8_t> source = read_file(words[1]);
    const std::vector<uint8_t> plane = stages ? std::vector<uint8_t>() : read_file(words[2]);
    const auto unit_nbytes = static_cast<uint32_t>(std::atoi(words[3]));
    const int split = std::atoi(words[4]), rounds = std::atoi(words[8]);
    const auto chunk_log = static_cast<uint32_t>(std::atoi(words[5]));
    const auto level = static_cast<Level>(std::atoi(words[6]));
    const auto isa = static_cast<Isa>(std::atoi(words[7]));
    if (!has_isa(std::atoi(words[7]))) fail("this processor has no such code path");
    const char* fault = geometry_fault(unit_nbytes, split, chunk_log, source.size());
    if (fault != nullptr) fail(fault);
    const Geometry geometry(unit_nbytes, split, chunk_log, source.size());
    if (stages) {
        time_stages(source, geometry, rounds, isa);
        return 0;
    }
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
