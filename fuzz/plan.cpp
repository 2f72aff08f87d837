// Plans a table and a payload that an adversary chose, as for kernels on a GPU. Nothing crashes, no
// row points outside of the payload or of the scratch memory, and the planner refuses a payload if
// and only if the decoder refuses its fields.
//
// Input: that of decode_tensor, whose seeds it shares; fields that only decoding needs are ignored.
#include "tensor/plan.hpp"

#include "common.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxNbytes = 1u << 18;
constexpr std::size_t kMaxPayload = 1u << 18;

bool is_planned(const uint32_t* descriptors, uint32_t n_planes) {
    for (uint32_t p = 0; p < n_planes; ++p)
        if (descriptor_mode(descriptors[p]) > Mode::kRans) return false;
    return true;
}

// Takes rows from a plan, in their order.
class Rows {
  public:
    explicit Rows(const uint8_t* plan) : at_(plan) {}

    template <class Row>
    Row take() {
        Row row;
        std::memcpy(&row, at_, sizeof row);
        at_ += sizeof row;
        return row;
    }
    void skip(std::size_t nbytes) { at_ += nbytes; }

  private:
    const uint8_t* at_;
};

bool lies_in(int64_t at, int64_t nbytes, std::size_t capacity) {
    return at >= 0 && nbytes >= 0 && static_cast<std::size_t>(at) <= capacity &&
           static_cast<std::size_t>(nbytes) <= capacity - static_cast<std::size_t>(at);
}

int64_t bits_nbytes(int64_t n_planes, int64_t n) {
    return n_planes * static_cast<int64_t>(bit_plane_nbytes(static_cast<std::size_t>(n)));
}

class Checker {
  public:
    Checker(const Geometry& geometry, const PlanShape& shape, std::size_t payload_nbytes)
        : geometry_(geometry), shape_(shape), payload_(payload_nbytes) {}

    void check(const uint8_t* plan) const {
        Rows rows(plan);
        for (std::size_t chunk = 0; chunk < geometry_.n_chunks(); ++chunk)
            for (uint32_t p = 0; p < geometry_.spec.n_planes; ++p)
                check_plane(rows.take<PlaneRow>(), static_cast<int64_t>(geometry_.units_of(chunk)));
        for (std::size_t i = 0; i < shape_.n_palettes; ++i) check_palette(rows.take<PaletteRow>());
        rows.skip(shape_.n_palettes << kMaxCodeBits);
        for (std::size_t i = 0; i < shape_.n_escaped; ++i) check_escaped(rows.take<EscapedRow>());
        check_streams(rows, shape_.n_bucketed, 3 * shape_.n_buckets);
        check_streams(rows, shape_.n_plain, kProbSum);
    }

  private:
    void check_plane(const PlaneRow& row, int64_t n) const {
        const bool constant = row.source == static_cast<int64_t>(PlaneSource::kConstant);
        const bool scratch = row.source == static_cast<int64_t>(PlaneSource::kScratch);
        const std::size_t capacity = scratch ? shape_.scratch_nbytes : payload_;
        claim(constant ? row.offset >= 0 && row.offset < 256
                       : lies_in(row.offset, row.n_there, capacity),
              "the bytes of a plane are in the payload");
        claim(row.n_there == n || lies_in(row.carried_at, n - row.n_there, shape_.scratch_nbytes),
              "the carried bytes of a plane are in memory");
        const int n_raw = __builtin_popcount(static_cast<uint32_t>(row.raw_mask));
        claim(n_raw == 0 || lies_in(row.raw_at, bits_nbytes(n_raw, n), payload_),
              "raw bits are in the payload");
        claim(row.raw_mask >> row.raw_bits == 0, "the mask fits the number of raw bits");
    }

    void check_palette(const PaletteRow& row) const {
        claim(lies_in(row.codes_at, bits_nbytes(row.code_bits, row.n_units), payload_),
              "codes are in the payload");
        claim(row.code_bits <= int64_t{kMaxCodeBits}, "every code has an entry");
        check_scratch(row.plane_at, row.n_units);
    }

    void check_escaped(const EscapedRow& row) const {
        claim(lies_in(row.escapes_at, row.n_escapes, payload_), "escapes are in the payload");
        check_scratch(row.plane_at, row.n_units);
    }

