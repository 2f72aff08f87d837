// Decodes a table and a payload that an adversary chose. Nothing may crash, and all instruction
// sets, numbers of threads and ranges must give the same bytes, or all refuse. So must a chain.
//
// Input: choices (2 bytes), Cut (2), length of the tensor (3), start and end of a range (2 each),
// Side (4 or more), the table, the payload. Checksums are corrected unless the choices say
// otherwise, because few inputs would have correct ones. The payload is cut, or filled with zeros,
// to the length that the table declares.
#include "common.hpp"
#include "tensor/chain.hpp"
#include "tensor/patch.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxNbytes = 1u << 18;
constexpr std::size_t kMaxPayload = 1u << 18;

struct Choices {
    Isa isa;
    std::size_t threads;
    bool keep_crc;      // the checksums of the input, which will be wrong
    bool keep_padding;  // the padding of the input, which will not be zero
    bool skip_crc;      // decode without the check, as a caller may ask for
    std::size_t misalign;

    explicit Choices(Input& input) {
        isa = choose_isa(input.take(1));
        const uint32_t bits = input.take(1);
        threads = 1 + (bits & 3);
        keep_crc = (bits >> 2 & 3) == 3;
        keep_padding = (bits >> 4 & 3) == 3;
        skip_crc = (bits >> 6 & 1) == 1;
        misalign = (bits >> 7 & 1) * 3;
    }
};

void seal(const EncodedTensor& tensor, uint32_t* table, uint8_t* payload, const Choices& choices) {
    for (std::size_t c = 0; c < tensor.geometry.n_chunks(); ++c) {
        uint32_t* const row = table + c * tensor.geometry.row_length();
        uint8_t* const chunk = payload + tensor.offsets[c];
        uint8_t* const end = chunk + tensor.nbytes_of(c);
        if (!choices.keep_padding)
            std::fill(chunk + stream_sum(row + 1, tensor.geometry.spec.n_planes), end, uint8_t{0});
        if (!choices.keep_crc) row[0] = crc32c(chunk, tensor.nbytes_of(c), Isa::kPortable);
    }
}

void compare(const EncodedTensor& tensor, const Choices& choices, std::size_t start,
             std::size_t stop) {
    const bool check = !choices.skip_crc;
    const std::size_t nbytes = tensor.geometry.nbytes();
    Buffer whole(nbytes, 0xA5), again(nbytes, 0x5A), part(stop - start, 0x5A);
    const DecodeResult first =
        decode_tensor(tensor, 0, whole.data(), nbytes, check, 1, Isa::kPortable);
    // With an even number of threads the output is written past the cache, as large ones are.
    const DecodeResult second =
        decode_tensor(tensor, 0, again.data(), nbytes, check, choices.threads, choices.isa,
                      choices.threads % 2 == 0 ? 0 : kPastCacheMinNbytes);
    const DecodeResult third = decode_tensor(tensor, start, part.data(), part.nbytes(), check,
                                             choices.threads, choices.isa);
    const bool good = first.status == Status::kOk;
    claim(good == (second.status == Status::kOk), "both code paths accept, or both refuse");
    claim(first.chunk < tensor.geometry.n_chunks() || nbytes == 0, "the bad chunk exists");
    claim(!good || third.status == Status::kOk, "a part of a good tensor is good");
    if (!good) return;
    claim(whole.equals(again), "all code paths decode the same bytes");
    claim(std::equal(part.data(), part.data() + part.nbytes(), whole.data() + start),
          "a range is a part of the whole");
}

