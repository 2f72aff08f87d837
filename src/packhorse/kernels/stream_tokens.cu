// Writes the tokens of a product twice, or once. More than 32 are `arranged`: this has them in the
// order in which the tensor cores read them, scaled (W12), with zeros for what is not there:
//     [block of tokens][64 steps][slice][chunk of 16 columns][8 tokens][half][token][8 columns]
// A chunk takes 4 columns from each of 4 runs of 16 steps, as the 4 lanes of a row decode them.
// `by_column` has them by columns, for exceptions: [block of tokens][column][token]. Up to 32
// tokens, W12 needs neither. A thread writes 64 columns of a token, or 8 tokens of a column.

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

// Columns `column` to `column + 64` of a token as pairs, zeros from `end` on.
__device__ __forceinline__ void load_columns(const uint16_t* x, uint64_t row, uint32_t column,
                                             uint32_t end, bool aligned, uint32_t* pairs) {
    if (aligned) {  // the end is a multiple of 8 columns, too
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            const bool there = column + 8 * i < end;
            const uint4 v = *reinterpret_cast<const uint4*>(x + (there ? row + column + 8 * i : 0));
            pairs[4 * i] = there ? v.x : 0;
            pairs[4 * i + 1] = there ? v.y : 0;
            pairs[4 * i + 2] = there ? v.z : 0;
            pairs[4 * i + 3] = there ? v.w : 0;
        }
    } else {
#pragma unroll
        for (uint32_t i = 0; i < 32; ++i) {
            const uint32_t c = column + 2 * i;
            pairs[i] = load_element(x, row + c, c < end) | load_element(x, row + c + 1, c + 1 < end)
                                                               << 16;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    arrange_tokens(const uint16_t* __restrict__ x,  // n_tokens x n_columns
                   uint4* __restrict__ arranged, uint4* __restrict__ by_column, uint32_t n_tokens,
                   uint32_t n_columns, uint32_t n_steps, uint32_t n_groups, uint32_t n_programs) {
    start_next_kernel();
    wait_for_kernel_before();
    constexpr uint32_t kTiles = kTokens / 8;
    const uint32_t n_blocks = (n_tokens + kTokens - 1) / kTokens;
    if (blockIdx.x < n_programs) {
        const uint32_t at = blockIdx.x * 128 + threadIdx.x;
        const uint32_t tile = at / 8 % kTiles, rest = at / 8 / kTiles;
        const uint32_t slice = rest % kSlices, group = rest / kSlices % n_groups;
        const uint32_t block = rest / kSlices / n_groups;
        const uint32_t token = block * kTokens + tile * 8 + at % 8;
        const uint32_t column = slice * n_steps + group * kGroup;
        const uint32_t slice_end = min((slice + 1) * n_steps, n_columns);
        uint32_t pairs[32];
        load_columns(x, static_cast<uint64_t>(token < n_tokens ? token : 0) * n_columns, column,
                     token < n_tokens ? slice_end : 0, n_columns % 8 == 0, pairs);
        uint4* out =
            arranged + static_cast<uint64_t>(rest) * 4 * (2 * kTokens) + tile * 16 + at % 8;
        if (block < n_blocks) {
#pragma unroll
            for (uint32_t i = 0; i < 8; ++i)  // 2 chunk + half
                out[i / 2 * (2 * kTokens) + i % 2 * 8] =
                    make_uint4(scale_token_pair(pairs[i]), scale_token_pair(pairs[8 + i]),
                               scale_token_pair(pairs[16 + i]), scale_token_pair(pairs[24 + i]));
        }
    } else {
        const uint32_t at = (blockIdx.x - n_programs) * 128 + threadIdx.x;
        const uint32_t column = at % n_columns, eighth = at / n_columns % kTiles;
        const uint32_t block = at / n_columns / kTiles;
        const uint32_t first = block * kTokens + eighth * 8;
        uint32_t words[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            const uint64_t token = first + 2 * i;
            words[i] = load_element(x, token * n_columns + column, token < n_tokens) |
                       load_element(x, (token + 1) * n_columns + column, token + 1 < n_tokens)
                           << 16;
        }
        if (block < n_blocks)
            by_column[(static_cast<uint64_t>(block) * n_columns + column) * kTiles + eighth] =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}
