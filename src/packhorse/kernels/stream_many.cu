// More than 32 tokens: four warps have 64 rows and all columns, and read the tokens from shared
// memory as they multiply. While a product runs, they decode what the next one needs to other
// registers, so that the tensor cores seldom wait.

constexpr uint32_t kWide = kMany ? kTokens : 64;  // tokens of a product
constexpr uint32_t kSumsOfLane = kWide / 2;       // 64 rows x kWide, by 128 threads

#define SUMS_8(i)                                                                               \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)

// 64 rows x kWide tokens x 16 columns. Runs until it is waited for; until then its registers and
// tokens must stay as they are.
__device__ __forceinline__ void start_product(float* d, const uint32_t* a, uint64_t tokens) {
    if constexpr (kWide == 64) {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %37, 0;"
            " wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
            "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
            : SUMS_32(0)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(1));
    } else if constexpr (kWide == 128) {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %69, 0;"
            " wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
            "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
            : SUMS_32(0), SUMS_32(32)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(1));
    } else {
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %133, 0;"
            " wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
            "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
            "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
            "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
            "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
            "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
            "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "
            "%111, "
            "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
            "%126, %127"
            "}, {%128, %129, %130, %131}, %132, p, 1, 1, 0; }"
            : SUMS_32(0), SUMS_32(32), SUMS_32(64), SUMS_32(96)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tokens), "r"(1));
    }
}

#undef SUMS_8
#undef SUMS_32

// Keeps a register as it is up to this place.
__device__ __forceinline__ void keep(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void keep(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}

// What four products need of the weights: 64 columns.
struct Operand {
    uint32_t a[4][4];

    __device__ __forceinline__ void decode(Pieces& pieces, uint32_t box, const uint32_t* offsets,
                                           uint32_t slice) {
        pieces.load(box, offsets, slice, kBits == 11 || slice == 0);
#pragma unroll
        for (uint32_t chunk = 0; chunk < 4; ++chunk) pieces.decode_chunk(chunk, slice, a[chunk]);
    }

    __device__ __forceinline__ void keep_all() {
#pragma unroll
        for (uint32_t chunk = 0; chunk < 4; ++chunk)
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) keep(a[chunk][i]);
    }
};

