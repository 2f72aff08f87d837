// Products of 1 to 256 tokens with a packed weight (docs/format.md, section 12) on Hopper:
// y = x W^T + bias.
//
// The warps of a program have different work. One warp fetches weights, by copies of boxes of rows
// that a barrier in shared memory counts; it waits for nothing but free stages, so it runs ahead
// even of the kernel before. Another one fetches tokens. The others decode in registers and
// multiply. Up to 32 tokens (stream_few.cu), each of eight warps has its own columns, and two more
// warps sum up exceptions and finish results. For more tokens (stream_many.cu), another kernel
// arranges them before; four warps have 64 rows and all columns, and read the tokens from shared
// memory as they multiply, while two more warps sum up exceptions. If units share a block, a third
// kernel adds their sums.
//
// Programs stay and take one unit after the other: a block of rows, a block of tokens, and a part
// of the columns. Programs of a cluster have neighbouring rows; up to 32 tokens, each has some of
// the columns of all these rows, and for more tokens they share what they fetch of the tokens. The
// order of sums depends on the matrix and the number of parts alone for up to 32 tokens.

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
            const uint32_t dst = s.weights + ring.stage * kWeightStageBytes;
            copy_box(dst, &low, turn * kBox, u.first_row, full, active);
            copy_box(dst + kSlices * kRows * kBox, &high, turn * kBox, u.first_row, full, active);
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
    if (warp < kConsumers) {
        if constexpr (kMany)
            consume_many(p, shared);
        else
            consume_few(p, shared);
    } else if (warp == kConsumers) {
        if constexpr (kMany)
            fetch_weights(p, low, high, shared);
        else
            fetch_boxes(p, low, high, shared);
        start_next_kernel();
    } else if (warp == kConsumers + 1) {
        if constexpr (kMany)
            fetch_tokens(p, shared);
        else
            fetch_rows(p, shared);
    } else if constexpr (kMany) {
        sum_exceptions(p, shared, warp - kConsumers - 2);
    } else {
        finish_few(p, shared, threadIdx.x - 32 * (kConsumers + 2));
    }
    if constexpr (kCluster > 1) cluster_sync();  // others may still write to this program's memory
}
