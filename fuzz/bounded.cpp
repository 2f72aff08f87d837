// Decodes hostile bounded messages and coded ones, and encodes any elements. Nothing may crash, all
// instruction sets must agree, and the error bound must hold.
//
// Input: instruction set (1 byte), what to do and threads (1). To encode: dtype, rounding and form
// (1), bits (1), bound (8), center (8), seed (8); then elements. To decode: then a message, or the
// length of models (2), the models, and a coded message. Lengths and checksums are set right.
#include <cmath>

#include "bounded/coded.hpp"
#include "bounded/decode.hpp"
#include "common.hpp"

namespace packhorse::fuzz {
namespace {

constexpr std::size_t kMaxElements = 1 << 16;

// Sets length and checksum, unless the message is too short.
void seal(Buffer& message) {
    if (message.nbytes() < kBoundedHeaderNbytes) return;
    store(message.data() + 16, static_cast<uint64_t>(message.nbytes()));
    store(message.data() + kBoundedCrcOffset,
          message_crc(message.data(), message.nbytes(), Isa::kPortable));
}

BoundedFault decode_all(const Buffer& message, Buffer& out, std::size_t threads, Isa isa) {
    BoundedMessage found = read_bounded(message.data(), message.nbytes(), isa);
    if (found.fault != BoundedFault::kNone) return found.fault;
    if (found.n_elements > kMaxElements) return BoundedFault::kLength;
    std::size_t element_nbytes = 0;
    with_element(found.header.dtype_code,
                 [&]<class Element>() { element_nbytes = Element::kNbytes; });
    out = Buffer(found.n_elements * element_nbytes, 0xA5);
    decode_bounded_message(message.data(), found, out.data(), threads, isa);
    return found.fault;
}

// Decodes a message by two paths. Returns whether it is valid.
bool decode_by_both(const Buffer& message, std::size_t threads, Isa isa) {
    Buffer out(0), other(0);
    const BoundedFault fault = decode_all(message, out, threads, isa);
    const BoundedFault other_fault = decode_all(message, other, 1, Isa::kPortable);
    claim(fault == other_fault, "all code paths find the same fault");
    if (fault != BoundedFault::kNone) return false;
    claim(out.equals(other), "all code paths decode alike");
    return true;
}

bool recode(const Buffer& coded, const CodeTables& tables, Buffer& out, std::size_t threads,
            Isa isa) {
    const CodedMessage found = read_coded(coded.data(), coded.nbytes(), kMaxElements, isa);
    if (found.fault != BoundedFault::kNone) return false;
    out = Buffer(found.message_nbytes, 0xA5);
    return decode_coded(coded.data(), found, tables, out.data(), threads, isa);
}

void run_coded(Input input, std::size_t threads, Isa isa) {
    Buffer models(std::min<std::size_t>(input.take(2), input.nbytes()));
    input.take_bytes(models.data(), models.nbytes());
    Buffer coded(input.nbytes());
    input.take_bytes(coded.data(), coded.nbytes());
    seal(coded);
    const CodeTables tables(models.data(), models.nbytes(), isa);
    if (!tables.is_valid()) return;
    Buffer message(0), other(0);
    const bool valid = recode(coded, tables, message, threads, isa);
    claim(valid == recode(coded, tables, other, 1, Isa::kPortable),
          "all code paths accept the same coded messages");
    if (!valid) return;
    claim(message.equals(other), "all code paths decode coded messages alike");
    seal(message);
    decode_by_both(message, threads, isa);
}

// A message through the models that are chosen for it.
void check_models(const Buffer& message, std::size_t threads, Isa isa) {
    const BoundedMessage found = read_bounded(message.data(), message.nbytes(), isa);
    const std::vector<uint8_t> models = choose_code_models(message.data(), found, isa);
    const CodeTables tables(models.data(), models.size(), isa);
    claim(tables.is_valid(), "chosen models are valid");
    Buffer room(kCodedHeaderNbytes + models.size() + message.nbytes() + message.nbytes() / 16);
    const std::size_t nbytes = encode_coded(message.data(), message.nbytes(), found, tables, true,
                                            room.data(), threads, isa);
    Buffer coded(nbytes), back(0);
    std::memcpy(coded.data(), room.data(), nbytes);
    claim(recode(coded, tables, back, threads, isa) && back.equals(message),
          "a coded message gives the message");
}

template <class Element>
void check_bound(const Buffer& src, const Buffer& out, double bound) {
    for (std::size_t at = 0; at < src.nbytes(); at += Element::kNbytes) {
        uint8_t rows[2][64];
        std::memset(rows, 0, sizeof rows);
        std::memcpy(rows[0], src.data() + at, Element::kNbytes);
        std::memcpy(rows[1], out.data() + at, Element::kNbytes);
        typename bounded_portable::Coder<Element>::Reals x, y;
        bounded_portable::read_elements(Element{}, rows[0], x);
        bounded_portable::read_elements(Element{}, rows[1], y);
        const bool is_same = std::memcmp(rows[0], rows[1], Element::kNbytes) == 0;
        if (!std::isfinite(x[0]))
            claim(is_same, "what is no number is kept");
        else
            claim(std::fabs(static_cast<long double>(x[0]) - static_cast<long double>(y[0])) <=
                      static_cast<long double>(bound),
                  "the error is within the bound");
    }
}

void run_encode(Input input, std::size_t threads, Isa isa) {
    const uint32_t choice = input.take(1);
    SegmentSpec spec{};
    spec.bits = input.take(1) % 18;
    uint8_t numbers[24] = {};
    input.take_bytes(numbers, sizeof numbers);
    spec.bound = load<double>(numbers);
    spec.center = load<double>(numbers + 8);
    const auto rounding = static_cast<Rounding>(choice >> 2 & 1);
    const bool is_fixed = (choice & 8) != 0;
    with_element(kF16Code + choice % 4, [&]<class Element>() {
        spec.n = input.nbytes() / Element::kNbytes;
        if (spec.bits < 1 || spec.bits > kMaxBoundedBits) return;
        Buffer src(spec.n * Element::kNbytes);
        input.take_bytes(src.data(), src.nbytes());
        const std::vector<SegmentSpec> specs{spec};
        const BoundedRequest request{{kF16Code + choice % 4, rounding,
                                      is_fixed ? BoundedForm::kFixed : BoundedForm::kPlain, 1},
                                     load<uint64_t>(numbers + 16),
                                     0,
                                     threads};
        const std::size_t room = is_fixed ? fixed_bounded_nbytes(spec, Element::kNbytes)
                                          : max_bounded_nbytes(specs, Element::kNbytes);
        Buffer dst(room, 0xA5), other(room, 0x5A);
        const BoundedEncoding result =
            encode_bounded_message(src.data(), specs, request, dst.data(), isa);
        BoundedRequest alone = request;
        alone.threads = 1;
        const BoundedEncoding again =
            encode_bounded_message(src.data(), specs, alone, other.data(), Isa::kPortable);
        claim(result.fault == again.fault && result.nbytes == again.nbytes,
              "all code paths find the same fault or length");
        if (result.fault != BoundedFault::kNone) return;
        claim(std::memcmp(dst.data(), other.data(), result.nbytes) == 0,
              "all code paths write the same message");
        Buffer message(result.nbytes), out(0);
        std::memcpy(message.data(), dst.data(), result.nbytes);
        claim(decode_all(message, out, threads, isa) == BoundedFault::kNone,
              "what was encoded is decoded");
        check_bound<Element>(src, out, spec.bound);
        check_models(message, threads, isa);
    });
}

void run(Input input) {
    const Isa isa = choose_isa(input.take(1));
    const uint32_t choice = input.take(1);
    const std::size_t threads = 1 + (choice >> 2) % 3;
    if (choice % 4 == 0) return run_encode(input, threads, isa);
    if (choice % 4 == 1) return run_coded(input, threads, isa);
    Buffer message(input.nbytes());
    input.take_bytes(message.data(), message.nbytes());
    if (choice % 4 == 2) seal(message);
    if (decode_by_both(message, threads, isa)) check_models(message, threads, isa);
}

}  // namespace
}  // namespace packhorse::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t nbytes) {
    packhorse::fuzz::run({data, nbytes});
    return 0;
}