// Starts the products of four chunks of tokens: 8 x 8 elements are 128 bytes, halves of a chunk
// adjacent.
__device__ __forceinline__ void start_products(float* sums, Operand& operand, uint32_t tokens) {
    const uint32_t place = (tokens & 0x3FFFF) >> 4 | 128 / 16 << 16;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (uint32_t chunk = 0; chunk < 4; ++chunk) {
        uint64_t descriptor;  // the upper half is the stride of 8 tokens
        asm("mov.b64 %0, {%1, %2};"
            : "=l"(descriptor)
            : "r"(place + chunk * kChunkBytes / 16), "r"(256 / 16));
        start_product(sums, operand.a[chunk], descriptor);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until only the `kLeft` latest groups of products run.
template <uint32_t kLeft>
__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// Two more warps sum up exceptions before the products of a unit are done: each has
// half of the rows whose exceptions the unit adds. The tokens of the next exceptions are copied to
// a ring in shared memory while those before are added.
//
// A lane has the same tokens of each row: of the octets i * kOctetsOfLane and on, where i = lane /
// 4, tokens 2 (lane % 4) and the next. Tokens by columns are in this order:
// [block of tokens][column][lane][octet][2 tokens].
constexpr uint32_t kOctetsOfLane = kWide / 64;
constexpr uint32_t kAtOnce = 8;                   // exceptions of a stage of the ring
constexpr uint32_t kPerCopy = 256 / kWide;        // of which one instruction copies so many
constexpr uint32_t kCopies = kAtOnce / kPerCopy;  // of a stage
constexpr uint32_t kEntryPlace = kAtOnce * kWide * 2;
static_assert(!kMany || kExceptionStageBytes == kEntryPlace + kAtOnce * 4, "tokens and exceptions");

// Sums that are added to those of the products, in device memory: [8 rows][octet][lane]. Lane l has
// row l / 4 and two tokens of the octet, as in the sums of products.
__device__ __forceinline__ float2* extras_of(const Product& p, uint32_t rows) {
    return static_cast<float2*>(p.extras) +
           static_cast<uint64_t>(blockIdx.x * (kRows / 8) + rows) * (kWide / 8) * 32;
}

// How many rows of a block each of several parts adds the exceptions of. n_parts is a power of two.
__device__ __forceinline__ uint32_t rows_of_part(const Product& p) {
    return kRows >> (31 - __clz(p.n_parts));
}

__device__ __forceinline__ void copy_async(uint32_t dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

template <uint32_t kLeft>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// The exceptions of consecutive rows, one after the other.
struct ExceptionStream {
    const uint32_t* entries;
    const uint4* tokens;
    const uint32_t* zero;
    uint32_t n, ring, ahead[kCopies];

    __device__ __forceinline__ void load_ahead(uint32_t stage) {
#pragma unroll
        for (uint32_t i = 0; i < kCopies; ++i) {
            const uint32_t k = stage * kAtOnce + i * kPerCopy + threadIdx.x % 32 * kPerCopy / 32;
            ahead[i] = *(k < n ? entries + k : zero);
        }
    }

    __device__ __forceinline__ uint32_t place(uint32_t stage) const {
        return ring + stage % kExceptionStages * kExceptionStageBytes;
    }

    // Copies what has been loaded of a stage, and loads of the next one.
    __device__ __forceinline__ void copy(uint32_t stage) {
        const uint32_t lane = threadIdx.x % 32, to = place(stage);
#pragma unroll
        for (uint32_t i = 0; i < kCopies; ++i) {
            copy_async(to + i * 512 + lane * 16,
                       tokens + (ahead[i] & 0xFFFF) * (kWide / 8) + lane % (kWide / 8));
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + kEntryPlace +
                                                         4 * (i * kPerCopy + lane * kPerCopy / 32)),
                         "r"(ahead[i])
                         : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        load_ahead(stage + 1);
    }
};

// What lanes know of the rows that a warp sums up exceptions of: lane i of rows i and i + 32.
struct Rows {
    uint32_t ends[2];  // of their exceptions, counted from the first one of all rows
    float holes[2];

    __device__ __forceinline__ Rows(const Product& p, uint32_t first_row, uint32_t begin) {
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t row = first_row + i * 32 + threadIdx.x % 32;
            ends[i] = p.starts[min(row + 1, p.n_rows)] - begin;
            if constexpr (kBits == 11)
                holes[i] = power_of_two(p.first_exponents[min(row, p.n_rows - 1)] - 127);
        }
    }

    // The row of an exception, which there must be.
    __device__ __forceinline__ uint32_t row_of(uint32_t exception) const {
        return __popc(__ballot_sync(0xFFFFFFFF, ends[0] <= exception)) +
               __popc(__ballot_sync(0xFFFFFFFF, ends[1] <= exception));
    }

    __device__ __forceinline__ float hole_of(uint32_t row) const {
        if constexpr (kBits == 11)
            return __shfl_sync(0xFFFFFFFF, row < 32 ? holes[0] : holes[1], row % 32);
        else
            return 0.0f;
    }
};

// A lane's sums of a row, for its tokens. Nothing branches from row to row, so that the compiler
// can mix the work for several exceptions.
struct RowSums {
    float2* block;  // of the sums of the warp's rows
    uint32_t row;
    float sums[2 * kOctetsOfLane];

    __device__ __forceinline__ void store(bool active) const {
        const uint32_t lane = threadIdx.x % 32;
        const float2* to = block + row / 8 * (kWide / 8 * 32) + row % 8 * 4 +
                           (lane / 4 * kOctetsOfLane * 32 + lane % 4);
#pragma unroll
        for (uint32_t i = 0; i < kOctetsOfLane; ++i)
            asm volatile(
                "{ .reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.f32 [%0], {%1, %2}; }" ::"l"(
                    to + i * 32),
                "f"(sums[2 * i]), "f"(sums[2 * i + 1]), "r"(static_cast<uint32_t>(active))
                : "memory");
    }

    // Begins with another row if it is another one.
    __device__ __forceinline__ void go_to(uint32_t next) {
        const bool changes = next != row;
        store(changes);
#pragma unroll
        for (uint32_t i = 0; i < 2 * kOctetsOfLane; ++i) sums[i] = changes ? 0.0f : sums[i];
        row = next;
    }
};

__device__ void sum_exceptions(const Product& p, const Shared& s, uint32_t warp) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t n_mine = rows_of_part(p) / kExceptionWarps;
    ExceptionStream stream;
    stream.ring = s.exceptions + warp * kExceptionStages * kExceptionStageBytes;
    stream.zero = reinterpret_cast<const uint32_t*>(p.starts);  // they begin with 0
    uint32_t parity = 1;
    wait_for_kernel_before();
    for (Units units(p); units.more(); units.next(), parity ^= 1) {
        const Unit u = units.get(p);
        const uint32_t first = (u.part * kExceptionWarps + warp) * n_mine;
        const uint32_t begin = p.starts[min(u.first_row + first, p.n_rows)];
        stream.n = p.starts[min(u.first_row + first + n_mine, p.n_rows)] - begin;
        stream.entries = p.exceptions + begin;
        stream.tokens = reinterpret_cast<const uint4*>(p.by_column) +
                        static_cast<uint64_t>(u.token_block) * p.n_columns * (kWide / 8);
        const Rows rows(p, u.first_row + first, begin);
        stream.load_ahead(0);
#pragma unroll
        for (uint32_t i = 0; i + 1 < kExceptionStages; ++i) stream.copy(i);
        barrier_wait(s.empty_sums, parity);
        RowSums sums = {extras_of(p, 0), first + rows.row_of(0), {}};
#pragma unroll 1
        for (uint32_t row = 0; row < n_mine; row += 8) {  // many have no exceptions
            float4* to = reinterpret_cast<float4*>(extras_of(p, (first + row) / 8)) + lane;
#pragma unroll
            for (uint32_t i = 0; i < kWide / 16; ++i) to[i * 32] = make_float4(0, 0, 0, 0);
        }
        __syncwarp();
#pragma unroll 1
        for (uint32_t k = 0; k < stream.n; k += kAtOnce) {
            wait_for_copies<kExceptionStages - 2>();
            __syncwarp();
            stream.copy(k / kAtOnce + kExceptionStages - 1);
            const uint32_t from = stream.place(k / kAtOnce);
            uint32_t entries[kAtOnce], x[kAtOnce][kOctetsOfLane];
#pragma unroll
            for (uint32_t e = 0; e < kAtOnce; e += 4) {
                const uint4 v = load_shared(from + kEntryPlace + 4 * e);
                entries[e] = v.x, entries[e + 1] = v.y, entries[e + 2] = v.z, entries[e + 3] = v.w;
            }
#pragma unroll
            for (uint32_t e = 0; e < kAtOnce; ++e)
                load_words(x[e], from + e * (kWide * 2) + lane * (4 * kOctetsOfLane));
#pragma unroll
            for (uint32_t e = 0; e < kAtOnce; ++e) {
                const uint32_t row = rows.row_of(min(k + e, stream.n - 1));
                sums.go_to(first + row);
                const float value = __uint_as_float(entries[e] & 0xFFFF0000);
                const float minus = k + e < stream.n ? rows.hole_of(row) : 0.0f;
#pragma unroll
                for (uint32_t i = 0; i < kOctetsOfLane; ++i) {
                    add_exception(sums.sums[2 * i], value, __uint_as_float(x[e][i] << 16), minus);
                    add_exception(sums.sums[2 * i + 1], value,
                                  __uint_as_float(x[e][i] & 0xFFFF0000), minus);
                }
            }
        }
        sums.store(stream.n > 0);
        wait_for_copies<0>();
        __syncwarp();
        barrier_arrive(s.full_sums, lane == 0);
    }
}

__device__ __forceinline__ float2 load_extra(const float2* from) {
    float2 v;
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
    return v;
}

__device__ __forceinline__ uint32_t round_pair(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// The place of 8 rows of a token in a warp's part of the results: 32 tokens x 16 rows. Lanes that
// are served together use different banks.
__device__ __forceinline__ uint32_t place_in_results(uint32_t token, uint32_t half) {
    return token * 32 + ((half ^ token >> 2) & 1) * 16;
}

// Rounds and stores a warp's sums of 32 tokens and 16 rows. Matrices in shared memory turn tokens
// of a row to rows of a token.
__device__ __forceinline__ void store_rounded(const Product& p, uint32_t first_token,
                                              uint32_t first_row, const float* sums,
                                              uint32_t results) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t to = results + place_in_results(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    __syncwarp();
#pragma unroll
    for (uint32_t two = 0; two < 2; ++two) {
        const float* from = sums + two * 8;
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + two * 16 * 32),
                     "r"(round_pair(from[0], from[1])), "r"(round_pair(from[2], from[3])),
                     "r"(round_pair(from[4], from[5])), "r"(round_pair(from[6], from[7]))
                     : "memory");
    }
    __syncwarp();
    uint16_t* y = static_cast<uint16_t*>(p.y);
#pragma unroll
    for (uint32_t piece = lane; piece < 64; piece += 32) {
        const uint4 v = load_shared(results + place_in_results(piece / 2, piece % 2));
        const uint32_t token = first_token + piece / 2, row = first_row + piece % 2 * 8;
        const uint64_t at = static_cast<uint64_t>(token) * p.n_rows + row;
        if (p.n_rows % 8 == 0) {
            if (token < p.n_tokens && row < p.n_rows) *reinterpret_cast<uint4*>(y + at) = v;
        } else {
#pragma unroll 1
            for (uint32_t i = 0; i < 8; ++i)
                if (token < p.n_tokens && row + i < p.n_rows)
                    y[at + i] = static_cast<uint16_t>(Pieces::word(v, i / 2) >> i % 2 * 16);
        }
    }
}

