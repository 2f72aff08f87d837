// Times differences from a base and chains of them in the C++ core, without Python;
// `benchmarks/deltas.py` compiles and runs this program.
//
//     deltas UNIT_NBYTES LEVEL ISA ROUNDS FULL LINK...
//
// FULL and the LINKs are files of floats of one length. FULL is encoded alone, and each LINK as
// differences from the file before it. Every result is compared before it is timed. The program
// prints the packed bytes of FULL and of each link, and then a line for each operation: its name
// and the processor seconds of each round. It runs one thread, and rounds take turns:
//
// - `full` decodes FULL, as a snapshot without a base is restored;
// - `encode` and `decode` handle the first link, with the hashes of both tensors, or of the base;
// - `alone-K` decodes the first K links one after the other, in memory;
// - `rans-K` decodes no more than the tokens of these links, if they are dense;
// - `chain-K` decodes FULL and the links range by range, as a chain is restored.
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <functional>
#include <string>

#include "../common/files.hpp"
#include "frame/plain.hpp"
#include "tensor/chain.hpp"

namespace packhorse {
namespace {

// The hash of a tensor as leaves.
struct Leaves {
    explicit Leaves(std::size_t nbytes)
        : digests(16 * n_leaves(nbytes)), tail(kXxh3LongMinNbytes) {}

    ContentLeaves view() { return {digests.data(), tail.data()}; }

    std::vector<uint8_t> digests, tail;
};

// A tensor of a chain, and its encoded form.
class Link {
  public:
    // The first one has no base; the others have the one before.
    Link(std::vector<uint8_t> source, const Link* before, const Geometry& geometry, Level level)
        : source_(std::move(source)),
          before_(before),
          geometry_(geometry),
          level_(level),
          payload_(round_up(source_.size(), kFrameAlignment)),
          table_(geometry.n_chunks() * geometry.row_length()),
          leaves_(source_.size()),
          base_leaves_(source_.size()) {}

    // `plain_nbytes` is what a tensor without a base takes.
    void encode(std::size_t plain_nbytes, Isa isa) {
        EncodeContext context;
        context.level = level_;
        EncodeOutput output{payload_.data(), table_.data(), leaves_.view()};
        if (before_ != nullptr) {
            context.base = base();
            context.plain_nbytes = plain_nbytes;
            output.base_leaves = base_leaves_.view();
        }
        nbytes_ = encode_tensor(source_.data(), geometry_, context, output, 1, isa);
        offsets_ = chunk_offsets(table_.data(), geometry_);
    }

    EncodedTensor view() const {
        return {geometry_, {}, base(), payload_.data(), table_.data(), offsets_};
    }

    void decode(const uint8_t* base_units, uint8_t* dst, Isa isa) const {
        EncodedTensor tensor = view();
        tensor.base.units = base_units;
        const auto result = decode_tensor(tensor, 0, dst, source_.size(), true, 1, isa);
        if (result.status != Status::kOk) fail("the encoded tensor is refused");
    }

    // Decodes the tokens of dense chunks, class by class, and nothing else.
    void decode_tokens(Isa isa) {
        if (opened_.empty()) open(isa);
        for (const Opened& chunk : opened_) {
            RansDecoder rans = chunk.decoder->rans;
            Ahead nothing;
            for (uint32_t c = 0; c < chunk.decoder->header.rule.n_classes; ++c) {
                rans.model = chunk.decoder->models[c];
                build_rans_tables(rans, isa);
                uint8_t* const to = tokens_.data() + chunk.starts.at[c];
                if (rans_decode(rans, chunk.starts.count(c), to, nothing, isa) != Status::kOk)
                    fail("the tokens are refused");
            }
        }
    }

    const std::vector<uint8_t>& source() const { return source_; }
    std::size_t packed_nbytes() const { return nbytes_ + 4 * table_.size(); }

  private:
    // A dense chunk whose header and models are read.
    struct Opened {
        std::unique_ptr<DeltaDecoder> decoder;
        DeltaStarts starts;
    };

    void open(Isa isa) {
        tokens_.resize(geometry_.largest_units() + kDeltaSlackNbytes);
        std::vector<uint8_t> keys(tokens_.size());
        const uint32_t unit_nbytes = geometry_.spec.unit_nbytes;
        for (std::size_t i = 0; i < geometry_.n_chunks(); ++i) {
            const uint32_t descriptor = view().row(i)[1];
            const uint8_t* const stream = view().chunk(i);
            const std::size_t nbytes = descriptor_nbytes(descriptor), n = geometry_.units_of(i);
            if (descriptor_mode(descriptor) != Mode::kDelta || nbytes == 0) continue;
            Opened chunk{std::make_unique<DeltaDecoder>(), {}};
            DeltaHeader& header = chunk.decoder->header;
            Status status = read_delta_header(stream, nbytes, 8 * unit_nbytes, header);
            with_units(unit_nbytes, true, [&]<class Unit, bool kFloat>() {
                fill_keys<Unit, kFloat>(before_->source_.data() + i * geometry_.chunk_nbytes(), n,
                                        keys.data(), isa);
            });
            chunk.starts = count_delta_classes(keys.data(), n, header.rule, isa);
            if (status == Status::kOk)
                status = open_delta_body(stream, nbytes, chunk.starts, *chunk.decoder);
            if (status != Status::kOk) fail("the header is refused");
            opened_.push_back(std::move(chunk));
        }
    }

    Base base() const {
        Base base;
        base.is_float = true;
        if (before_ != nullptr) base.units = before_->source_.data();
        return base;
    }

