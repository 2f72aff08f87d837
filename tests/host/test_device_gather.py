"""Gathers of packed tables on a GPU: the kernels run in Triton's interpreter (or on a GPU, with
TRITON_INTERPRET=0), on views of the table's own memory. In the interpreter, tests let the host be
the device."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from host_samples import bf16_rows, equal_bits, ways_of_all_modes

from packhorse.codecs.table_plan import TableWay
from packhorse.gpu.figure_cache import CACHE_VARIABLE, Identity
from packhorse.gpu.host_memory import MemoryKind, host_memory
from packhorse.gpu.models import PRESETS
from packhorse.host import PackedEmbedding, PackedTable, crossover, device_gather, pack_table, table
from packhorse.host.crossover import NEVER, SIZES, find_crossover
from packhorse.host.device_copies import RowRing
from packhorse.host.device_cost import default_programs, predict_gather
from packhorse.kernels.tables import kernel_of
from packhorse.table_layout import TableFormat, TableMode

INTERPRETED = bool(triton.knobs.runtime.interpret)
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
ONLY_INTERPRETED = pytest.mark.skipif(DEVICE != "cpu", reason="stands in for a GPU")


@pytest.fixture(autouse=True)
def host_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        kinds = torch.Tensor, torch.device
        monkeypatch.setattr(table, "is_on_device", lambda where: isinstance(where, kinds))


def on_device(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, device=DEVICE)


def pack(rows: Any, **options: Any) -> PackedTable:
    return pack_table(rows, device=DEVICE, **options)


def test_modes_are_gathered_read_and_updated() -> None:
    """`tests/kernels/test_tables.py` has the kernels of all modes."""
    for rows, way in ways_of_all_modes()[::6]:
        packed = pack(rows, way=way)
        ids = np.random.default_rng(1).permutation(50)[:30]
        changed = rows.copy()
        for n_changed in (0, 11):
            at = np.arange(3, 3 + n_changed)
            changed[at] = rows[(at + 17) % 50]
            packed.update_(at, rows[(at + 17) % 50])
            found = packed.gather(torch.from_numpy(ids).to(DEVICE))
            assert found.cpu().numpy().tobytes() == changed[ids].tobytes(), way.format
        for copies in (False, True):
            found = packed.read(7, 44, device=DEVICE, copies=copies)
            assert found.cpu().numpy().tobytes() == changed[7:44].tobytes(), way.format


def test_ids_of_any_shape_and_type_and_outputs() -> None:
    rows = bf16_rows(100)
    packed = pack(rows)
    for kind in (torch.uint8, torch.int32, torch.int64):
        found = packed.gather(on_device(3, 99, 3, 0).to(kind).view(2, 2))
        assert found.dtype == torch.bfloat16
        assert equal_bits(found.cpu(), rows[torch.tensor([[3, 99], [3, 0]])])
    out = torch.zeros(2, 384, dtype=torch.bfloat16, device=DEVICE)
    assert packed.gather([7, 8], out) is out  # ids of the host, rows on the device
    assert equal_bits(out.cpu(), rows[7:9])
    ids = np.array([3, 5])
    ids.flags.writeable = False
    assert equal_bits(packed.gather(ids, out).cpu(), rows[[3, 5]])
    assert packed.read(20, 22, out) is out
    assert equal_bits(out.cpu(), rows[20:22])
    assert packed.gather(on_device().to(torch.int64)).shape == (0, 384)
    assert packed.read(5, 5, device=DEVICE).shape == (0, 384)


def test_embeddings_fetch_on_the_device() -> None:
    rows = bf16_rows(100)
    bag = PackedEmbedding.from_pretrained(rows, device=DEVICE)
    bag.table.memory.kind = MemoryKind.PINNED  # as if the device could read it
    ids = torch.tensor([[3, 99], [3, 0]])
    for each in (ids, ids.to(DEVICE)):
        assert equal_bits(bag.fetch(each).cpu(), rows[ids])


def test_rows_that_are_asked_for_often_may_travel_once() -> None:
    rows = bf16_rows(100)
    ids = torch.randint(0, 9, (4, 25), device=DEVICE)
    found = pack(rows).gather(ids, unique=True, sm_budget=3)
    assert equal_bits(found.cpu(), rows[ids.cpu()])


def test_changed_rows_are_found_wherever_they_are() -> None:
    rows = bf16_rows(64)
    packed = pack(rows)
    ids = torch.arange(64, device=DEVICE)
    packed.gather(ids)
    for at in ([63], [0, 31], [1, 2, 62], list(range(0, 64, 3)), list(range(64))):
        new = torch.full((len(at), 384), 1e30, dtype=torch.bfloat16)  # fits no window
        new += torch.tensor(at)[:, None] * 1e28
        rows[at] = new
        packed.update_(torch.tensor(at).numpy(), new)
        assert packed.n_unpacked_rows >= len(at)
        assert equal_bits(packed.gather(ids).cpu(), rows)
        assert equal_bits(packed.gather(ids.flip(0)[:40]).cpu(), rows.flip(0)[:40])
    packed.update_(np.arange(64), bf16_rows(64))
    assert equal_bits(packed.gather(ids).cpu(), bf16_rows(64))


@ONLY_INTERPRETED
def test_graphs_look_for_rows_that_are_changed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[int] = []
    monkeypatch.setattr(
        "packhorse.kernels.tables.put_rows", lambda head, ids, out, **_: puts.append(len(ids))
    )
    packed = pack(bf16_rows(20))
    packed.gather(on_device(1, 2))
    assert puts == [1]  # so that it is compiled
    monkeypatch.setattr(device_gather, "_is_captured", lambda device: True)
    packed.gather(on_device(1, 2, 3))
    assert puts == [1, 3]
    with pytest.raises(RuntimeError, match=r"the first gather uploads .* call it once before"):
        pack(bf16_rows(20)).gather(on_device(1))
    with pytest.raises(RuntimeError, match=r"ids in host memory .* give ids that are on the GPU"):
        device_gather._bring(np.arange(3), torch.device("cuda"))


def test_wrong_ids_and_outputs_are_refused() -> None:
    packed = pack(bf16_rows(20))
    if DEVICE == "cpu":  # a GPU says so later, and is of no use from then on
        for ids in ([20], [0, -1]):
            with pytest.raises(RuntimeError, match="out of range: the table has 20 rows"):
                packed.gather(on_device(*ids))
    out = torch.zeros(1, 384, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(IndexError, match="id 20 is out of range: the table has 20 rows"):
        packed.gather([20], out)
    with pytest.raises(TypeError, match=r"ids must be integers, not torch\.float32"):
        packed.gather(on_device(1).float())
    with pytest.raises(TypeError, match=r"ids must be integers, not torch\.bool"):
        packed.gather(on_device(1).bool())
    with pytest.raises(ValueError, match=r"out is torch.bfloat16 \(1, 384\); it must be "):
        packed.gather(on_device(1, 2), out)
    with pytest.raises(ValueError, match=r"out is torch\.float32"):
        packed.gather(on_device(1), out.float())
    with pytest.raises(TypeError, match="contiguous PyTorch tensor"):
        packed.gather(on_device(1), out.repeat(1, 2)[:, ::2])
    with pytest.raises(ValueError, match="out is on meta"):
        packed.gather(on_device(1), out.to("meta"))
    for ids in (on_device(1), [1]):
        with pytest.raises(ValueError, match="sm_budget is 0; it must be at least 1"):
            packed.gather(ids, sm_budget=0)
    with pytest.raises(ValueError, match="sm_budget is -1"):
        packed.read(0, 1, sm_budget=-1)
    with pytest.raises(ValueError, match="give one: out has a device"):
        packed.read(0, 1, out, device=DEVICE)
    with pytest.raises(ValueError, match="device 'foo' is unknown"):
        packed.read(0, 1, device="foo")
    with pytest.raises(TypeError, match="out must be a contiguous PyTorch tensor"):
        packed.read(0, 1, [1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tensors on meta have no memory"):
        packed.read(0, 1, device="meta")
    for start, stop in ((-1, 3), (5, 4), (0, 21)):
        with pytest.raises(IndexError, match=f"rows {start} to {stop} are out of range"):
            packed.read(start, stop, device=DEVICE)


def test_rows_are_read_on_the_host_too() -> None:
    rows = bf16_rows(20)
    packed = pack_table(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "is_on_device", lambda where: False)
        assert equal_bits(packed.read(3, 9), rows[3:9])
        out = torch.empty(2, 384, dtype=torch.bfloat16)
        assert packed.read(3, 5, out) is out
        assert equal_bits(out, rows[3:5])
        with pytest.raises(ValueError, match="it must be"):
            packed.read(3, 4, out)


# What a GPU cannot do.


@ONLY_INTERPRETED
def test_the_host_gathers_for_a_gpu_that_cannot_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = bf16_rows(20)
    packed = pack_table(rows)
    monkeypatch.setattr(device_gather, "why_not", lambda memory, device: "cuda:0 cannot read it")
    with pytest.warns(RuntimeWarning, match="cuda:0 cannot read it: so the host gathers"):
        found = packed.gather(on_device(3, 4))
    assert equal_bits(found, rows[3:5])
    assert equal_bits(packed.gather(on_device(5, 5)), rows[[5, 5]])
    assert equal_bits(packed.read(2, 9, device=DEVICE), rows[2:9])
    with pytest.raises(IndexError, match="id 20"):
        packed.gather(on_device(20))


@ONLY_INTERPRETED
def test_the_host_gathers_where_no_kernel_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    rows = bf16_rows(20)
    packed = pack_table(rows)
    monkeypatch.setattr("packhorse.kernels.tables.gather_rows", fail)
    with pytest.warns(RuntimeWarning, match=r"cannot compile kernels for cpu \(Failed to find C"):
        assert equal_bits(packed.gather(on_device(3, 4)), rows[3:5])


def test_the_reason_names_the_remedy() -> None:
    memory = host_memory(10, device="cpu")
    said = device_gather.why_not(memory, torch.device("cuda:1"))
    assert said is not None
    assert "cuda:1 cannot read the pageable memory" in said
    assert "pack the table with device='cuda'" in said
    said = device_gather.why_not(memory, torch.device("xpu"))
    assert said == "the kernels run on NVIDIA GPUs, not on xpu"
    if INTERPRETED:
        assert device_gather.why_not(memory, torch.device("cpu")) is None


# Copies.


class FakeStream:
    """A stream of CUDA that writes down what it is told, in one list for all."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.n_events = 0

    def record_event(self) -> str:
        self.n_events += 1
        event = f"{self.name}{self.n_events}"
        self.log.append(event)
        return event

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@ONLY_INTERPRETED
def test_a_ring_copies_while_it_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    home, side = FakeStream("home", log), FakeStream("side", log)

    @contextmanager
    def stream(_: object) -> Any:
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: home)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    ring = RowRing(torch.device("cpu"), nbytes=128)
    ring._stream = side
    rows = torch.arange(11 * 32).view(11, 32).to(torch.uint8)
    parts = []

    def decode(part: torch.Tensor, first: int, last: int) -> None:
        log.append(f"decode {first}")
        assert torch.equal(part, rows[first:last])
        parts.append((first, last))

    ring.run(rows, 1, 11, decode)
    assert parts == [(1, 5), (5, 9), (9, 11)]
    assert log == [
        "home1", "home2",
        "side waits for home1", "side1", "home waits for side1", "decode 1", "home3",
        "side waits for home2", "side2", "home waits for side2", "decode 5", "home4",
        "side waits for home3", "side3", "home waits for side3", "decode 9", "home5",
    ]  # fmt: skip


