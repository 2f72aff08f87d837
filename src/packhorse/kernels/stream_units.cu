// What both loops of stream_product.cu stand on: units of work, rings of stages, the plan of shared
// memory, decoding, results and exceptions.

struct alignas(64) TensorMap {
    uint64_t words[16];
};

struct Product {
    const uint4* arranged;
    const uint16_t* by_column;
    const uint8_t* first_exponents;
    const int* starts;
    const uint32_t* exceptions;
    const uint16_t* bias;  // or null
    void* y;               // n_tokens x n_rows, BF16; FP32 and n_parts of them if there are several
    // More than 32 tokens, FP32:
    void* extras;  // sums of exceptions: programs x kRows x kTokens
    void* parts;   // sums of parts, if there are several
    uint32_t n_tokens, n_rows, n_columns, n_turns, n_token_blocks, n_row_blocks, n_parts;
};

// A unit of work.
struct Unit {
    uint32_t token_block, first_row, part, begin, end;  // begin and end count stages of weights
};

struct Units {
    uint32_t index, step, n;

    __device__ Units(const Product& p)
        : index(blockIdx.x / kCluster),
          step(gridDim.x / kCluster),
          n(p.n_token_blocks * p.n_row_blocks * p.n_parts) {}

    __device__ bool more() const { return index < n; }

    __device__ void next(bool is_last = false) { index = is_last ? n : index + step; }

    __device__ Unit get(const Product& p) const {
        Unit u;
        const uint32_t block = index / p.n_token_blocks;
        u.token_block = index % p.n_token_blocks;
        u.first_row = (block % p.n_row_blocks * kCluster + cluster_rank()) * kRows;
        u.part = block / p.n_row_blocks;
        const uint32_t turns = (p.n_turns + p.n_parts - 1) / p.n_parts;
        u.begin = min(u.part * turns, p.n_turns);
        u.end = min(u.begin + turns, p.n_turns);
        return u;
    }
};

// A ring of stages: the one that is next, and how often the ring has been gone round.
template <uint32_t kStages>
struct Ring {
    uint32_t stage = 0, round = 0;

    __device__ void next(uint32_t by = 1) {
        const bool again = stage + by >= kStages;
        stage += again ? by - kStages : by;
        round ^= again ? 1 : 0;
    }
};

using WeightRing = Ring<kWeightStages>;
using TokenRing = Ring<kTokenStages>;

// Addresses in shared memory.
struct Shared {
    uint32_t weights, tokens, sums, exceptions, results, full_weights, empty_weights, full_tokens,
        empty_tokens, full_sums, empty_sums;

    __device__ Shared(uint32_t base) {
        weights = (base + 1023) / 1024 * 1024;
        tokens = weights + kWeightStages * kWeightStageBytes;
        sums = tokens + kTokenStages * kTokenStageBytes;
        exceptions = sums + kSumBytes;
        results = exceptions + kRingBytes;
        full_weights = results + (kMany ? kConsumers * kResultBytes : 0);
        empty_weights = full_weights + 8 * kWeightStages;
        full_tokens = empty_weights + 8 * kWeightStages;
        empty_tokens = full_tokens + 8 * kTokenStages;
        full_sums = empty_tokens + 8 * kTokenStages;
        empty_sums = full_sums + 8;
    }

