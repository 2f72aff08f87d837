// Packs a short tensor that is no float, of any dtype, without a plan, and unpacks it.
//
// Input: choices (1 byte), dtype (1), length (3), Noise (10), the pattern of make_tensor().
#include <numeric>

#include "packing.hpp"

namespace packhorse::fuzz {
namespace {

// The code of a dtype that is no float.
uint32_t choose_dtype(uint32_t choice) {
    uint32_t code = choice % kDTypeCodes;
    while (dtype_row(code) == nullptr || dtype_row(code)->is_float())
        code = (code + 1) % kDTypeCodes;
    return code;
}

void run(Input input) {
    const uint32_t bits = input.take(1);
    const PackChoices choices{choose_isa(bits & 3), 1 + (bits >> 2 & 1),
                              static_cast<Level>(1 + (bits >> 3 & 1))};
    const uint32_t code = choose_dtype(input.take(1));
    const DTypeRow& dtype = *dtype_row(code);
    const std::size_t step = std::lcm(dtype.bits, 8u) / 8;  // bytes of whole elements
    std::size_t nbytes = input.take(3) % (kShortNbytes + 1);
    nbytes -= nbytes % step;
    if (!is_short(dtype, nbytes)) return;
    const Noise noise(input);
    const Buffer tensor = make_tensor(input, nbytes, dtype.unit_nbytes, noise);
    std::vector<uint64_t> shape(1 + (bits >> 4 & 3), 1);
    shape.back() = 8 * nbytes / dtype.bits;
    claim_packing(code, shape, tensor, choices);
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
