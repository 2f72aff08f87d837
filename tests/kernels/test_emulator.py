"""The emulator of PTX itself: small kernels with and without the faults that it must notice."""

import numpy as np
import pytest
from tests.ptx.faults import Fault, UnknownInstruction
from tests.ptx.machine import Launch, run_grid
from tests.ptx.memory import WARP, GlobalMemory, SharedMemory
from tests.ptx.program import SHARED_BASE, parse

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .u64 .ptr .global .align 16 kernel_param_1
)
{
    .reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .b16 %rs<9>; .reg .f32 %f<9>;
    ld.param.u64 %rd1, [kernel_param_0];
    ld.param.u64 %rd2, [kernel_param_1];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, memory;
    shl.b32 %r3, %r1, 2;
    add.s32 %r4, %r2, %r3;      // this thread's word of shared memory
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;   // its word of the source
    add.s64 %rd5, %rd2, %rd3;   // its word of the result
    setp.eq.u32 %p1, %r1, 0;
"""
N = 64
SOURCE = np.arange(N, dtype=np.uint32) * 3 + 1


def run(body: str, *, dependent: bool = False, nbytes: int = 4 * N, **how: object) -> np.ndarray:
    """The result of a kernel of two warps with these statements."""
    memory = GlobalMemory()
    source = memory.add("source", SOURCE, dependent=dependent)
    result = memory.add("result", np.zeros(N, np.uint32))
    launch = Launch([source, result], (1, 1, 1), 2, nbytes, dependent=dependent, **how)
    run_grid(parse(HEAD + body + "\n ret;\n}\n"), memory, launch)
    return memory.read("result", np.uint32)


def everywhere(body: str, **more: object) -> np.ndarray:
    """The result, which must be the same in every way to run."""
    ways = [(late, back) for late in (True, False) for back in (True, False)]
    results = [run(body, late=late, backwards=back, **more) for late, back in ways]
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    return results[0]


# Each warp's threads read what a thread of the other warp wrote.
EXCHANGE = """
    ld.global.u32 %r5, [%rd4];
    st.shared.u32 [%r4], %r5;
    {barrier}
    xor.b32 %r6, %r3, {flip};
    add.s32 %r6, %r2, %r6;
    ld.shared.u32 %r7, [%r6];
    st.global.u32 [%rd5], %r7;
"""


def test_threads_read_what_others_wrote() -> None:
    found = everywhere(EXCHANGE.format(barrier="bar.sync 0;", flip=128))
    np.testing.assert_array_equal(found, SOURCE[np.arange(N) ^ 32])


@pytest.mark.parametrize(("step", "conflicts"), [(4, 1), (0, 1), (8, 2), (128, 32)])
def test_bank_conflicts_are_counted(step: int, conflicts: int) -> None:
    """Lanes read words that are so many bytes apart."""
    passes: dict[int, list[int]] = {}
    body = f"""
        mul.lo.u32 %r5, %r1, {step}; add.s32 %r5, %r2, %r5;
        st.shared.u32 [%r5], {step}; bar.sync 0;
        ld.shared.u32 %r6, [%r5]; st.global.u32 [%rd5], %r6;
    """
    run(body, nbytes=N * max(step, 4), passes=passes)
    assert passes == {4: [2 * conflicts, 2]}  # of two warps


def test_a_missing_barrier_is_noticed() -> None:
    with pytest.raises(Fault, match=r"ld.shared.*reads shared memory that nothing wrote"):
        run(EXCHANGE.format(barrier="", flip=128))
    # Where something was written before, only the order tells.
    twice = EXCHANGE.format(barrier="bar.sync 0;", flip=128) + "st.shared.u32 [%r4], %r1;"
    with pytest.raises(
        Fault, match=r"another warp reads, unordered|another warp wrote, with nothing"
    ):
        run(twice)


def test_a_missing_syncwarp_is_noticed() -> None:
    with pytest.raises(Fault, match=r"without bar\.warp\.sync"):
        run(EXCHANGE.format(barrier="", flip=4))
    found = everywhere(EXCHANGE.format(barrier="bar.warp.sync -1;", flip=4))
    np.testing.assert_array_equal(found, SOURCE[np.arange(N) ^ 1])


def test_accesses_beyond_arrays_are_noticed() -> None:
    with pytest.raises(Fault, match="beyond array source of 256 bytes: bytes 256 to 260"):
        run("ld.global.u32 %r5, [%rd4+4];")
    with pytest.raises(Fault, match="beyond shared memory of 256 bytes: bytes 132 to 260"):
        run("st.shared.u32 [%r4+4], %r1;")
    with pytest.raises(Fault, match="not a multiple of 4"):
        run("st.shared.u32 [%r4+2], %r1;", nbytes=999)
    with pytest.raises(Fault, match=r"register %r50 is read before it is written"):
        run("add.s32 %r5, %r50, 1;")


def test_what_a_load_that_no_lane_does_leaves_may_be_passed_on_but_is_no_number() -> None:
    """Triton's reductions over warps pass it on, where nobody uses it."""
    body = """
        setp.lt.u32 %p2, %r1, 32;
        @%p2 ld.global.u32 %r50, [%rd4];
        shfl.sync.bfly.b32 %r51, %r50, 0, 31, -1;
        st.global.u32 [%rd5], %r51;
    """
    found = everywhere(body)
    np.testing.assert_array_equal(found[:32], SOURCE[:32])
    assert not np.isin(found[32:], [0, *SOURCE]).any()


def test_lanes_that_part_meet_again() -> None:
    found = everywhere("""
        and.b32 %r5, %r1, 3;
        mov.u32 %r6, 0;
    AGAIN:
        setp.ge.u32 %p2, %r6, %r5;
        @%p2 bra DONE;
        add.u32 %r6, %r6, 1;
        bra AGAIN;
    DONE:
        vote.sync.ballot.b32 %r7, %p1, -1;
        add.u32 %r6, %r6, %r7;
        st.global.u32 [%rd5], %r6;
    """)
    lanes = np.arange(N)
    np.testing.assert_array_equal(found, lanes % 4 + (lanes < 32))


COPY = """
    cp.async.ca.shared.global [%r4], [%rd4], 4;
    cp.async.commit_group;
    {wait}
    ld.shared.u32 %r5, [%r4];
    st.global.u32 [%rd5], %r5;
"""


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 1;"])
def test_copies_that_nobody_waits_for_are_noticed(wait: str) -> None:
    np.testing.assert_array_equal(everywhere(COPY.format(wait="cp.async.wait_group 0;")), SOURCE)
    with pytest.raises(Fault, match="nothing wrote"):
        run(COPY.format(wait=wait), late=True)
    with pytest.raises(Fault, match="a copy is under way"):
        run(COPY.format(wait=wait), late=False)


COPY_BYTES = (
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r10];"
)
# One thread copies all words at once; an mbarrier behind them counts the bytes.
BULK = f"""
    add.s32 %r10, %r2, {4 * N};
    @%p1 mbarrier.init.shared::cta.b64 [%r10], 1;
    @%p1 {{fence}}
    {{barrier}}
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {{nbytes}};
    @%p1 {COPY_BYTES}
    {{wait}}
    ld.shared.u32 %r5, [%r4];
    st.global.u32 [%rd5], %r5;
"""
WAIT = """
    WAITING:
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r10], 0;
    @!%p2 bra WAITING;
"""
GOOD = {"fence": "fence.mbarrier_init.release.cluster;", "barrier": "bar.sync 0;", "nbytes": 256}


