// Constants of the format (docs/format.md), the C++ side of src/packhorse/layout.py.
// tests/codecs/test_layout.py checks that the two agree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace packhorse {

constexpr std::size_t kFrameAlignment = 64;
constexpr std::size_t kContentLeafNbytes = 262144;
constexpr std::size_t kMaxChunkNbytes = 2097152;
constexpr std::size_t kChunkNbytes = 262144;          // what the encoder usually writes
constexpr std::size_t kClassedChunkNbytes = 1048576;  // what the encoder writes at level max
constexpr std::size_t kNibbleChunkNbytes = 524288;    // and in mode nibbles
constexpr uint32_t kMinChunkLog = 6;
constexpr uint32_t kMaxChunkLog = 21;
constexpr uint32_t kMaxPlanes = 8;
constexpr uint32_t kStreamNbytesBits = 24;
constexpr uint32_t kStreamNbytesMask = (1u << kStreamNbytesBits) - 1;

enum class Split : uint8_t { kWhole = 0, kBytes = 1, kFloat = 2 };
enum class Mode : uint8_t {
    kStored = 0,
    kConstant = 1,
    kPalette = 2,
    kRans = 3,
    kZstd = 4,
    kClassedRans = 5,
    kDelta = 6,
    kSparseDelta = 7,
    kMatches = 8,
    kNibbles = 9
};
enum class ClassSource : uint8_t { kNone = 0, kPrediction = 1, kLead = 2 };

// Section 2.
constexpr uint32_t kFrameMagicNumber = 0x46485089;  // FRAME_MAGIC, as it is loaded
constexpr uint32_t kFrameVersion = 4;
constexpr std::size_t kFixedHeaderNbytes = 56;
constexpr std::size_t kBaseBlockNbytes = 24;
constexpr std::size_t kContentHashOffset = 24;
constexpr std::size_t kHeaderCrcOffset = 44;
constexpr std::size_t kSideFieldsOffset = 48;  // the descriptor is 4 bytes further on
constexpr uint32_t kFlagBase = 1;
constexpr uint32_t kFlagSum = 2;
constexpr uint32_t kMaxDims = 64;
constexpr std::size_t kMaxSideNbytes = 2097152;

// Section 6.1.
constexpr uint32_t kMaxRansRawBits = 7;
constexpr uint32_t kMaxPaletteRawBits = 8;

// Section 6.2.
constexpr uint32_t kProbBits = 12;
constexpr uint32_t kProbSum = 1u << kProbBits;
constexpr uint32_t kNarrowBuckets = 32;
constexpr uint32_t kWideBuckets = 64;

// Section 6.3.
constexpr std::size_t kPaletteHeaderNbytes = 24;
constexpr uint32_t kMaxCodeBits = 4;

// Section 6.4.
constexpr uint32_t kMinLanesLog = 2;
constexpr uint32_t kMaxLanesLog = 7;
constexpr uint32_t kMaxLanes = 1u << kMaxLanesLog;
constexpr uint32_t kShortLanesLog = 4;  // of streams too short for 128 lanes
constexpr uint32_t kStateLowerBound = 1u << 16;
constexpr std::size_t kModelOffset = 8;

// Section 6.5.
constexpr std::size_t kClassedModelsOffset = 16;
constexpr uint32_t kMaxClasses = 4;
constexpr uint32_t kPredictionClasses = 4;
constexpr uint32_t kPredictionBias = 128;

// Section 6.6.
constexpr uint32_t kMaxDeltaClasses = 8;
constexpr std::size_t kDeltaModelsOffset = 32;
constexpr uint32_t kDeltaTokens = 64;
constexpr uint32_t kDeltaDirectTokens = 32;
constexpr uint32_t kDeltaFullToken = 63;

// Section 6.7.
constexpr uint32_t kMaxSparseClasses = 8;
constexpr std::size_t kSparseClassNbytes = 6;
constexpr uint32_t kMaxSparseZeros = 24;   // in front of a number that is written in full
constexpr uint32_t kSparseCountBits = 22;  // of a gap with its sign, and of a run, in full
constexpr uint32_t kMaxSparseCountShift = 21;
constexpr uint32_t kMaxSparseSizeShift = 58;
constexpr uint32_t kSparseNoSizes = 254;    // all steps have the size 1
constexpr uint32_t kSparseEverySize = 255;  // the size of every step is written

// Section 6.8.
constexpr std::size_t kMatchDescriptorsOffset = 40;
constexpr uint32_t kRunByteMax = 255;  // a byte of a run or a length that is not the last

// Section 6.9.
constexpr uint32_t kNibbleBits = 4;

// Section 12.
constexpr std::size_t kMaxWeightColumns = 65536;
constexpr std::size_t kWeightStepAlignment = 16;

struct W12 {
    static constexpr uint32_t kBits = 12;
    static constexpr uint32_t kCodeBits = 4;
    static constexpr uint32_t kSlices = 2;
    static constexpr uint32_t kFirstCode = 1;
    static constexpr uint32_t kMinFirst = 0;
    static constexpr uint32_t kMaxFirst = 239;
};

struct W11 {
    static constexpr uint32_t kBits = 11;
    static constexpr uint32_t kCodeBits = 3;
    static constexpr uint32_t kSlices = 8;
    static constexpr uint32_t kFirstCode = 0;
    static constexpr uint32_t kMinFirst = 1;
    static constexpr uint32_t kMaxFirst = 247;
};

// Section 13.
constexpr uint32_t kBoundedVersion = 1;
constexpr std::size_t kBoundedHeaderNbytes = 32;
constexpr std::size_t kBoundedEntryNbytes = 40;
constexpr std::size_t kBoundedCrcOffset = 12;
constexpr std::size_t kBoundedAlignment = 64;
constexpr std::size_t kBoundedLanes = 16;
constexpr std::size_t kBoundedBlock = 512;
constexpr uint64_t kMaxBoundedLength = 4294967295;
constexpr uint32_t kMaxBoundedBits = 16;
constexpr uint64_t kBoundedSlotShare = 256;
constexpr uint64_t kBoundedFreeSlots = 16;
constexpr uint32_t kF16Code = 14;
constexpr uint32_t kBF16Code = 15;
constexpr uint32_t kF32Code = 16;
constexpr uint32_t kF64Code = 17;

// What a decoder found wrong. bind/bind.cpp passes the number to Python, where codecs/base.py puts
// it into words.
enum class Status : int {
    kOk = 0,
    kChecksum = 1,        // the chunk's CRC32C does not match
    kStreamLength = 2,    // a stream is shorter or longer than its fields say
    kReserved = 3,        // a reserved field is not zero
    kBadField = 4,        // a field is outside of its range
    kFrequencies = 5,     // frequencies are zero, or do not sum to 4096
    kWordsExhausted = 6,  // the coder asked for a word and none was left
    kWordsLeft = 7,       // words were left over at the end
    kFinalState = 8,      // a lane ended in a state that no encoder starts from
    kEscapeCount = 9,     // the number of escapes differs from the declared one
    kExtraBits = 10,      // fewer or more extra bits than declared
};

template <class T>
inline T load(const void* src) {
    T value;
    std::memcpy(&value, src, sizeof value);
    return value;
}

template <class T>
inline void store(void* dst, T value) {
    std::memcpy(dst, &value, sizeof value);
}

#define PACKHORSE_INLINE inline __attribute__((always_inline))

constexpr std::size_t round_up(std::size_t n, std::size_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace packhorse
