// Up to 32 tokens: the columns of a row are in eight parts, whatever the division. A warp
// multiplies one part for `kRows` rows, and two more warps add the parts, in their order, and
// exceptions.
//
// A turn has four boxes of columns. Of box i of a turn, half of the slices are part 2 i, and half
// are part 2 i + 1. A program has `kRows` rows of all four boxes. Programs of a cluster put their
// rows together, and each takes 4 / kCluster of the boxes for all of them, so that it needs fewer
// tokens. Two warps, a pair, take a stage: one box for `kRows` rows.

constexpr uint32_t kBoxes = 4;                     // of a turn
constexpr uint32_t kMyBoxes = kBoxes / kCluster;   // of them in this program
constexpr uint32_t kPairs = kBoxes;                // of warps
constexpr uint32_t kTiles = kRows / 16;            // of rows
constexpr uint32_t kOctets = kTokens / 8;          // of tokens
constexpr uint32_t kShift = kBits == 12 ? 40 : 0;  // tokens are scaled by 2^kShift
// A barrier tells phases apart by parity alone. A warp that left out phases could take the one
// before last for the one that it waits for.
static_assert(kMany || (kWeightStages % kPairs == 0 && kTokenStages % kMyBoxes == 0),
              "a stage stays with its warps");

// Sizes that follow from those of a product.
struct Columns {
    uint32_t n_steps, n_boxes;  // of a row
    uint32_t pitch;             // elements from a token to the next
    bool fit;                   // all tokens fit the stages at once, so they are fetched once

    __device__ explicit Columns(const Product& p) {
        constexpr uint32_t kUnit = 16 * kSlices;
        n_steps = (p.n_columns + kUnit - 1) / kUnit * 16;
        n_boxes = (n_steps + kBox - 1) / kBox;
        pitch = (p.n_columns + 7) / 8 * 8;
        fit = p.n_turns * kMyBoxes <= kTokenStages && p.n_parts == 1 && p.n_token_blocks == 1;
    }
};

__device__ __forceinline__ uint32_t first_of_cluster(const Unit& u) {
    return u.first_row - cluster_rank() * kRows;
}

__device__ void fetch_boxes(const Product& p, const TensorMap& low, const TensorMap& high,
                            const Shared& s) {
    const bool active = threadIdx.x % 32 == 0;
    const Columns columns(p);
    WeightRing ring;
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        const uint32_t first_row = first_of_cluster(u);
        for (uint32_t turn = u.begin; turn < u.end; ++turn) {
#pragma unroll
            for (uint32_t pair = 0; pair < kPairs; ++pair, ring.next()) {
                const uint32_t box = turn * kBoxes + cluster_rank() * kMyBoxes + pair / kCluster;
                const bool there = active && box < columns.n_boxes;
                const uint32_t full = s.full_weights + 8 * ring.stage;
                const uint32_t dst = s.weights + ring.stage * kWeightStageBytes;
                const uint32_t row = first_row + pair % kCluster * kRows;
                barrier_wait(s.empty_weights + 8 * ring.stage, ring.round ^ 1);
                barrier_expect(full, there ? kWeightStageBytes : 0, active);
                copy_box(dst, &low, box * kBox, row, full, there);
                copy_box(dst + kSlices * kRows * kBox, &high, box * kBox, row, full, there);
            }
        }
    }
}

// Each lane copies 16 bytes; zeros if there is nothing.
__device__ __forceinline__ void copy_16(uint32_t dst, const void* src, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(there ? 16 : 0)
                 : "memory");
}

