// What the kernels of stream_product.py share: instructions that C++ has no word for, and the
// constants of a division. The launcher defines the macros of the first group.
//
// No branch depends on the lane, so that a warp stays together: what only some lanes do is
// predicated within the assembly.

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

constexpr uint32_t kBits = BITS;      // of a packed weight: 12 or 11
constexpr uint32_t kTokens = TOKENS;  // of a block: 8, 16, 32, 64, 128 or 256
constexpr uint32_t kRows = ROWS;      // of a program
constexpr uint32_t kWeightStages = WEIGHT_STAGES;
constexpr uint32_t kTokenStages = TOKEN_STAGES;
constexpr uint32_t kCluster = CLUSTER;  // programs that share what they fetch of the tokens

constexpr bool kMany = kTokens > 32;  // a group of four warps multiplies 64 rows
constexpr uint32_t kSlices = kBits == 12 ? 2 : 8;
constexpr uint32_t kHighParts = kBits == 12 ? 1 : 3;
constexpr uint32_t kGroup = 64;  // steps whose 16 bytes each a quarter of a warp reads
constexpr uint32_t kBox = !kMany && kBits == 12 ? 128 : 64;  // steps of a copy, and of a stage
constexpr uint32_t kChunkColumns = 16;  // columns of one product of the tensor cores
constexpr uint32_t kChunkBytes = kChunkColumns * kTokens * 2;  // its tokens
constexpr uint32_t kStageChunks = kBox / kChunkColumns * kSlices;
constexpr uint32_t kTokenChunks = 4;  // of a stage of tokens, if there are many
// Up to 32 tokens, a stage of tokens has their columns of a box as they are, for each slice. The
// 16 bytes between two tokens make lanes that are served together read from different banks.
constexpr uint32_t kTokenPitch = 2 * kBox + 16;
constexpr uint32_t kTokenStageBytes =
    kMany ? kTokenChunks * kChunkBytes : kSlices * kTokens * kTokenPitch;
constexpr uint32_t kWeightStageBytes = kRows * kBox * (kSlices + kHighParts);
constexpr uint32_t kConsumers = kMany ? kRows / 16 : 8;  // warps that multiply
constexpr uint32_t kThreads = 32 * (kConsumers + 4);     // the last group of four warps fetches
constexpr uint32_t kParts = 8;  // of a row's columns, up to 32 tokens, each with sums of its own
constexpr uint32_t kSumPitch = kTokens + 4;  // of a row's sums, against conflicts of banks
constexpr uint32_t kSumBytes = kMany ? 0 : 4 * kParts * kRows * kSumPitch;
// More than 32 tokens: rings of exceptions, one for each of two warps, and results on their way.
constexpr uint32_t kExceptionWarps = 2;
constexpr uint32_t kExceptionStages = 3;
constexpr uint32_t kExceptionStageBytes = 8 * (kTokens * 2 + 4);
constexpr uint32_t kRingBytes =
    kMany ? kExceptionWarps * kExceptionStages * kExceptionStageBytes : 0;
constexpr uint32_t kResultBytes = 16 * 32 * 2;  // of a warp
constexpr uint32_t kBarriers = 2 * kWeightStages + 2 * kTokenStages + 2;
constexpr uint32_t kSharedBytes = 1024 + kWeightStages * kWeightStageBytes +
                                  kTokenStages * kTokenStageBytes + kSumBytes + kRingBytes +
                                  (kMany ? kConsumers * kResultBytes : 0) + 8 * kBarriers;

