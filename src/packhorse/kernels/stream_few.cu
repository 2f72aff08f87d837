// Up to 32 tokens: each of eight warps multiplies its own columns of all rows of the program, and
// two more warps meanwhile sum up exceptions.

// Up to 32 tokens: a thread sums up the exceptions of a row for 8 tokens.
__device__ void sum_exceptions(const Product& p, const Shared& s, uint32_t thread) {
    constexpr uint32_t kEighths = kTokens / 8, kAtOnce = 4;
    wait_for_kernel_before();
    uint32_t parity = 1;
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        barrier_wait(s.empty_extra, parity);
        constexpr uint32_t kAll = kRows * kEighths;
        for (uint32_t start = thread / 32 * 32; start < kAll; start += 32 * kExceptionWarps) {
            // A warp stays together: lanes without work take part with a row that is not there.
            const uint32_t i = start + thread % 32;
            const bool mine = i < kAll;
            const uint32_t tile_row = i / kEighths, eighth = i % kEighths;
            const uint32_t row = mine ? u.first_row + tile_row : p.n_rows;
            const Exceptions exceptions(p, u, row);
            const uint4* tokens = reinterpret_cast<const uint4*>(p.by_column) +
                                  static_cast<uint64_t>(u.token_block) * p.n_columns * kEighths +
                                  eighth;
            const float hole = power_of_two(p.first_exponents[row < p.n_rows ? row : 0] - 127);
            float sums[8] = {};
            for (uint32_t k = 0; k < exceptions.most; k += kAtOnce) {
                uint32_t entries[kAtOnce];
                uint4 x[kAtOnce];
#pragma unroll
                for (uint32_t e = 0; e < kAtOnce; ++e) entries[e] = exceptions.get(k + e);
#pragma unroll
                for (uint32_t e = 0; e < kAtOnce; ++e)
                    x[e] = tokens[(entries[e] & 0xFFFF) * kEighths];
#pragma unroll
                for (uint32_t e = 0; e < kAtOnce; ++e) {
                    const float value = __uint_as_float(entries[e] & 0xFFFF0000);
                    const float minus = k + e < exceptions.n ? hole : 0.0f;
#pragma unroll
                    for (uint32_t t = 0; t < 8; ++t)
                        add_exception(sums[t], value,
                                      widen(Pieces::word(x[e], t / 2) >> t % 2 * 16 & 0xFFFF),
                                      minus);
                }
            }
#pragma unroll
            for (uint32_t t = 0; t < 8; t += 4)
                asm volatile(
                    "{ .reg .pred p; setp.ne.u32 p, %5, 0;"
                    " @p st.shared.v4.f32 [%0], {%1, %2, %3, %4}; }" ::"r"(
                        s.extra + 4 * (tile_row * kTokens + eighth * 8 + t)),
                    "f"(sums[t]), "f"(sums[t + 1]), "f"(sums[t + 2]), "f"(sums[t + 3]),
                    "r"(static_cast<uint32_t>(mine))
                    : "memory");
        }
        __syncwarp();
        barrier_arrive(s.full_extra, threadIdx.x % 32 == 0);
        parity ^= 1;
    }
}

__device__ __forceinline__ void multiply_few(float* sums, const uint32_t* a, uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The tokens of two chunks, for each 8 tokens.
__device__ __forceinline__ uint4 load_tokens(uint32_t address) {
    uint4 b;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w)
                 : "r"(address)
                 : "memory");
    return b;
}

constexpr uint32_t kTiles = kRows / 16;    // of rows
constexpr uint32_t kOctets = kTokens / 8;  // of tokens

// One warp's group of a stage: 64 steps of a slice, all rows and tokens.
__device__ __forceinline__ void multiply_group(float (*sums)[kOctets][4], uint32_t box,
                                               uint32_t tokens, const uint32_t* offsets,
                                               uint32_t slice) {
    uint4 b[2][kOctets];
#pragma unroll
    for (uint32_t pair = 0; pair < 2; ++pair)
#pragma unroll
        for (uint32_t n = 0; n < kOctets; ++n)
            b[pair][n] = load_tokens(tokens + pair * 2 * kChunkBytes + n * 256);
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; ++tile) {
        Pieces pieces;
        pieces.load(box + tile * 16 * kBox, offsets, slice);
#pragma unroll
        for (uint32_t chunk = 0; chunk < 4; ++chunk) {
            uint32_t a[4];
            pieces.decode_chunk(chunk, slice, a);
#pragma unroll
            for (uint32_t n = 0; n < kOctets; ++n) {
                const uint4& v = b[chunk / 2][n];
                multiply_few(sums[tile][n], a, chunk % 2 ? v.z : v.x, chunk % 2 ? v.w : v.y);
            }
        }
    }
}