// Where a warp's sums of a part are: [octet of tokens][lane], as the lanes have them.
__device__ __forceinline__ float4* sums_of_part(const Product& p, uint32_t part,
                                                uint32_t token_block, uint32_t first_row) {
    const uint32_t n_tiles = p.n_row_blocks * (kCluster * kRows / 16);
    const uint64_t tile =
        (static_cast<uint64_t>(part) * p.n_token_blocks + token_block) * n_tiles + first_row / 16;
    return static_cast<float4*>(p.parts) + tile * (kWide / 8) * 32 + threadIdx.x % 32;
}

// The power of two for the sums of a lane's two rows, as in `scale_sum`, and their bias.
struct Scales {
    float scale[2], rest[2], bias[2];

    // What has been loaded is used from here on, before other loads are under way.
    __device__ __forceinline__ void keep_all() {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            keep(scale[half]);
            keep(rest[half]);
            keep(bias[half]);
        }
    }

    __device__ __forceinline__ Scales(const Product& p, const Unit& u, uint32_t row) {
#pragma unroll
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t there = row + 8 * half < p.n_rows ? row + 8 * half : 0;
            const int shift = p.first_exponents[there] - kSumShift;
            scale[half] = power_of_two(min(shift, 127));
            rest[half] = power_of_two(max(shift - 127, 0));
            bias[half] = p.bias != nullptr && u.part == 0 ? widen(p.bias[there]) : 0.0f;
        }
    }
};

