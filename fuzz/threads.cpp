// Many threads pack, unpack and patch tensors and code bounded messages at once, from shared memory
// that is read-only; each call starts threads of its own. `make tsan` builds this with
// ThreadSanitizer. Every result is compared with the result of a single thread.
//
// Usage: threads [seconds]
#include <sys/mman.h>

#include <barrier>
#include <chrono>
#include <random>

#include "bounded/coded.hpp"
#include "bounded/decode.hpp"
#include "common.hpp"
#include "tensor/patch.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kNbytes = 5 * kContentLeafNbytes + 1024;  // five chunks and a short one
constexpr std::size_t kCallers = 6;
constexpr std::size_t kMaxThreads = 8;

// Memory that becomes read-only, so that a write to the input is a fault.
class SharedSource {
  public:
    explicit SharedSource(uint32_t seed) {
        void* const memory =
            mmap(nullptr, kNbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        claim(memory != MAP_FAILED, "memory can be mapped");
        data_ = static_cast<uint8_t*>(memory);
        std::mt19937 random(seed);
        // A skewed byte next to noise, as in weights; every third run is constant.
        for (std::size_t i = 0; i < kNbytes; ++i) {
            const uint32_t noise = random();
            const auto skewed = static_cast<uint8_t>(120 + std::countr_zero(noise | 0x100));
            data_[i] = i >> 17 & 1 ? seed & 0xFF : i % 2 == 1 ? skewed : noise >> 24;
        }
        mprotect(memory, kNbytes, PROT_READ);
    }
    SharedSource(const SharedSource&) = delete;
    ~SharedSource() { munmap(data_, kNbytes); }

    const uint8_t* data() const { return data_; }

  private:
    uint8_t* data_;
};

constexpr std::size_t kRows = 256;

// The data that all callers share.
struct Tensor {
    SharedSource source;
    Geometry geometry;
    Level level;
    std::vector<uint8_t> side;  // empty for none
    std::vector<uint8_t> base_units;

    Tensor(uint32_t seed, uint32_t unit_nbytes, int split, Level level, bool predicts)
        : source(seed),
          geometry(unit_nbytes, split, chunk_log_of(unit_nbytes), kNbytes),
          level(level),
          side(predicts ? kRows + geometry.n_units / kRows : 0) {
        claim(geometry.n_chunks() > 4, "there are chunks for several threads");
        // The base is near the tensor in the middle, even nearer in one chunk, and far from it
        // elsewhere, so that some chunks use the base, one as a few differences, and some do not.
        base_units.assign(source.data(), source.data() + kNbytes);
        for (std::size_t i = 0; i < kNbytes; ++i)
            base_units[i] ^= static_cast<uint8_t>(i >> 18 == 3   ? i % 512 == 0
                                                  : i >> 18 == 2 ? i % 8 == 0
                                                                 : 97 * i >> 3);
        claim(side_fault(geometry, side.size(), kRows) == nullptr, "the side data fit");
        const std::size_t n_columns = geometry.n_units / kRows;
        if (predicts)
            fill_side({source.data(), kRows, n_columns, 1, n_columns * unit_nbytes}, geometry.spec,
                      side.data(), Isa::kPortable);
    }

    static uint32_t chunk_log_of(uint32_t unit_nbytes) {
        return static_cast<uint32_t>(std::countr_zero(kContentLeafNbytes / unit_nbytes));
    }
    SideData side_view() const { return view_side(side.data(), side.size(), kRows); }
    Base base() const { return {base_units.data(), true, Cast::kNone}; }
    EncodeContext context() const { return {level, side_view(), base(), kNbytes}; }
};

struct Packed {
    Buffer payload{round_up(kNbytes, kFrameAlignment)};
    std::vector<uint32_t> table;
    Leaves leaves{kNbytes};
    Leaves base_leaves{kNbytes};
    std::vector<std::size_t> offsets;

    Packed(const Tensor& tensor, std::size_t threads, Isa isa)
        : table(tensor.geometry.n_chunks() * tensor.geometry.row_length()) {
        const EncodeOutput output{payload.data(), table.data(), leaves.view(), base_leaves.view()};
        encode_tensor(tensor.source.data(), tensor.geometry, tensor.context(), output, threads,
                      isa);
        offsets = chunk_offsets(table.data(), tensor.geometry);
    }