// The copies of a stage are waited for when those of the next one have been started. Tokens that
// are not there leave what was there before: consumers read others in their place.
__device__ void fetch_rows(const Product& p, const Shared& s) {
    constexpr uint32_t kLanes = kBox / 8,
                       kAtOnce = 32 / kLanes;  // of a row; rows of an instruction
    const uint32_t lane = threadIdx.x % 32;
    const Columns columns(p);
    TokenRing ring;
    uint32_t before = 0;
    wait_for_kernel_before();
    for (Units units(p); units.more(); units.next(columns.fit)) {
        const Unit u = units.get(p);
        const uint32_t first = u.token_block * kTokens, n = min(p.n_tokens - first, kTokens);
        const uint16_t* tokens = reinterpret_cast<const uint16_t*>(p.arranged) +
                                 static_cast<uint64_t>(first) * columns.pitch;
        for (uint32_t turn = u.begin; turn < u.end; ++turn) {
#pragma unroll 1  // one loop of copies
            for (uint32_t own = 0; own < kMyBoxes; ++own, ring.next()) {
                const uint32_t box = turn * kBoxes + cluster_rank() * kMyBoxes + own;
                const uint32_t step = box * kBox + lane % kLanes * 8;
                barrier_wait(s.empty_tokens + 8 * ring.stage, ring.round ^ 1);
#pragma unroll
                for (uint32_t i = 0; i < kSlices; i += kAtOnce) {
                    const uint32_t slice = i + lane / kLanes;
                    const uint32_t column = slice * columns.n_steps + step;
                    const bool there = step < columns.n_steps && column < columns.pitch;
                    const uint16_t* src = tokens + (there ? column : 0);
                    uint32_t dst = s.tokens + ring.stage * kTokenStageBytes +
                                   slice * kTokens * kTokenPitch + lane % kLanes * 16;
#pragma unroll 4
                    for (uint32_t token = 0; token < n; ++token) {
                        copy_16(dst, src, there);
                        dst += kTokenPitch;
                        src += columns.pitch;
                    }
                }
                asm volatile("cp.async.commit_group; cp.async.wait_group 1;" ::: "memory");
                __syncwarp();
                barrier_arrive(before, lane == 0 && before != 0);
                before = s.full_tokens + 8 * ring.stage;
            }
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    barrier_arrive(before, lane == 0 && before != 0);
}

__device__ __forceinline__ void multiply_few(float* sums, const uint32_t* a, uint32_t b0,
                                             uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t scale_pair(uint32_t pair) {
    if constexpr (kShift == 0) return pair;
    uint32_t scaled;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scaled) : "r"(pair), "r"(0x53805380));  // 2^40
    return scaled;
}

// The tokens of a group of 64 steps: a lane has 16 consecutive columns of a token of each octet, in
// the order in which it decodes them.
struct TokenPieces {
    uint4 halves[kOctets][2];

    __device__ __forceinline__ void load(const uint32_t* addresses, uint32_t offset) {
#pragma unroll
        for (uint32_t n = 0; n < kOctets; ++n)
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half)
                halves[n][half] = load_shared(addresses[n] + offset + 16 * half);
    }

    __device__ __forceinline__ void scale() {
#pragma unroll
        for (uint32_t n = 0; n < kOctets; ++n)
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half) {
                uint4& v = halves[n][half];
                v = make_uint4(scale_pair(v.x), scale_pair(v.y), scale_pair(v.z), scale_pair(v.w));
            }
    }
};

