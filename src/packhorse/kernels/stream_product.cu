// Products of 1 to 256 tokens with a packed weight (docs/format.md, section 12) on Hopper:
// y = x W^T + bias.
//
// The warps of a program have different work. One warp fetches weights, by copies of boxes of rows
// that a barrier in shared memory counts; it waits for nothing but free stages, so it runs ahead
// even of the kernel before. Another one fetches arranged tokens (stream_tokens.cu). The others
// decode in registers and multiply. Up to 32 tokens, each of eight warps has its own columns of
// all rows of the program, and two more warps meanwhile sum up exceptions. For more tokens, four
// warps have 64 rows and all columns, and read the tokens from shared memory as they multiply.
// They wait for a product before they write its registers again.
//
// Programs stay and take one unit after the other: a block of rows, a block of tokens, and a part
// of the columns. Programs of a cluster have neighbouring rows, and share what they fetch of the
// tokens. The order of sums depends on the matrix and the number of parts alone for up to 32
// tokens.

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

    __device__ void next() { index += step; }

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

    __device__ void next() {
        stage = stage + 1 == kStages ? 0 : stage + 1;
        round ^= stage == 0 ? 1 : 0;
    }
};

using WeightRing = Ring<kWeightStages>;
using TokenRing = Ring<kTokenStages>;

// Addresses in shared memory.
struct Shared {
    uint32_t weights, tokens, sums, extra, full_weights, empty_weights, full_tokens, empty_tokens,
        full_extra, empty_extra;

    __device__ Shared(uint32_t base) {
        weights = (base + 1023) / 1024 * 1024;
        tokens = weights + kWeightStages * kWeightStageBytes;
        sums = tokens + kTokenStages * kTokenStageBytes;
        extra = sums + 4 * kSums;
        full_weights = extra + 4 * kExtraSums;
        empty_weights = full_weights + 8 * kWeightStages;
        full_tokens = empty_weights + 8 * kWeightStages;
        empty_tokens = full_tokens + 8 * kTokenStages;
        full_extra = empty_tokens + 8 * kTokenStages;
        empty_extra = full_extra + 8;
    }

    __device__ void init() const {
        for (uint32_t i = 0; i < kWeightStages; ++i) {
            barrier_init(full_weights + 8 * i, 1);
            barrier_init(empty_weights + 8 * i, kConsumers);
        }
        for (uint32_t i = 0; i < kTokenStages; ++i) {
            barrier_init(full_tokens + 8 * i, 1);
            barrier_init(empty_tokens + 8 * i, kConsumers * kCluster);
        }
        barrier_init(full_extra, kExceptionWarps > 0 ? kExceptionWarps : 1);
        barrier_init(empty_extra, kConsumers);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
};

__device__ void fetch_weights(const Product& p, const TensorMap& low, const TensorMap& high,
                              const Shared& s) {
    const bool active = threadIdx.x % 32 == 0;
    WeightRing ring;
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        for (uint32_t turn = u.begin; turn < u.end; ++turn, ring.next()) {
            const uint32_t full = s.full_weights + 8 * ring.stage;
            barrier_wait(s.empty_weights + 8 * ring.stage, ring.round ^ 1);
            barrier_expect(full, kWeightStageBytes, active);
#pragma unroll
            for (uint32_t box = 0; box < kSteps / kBox; ++box) {
                const uint32_t dst = s.weights + ring.stage * kWeightStageBytes + box * kBoxBytes;
                const uint32_t step = turn * kSteps + box * kBox;
                copy_box(dst, &low, step, u.first_row, full, active);
                copy_box(dst + kSlices * kRows * kBox, &high, step, u.first_row, full, active);
            }
        }
    }
}

__device__ void fetch_tokens(const Product& p, const Shared& s) {
    constexpr uint32_t kPart = kTokenStageBytes / kCluster;  // each program fetches a part for all
    constexpr uint32_t kPerTurn = kStageChunks / kTokenChunks;
    const bool active = threadIdx.x % 32 == 0;
    const uint32_t part = cluster_rank() * kPart;
    TokenRing ring;
    wait_for_kernel_before();
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        const char* src = reinterpret_cast<const char*>(p.arranged);
        src += (static_cast<uint64_t>(u.token_block) * p.n_turns + u.begin) * kPerTurn *
               kTokenStageBytes;
        for (uint32_t i = u.begin * kPerTurn; i < u.end * kPerTurn; ++i, ring.next()) {
            const uint32_t full = s.full_tokens + 8 * ring.stage;
            barrier_wait(s.empty_tokens + 8 * ring.stage, ring.round ^ 1);
            barrier_expect(full, kTokenStageBytes, active);
            const uint32_t dst = s.tokens + ring.stage * kTokenStageBytes + part;
            copy_bytes(dst, src + part, kPart, full, active);
            src += kTokenStageBytes;
        }
    }
}

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
    __device__ __forceinline__ void load(uint32_t box, const uint32_t* offsets, uint32_t slice) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t upper = box + kSlices * kRows * kBox + offsets[i];
            low[i] = load_shared(box + slice * kRows * kBox + offsets[i]);
            high[i] = load_shared(upper);
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

// Scales a sum over window elements to one over the row's elements. 2^199 does not fit FP32; in two
// steps nothing overflows unless the result does.
__device__ __forceinline__ float scale_sum(float sum, int first) {
    const int shift = first - (kBits == 12 ? 40 : 112);
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

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
    __launch_bounds__(kThreads, 1)
        multiply(const __grid_constant__ TensorMap low, const __grid_constant__ TensorMap high,
                 const __grid_constant__ Product p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Shared shared(shared_address(memory));
    if (threadIdx.x == 0) shared.init();
    cluster_sync();
    const uint32_t warp = threadIdx.x / 32;
    if (warp == kConsumers) {
        fetch_weights(p, low, high, shared);
        start_next_kernel();
    } else if (warp == kConsumers + 1) {
        fetch_tokens(p, shared);
    } else if (!kMany && warp > kConsumers + 1) {
        sum_exceptions(p, shared, threadIdx.x - 32 * (kConsumers + 2));
    } else if (warp < kConsumers) {
        if constexpr (kMany)
            consume_many(p, shared);
        else
            consume_few(p, shared);
    }
    if constexpr (kCluster > 1) cluster_sync();  // others may still write to this program's memory
}