    bool equals(const Packed& other) const {
        return table == other.table && leaves == other.leaves && base_leaves == other.base_leaves &&
               offsets == other.offsets &&
               std::equal(payload.data(), payload.data() + offsets.back(), other.payload.data());
    }
};

// A tensor and its packed form, whole and with two bad chunks.
struct Job {
    Tensor tensor;
    Packed packed;
    Packed damaged;

    Job(uint32_t seed, uint32_t unit_nbytes, int split, Level level, bool predicts)
        : tensor(seed, unit_nbytes, split, level, predicts),
          packed(tensor, 1, Isa::kPortable),
          damaged(packed) {
        const uint32_t* const row = packed.table.data() + 3 * tensor.geometry.row_length();
        claim(patch_kind(row) == PatchKind::kChanges, "a chunk is coded as a few differences");
        for (const std::size_t chunk : {std::size_t{1}, std::size_t{3}})
            damaged.payload.data()[damaged.offsets[chunk]] ^= 1;
    }
};

EncodedTensor view(const Job& job, const Packed& packed, const Base& base) {
    return {job.tensor.geometry,   job.tensor.side_view(), base,
            packed.payload.data(), packed.table.data(),    packed.offsets};
}

DecodeResult decode(const Job& job, const Packed& packed, std::size_t start, Buffer& dst,
                    std::size_t threads, Isa isa) {
    return decode_tensor(view(job, packed, job.tensor.base()), start, dst.data(), dst.nbytes(),
                         true, threads, isa);
}

// Makes a copy of the base the tensor, and lists what that changes.
void patch(const Job& job, std::size_t threads, Isa isa) {
    Buffer target(kNbytes);
    std::copy_n(job.tensor.base_units.data(), kNbytes, target.data());
    const EncodedTensor onto = view(job, job.packed, {target.data(), true, Cast::kNone});
    std::vector<ChunkChanges> changes;
    claim(list_changes(onto, threads, isa, changes).status == Status::kOk &&
              changes[3].places.size() > 0,
          "changes are listed");
    claim(patch_tensor(onto, target.data(), threads, isa).status == Status::kOk &&
              std::equal(target.data(), target.data() + kNbytes, job.tensor.source.data()),
          "patching makes the base the tensor");
}

void call_once(const Job& job, std::size_t threads, Isa isa) {
    claim(Packed(job.tensor, threads, isa).equals(job.packed),
          "the same bytes from any number of threads");
    Leaves leaves(kNbytes);
    hash_leaves_threaded(job.tensor.source.data(), kNbytes, leaves.view().digests, threads, isa);
    claim(leaves == job.packed.leaves, "the same hashes from any number of threads");
    Buffer whole(kNbytes), part(kNbytes / 2);
    claim(decode(job, job.packed, 0, whole, threads, isa).status == Status::kOk &&
              std::equal(whole.data(), whole.data() + kNbytes, job.tensor.source.data()),
          "decoding restores the tensor");
    const std::size_t start = kNbytes / 3;
    claim(
        decode(job, job.packed, start, part, threads, isa).status == Status::kOk &&
            std::equal(part.data(), part.data() + part.nbytes(), job.tensor.source.data() + start),
        "decoding restores a part");
    const DecodeResult bad = decode(job, job.damaged, 0, whole, threads, isa);
    claim(bad.status == Status::kChecksum && (bad.chunk == 1 || bad.chunk == 3),
          "a damaged chunk is found");
    patch(job, threads, isa);
}

// A message of several segments with escapes, and its models, which all callers share.
struct BoundedJob {
    static constexpr std::size_t kElements = 300'000;
    std::vector<float> elements;
    std::vector<SegmentSpec> specs{{200'001, 0.01, 0.0, 6}, {99'999, 0.001, 0.5, 8}};
    Rounding rounding;
    Buffer message{0};
    Buffer decoded{kElements * sizeof(float)};
    std::unique_ptr<CodeTables> tables;