// A warp's part of a box: of `half` of the slices, all rows and tokens. `at` are the places of the
// lane's two rows in a tile, for each group of a slice.
template <uint32_t kHalf>
__device__ __forceinline__ void multiply_box(float (*sums)[kOctets][4], uint32_t box,
                                             const uint32_t* tokens, const uint32_t (*at)[2]) {
    constexpr uint32_t kGroupsOfSlice = kBox / kGroup;
    constexpr uint32_t kGroups = kSlices / 2 * kGroupsOfSlice, kItems = kGroups * kTiles;
    constexpr uint32_t kFirst = kHalf * kSlices / 2;
    Pieces next;
    TokenPieces x;
    next.load(box, at[0], kFirst);
#pragma unroll
    for (uint32_t item = 0; item < kItems; ++item) {
        const uint32_t group = item / kTiles, tile = item % kTiles;
        const uint32_t slice = kFirst + group / kGroupsOfSlice;
        if (tile == 0) {
            x.load(tokens, slice * kTokens * kTokenPitch + group % kGroupsOfSlice * 2 * kGroup);
            x.scale();
        }
        const Pieces pieces = next;
        if (item + 1 < kItems) {
            const uint32_t other = (item + 1) / kTiles;
            next.load(box + (item + 1) % kTiles * 16 * kBox, at[other % kGroupsOfSlice],
                      kFirst + other / kGroupsOfSlice);
        }
#pragma unroll
        for (uint32_t chunk = 0; chunk < 4; ++chunk) {
            uint32_t a[4];
            pieces.decode_chunk(chunk, slice, a);
#pragma unroll
            for (uint32_t n = 0; n < kOctets; ++n) {
                const uint4& v = x.halves[n][chunk / 2];
                multiply_few(sums[tile][n], a, chunk % 2 ? v.z : v.x, chunk % 2 ? v.w : v.y);
            }
        }
    }
}

// Two results for a program of the cluster, which a barrier there counts.
__device__ __forceinline__ void send(uint32_t dst, float first, float second, uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::
            "r"(dst),
        "f"(first), "f"(second), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ uint32_t address_in(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Sends a warp's sums to the program that finishes these rows.
__device__ __forceinline__ void send_sums(const Shared& s, float (*sums)[kOctets][4]) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2;
    const uint32_t part = 2 * (cluster_rank() * kMyBoxes + pair / kCluster) + warp % 2;
    const uint32_t row = part * kRows + tile_row(lane / 4), rank = pair % kCluster;
    const uint32_t dst = address_in(s.sums + 4 * (row * kSumPitch + lane % 4 * 2), rank);
    const uint32_t barrier = address_in(s.full_sums, rank);
#pragma unroll
    for (uint32_t tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (uint32_t n = 0; n < kOctets; ++n)
#pragma unroll
            for (uint32_t half = 0; half < 2; ++half)
                send(dst + 4 * ((tile * 16 + half * 8) * kSumPitch + n * 8),
                     sums[tile][n][2 * half], sums[tile][n][2 * half + 1], barrier);
}

__device__ void consume_few(const Product& p, const Shared& s) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = warp / 2;
    const uint32_t row = tile_row(lane / 4), own = pair / kCluster;
    const Columns columns(p);
    uint32_t at[kBox / kGroup][2];
#pragma unroll
    for (uint32_t i = 0; i < kBox / kGroup; ++i)
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half)
            at[i][half] = place_in_box(row + 8 * half, 4 * i + lane % 4);
    WeightRing weights;
    TokenRing ring;
    weights.next(pair);
    ring.next(own);
    uint32_t parity = 1;
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        const uint32_t last = min(p.n_tokens - u.token_block * kTokens, kTokens) - 1;
        uint32_t places[kOctets];
#pragma unroll
        for (uint32_t n = 0; n < kOctets; ++n)
            places[n] = s.tokens + min(8 * n + lane / 4, last) * kTokenPitch + lane % 4 * 32;
        if (columns.fit) {  // tokens are where they were for the unit before
            ring.stage = own;
            ring.round = 0;
        }
        float sums[kTiles][kOctets][4] = {};
        for (uint32_t turn = u.begin; turn < u.end; ++turn) {
            barrier_wait(s.full_weights + 8 * weights.stage, weights.round);
            barrier_wait(s.full_tokens + 8 * ring.stage, ring.round);
            if (turn * kBoxes + cluster_rank() * kMyBoxes + own < columns.n_boxes) {
                const uint32_t box = s.weights + weights.stage * kWeightStageBytes;
                uint32_t tokens[kOctets];
#pragma unroll
                for (uint32_t n = 0; n < kOctets; ++n)
                    tokens[n] = places[n] + ring.stage * kTokenStageBytes;
                if (warp % 2 == 0)
                    multiply_box<0>(sums, box, tokens, at);
                else
                    multiply_box<1>(sums, box, tokens, at);
            }
            finish_loads();
            __syncwarp();
            barrier_arrive(s.empty_weights + 8 * weights.stage, lane == 0);
            barrier_arrive(s.empty_tokens + 8 * ring.stage, lane == 0);
            weights.next(kPairs);
            ring.next(kMyBoxes);
        }
        barrier_wait(s.empty_sums, parity);
        send_sums(s, sums);
        parity ^= 1;
    }
}

