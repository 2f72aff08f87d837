// Encoding a chunk in mode nibbles.
#pragma once

#include "chunk/encode.hpp"
#include "common/scratch.hpp"
#include "nibbles/halves.hpp"

namespace packhorse {

// Counts the halves of bytes that were counted.
inline Histogram count_halves(const Histogram& bytes) {
    constexpr uint32_t kHalves = 1u << kNibbleBits;
    Histogram halves = {};
    for (uint32_t byte = 0; byte < 256; ++byte) {
        halves.counts[byte % kHalves] += bytes.counts[byte];
        halves.counts[byte / kHalves] += bytes.counts[byte];
    }
    halves.total = 2 * bytes.total;
    halves.sampled = bytes.sampled;
    return halves;
}

// Chooses the model and the lanes for the halves of `n` bytes, which are not all equal. Returns the
// estimated bytes of the stream.
inline std::size_t choose_nibbles(const uint8_t* bytes, std::size_t n, Level level,
                                  PlaneChoice& choice) {
    Histogram histogram;
    count_bytes(bytes, n, sample_log_for(n, level_spec(level).sample_units), histogram);
    SymbolCounts symbols;
    list_symbols(count_halves(histogram), symbols);
    RansModel& model = choice.models[0];
    const std::size_t nbytes = try_codes(symbols, 0, 2 * n, kNarrowBuckets - 1, kNibbleBits, model);
    settle_model(symbols, model);
    choice.mode = Mode::kRans;
    choice.lanes_log = choose_lanes_log_alone(2 * n, nbytes);
    return kModelOffset + (std::size_t{4} << choice.lanes_log) + nbytes;
}

// Memory for one chunk of `n` bytes.
class NibbleMemory {
  public:
    explicit NibbleMemory(std::size_t n) {
        const std::size_t bytes = round_up(n, 64) + kPlaneSlack;
        memory_ = Scratch(7 * bytes + kPlaneSlack + round_up(sizeof *tables, 64));
        tables = reinterpret_cast<RansEncodeMemory*>(memory_.get());
        units = memory_.get() + round_up(sizeof *tables, 64);
        escapes_end = units + 3 * bytes;
        words_end = escapes_end + 4 * bytes + kPlaneSlack;
    }

    RansEncodeMemory* tables;
    uint8_t* units;
    uint8_t* escapes_end;  // behind a byte for each half
    uint8_t* words_end;    // behind a word for each half

  private:
    Scratch memory_;
};

// Writes the stream of the `n` bytes in `memory.units` if it takes less than they do, and seems to
// take less than `most` bytes. Returns its length, or 0 if it does not pay.
inline std::size_t write_nibbles(std::size_t n, std::size_t most, Level level, NibbleMemory& memory,
                                 uint8_t* dst, Isa isa) {
    PlaneChoice choice;
    // Level fast has no entropy coder, without which there would be nothing to gain.
    const Level counted = level == Level::kFast ? Level::kDefault : level;
    if (choose_nibbles(memory.units, n, counted, choice) >= std::min(n, most)) return 0;
    const RansModel& model = choice.models[0];
    const uint32_t lanes_log = choice.lanes_log;
    const std::size_t n_lanes = std::size_t{1} << lanes_log;
    fill_encode_tables(model, 2 * n, lanes_log, isa, *memory.tables);
    RansEncoded encoded;
    encoded.words = memory.words_end;
    encoded.escapes = memory.escapes_end;
    std::fill_n(encoded.states, n_lanes, kStateLowerBound);
    alignas(64) uint8_t halves[kSegmentUnits];
    Ahead nothing;
    rans_encode_from(
        [&](std::size_t begin, std::size_t run) {
            spread_halves(memory.units + begin / 2, run / 2, halves, isa);
            return static_cast<const uint8_t*>(halves);
        },
        2 * n, model, *memory.tables, lanes_log, encoded, nothing, isa);
    const auto words_nbytes = static_cast<std::size_t>(memory.words_end - encoded.words);
    const auto n_escapes = static_cast<std::size_t>(memory.escapes_end - encoded.escapes);
    const std::size_t nbytes = rans_header_nbytes(choice) + 4 * n_lanes + n_escapes + words_nbytes;
    if (nbytes >= n) return 0;
    uint8_t* at = write_rans_header(choice, {kNibbleBits, 0}, lanes_log, n_escapes, dst);
    std::memcpy(at, encoded.states, 4 * n_lanes);
    std::memcpy(at + 4 * n_lanes, encoded.escapes, n_escapes);
    std::memcpy(at + 4 * n_lanes + n_escapes, encoded.words, words_nbytes);
    return nbytes;
}

// Encodes a chunk of whole units: in mode nibbles, or constant, or stored, which it is also if
// nibbles seem to take `most` bytes. `dst` has room for round_up(n * unit_nbytes, 64) bytes.
// Returns the padded length.
inline std::size_t encode_nibbles(const ChunkSource& source, std::size_t n, uint32_t unit_nbytes,
                                  std::size_t most, Level level, uint8_t* dst,
                                  uint32_t* descriptors, Isa isa) {
    const std::size_t nbytes = n * unit_nbytes;
    NibbleMemory memory(nbytes);
    source.copy_to(memory.units, nbytes, isa);
    Mode mode = Mode::kNibbles;
    std::size_t used = 0;
    if (is_constant(memory.units, n, unit_nbytes)) {
        mode = Mode::kConstant;
        used = unit_nbytes;
    } else {
        used = write_nibbles(nbytes, most, level, memory, dst, isa);
        if (used == 0) {
            mode = Mode::kStored;
            used = nbytes;
        }
    }
    if (mode != Mode::kNibbles) std::memcpy(dst, memory.units, used);
    descriptors[0] = make_descriptor(mode, used);
    const std::size_t padded = round_up(used, kFrameAlignment);
    std::memset(dst + used, 0, padded - used);
    return padded;
}

}  // namespace packhorse