def test_the_crossover_is_where_copies_win_for_good() -> None:
    def read(nbytes: int) -> float:
        return 2e-6 + nbytes / 40e9

    assert find_crossover(read, lambda n: 20e-6 + n / 50e9) == 1 << 22
    assert find_crossover(read, lambda n: 1.04 * read(n)) == SIZES[0]
    assert find_crossover(read, lambda n: 1.0) == NEVER


def test_the_crossover_is_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(crossover, "identify", lambda device: Identity("Card", 132, "3", "0"))
    device, measured = torch.device("cuda:0"), []

    def ask() -> int:
        monkeypatch.setattr(crossover, "_known", {})  # as another process
        return crossover.crossover_of(device, lambda: measured.append(1) or SIZES[3])

    assert ask() == ask() == SIZES[3]
    assert len(measured) == 1
    (path,) = tmp_path.glob("host-copies-card.json")
    path.write_text(path.read_text().replace(str(SIZES[3]), "77"))
    with pytest.warns(RuntimeWarning, match="nbytes is not one of the sizes. So copies"):
        assert ask() == SIZES[3]
    assert len(measured) == 2


# Predictions.


def test_more_programs_are_taken_where_rows_become_short() -> None:
    dense = TableFormat(TableMode.DENSE, 16, 384, tuple(range(16)), 8)
    rare = TableFormat(TableMode.LIST, 32, 3703, (1,), capacity=14)
    for device in PRESETS:
        budgets = []
        for format in (dense, rare):
            block_rows = kernel_of(format, False).constants["BLOCK_ROWS"]
            n = default_programs(format, block_rows, device)
            budgets.append(n)
            found = predict_gather(format, 1 << 20, n, block_rows, device)
            assert found.limit != "programs" or n == device.n_processors
        assert 16 <= budgets[0] <= 32
        assert budgets[1] > budgets[0] + 15


def test_predictions_follow_bytes_and_pages() -> None:
    raw = TableFormat(TableMode.RAW, 16, 384, rest_bits=16)
    dense = TableFormat(TableMode.DENSE, 16, 384, tuple(range(16)), 8)
    times = [predict_gather(f, 1 << 20, 32, 32, PRESETS[0]) for f in (raw, dense)]
    assert [time.limit for time in times] == ["link", "link"]
    assert 1.33 < times[0].seconds / times[1].seconds < 1.34
    small = predict_gather(dense, 1 << 20, 32, 32, PRESETS[0], huge_pages=False)
    assert small.seconds > 9 * times[1].seconds
    assert predict_gather(dense, 1 << 20, 1, 32, PRESETS[0]).limit == "programs"
    fewer = predict_gather(dense, 1 << 20, 32, 32, PRESETS[0], pulled_nbytes=288)
    assert fewer.seconds < 0.51 * times[1].seconds
    way = TableWay(dense, "", {32: 288.0}, 0.0, 0.0)
    assert way.pulled[32] == 288.0