def test_bulk_copies_that_an_mbarrier_counts() -> None:
    found = everywhere(BULK.format(**GOOD, wait=WAIT), nbytes=4 * N + 8)
    np.testing.assert_array_equal(found, SOURCE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wait": ""}, "nothing wrote|a copy is under way"),
        ({"fence": "fence.proxy.alias;"}, "without fence.mbarrier_init"),
        ({"barrier": ""}, "there is no mbarrier|another warp made"),
        ({"nbytes": 272}, "all warps wait for each other: warp .*try_wait"),
        ({"wait": WAIT.replace("], 0", "], 1")}, "nothing wrote|a copy is under way"),
    ],
)
@pytest.mark.parametrize("late", [True, False])
def test_damaged_bulk_copies_are_noticed(change: dict, message: str, late: bool) -> None:
    body = BULK.format(**GOOD | {"wait": WAIT} | change)
    with pytest.raises(Fault, match=message):
        run(body, nbytes=4 * N + 8, late=late, backwards="barrier" in change)


def test_a_stage_that_is_filled_again_too_early_is_noticed() -> None:
    again = (
        BULK.format(**GOOD, wait=WAIT)
        + f"""
        {{between}}
        @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], {GOOD["nbytes"]};
        @%p1 {COPY_BYTES}
    """
    )
    fence, barrier = "fence.proxy.async.shared::cta;", "bar.sync 0;"
    for late in (True, False):
        with pytest.raises(Fault, match=r"another warp reads, unordered|wait for each other"):
            run(again.replace("{between}", fence), nbytes=4 * N + 8, late=late, backwards=True)
    with pytest.raises(Fault, match=r"without fence\.proxy\.async"):
        run(again.replace("{between}", barrier), nbytes=4 * N + 8)
    run(again.replace("{between}", fence + barrier), nbytes=4 * N + 8)