    // Up to 32 tokens, two warps take a stage of weights, and 2 `kCluster` one of tokens.
    __device__ void init() const {
        for (uint32_t i = 0; i < kWeightStages; ++i) {
            barrier_init(full_weights + 8 * i, 1);
            barrier_init(empty_weights + 8 * i, kMany ? kConsumers : 2);
        }
        for (uint32_t i = 0; i < kTokenStages; ++i) {
            barrier_init(full_tokens + 8 * i, 1);
            barrier_init(empty_tokens + 8 * i, (kMany ? kConsumers : 2) * kCluster);
        }
        barrier_init(full_sums, kMany ? kExceptionWarps : 1);
        barrier_init(empty_sums, kMany ? kConsumers : 2 * kCluster);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

// Four consecutive elements of a row in the form that products take: two registers of two. `high`
// are the bytes with their high bits (W12) or signs, `rest` the bytes with the other bits (W11).
// Codes stand in the place of exponents (W12), or 112 + code (W11).
__device__ __forceinline__ void decode(uint32_t low, uint32_t high, uint32_t rest, uint32_t slice,
                                       uint32_t& first, uint32_t& second) {
    uint32_t upper, sign;
    if constexpr (kBits == 12) {
        sign = slice == 0 ? high << 4 : high;
        upper = (slice == 0 ? high : high >> 4) & 0x07070707;
    } else {
        sign = high << (7 - slice);
        upper = (rest >> (slice & 6) & 0x03030303) | 0x38383838;
    }
    upper |= sign & 0x80808080;
    first = __byte_perm(low, upper, 0x5140);
    second = __byte_perm(low, upper, 0x7362);
}

// What a lane reads of two rows of a tile: 16 bytes of each part.
struct Pieces {
    uint4 low[2], high[2], rest[2];

    // `offsets` are those of the lane's two rows in a part of the box.
    // Two slices of W12 share their high bits: for the second of them they may be there already.
    __device__ __forceinline__ void load(uint32_t box, const uint32_t* offsets, uint32_t slice,
                                         bool with_high = true) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t upper = box + kSlices * kRows * kBox + offsets[i];
            low[i] = load_shared(box + slice * kRows * kBox + offsets[i]);
            if (with_high) high[i] = load_shared(upper);
            if constexpr (kBits == 11)
                rest[i] = load_shared(upper + (1 + slice % 2) * kRows * kBox);
            else
                rest[i] = high[i];
        }
    }

    // Decodes chunk 0 to 3 of the group to the registers of a product.
    __device__ __forceinline__ void decode_chunk(uint32_t chunk, uint32_t slice,
                                                 uint32_t* a) const {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i)
            decode(word(low[i], chunk), word(high[i], chunk), word(rest[i], chunk), slice, a[i],
                   a[2 + i]);
    }

    static __device__ __forceinline__ uint32_t word(const uint4& v, uint32_t i) {
        return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
    }
};

constexpr int kSumShift = kBits == 12 ? 40 : 112;

// Scales a sum over window elements to one over the row's elements. 2^199 does not fit FP32; in two
// steps nothing overflows unless the result does.
__device__ __forceinline__ float scale_sum(float sum, int first) {
    const int shift = first - kSumShift;
    return sum * power_of_two(min(shift, 127)) * power_of_two(max(shift - 127, 0));
}

__device__ __forceinline__ uint64_t output_index(const Product& p, const Unit& u, uint32_t token,
                                                 uint32_t row) {
    return (static_cast<uint64_t>(u.part) * p.n_tokens + token) * p.n_rows + row;
}

__device__ __forceinline__ void store(const Product& p, uint64_t at, float sum, bool there) {
    if (p.n_parts > 1) {
        if (there) static_cast<float*>(p.y)[at] = sum;
    } else {
        if (there) static_cast<uint16_t*>(p.y)[at] = round_to_bf16(sum);
    }
}

// Exceptions of a row that a unit adds, one after the other. `more` is the same in all lanes: rows
// with fewer exceptions take part with zeros.
struct Exceptions {
    const uint32_t *entries, *nothing;
    uint32_t n, most;

    __device__ __forceinline__ Exceptions(const Product& p, const Unit& u, uint32_t row) {
        const bool there = row < p.n_rows;
        const int begin = p.starts[there ? row : 0], end = p.starts[there ? row + 1 : 0];
        const uint32_t count = static_cast<uint32_t>(end - begin);
        const uint32_t per_part = (count + p.n_parts - 1) / p.n_parts;
        const uint32_t first = min(u.part * per_part, count);
        nothing = reinterpret_cast<const uint32_t*>(p.starts);
        entries = p.exceptions + begin + first;
        n = there ? min(per_part, count - first) : 0;
        most = __reduce_max_sync(0xFFFFFFFF, n);
    }

    // Exception `i`, or a zero of column 0.
    __device__ __forceinline__ uint32_t get(uint32_t i) const {
        const uint32_t entry = *(i < n ? entries + i : nothing);
        return i < n ? entry : 0;
    }
};

// What an exception adds: its product, less that of the packed element 0 in its place, which stands
// for `hole`.
__device__ __forceinline__ void add_exception(float& sum, float value, float x, float hole) {
    sum = fmaf(value, x, sum);
    if constexpr (kBits == 11) sum = fmaf(-hole, x, sum);
}