// Scales the sums of a warp's 16 rows, adds what has been summed up beside them, and stores the
// results.
__device__ __forceinline__ void finish_many(const Product& p, const Shared& s, const Unit& u,
                                            float* sums, const Scales& scales) {
    const uint32_t warp = threadIdx.x / 32, first_row = u.first_row + warp * 16;
    if (__any_sync(0xFFFFFFFF, scales.rest[0] > 1.0f || scales.rest[1] > 1.0f))
#pragma unroll
        for (uint32_t i = 0; i < kSumsOfLane; ++i) sums[i] *= scales.rest[i / 2 % 2];
    const uint32_t n_rows_of_part = rows_of_part(p);
    bool mine[2];
    const float2* from[2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
        mine[half] = (warp * 2 + half) * 8 / n_rows_of_part == u.part;
        from[half] = extras_of(p, warp * 2 + half) + threadIdx.x % 32;
    }
    constexpr uint32_t kBatch = 8;  // octets whose sums are loaded at once
#pragma unroll
    for (uint32_t start = 0; start < kWide / 8; start += kBatch) {
        float2 extras[2][kBatch];
#pragma unroll
        for (uint32_t i = 0; i < 2 * kBatch; ++i)
            extras[i / kBatch][i % kBatch] =
                mine[i / kBatch] ? load_extra(from[i / kBatch] + (start + i % kBatch) * 32)
                                 : make_float2(0.0f, 0.0f);
#pragma unroll
        for (uint32_t i = 0; i < 2 * kBatch; ++i) {
            const float2 extra = extras[i / kBatch][i % kBatch];
            float* to = sums + (start + i % kBatch) * 4 + 2 * (i / kBatch);
            to[0] = fmaf(to[0], scales.scale[i / kBatch], extra.x);
            to[1] = fmaf(to[1], scales.scale[i / kBatch], extra.y);
        }
    }
    __syncwarp();
    barrier_arrive(s.empty_sums, threadIdx.x % 32 == 0);
    if (p.bias != nullptr)
#pragma unroll
        for (uint32_t i = 0; i < kSumsOfLane; ++i) sums[i] += scales.bias[i / 2 % 2];
    if (p.n_parts > 1) {
        float4* to = sums_of_part(p, u.part, u.token_block, first_row);
#pragma unroll
        for (uint32_t i = 0; i < kWide / 8; ++i)
            to[i * 32] =
                make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
    } else {
#pragma unroll
        for (uint32_t quad = 0; quad < kWide / 32; ++quad)
            store_rounded(p, u.token_block * kTokens + quad * 32, first_row, sums + quad * 16,
                          s.results + warp * kResultBytes);
    }
}