def test_a_phase_that_is_taken_for_a_later_one_is_noticed() -> None:
    """A warp that has left out a phase: its parity is that of the phase before."""
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r10];"
    expect = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r10], 256;"
    again = WAIT.replace("WAITING", "AGAIN")
    body = BULK.format(**GOOD, wait=WAIT + "bar.sync 0;" + expect + again)
    with pytest.raises(Fault, match="takes an older one"):
        run(body, nbytes=4 * N + 8, late=True)
    body = BULK.format(**GOOD, wait=WAIT + "bar.sync 0;" + arrive + again.replace("], 0", "], 1"))
    np.testing.assert_array_equal(everywhere(body, nbytes=4 * N + 8), SOURCE)


def test_products_read_only_what_a_fence_has_shown_them() -> None:
    """Nothing of ours lets Hopper's products read what threads wrote, so this asks the memory."""
    memory, lanes = SharedMemory(1, 1, 64, track=True), np.arange(WARP)
    place = SHARED_BASE + 2 * lanes
    memory.store(0, lanes, place, np.ones((WARP, 2), np.uint8))
    memory.sync_lanes(0, np.zeros(1, int))
    with pytest.raises(Fault, match=r"without fence\.proxy\.async"):
        memory.begin_product(0, lanes, place)
    memory.fence(0, np.zeros(1, int))
    memory.begin_product(0, lanes, place)
    with pytest.raises(Fault, match="a product under way may still read"):
        memory.store(0, lanes, place, np.zeros((WARP, 2), np.uint8))
    memory.end_product(0, lanes, place)
    memory.store(0, lanes, place, np.zeros((WARP, 2), np.uint8))


def test_dependent_arrays_wait_for_the_kernel_before() -> None:
    body = "{wait} ld.global.u32 %r5, [%rd4]; st.global.u32 [%rd5], %r5;"
    found = everywhere(body.format(wait="griddepcontrol.wait;"), dependent=True)
    np.testing.assert_array_equal(found, SOURCE)
    with pytest.raises(Fault, match=r"array source is used before griddepcontrol\.wait"):
        run(body.format(wait=""), dependent=True)


def test_warps_that_wait_for_each_other_are_noticed() -> None:
    with pytest.raises(Fault, match=r"all warps wait for each other: warp 0 .*bar.sync 1, 64"):
        run("setp.lt.u32 %p2, %r1, 32; @%p2 bra FIRST; ret; FIRST: bar.sync 1, 64;")


def test_one_lane_is_elected() -> None:
    found = everywhere("""
        elect.sync %r5|%p2, -1;
        selp.b32 %r6, 1, 0, %p2;
        st.global.u32 [%rd5], %r6;
    """)
    np.testing.assert_array_equal(found.nonzero()[0], [0, 32])


def test_what_the_emulator_does_not_know_is_told() -> None:
    with pytest.raises(UnknownInstruction, match=r"tex\.2d"):
        run("tex.2d.v4.f32.f32 %r5, %r6;")


def test_arithmetic() -> None:
    found = everywhere("""
        ld.global.u32 %r5, [%rd4];
        prmt.b32 %r6, %r5, %r1, 0x5140;
        lop3.b32 %r6, %r6, %r5, %r1, 0x96;
        bfe.u32 %r7, %r5, 1, 4;
        mad.lo.s32 %r6, %r7, -3, %r6;
        shf.l.wrap.b32 %r8, %r6, %r5, 9;
        shr.s32 %r9, %r8, 3;
        cvt.rn.f32.s32 %f1, %r9;
        cvt.rn.bf16.f32 %rs1, %f1;
        mov.b32 %r11, {%rs1, %rs1};
        st.global.u32 [%rd5], %r11;
    """)
    tid = np.arange(N, dtype=np.uint32)
    low, high = SOURCE & 255, (SOURCE >> 8) & 255
    mixed = low | (tid & 255) << 8 | high << 16 | ((tid >> 8) & 255) << 24
    mixed = mixed ^ SOURCE ^ tid
    mixed = mixed - 3 * ((SOURCE >> 1) & 15)
    wide = (SOURCE.astype(np.uint64) << 32 | mixed) << 9
    value = ((wide >> 32) & 0xFFFFFFFF).astype(np.uint32).view(np.int32) >> 3
    bits = value.astype(np.float32).view(np.uint32)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    np.testing.assert_array_equal(found, half | half << 16)
