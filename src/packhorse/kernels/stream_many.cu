// More than 32 tokens: four warps have 64 rows and all columns, and read the tokens from shared
// memory as they multiply.

// 64 rows x 64 tokens x 16 columns. Runs until the next wait; until then its registers and tokens
// must stay as they are.
__device__ __forceinline__ void start_product(float* d, const uint32_t* a, uint64_t tokens) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %37, 0;"
        " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
          "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
          "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
          "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(1));
}

// Keeps a register as it is up to this place.
__device__ __forceinline__ void keep(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void keep(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

constexpr uint32_t kWides = kMany ? kTokens / 64 : 1;  // blocks of 64 tokens

// Four chunks of tokens: 8 x 8 elements are 128 bytes, halves of a chunk adjacent.
__device__ __forceinline__ void multiply_many(float (*sums)[32], uint32_t (*a)[4],
                                              uint32_t tokens) {
    const uint32_t place = (tokens & 0x3FFFF) >> 4 | 128 / 16 << 16;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (uint32_t chunk = 0; chunk < 4; ++chunk)
#pragma unroll
        for (uint32_t wide = 0; wide < kWides; ++wide) {
            uint64_t descriptor;  // the upper half is the stride of 8 tokens
            asm("mov.b64 %0, {%1, %2};"
                : "=l"(descriptor)
                : "r"(place + (chunk * kChunkBytes + wide * 2048) / 16), "r"(256 / 16));
            start_product(sums[wide], a[chunk], descriptor);
        }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (uint32_t chunk = 0; chunk < 4; ++chunk)
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) keep(a[chunk][i]);
}

// Adds exceptions and the bias, and stores the results of two rows in each lane.
__device__ __forceinline__ void finish_many(const Product& p, const Unit& u, float (*sums)[32],
                                            uint32_t tile) {
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t row = u.first_row + tile * 16 + half * 8 + lane / 4;
        const uint32_t there = row < p.n_rows ? row : 0;
        const int first = p.first_exponents[there];
        const float hole = power_of_two(first - 127);
        const float bias = p.bias != nullptr && u.part == 0 ? widen(p.bias[there]) : 0.0f;
#pragma unroll
        for (uint32_t wide = 0; wide < kWides; ++wide)
#pragma unroll
            for (uint32_t i = 0; i < 16; ++i) {
                float& sum = sums[wide][i / 2 * 4 + 2 * half + i % 2];
                sum = scale_sum(sum, first);
            }
        const Exceptions exceptions(p, u, row);
        const uint32_t* tokens =
            reinterpret_cast<const uint32_t*>(p.by_column) +
            static_cast<uint64_t>(u.token_block) * p.n_columns * (kTokens / 2) + lane % 4;
        for (uint32_t k = 0; k < exceptions.most; ++k) {
            const uint32_t entry = exceptions.get(k);
            const float value = __uint_as_float(entry & 0xFFFF0000);
            const float minus = k < exceptions.n ? hole : 0.0f;
            const uint32_t* from = tokens + (entry & 0xFFFF) * (kTokens / 2);
#pragma unroll
            for (uint32_t octet = 0; octet < kTokens / 8; ++octet) {
                const uint32_t x = from[4 * octet];
                float* sum = sums[octet / 8] + octet % 8 * 4 + 2 * half;
                add_exception(sum[0], value, widen(x & 0xFFFF), minus);
                add_exception(sum[1], value, widen(x >> 16), minus);
            }
        }
        // The addresses of the second half must not be made of those of the first, and kept.
        uint32_t token = u.token_block * kTokens + lane % 4 * 2;
        keep(token);
        const uint64_t at = output_index(p, u, token, there);
#pragma unroll
        for (uint32_t octet = 0; octet < kTokens / 8; ++octet)
#pragma unroll
            for (uint32_t i = 0; i < 2; ++i)
                store(p, at + (octet * 8 + i) * static_cast<uint64_t>(p.n_rows),
                      sums[octet / 8][octet % 8 * 4 + 2 * half + i] + bias,
                      row < p.n_rows && token + octet * 8 + i < p.n_tokens);
    }
}

__device__ void consume_many(const Product& p, const Shared& s) {
    const uint32_t tile = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t offsets[2] = {place_in_box(lane / 4, lane % 4),
                                 place_in_box(lane / 4 + 8, lane % 4)};
    WeightRing weights;
    TokenRing ring;
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        float sums[kWides][32] = {};
        for (uint32_t turn = u.begin; turn < u.end; ++turn, weights.next()) {
            barrier_wait(s.full_weights + 8 * weights.stage, weights.round);
            const uint32_t box = s.weights + weights.stage * kWeightStageBytes + tile * 16 * kBox;
#pragma unroll 2
            for (uint32_t slice = 0; slice < kSlices; ++slice, ring.next()) {
                Pieces pieces;
                pieces.load(box, offsets, slice);
                uint32_t a[4][4];
#pragma unroll
                for (uint32_t chunk = 0; chunk < 4; ++chunk)
                    pieces.decode_chunk(chunk, slice, a[chunk]);
                if (slice + 1 == kSlices) {
                    __syncwarp();
                    barrier_arrive(s.empty_weights + 8 * weights.stage, lane == 0);
                }
                barrier_wait(s.full_tokens + 8 * ring.stage, ring.round);
                multiply_many(sums, a, s.tokens + ring.stage * kTokenStageBytes);
                barrier_arrive_cluster(s.empty_tokens + 8 * ring.stage, lane);
            }
        }
#pragma unroll
        for (uint32_t wide = 0; wide < kWides; ++wide)
#pragma unroll
            for (uint32_t i = 0; i < 32; ++i) keep(sums[wide][i]);
        finish_many(p, u, sums, tile);
    }
}