// Adds the sums of all warps, in their order, and stores the results.
__device__ __forceinline__ void finish_few(const Product& p, const Shared& s, const Unit& u,
                                           float (*sums)[kOctets][4], uint32_t parity) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t mine = s.sums + 4 * (warp * kRows * kTokens + lane / 4 * 8 + lane % 4 * 2);
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (uint32_t n = 0; n < kOctets; ++n)
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half)
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                                 mine + 4 * ((tile * kOctets + n) * 128 + half * 64)),
                             "f"(sums[tile][n][2 * half]), "f"(sums[tile][n][2 * half + 1])
                             : "memory");
    consumers_sync();
    barrier_wait(s.full_extra, parity);
#pragma unroll
    for (uint32_t i = threadIdx.x; i < kRows * kTokens; i += 32 * kConsumers) {
        const uint32_t row = i / 128 / kOctets * 16 + i / 64 % 2 * 8 + tile_row(i / 8 % 8);
        const uint32_t token = i / 128 % kOctets * 8 + i % 8;
        float sum = 0.0f, extra;
#pragma unroll
        for (uint32_t w = 0; w < kConsumers; ++w) {
            float part;
            asm volatile("ld.shared.f32 %0, [%1];"
                         : "=f"(part)
                         : "r"(s.sums + 4 * (w * kRows * kTokens + i))
                         : "memory");
            sum += part;
        }
        asm volatile("ld.shared.f32 %0, [%1];"
                     : "=f"(extra)
                     : "r"(s.extra + 4 * (row * kTokens + token))
                     : "memory");
        const uint32_t there = u.first_row + row < p.n_rows ? u.first_row + row : 0;
        sum = scale_sum(sum, p.first_exponents[there]) + extra;
        if (p.bias != nullptr && u.part == 0) sum += widen(p.bias[there]);
        const uint32_t out = u.token_block * kTokens + token;
        store(p, output_index(p, u, out, there), sum,
              out < p.n_tokens && u.first_row + row < p.n_rows);
    }
    __syncwarp();
    barrier_arrive(s.empty_extra, lane == 0);
    consumers_sync();
}

__device__ void consume_few(const Product& p, const Shared& s) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t group = warp / kSlices, slice = warp % kSlices;
    const uint32_t row = tile_row(lane / 4), unit = group * kGroup % kBox / 16 + lane % 4;
    const uint32_t offsets[2] = {place_in_box(row, unit), place_in_box(row + 8, unit)};
    const uint32_t box = group * kGroup / kBox * kBoxBytes;
    // Lane l gives the address of row l % 8 of matrix l / 8: halves of two chunks.
    const uint32_t tokens =
        warp * 4 * kChunkBytes + lane / 16 * kChunkBytes + lane / 8 % 2 * 128 + lane % 8 * 16;
    WeightRing weights;
    TokenRing ring;
    uint32_t parity = 0;
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        float sums[kTiles][kOctets][4] = {};
        for (uint32_t turn = u.begin; turn < u.end; ++turn, weights.next(), ring.next()) {
            barrier_wait(s.full_weights + 8 * weights.stage, weights.round);
            barrier_wait(s.full_tokens + 8 * ring.stage, ring.round);
            const uint32_t from = s.weights + weights.stage * kWeightStageBytes + box;
            const uint32_t x = s.tokens + ring.stage * kTokenStageBytes + tokens;
            if (kBits == 11)
                multiply_group(sums, from, x, offsets, slice);
            else if (slice == 0)
                multiply_group(sums, from, x, offsets, 0);
            else
                multiply_group(sums, from, x, offsets, 1);
            __syncwarp();
            barrier_arrive(s.empty_weights + 8 * weights.stage, lane == 0);
            barrier_arrive_cluster(s.empty_tokens + 8 * ring.stage, lane);
        }
        finish_few(p, s, u, sums, parity);
        parity ^= 1;
    }
}