// Patching the base in place must give the tensor, or leave the base as it was; and the list of
// changes must have exactly the units that differ.
void compare_patch(const EncodedTensor& tensor, const Buffer& base, const Choices& choices) {
    const uint32_t unit = tensor.geometry.spec.unit_nbytes;
    if (tensor.base.units == nullptr || tensor.base.cast != Cast::kNone) return;
    const std::size_t nbytes = tensor.geometry.nbytes();
    Buffer whole(nbytes, 0xA5), target(nbytes);
    std::copy_n(base.data(), nbytes, target.data());
    EncodedTensor onto = tensor;
    onto.base.units = target.data();
    const bool good =
        decode_tensor(tensor, 0, whole.data(), nbytes, true, 1, Isa::kPortable).status ==
        Status::kOk;
    const DecodeResult patched = patch_tensor(onto, target.data(), choices.threads, choices.isa);
    claim(good == (patched.status == Status::kOk), "a tensor that decodes is a patch");
    claim(target.equals(good ? whole : base), "a patch makes the tensor, or nothing");
    std::vector<ChunkChanges> changes;
    const DecodeResult listed = list_changes(tensor, choices.threads, choices.isa, changes);
    claim(good == (listed.status == Status::kOk), "a tensor that decodes has changes");
    for (std::size_t chunk = 0; good && chunk < changes.size(); ++chunk)
        for (std::size_t i = 0; i < changes[chunk].places.size(); ++i) {
            const std::size_t at = chunk * tensor.geometry.chunk_nbytes() +
                                   std::size_t{changes[chunk].places[i]} * unit;
            const uint8_t* const value = changes[chunk].units.data() + i * unit;
            claim(std::memcmp(value, whole.data() + at, unit) == 0, "changes have new units");
            claim(std::memcmp(value, base.data() + at, unit) != 0, "only changes are listed");
            claim(i == 0 || changes[chunk].places[i - 1] < changes[chunk].places[i],
                  "changes ascend");
        }
}

// A chain must give what its links give one after the other. The tensor is both links.
void compare_chain(const EncodedTensor& tensor, const Choices& choices) {
    if (tensor.base.units == nullptr || tensor.base.cast != Cast::kNone) return;
    const std::size_t nbytes = tensor.geometry.nbytes();
    Buffer once(nbytes, 0xA5), twice(nbytes, 0x5A), chained(nbytes, 0x3C);
    const auto decode = [&](const EncodedTensor& link, Buffer& to) {
        return decode_tensor(link, 0, to.data(), nbytes, true, 1, Isa::kPortable).status ==
               Status::kOk;
    };
    EncodedTensor second = tensor;
    second.base.units = once.data();
    const bool good = decode(tensor, once) && decode(second, twice);
    const ChainResult result =
        decode_chain({tensor, second}, chained.data(), true, choices.threads, choices.isa);
    claim(good == (result.status == Status::kOk), "a chain is good if its links are");
    claim(result.link < 2 && (result.chunk < tensor.geometry.n_chunks() || nbytes == 0),
          "the bad chunk exists");
    claim(!good || chained.equals(twice), "a chain gives what its links give");
}

void run(Input input) {
    const Choices choices(input);
    const Cut cut(input);
    std::size_t nbytes = input.take(3) % (kMaxNbytes + 1);
    nbytes -= nbytes % cut.unit_nbytes;
    if (cut.fault(nbytes) != nullptr) return;
    const Geometry geometry = cut.geometry(nbytes);
    std::size_t start = nbytes * input.take(2) / 0xFFFF;
    std::size_t stop = nbytes * input.take(2) / 0xFFFF;
    if (start > stop) std::swap(start, stop);

    const Side side(input, geometry);
    std::vector<uint32_t> table(geometry.n_chunks() * geometry.row_length());
    for (uint32_t& word : table) word = input.take(4);
    const BaseUnits base(cut, geometry, nullptr, ~uint64_t{0}, 1);
    const TableCheck checked =
        check_descriptors(table.data(), geometry, base.view().units != nullptr);
    const std::vector<std::size_t> offsets = chunk_offsets(table.data(), geometry);
    if (offsets.back() > kMaxPayload) return;
    claim(checked.fault != TableFault::kNone || checked.payload_nbytes == offsets.back(),
          "the table's two sums agree");
    Buffer payload(offsets.back(), 0, choices.misalign);
    input.take_bytes(payload.data(), payload.nbytes());
    const EncodedTensor tensor{geometry,       side.view(),  base.view(),
                               payload.data(), table.data(), offsets};
    seal(tensor, table.data(), payload.data(), choices);
    compare(tensor, choices, start, stop);
    if (choices.skip_crc) return;
    compare_patch(tensor, base.values(), choices);
    compare_chain(tensor, choices);
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
