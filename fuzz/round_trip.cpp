// Encodes arbitrary bytes as a tensor with an arbitrary cut, at any level, and decodes them. All
// instruction sets and numbers of threads must write the same bytes, the decoder's own checks must
// accept these bytes, and decoding must restore the tensor.
//
// Input: choices (2 bytes), Cut (2), length (3), Side (4 or more), Noise (10), the pattern of
// make_tensor().
#include "common.hpp"
#include "tensor/single_plane.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxNbytes = 2 * kContentLeafNbytes + 4096;

// The data to encode, and the options.
struct Task {
    Geometry geometry;
    Side side;
    Buffer src;
    BaseUnits base;
    Level level;
    Mode whole = Mode::kStored;  // matches or nibbles, for whole units without a base

    // Pretends that the tensor takes many bytes without its base, so that every chunk becomes
    // differences if it can.
    EncodeContext context() const {
        const bool has_base = base.view().units != nullptr;
        EncodeContext context{level, side.view(), base.view(), has_base ? 4 * src.nbytes() : 0};
        context.whole = whole;
        return context;
    }
};

// Hashes the leaves of a tensor that is not encoded.
Leaves leaves_of(const Buffer& src) {
    Leaves leaves(src.nbytes());
    const std::size_t last = src.nbytes() % kContentLeafNbytes;
    hash_leaves(src.data(), src.nbytes(), leaves.view().digests, Isa::kPortable);
    if (last < kXxh3LongMinNbytes)
        std::copy_n(src.data() + (src.nbytes() - last), last, leaves.view().tail);
    return leaves;
}

struct Encoded {
    Buffer payload;
    std::vector<uint32_t> table;
    Leaves leaves;
    Leaves base_leaves;
    std::size_t nbytes = 0;

    // If the base is fixed, it is not hashed. The first chunks are encoded by a call of their own.
    Encoded(const Task& task, std::size_t threads, Isa isa, bool base_is_fixed = false,
            std::size_t n_first = 0)
        : payload(round_up(task.src.nbytes(), kFrameAlignment), 0xA5),
          table(task.geometry.n_chunks() * task.geometry.row_length()),
          leaves(task.src.nbytes()),
          base_leaves(task.base.values().nbytes()) {
        EncodeOutput output{payload.data(), table.data(), leaves.view(), base_leaves.view()};
        if (base_is_fixed) output.base_leaves = {};
        const std::size_t start = n_first * task.geometry.chunk_nbytes();
        for (const ChunkRun& run :
             {ChunkRun{0, n_first}, ChunkRun{n_first, task.geometry.n_chunks() - n_first}}) {
            output.payload = payload.data() + nbytes;
            nbytes += encode_run(task.src.data() + (run.first == 0 ? 0 : start), task.geometry, run,
                                 task.context(), output, threads, isa);
        }
        claim(leaves == leaves_of(task.src), "the hashes are those of the tensor");
        claim(base_is_fixed || base_leaves == leaves_of(task.base.values()),
              "the hashes are those of the base");
    }

    bool equals(const Encoded& other) const {
        return nbytes == other.nbytes && table == other.table && leaves == other.leaves &&
               std::equal(payload.data(), payload.data() + nbytes, other.payload.data());
    }
};

// With an even number of threads the output is written past the cache, as large ones are.
void decode_back(const Encoded& encoded, const Task& task, std::size_t threads, Isa isa) {
    const std::vector<std::size_t> offsets = chunk_offsets(encoded.table.data(), task.geometry);
    claim(offsets.back() == encoded.nbytes, "the table gives the length of the payload");
    Buffer payload(encoded.nbytes);
    std::copy(encoded.payload.data(), encoded.payload.data() + encoded.nbytes, payload.data());
    const EncodedTensor tensor{task.geometry,  task.side.view(),     task.base.view(),
                               payload.data(), encoded.table.data(), offsets};
    Buffer decoded(task.src.nbytes(), 0x5A);
    const DecodeResult result =
        decode_tensor(tensor, 0, decoded.data(), decoded.nbytes(), true, threads, isa,
                      threads % 2 == 0 ? 0 : kPastCacheMinNbytes);
    claim(result.status == Status::kOk, "an encoded tensor can be decoded");
    claim(decoded.equals(task.src), "the decoded tensor equals the encoded one");
}

void round_trip_tensor(const Task& task, std::size_t threads, Isa isa) {
    const Encoded plain(task, 1, Isa::kPortable);
    const bool has_base = task.base.view().units != nullptr;
    const TableCheck check = check_descriptors(plain.table.data(), task.geometry, has_base);
    claim(check.fault == TableFault::kNone, "the encoder writes a table that passes the check");
    claim(plain.nbytes <= round_up(task.src.nbytes(), kFrameAlignment), "nothing grows");
    const Encoded other(task, threads, isa);
    claim(plain.equals(other), "all code paths and numbers of threads write the same bytes");
    claim(plain.equals(Encoded(task, threads, isa, false, task.geometry.n_chunks() / 2)),
          "parts of a tensor are the same bytes as the whole");
    if (has_base)
        claim(plain.equals(Encoded(task, threads, isa, true)), "a fixed base gives the same bytes");
    decode_back(plain, task, 1, Isa::kPortable);
    decode_back(other, task, threads, isa);
}