    void check_streams(Rows& rows, std::size_t n, std::size_t n_entries) const {
        for (std::size_t i = 0; i < n; ++i) {
            const auto row = rows.take<StreamRow>();
            claim(lies_in(row.words_at, 2 * row.n_words, payload_), "words are in the payload");
            claim(row.quarter >= 1 && row.quarter <= int64_t{kMaxLanes / 4}, "and lanes");
            check_scratch(row.plane_at, row.n_units);
            claim(row.carried_at == -1 ||
                      lies_in(row.carried_at, 8 * row.quarter, shape_.scratch_nbytes),
                  "there is room for carried bytes");
        }
        for (std::size_t i = 0; i < n * kMaxLanes; ++i)
            claim(rows.take<uint32_t>() >= kStateLowerBound, "states are in their range");
        rows.skip(n * n_entries * sizeof(uint32_t));
    }

    // Kernels write whole rounds.
    void check_scratch(int64_t at, int64_t n) const {
        const auto nbytes = round_up(static_cast<std::size_t>(n), kPlanAlignment);
        claim(at % int64_t{kPlanAlignment} == 0 &&
                  lies_in(at, static_cast<int64_t>(nbytes), shape_.scratch_nbytes),
              "there is room for a plane");
    }

    const Geometry& geometry_;
    const PlanShape& shape_;
    std::size_t payload_;
};

// Whether only decoding, and not planning, can find a fault.
bool is_found_by_decoding(Status status) {
    return status == Status::kOk || status == Status::kWordsExhausted ||
           status == Status::kWordsLeft || status == Status::kFinalState ||
           status == Status::kEscapeCount;
}

void run(Input input) {
    const bool keep_padding = (input.take(2) >> 12 & 3) == 3;
    const Cut cut(input);
    std::size_t nbytes = input.take(3) % (kMaxNbytes + 1);
    nbytes -= nbytes % cut.unit_nbytes;
    if (nbytes == 0 || cut.fault(nbytes) != nullptr) return;
    const Geometry geometry = cut.geometry(nbytes);
    if (item_nbytes(geometry.spec) != 1) return;
    input.take(4);
    const Side side(input, geometry);
    std::vector<uint32_t> table(geometry.n_chunks() * geometry.row_length());
    for (uint32_t& word : table) word = input.take(4);
    const std::vector<std::size_t> offsets = chunk_offsets(table.data(), geometry);
    if (offsets.back() > kMaxPayload) return;
    Buffer payload(offsets.back(), 0);
    input.take_bytes(payload.data(), payload.nbytes());
    const EncodedTensor tensor{geometry, {}, {}, payload.data(), table.data(), offsets};
    bool all_planned = true;
    for (std::size_t c = 0; c < geometry.n_chunks(); ++c) {
        const std::size_t used = stream_sum(tensor.row(c) + 1, geometry.spec.n_planes);
        if (!keep_padding)
            std::fill(payload.data() + offsets[c] + used, payload.data() + offsets[c + 1],
                      uint8_t{0});
        all_planned &= is_planned(tensor.row(c) + 1, geometry.spec.n_planes);
    }

    ChunkPlanner planner(tensor);
    const PlanFault fault = planner.read();
    claim(fault.status == Status::kOk ||
              (fault.chunk < geometry.n_chunks() && fault.at <= payload.nbytes()),
          "the bad stream exists");
    claim(all_planned || fault.status != Status::kOk,
          "payloads that kernels cannot decode are refused");
    if (fault.status == Status::kOk) {
        const PlanShape shape = planner.shape();
        Buffer plan(shape.nbytes, 0xA5);
        planner.write(plan.data());
        Checker(geometry, shape, payload.nbytes()).check(plan.data());
    }
    if (!all_planned) return;
    Buffer units(nbytes);
    const DecodeResult decoded =
        decode_tensor(tensor, 0, units.data(), nbytes, false, 1, Isa::kPortable);
    claim(fault.status == Status::kOk ? is_found_by_decoding(decoded.status)
                                      : decoded.status != Status::kOk,
          "the planner refuses the same payloads as the decoder");
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