// A thread finishes a row for half of the tokens.
constexpr uint32_t kFinishers = 64;
constexpr uint32_t kMine = kMany ? 4 : kTokens / 2;
constexpr uint32_t kPasses = (2 * kRows + kFinishers - 1) / kFinishers;
static_assert(kMany || kPasses <= 2, "rows of a program");

// As `barrier_wait`, for what other programs of the cluster wrote.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p;"
            " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// What a thread finishes. A warp stays together: threads without work take part with a row that is
// not there.
struct Finished {
    uint32_t tile_row, row, there, token;  // `there` is a row that is
    int first_exponent;
    float bias;
    float extra[kMine] = {};  // sums of exceptions

    __device__ __forceinline__ Finished(const Product& p, const Unit& u, uint32_t i) {
        tile_row = i % kRows;
        row = i < 2 * kRows ? u.first_row + tile_row : p.n_rows;
        there = row < p.n_rows ? row : 0;
        token = i / kRows % 2 * kMine;
        first_exponent = p.first_exponents[there];
        bias = has_bias(p, u) ? widen(p.bias[there]) : 0.0f;
    }

    static __device__ __forceinline__ bool has_bias(const Product& p, const Unit& u) {
        return p.bias != nullptr && u.part == 0;
    }
};

// The tokens of a column, in registers of one (W12) or two (W11). W12 has hardly any exceptions;
// W11 has dozens in a row, so it has the tokens by columns.
struct Column {
    uint32_t words[kBits == 12 ? kMine : kMine / 2];

    // From the first token, with a distance of `pitch` and no token after the one at `last`.
    __device__ __forceinline__ void load(const uint16_t* first, uint32_t pitch, uint32_t last,
                                         uint32_t column) {
        if constexpr (kBits == 12) {
#pragma unroll
            for (uint32_t t = 0; t < kMine; ++t) words[t] = first[min(t, last) * pitch + column];
        } else {
            const uint2* pairs = reinterpret_cast<const uint2*>(first + column * kTokens);
#pragma unroll
            for (uint32_t t = 0; t < kMine; t += 4) {
                const uint2 v = pairs[t / 4];
                words[t / 2] = v.x;
                words[t / 2 + 1] = v.y;
            }
        }
    }

    __device__ __forceinline__ float get(uint32_t t) const {
        return widen(kBits == 12 ? words[t] : words[t / 2] >> t % 2 * 16 & 0xFFFF);
    }
};

// The next entries are loaded while those before wait for their tokens.
__device__ __forceinline__ void sum_exceptions(const Product& p, const Unit& u, Finished& f) {
    constexpr uint32_t kMost = kBits == 12 ? 8 : 16, kFit = 256 / sizeof(Column);
    constexpr uint32_t kAtOnce = kFit < kMost ? kFit : kMost;
    const Exceptions exceptions(p, u, f.row);
    const float hole = power_of_two(f.first_exponent - 127);
    const uint32_t pitch = Columns(p).pitch, token = u.token_block * kTokens + f.token;
    const uint32_t first = min(token, p.n_tokens - 1), last = p.n_tokens - 1 - first;
    const uint16_t* tokens = p.by_column + static_cast<uint64_t>(first) * pitch;
    if constexpr (kBits == 11)
        tokens =
            p.by_column + static_cast<uint64_t>(u.token_block) * kTokens * p.n_columns + f.token;
    uint32_t next[kAtOnce];
#pragma unroll
    for (uint32_t e = 0; e < kAtOnce; ++e) next[e] = exceptions.get(e);
    for (uint32_t k = 0; k < exceptions.most; k += kAtOnce) {
        uint32_t entries[kAtOnce];
        Column columns[kAtOnce];
#pragma unroll
        for (uint32_t e = 0; e < kAtOnce; ++e) {
            entries[e] = next[e];
            columns[e].load(tokens, pitch, last, entries[e] & 0xFFFF);
        }
#pragma unroll
        for (uint32_t e = 0; e < kAtOnce; ++e) next[e] = exceptions.get(k + kAtOnce + e);
#pragma unroll
        for (uint32_t e = 0; e < kAtOnce; ++e) {
            const float value = __uint_as_float(entries[e] & 0xFFFF0000);
            const float minus = k + e < exceptions.n ? hole : 0.0f;
#pragma unroll
            for (uint32_t t = 0; t < kMine; ++t)
                add_exception(f.extra[t], value, columns[e].get(t), minus);
        }
    }
}