// Compares the estimates that the planner uses. They must be the same on every code path.
void compare_estimates(const Task& task, std::size_t n_samples, Isa isa) {
    const auto estimate = [&](Isa of) {
        return estimate_tensor(task.src.data(), task.geometry, task.level, n_samples, of).planes;
    };
    const std::vector<PlaneEstimate> plain = estimate(Isa::kPortable), other = estimate(isa);
    claim(std::equal(plain.begin(), plain.end(), other.begin(), other.end(),
                     [](const PlaneEstimate& a, const PlaneEstimate& b) {
                         return a.mode == b.mode && a.nbytes == b.nbytes;
                     }),
          "all code paths estimate the same");
}

void compare_delta_estimates(const Task& task, Isa isa) {
    const auto estimate = [&](Isa of) {
        return estimate_delta_tensor(task.src.data(), task.geometry, task.base.view(),
                                     task.src.nbytes(), task.level, of);
    };
    claim(estimate(Isa::kPortable) == estimate(isa), "all code paths estimate the same deltas");
}

void compare_sides(const Task& task, Isa isa) {
    Side plain(task.side), other(task.side);
    plain.fit(task.src.data(), task.geometry, Isa::kPortable);
    other.fit(task.src.data(), task.geometry, isa);
    claim(plain.values().equals(other.values()), "all code paths make the same side data");
}

void round_trip_plane(const Buffer& src, Mode mode, Isa isa) {
    Buffer stream(src.nbytes(), 0xA5), again(src.nbytes(), 0x5A), decoded(src.nbytes());
    const std::size_t nbytes =
        encode_single_plane(src.data(), src.nbytes(), mode, stream.data(), Isa::kPortable);
    const std::size_t other =
        encode_single_plane(src.data(), src.nbytes(), mode, again.data(), isa);
    claim(nbytes == other && std::equal(stream.data(), stream.data() + nbytes, again.data()),
          "all code paths write the same stream");
    if (nbytes == 0) return;
    claim(nbytes < src.nbytes(), "a stream is smaller than its plane");
    Buffer exact(nbytes);
    std::copy(stream.data(), stream.data() + nbytes, exact.data());
    const Status status =
        decode_single_plane(exact.data(), nbytes, mode, decoded.data(), decoded.nbytes(), isa);
    claim(status == Status::kOk && decoded.equals(src), "decoding restores a plane");
}

void run(Input input) {
    const Isa isa = choose_isa(input.take(1));
    const uint32_t bits = input.take(1);
    const auto level = static_cast<Level>(1 + (bits & 3) % 3);
    const std::size_t threads = 1 + (bits >> 2 & 3);
    const Cut cut(input);
    std::size_t nbytes = input.take(3) % (kMaxNbytes + 1);
    nbytes -= nbytes % cut.unit_nbytes;
    if (cut.fault(nbytes) != nullptr) return;
    const Geometry geometry = cut.geometry(nbytes);
    // The binding requires this from its caller.
    if (geometry.chunk_nbytes() % kContentLeafNbytes != 0 && geometry.n_chunks() > 1) return;
    // The planner splits every tensor with a base.
    if (cut.has_base && item_nbytes(geometry.spec) > 1) return;
    Side side(input, geometry);
    const Noise noise(input);
    Buffer src = make_tensor(input, nbytes, cut.unit_nbytes, noise);
    BaseUnits base(cut, geometry, src.data(), noise.mask >> 3, noise.stride);
    Task task{geometry, std::move(side), std::move(src), std::move(base), level, Mode::kStored};
    const Buffer before(task.src);
    if (bits >> 4 & 1)
        task.side.fit(task.src.data(), geometry, isa);
    else
        compare_sides(task, isa);
    round_trip_tensor(task, threads, isa);
    if (geometry.split == Split::kWhole && task.base.view().units == nullptr)
        for (const Mode whole : {Mode::kMatches, Mode::kNibbles}) {
            task.whole = whole;
            round_trip_tensor(task, threads, isa);
        }
    if (nbytes > 0 && item_nbytes(geometry.spec) == 1)
        compare_estimates(task, 1 + (bits >> 5 & 1), isa);
    if (task.base.view().units != nullptr) compare_delta_estimates(task, isa);
    if (nbytes > 0 && bits >> 6 != 0)
        round_trip_plane(task.src, bits >> 6 == 1 ? Mode::kPalette : Mode::kRans, isa);
    claim(task.src.equals(before), "the input is only read");
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