    std::vector<uint8_t> source_;
    const Link* before_;
    Geometry geometry_;
    Level level_;
    std::vector<uint8_t> payload_;
    std::vector<uint32_t> table_;
    std::vector<std::size_t> offsets_;
    Leaves leaves_, base_leaves_;
    std::vector<Opened> opened_;
    std::vector<uint8_t> tokens_;
    std::size_t nbytes_ = 0;
};

struct Operation {
    std::string name;
    std::function<void()> work;
    std::vector<double> seconds = {};
};

class Chain {
  public:
    Chain(uint32_t unit_nbytes, Level level, Isa isa, const std::vector<const char*>& paths)
        : isa_(isa) {
        std::size_t plain_nbytes = 0;
        for (const char* path : paths) {
            std::vector<uint8_t> source = read_file(path);
            const bool is_full = links_.empty();
            if (!is_full && source.size() != links_[0].source().size())
                fail("files of different lengths");
            const Geometry geometry = cut_tensor(unit_nbytes, Split::kFloat, source.size(),
                                                 is_full ? kChunkNbytes : kClassedChunkNbytes);
            const Link* const before = is_full ? nullptr : &links_.back();
            links_.emplace_back(std::move(source), before, geometry, level);
            links_.back().encode(plain_nbytes, isa);
            if (is_full) plain_nbytes = links_[0].packed_nbytes();
        }
        dst_.resize(links_[0].source().size());
    }

    void print_sizes() const {
        std::printf("packed");
        for (const Link& link : links_) std::printf(" %zu", link.packed_nbytes());
        std::printf("\n");
    }

    std::vector<Operation> operations() {
        std::vector<Operation> out;
        out.push_back({"full", [this] { links_[0].decode(nullptr, dst_.data(), isa_); }});
        out.push_back({"encode", [this] { links_[1].encode(links_[0].packed_nbytes(), isa_); }});
        out.push_back({"decode", [this] { decode_first(); }});
        for (std::size_t k = 1; k < links_.size(); ++k) {
            out.push_back({"alone-" + std::to_string(k), [this, k] { decode_alone(k); }});
            out.push_back({"rans-" + std::to_string(k), [this, k] { decode_tokens(k); }});
            out.push_back({"chain-" + std::to_string(k), [this, k] { restore(k); }});
        }
        return out;
    }

    void check(const Operation& operation) {
        std::fill(dst_.begin(), dst_.end(), uint8_t{0xA5});
        operation.work();
        const std::size_t dash = operation.name.find('-');
        const std::size_t last = dash != std::string::npos
                                     ? std::stoul(operation.name.substr(dash + 1))
                                     : (operation.name == "full" ? 0 : 1);
        const bool restores = operation.name != "encode" && !operation.name.starts_with("rans");
        if (restores && dst_ != links_[last].source())
            fail("a decoded tensor differs from the encoded one");
    }

  private:
    void decode_first() {
        Leaves leaves(dst_.size());
        hash_leaves(links_[0].source().data(), dst_.size(), leaves.digests.data(), isa_);
        links_[1].decode(links_[0].source().data(), dst_.data(), isa_);
    }

    void decode_alone(std::size_t n) {
        for (std::size_t k = 1; k <= n; ++k)
            links_[k].decode(links_[k - 1].source().data(), dst_.data(), isa_);
    }

    void decode_tokens(std::size_t n) {
        for (std::size_t k = 1; k <= n; ++k) links_[k].decode_tokens(isa_);
    }

    void restore(std::size_t n) {
        std::vector<EncodedTensor> chain;
        for (std::size_t k = 0; k <= n; ++k) chain.push_back(links_[k].view());
        if (decode_chain(chain, dst_.data(), true, 1, isa_).status != Status::kOk)
            fail("the chain is refused");
    }

    Isa isa_;
    std::deque<Link> links_;  // whose addresses stay
    std::vector<uint8_t> dst_;
};

int run(int n_words, char** words) {
    const auto unit_nbytes = static_cast<uint32_t>(std::atoi(words[1]));
    if (unit_nbytes != 2 && unit_nbytes != 4) fail("units have 2 or 4 bytes");
    if (!has_isa(std::atoi(words[3]))) fail("this processor has no such code path");
    const int rounds = std::atoi(words[4]);
    Chain chain(unit_nbytes, static_cast<Level>(std::atoi(words[2])),
                static_cast<Isa>(std::atoi(words[3])),
                std::vector<const char*>(words + 5, words + n_words));
    chain.print_sizes();
    std::vector<Operation> operations = chain.operations();
    for (Operation& operation : operations) chain.check(operation);
    for (int round = 0; round < rounds; ++round)
        for (Operation& operation : operations) {
            const std::clock_t begun = std::clock();
            operation.work();
            const std::clock_t ended = std::clock();
            operation.seconds.push_back(static_cast<double>(ended - begun) / CLOCKS_PER_SEC);
        }
    for (const Operation& operation : operations) {
        std::printf("%s", operation.name.c_str());
        for (const double seconds : operation.seconds) std::printf(" %.9g", seconds);
        std::printf("\n");
    }
    return 0;
}

}  // namespace
}  // namespace packhorse

int main(int argc, char** argv) {
    if (argc < 7) {
        std::fprintf(stderr, "usage: deltas UNIT_NBYTES LEVEL ISA ROUNDS FULL LINK...\n");
        return 2;
    }
    return packhorse::run(argc, argv);
}