// Adds the parts of a row.
__device__ __forceinline__ void add_parts(const Shared& s, const Finished& f, float* sums) {
    const uint32_t at = s.sums + 4 * (f.tile_row * kSumPitch + f.token);
#pragma unroll
    for (uint32_t t = 0; t < kMine; ++t) sums[t] = 0.0f;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
        for (uint32_t t = 0; t < kMine; t += 4) {
            const uint4 v = load_shared(at + 4 * (part * kRows * kSumPitch + t));
            sums[t] += __uint_as_float(v.x);
            sums[t + 1] += __uint_as_float(v.y);
            sums[t + 2] += __uint_as_float(v.z);
            sums[t + 3] += __uint_as_float(v.w);
        }
}

__device__ __forceinline__ void store_row(const Product& p, const Unit& u, const Finished& f,
                                          float* sums) {
    const uint32_t token = u.token_block * kTokens + f.token;
    const uint32_t n = f.row < p.n_rows ? p.n_tokens : 0;
    const uint64_t at = output_index(p, u, token, f.there);
#pragma unroll
    for (uint32_t t = 0; t < kMine; ++t) {
        sums[t] = scale_sum(sums[t], f.first_exponent) + f.extra[t];
        if (Finished::has_bias(p, u)) sums[t] += f.bias;
    }
    if (p.n_parts > 1) {
        float* y = static_cast<float*>(p.y) + at;
#pragma unroll
        for (uint32_t t = 0; t < kMine; ++t, y += p.n_rows)
            if (token + t < n) *y = sums[t];
    } else {
        uint16_t* y = static_cast<uint16_t*>(p.y) + at;
#pragma unroll
        for (uint32_t t = 0; t < kMine; ++t, y += p.n_rows)
            if (token + t < n) *y = round_to_bf16(sums[t]);
    }
}

// Two warps: sum up the exceptions of a unit, while others multiply, then add all and store it.
__device__ void finish_few(const Product& p, const Shared& s, uint32_t thread) {
    uint32_t parity = 0;
    wait_for_kernel_before();
    for (Units units(p); units.more(); units.next()) {
        const Unit u = units.get(p);
        barrier_expect(s.full_sums, 4 * kParts * kRows * kTokens, thread == 0);
        Finished finished[2] = {Finished(p, u, thread), Finished(p, u, kFinishers + thread)};
        float sums[kPasses][kMine];
#pragma unroll
        for (uint32_t pass = 0; pass < kPasses; ++pass) sum_exceptions(p, u, finished[pass]);
        barrier_wait_cluster(s.full_sums, parity);
#pragma unroll
        for (uint32_t pass = 0; pass < kPasses; ++pass) add_parts(s, finished[pass], sums[pass]);
        finish_loads();
        __syncwarp();
        barrier_arrive_cluster(s.empty_sums, thread % 32);
#pragma unroll
        for (uint32_t pass = 0; pass < kPasses; ++pass) store_row(p, u, finished[pass], sums[pass]);
        parity ^= 1;
    }
}