__device__ void consume_many(const Product& p, const Shared& s) {
    const uint32_t tile = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t offsets[2] = {place_in_box(lane / 4, lane % 4),
                                 place_in_box(lane / 4 + 8, lane % 4)};
    WeightRing weights;
    TokenRing ring, done;
    uint32_t parity = 0;
    for (Units units(p); units.more(); units.next(), parity ^= 1) {
        const Unit u = units.get(p);
        Scales scales(p, u, u.first_row + tile * 16 + lane / 4);
        float sums[kSumsOfLane] = {};
        Operand operands[2];
        Pieces pieces;
        for (uint32_t turn = u.begin; turn < u.end; ++turn) {
            barrier_wait(s.full_weights + 8 * weights.stage, weights.round);
            const uint32_t box = s.weights + weights.stage * kWeightStageBytes + tile * 16 * kBox;
#pragma unroll 2
            for (uint32_t slice = 0; slice < kSlices; ++slice, ring.next()) {
                // The product that reads these registers is the one before the last.
                Operand& operand = operands[slice % 2];
                operand.decode(pieces, box, offsets, slice);
                if (slice + 1 == kSlices) {
                    finish_loads();
                    __syncwarp();
                    barrier_arrive(s.empty_weights + 8 * weights.stage, lane == 0);
                }
                barrier_wait(s.full_tokens + 8 * ring.stage, ring.round);
                start_products(sums, operand, s.tokens + ring.stage * kTokenStageBytes);
                wait_for_products<1>();
                operands[1 - slice % 2].keep_all();
                if (turn > u.begin || slice > 0) {
                    barrier_arrive_cluster(s.empty_tokens + 8 * done.stage, lane);
                    done.next();
                }
            }
            weights.next();
        }
        scales.keep_all();
        wait_for_products<0>();
        if (u.begin < u.end) {
            barrier_arrive_cluster(s.empty_tokens + 8 * done.stage, lane);
            done.next();
        }
#pragma unroll
        for (uint32_t i = 0; i < kSumsOfLane; ++i) keep(sums[i]);
        barrier_wait(s.full_sums, parity);
        finish_many(p, s, u, sums, scales);
    }
}

// In assembly, so that several loads are on their way before the first is used.
__device__ __forceinline__ float4 load_sums(const float4* from) {
    float4 v;
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// Adds the sums of all parts in their order, and rounds the results: a warp has 16 rows and 32
// tokens.
extern "C" __global__ void __launch_bounds__(128, 2) add_parts(const __grid_constant__ Product p) {
    __shared__ __align__(128) uint8_t memory[4 * kResultBytes];
    start_next_kernel();
    wait_for_kernel_before();
    const uint32_t warp = threadIdx.x / 32, index = blockIdx.x * 4 + warp;
    const uint32_t quad = index % (kWide / 32), tile = index / (kWide / 32);
    const uint32_t n_tiles = p.n_row_blocks * (kCluster * kRows / 16);
    const uint32_t token_block = tile / n_tiles, first_row = tile % n_tiles * 16;
    if (token_block >= p.n_token_blocks) return;
    float sums[16] = {};
#pragma unroll 1
    for (uint32_t part = 0; part < p.n_parts; part += 2) {  // there is an even number
        const float4* from[2];
        float4 v[2][4];
#pragma unroll
        for (uint32_t i = 0; i < 2; ++i)
            from[i] = sums_of_part(p, part + i, token_block, first_row) + quad * 4 * 32;
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) v[i / 4][i % 4] = load_sums(from[i / 4] + i % 4 * 32);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
            float* to = sums + i % 4 * 4;
            const float4& from = v[i / 4][i % 4];
            to[0] += from.x, to[1] += from.y, to[2] += from.z, to[3] += from.w;
        }
    }
    store_rounded(p, token_block * kTokens + quad * 32, first_row, sums,
                  shared_address(memory) + warp * kResultBytes);
}
