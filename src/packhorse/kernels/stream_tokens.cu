// Writes the tokens of a product twice, or once. More than 32 are `arranged`: this has them in the
// order in which the tensor cores read them, scaled (W12), with zeros for what is not there:
//     [block of tokens][64 steps][slice][chunk of 16 columns][8 tokens][half][token][8 columns]
// A chunk takes 4 columns from each of 4 runs of 16 steps, as the 4 lanes of a row decode them.
// `by_column` has them by columns, for exceptions: [block of tokens][column][token], or above 32
// tokens in the order that stream_many.cu says. Up to 32 tokens, W12 needs neither.

constexpr float kTokenShift = kBits == 12 ? 1099511627776.0f : 1.0f;  // 2^40

__device__ __forceinline__ uint32_t scale_token_pair(uint32_t pair) {
    const float low = widen(pair & 0xFFFF) * kTokenShift, high = widen(pair >> 16) * kTokenShift;
    uint32_t scaled;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(scaled) : "f"(high), "f"(low));
    return scaled;
}

// What is not there is read from the start, and replaced by zeros: no lane takes another way.
__device__ __forceinline__ uint32_t load_element(const uint16_t* x, uint64_t at, bool there) {
    const uint32_t bits = x[there ? at : 0];
    return there ? bits : 0;
}

// Columns of a token from `column` on as pairs, zeros from `end` on.
template <uint32_t kPairs>
__device__ __forceinline__ void load_columns(const uint16_t* x, uint64_t row, uint32_t column,
                                             uint32_t end, bool aligned,
                                             uint32_t (&pairs)[kPairs]) {
    if (aligned) {  // the end is a multiple of 8 columns, too
#pragma unroll
        for (uint32_t i = 0; i < kPairs / 4; ++i) {
            const bool there = column + 8 * i < end;
            const uint4 v = *reinterpret_cast<const uint4*>(x + (there ? row + column + 8 * i : 0));
            pairs[4 * i] = there ? v.x : 0;
            pairs[4 * i + 1] = there ? v.y : 0;
            pairs[4 * i + 2] = there ? v.z : 0;
            pairs[4 * i + 3] = there ? v.w : 0;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < kPairs; ++i) {
            const uint32_t c = column + 2 * i;
            pairs[i] = load_element(x, row + c, c < end) | load_element(x, row + c + 1, c + 1 < end)
                                                               << 16;
        }
    }
}

// More than 32 tokens: a program has 32 tokens and 64 columns.
constexpr uint32_t kTilePitch =
    64 + 8;  // of a token in shared memory, so that lanes differ in bank

__device__ void arrange_many(const uint16_t* x, uint4* arranged, uint4* by_column,
                             uint32_t n_tokens, uint32_t n_columns, uint32_t n_steps,
                             uint32_t n_groups) {
    constexpr uint32_t kQuads = kTokens / 32, kOctets = kTokens / 64;
    __shared__ __align__(16) uint16_t tile[32 * kTilePitch];
    const uint32_t quad = blockIdx.x % kQuads, rest = blockIdx.x / kQuads;
    const uint32_t slice = rest % kSlices, group = rest / kSlices % n_groups;
    const uint32_t block = rest / kSlices / n_groups;
    const uint32_t first = slice * n_steps + group * kGroup;
    const uint32_t end = min((slice + 1) * n_steps, n_columns);
#pragma unroll
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const uint32_t i = turn * 128 + threadIdx.x;
        const uint32_t token = block * kTokens + quad * 32 + i / 8, column = first + i % 8 * 8;
        const uint64_t row = static_cast<uint64_t>(token < n_tokens ? token : 0) * n_columns;
        uint32_t words[4];
        load_columns(x, row, column, token < n_tokens ? end : 0, n_columns % 8 == 0, words);
        *reinterpret_cast<uint4*>(tile + i / 8 * kTilePitch + i % 8 * 8) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncthreads();
    uint4* out = arranged + static_cast<uint64_t>(rest) * 4 * (2 * kTokens) + quad * 64;
#pragma unroll
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const uint32_t i = turn * 128 + threadIdx.x;  // chunk, octet of tokens, half, token
        const uint32_t chunk = i / 64, token = i / 16 % 4 * 8 + i % 8, half = i / 8 % 2;
        const uint16_t* from = tile + token * kTilePitch + chunk * 4 + half * 2;
        uint32_t pairs[4];
#pragma unroll
        for (uint32_t run = 0; run < 4; ++run)
            pairs[run] = scale_token_pair(*reinterpret_cast<const uint32_t*>(from + run * 16));
        out[chunk * (2 * kTokens) + i % 64] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
#pragma unroll
    for (uint32_t turn = 0; turn < 2; ++turn) {
        const uint32_t i = turn * 128 + threadIdx.x;  // column, quarter of the tokens
        const uint32_t column = i / 4;
        uint32_t words[4];
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) {
            const uint32_t at = i % 4 * 4 + w;  // of 16: octets of a lane, lanes, more octets
            const uint32_t octet = at / (4 * kOctets) * kOctets + at % kOctets;
            const uint16_t* from = tile + (octet * 8 + at / kOctets % 4 * 2) * kTilePitch + column;
            words[w] = from[0] | static_cast<uint32_t>(from[kTilePitch]) << 16;
        }
        if (first + column < end)
            by_column[(static_cast<uint64_t>(block) * n_columns + first + column) * (kTokens / 8) +
                      quad * 4 + i % 4] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

extern "C" __global__ void __launch_bounds__(128)
    arrange_tokens(const uint16_t* __restrict__ x,  // n_tokens x n_columns
                   uint4* __restrict__ arranged, uint4* __restrict__ by_column, uint32_t n_tokens,
                   uint32_t n_columns, uint32_t n_steps, uint32_t n_groups) {
    start_next_kernel();
    wait_for_kernel_before();
    if constexpr (kMany) {
        arrange_many(x, arranged, by_column, n_tokens, n_columns, n_steps, n_groups);
        return;
    }
    // W11: a thread writes 8 tokens of a column.
    constexpr uint32_t kTiles = kTokens / 8;
    const uint32_t at = blockIdx.x * 128 + threadIdx.x;
    const uint32_t column = at % n_columns, eighth = at / n_columns % kTiles;
    const uint32_t block = at / n_columns / kTiles;
    const uint32_t first = block * kTokens + eighth * 8;
    uint32_t words[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
        const uint64_t token = first + 2 * i;
        words[i] = load_element(x, token * n_columns + column, token < n_tokens) |
                   load_element(x, (token + 1) * n_columns + column, token + 1 < n_tokens) << 16;
    }
    if (block * kTokens < n_tokens)
        by_column[(static_cast<uint64_t>(block) * n_columns + column) * kTiles + eighth] =
            make_uint4(words[0], words[1], words[2], words[3]);
}