    explicit BoundedJob(Rounding rounding) : elements(kElements), rounding(rounding) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal(0, 0.1F);
        for (float& element : elements) element = normal(random);
        message = encode(1, Isa::kPortable);
        BoundedMessage found = read_bounded(message.data(), message.nbytes(), Isa::kPortable);
        decode_bounded_message(message.data(), found, decoded.data(), 1, Isa::kPortable);
        claim(found.fault == BoundedFault::kNone, "what was encoded is decoded");
        const std::vector<uint8_t> models =
            choose_code_models(message.data(), found, Isa::kPortable);
        tables = std::make_unique<CodeTables>(models.data(), models.size(), Isa::kPortable);
        claim(tables->of(0) != nullptr, "a segment has a model");
    }

    Buffer encode(std::size_t threads, Isa isa) const {
        const BoundedHeader header{kF32Code, rounding, BoundedForm::kPlain, 2};
        Buffer room(max_bounded_nbytes(specs, sizeof(float)));
        const auto* const src = reinterpret_cast<const uint8_t*>(elements.data());
        const BoundedEncoding made =
            encode_bounded_message(src, specs, {header, 11, 0, threads}, room.data(), isa);
        claim(made.fault == BoundedFault::kNone, "elements are encoded");
        Buffer exact(made.nbytes);
        std::copy_n(room.data(), made.nbytes, exact.data());
        return exact;
    }

    // Codes the message with the shared tables, and decodes it again.
    Buffer recode(std::size_t threads, Isa isa) const {
        const BoundedMessage found = read_bounded(message.data(), message.nbytes(), isa);
        Buffer room(kCodedHeaderNbytes + message.nbytes() + 1024);
        const std::size_t nbytes = encode_coded(message.data(), message.nbytes(), found, *tables,
                                                false, room.data(), threads, isa);
        const CodedMessage coded = read_coded(room.data(), nbytes, message.nbytes(), isa);
        Buffer back(coded.message_nbytes);
        claim(decode_coded(room.data(), coded, *tables, back.data(), threads, isa),
              "a coded message is decoded");
        return back;
    }
};

void call_once(const BoundedJob& job, std::size_t threads, Isa isa) {
    claim(job.encode(threads, isa).equals(job.message),
          "the same message from any number of threads");
    BoundedMessage found = read_bounded(job.message.data(), job.message.nbytes(), isa);
    Buffer decoded(job.decoded.nbytes());
    decode_bounded_message(job.message.data(), found, decoded.data(), threads, isa);
    claim(found.fault == BoundedFault::kNone && decoded.equals(job.decoded),
          "the same elements from any number of threads");
    claim(job.recode(threads, isa).equals(job.message), "a coded message gives the message");
}

// Returns the number of rounds of all callers together.
std::size_t run(std::chrono::seconds limit) {
    std::vector<std::unique_ptr<Job>> jobs;
    jobs.push_back(std::make_unique<Job>(1, 2, 2, Level::kDefault, false));
    jobs.push_back(std::make_unique<Job>(2, 4, 2, Level::kMax, true));
    jobs.push_back(std::make_unique<Job>(3, 1, 0, Level::kFast, false));
    const BoundedJob messages[]{BoundedJob(Rounding::kNearest), BoundedJob(Rounding::kStochastic)};
    const auto end = std::chrono::steady_clock::now() + limit;
    std::barrier start(kCallers);
    std::atomic<std::size_t> rounds{0};
    std::vector<std::thread> callers;
    for (std::size_t caller = 0; caller < kCallers; ++caller)
        callers.emplace_back([&, caller] {
            start.arrive_and_wait();
            for (std::size_t i = caller; std::chrono::steady_clock::now() < end; ++i) {
                const auto isa = choose_isa(static_cast<uint32_t>(i / 2));
                call_once(*jobs[i % jobs.size()], 1 + i % kMaxThreads, isa);
                call_once(messages[i / 3 % 2], 1 + i % kMaxThreads, isa);
                ++rounds;
            }
        });
    for (std::thread& caller : callers) caller.join();
    return rounds;
}

}  // namespace
}  // namespace packhorse::fuzz

int main(int argc, char** argv) {
    const int seconds = argc > 1 ? std::atoi(argv[1]) : 20;
    const std::size_t rounds = packhorse::fuzz::run(std::chrono::seconds(seconds));
    std::printf("threads: %zu rounds in %d s, no fault\n", rounds, seconds);
    return 0;
}