static_assert(kSharedBytes == SHARED_NBYTES, "the launcher counts in the same way");
static_assert(kRows % (kMany ? 64 : 16) == 0, "rows of a program");
static_assert(kMany || (kWeightStages >= 4 && kTokenStages * kCluster >= 4), "stages of a turn");
static_assert(kMany || kCluster > 1, "sums are sent with st.async, which needs a cluster");
static_assert(kRows * kTokens <= 128 * 128, "registers for sums");
static_assert(kTokenStages >= 2, "a stage is waited for when the next one is under way");
static_assert(!kMany || kTokenStageBytes % (16 * kCluster) == 0, "parts of a stage of tokens");

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank = 0;
    if constexpr (kCluster > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All programs of the cluster, or all threads of the program if it is alone.
__device__ __forceinline__ void cluster_sync() {
    if constexpr (kCluster > 1)
        asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    else
        __syncthreads();
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    do {
        asm volatile(
            "{ .reg .pred p;"
            " mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
            " selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// One lane arrives, and says how many bytes copies will bring.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t nbytes, bool active) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %2, 0;"
        " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1; }" ::"r"(barrier),
        "r"(nbytes), "r"(static_cast<uint32_t>(active))
        : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, bool active) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %1, 0;"
        " @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(barrier),
        "r"(static_cast<uint32_t>(active))
        : "memory");
}

// Lane i arrives at the barrier of program i of the cluster. What it read has arrived; a release
// for the cluster would cost a fence for all memory.
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t barrier, uint32_t lane) {
    if constexpr (kCluster == 1) {
        barrier_arrive(barrier, lane == 0);
    } else {
        asm volatile(
            "{ .reg .pred p; .reg .b32 a; setp.lt.u32 p, %1, %2;"
            " @p mapa.shared::cluster.u32 a, %0, %1;"
            " @p mbarrier.arrive.shared::cluster.b64 _, [a]; }" ::"r"(barrier),
            "r"(lane), "n"(kCluster)
            : "memory");
    }
}

// One lane copies a box of a tensor: steps from `step` on, rows from `row` on, all parts. What lies
// outside of the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(uint32_t dst, const void* map, uint32_t step, uint32_t row,
                                         uint32_t barrier, bool active) {
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %6, 0;"
        " @p cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %4}], [%5]; }" ::"r"(dst),
        "l"(map), "r"(step), "r"(row), "r"(0), "r"(barrier), "r"(static_cast<uint32_t>(active))
        : "memory");
}

// One lane copies consecutive bytes, to all programs of the cluster.
__device__ __forceinline__ void copy_bytes(uint32_t dst, const void* src, uint32_t nbytes,
                                           uint32_t barrier, bool active) {
    if constexpr (kCluster > 1)
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0;"
            " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1], %2, [%3], %4; }" ::"r"(dst),
            "l"(src), "r"(nbytes), "r"(barrier), "h"(static_cast<uint16_t>((1u << kCluster) - 1)),
            "r"(static_cast<uint32_t>(active))
            : "memory");
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %4, 0;"
            " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [%0], [%1], %2, [%3]; }" ::"r"(dst),
            "l"(src), "r"(nbytes), "r"(barrier), "r"(static_cast<uint32_t>(active))
            : "memory");
}

// What this thread has loaded from shared memory has arrived, so that copies may replace it as soon
// as it says so. An arrival alone does not wait for loads that are under way: copies by the engine
// are another proxy (PTX, section 8.6), and came first where products kept shared memory busy.
__device__ __forceinline__ void finish_loads() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Waits until the kernels before have ended and their results can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel start, which then waits as above.
__device__ __forceinline__ void start_next_kernel() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void consumers_sync() {
    asm volatile("barrier.sync.aligned 1, %0;" ::"n"(32 * kConsumers) : "memory");
}

__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// 4, 8 or 16 bytes.
template <uint32_t kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], uint32_t address) {
    if constexpr (kWords == 1) {
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(words[0]) : "r"(address) : "memory");
    } else if constexpr (kWords == 2) {
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(words[0]), "=r"(words[1])
                     : "r"(address)
                     : "memory");
    } else {
        const uint4 v = load_shared(address);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
}

__device__ __forceinline__ float power_of_two(int exponent) {  // -126 to 127
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

__device__ __forceinline__ float widen(uint32_t bits) {
    return __uint_as_float(bits << 16);
}

__device__ __forceinline__ uint16_t round_to_bf16(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// The place of a step's 16 bytes in a row of a box: copies of 128 bytes are swizzled.
__device__ __forceinline__ uint32_t place_in_box(uint32_t row, uint32_t unit) {
    if constexpr (kBox == 128) return row * 128 + ((unit ^ row) & 7) * 16;
    return row * 64 + unit * 16;
}

// The row of a tile that a lane's rows of a product stand for, so that lanes that are served
// together read from different banks.
__device__ __forceinline__ uint32_t tile_row(uint32_t row) {
    if constexpr (kBox == 128) return (row & 1) << 2 | row >> 1;
    return row;
}
