"""Updates over a process group: real ranks, trees, and ranks that die."""

from pathlib import Path

import pytest
import torch.distributed as dist
import update_ranks
from forked import run_many_forked

from packhorse.wire.updates import GroupTransport


def ranks(folder: Path, size: int, what: str) -> list[tuple[int, list[str]]]:
    """Run ranks; the exit code and the printed lines of each."""
    outputs = [folder / f"{rank}.txt" for rank in range(size)]
    words = [(folder, rank, size, what) for rank in range(size)]
    codes = run_many_forked(Path(update_ranks.__file__), outputs, words)
    assert set(codes) <= {0, 9}
    return [
        (code, output.read_text().splitlines()) for code, output in zip(codes, outputs, strict=True)
    ]


def test_updates_reach_all_ranks(tmp_path: Path) -> None:
    ended = ranks(tmp_path, 4, "rounds")
    whole = [f"fanout {fanout} from {src}: version 3" for fanout, src in ((1, 0), (2, 1), (4, 0))]
    for rank, (code, lines) in enumerate(ended):
        assert code == 0
        assert lines[:3] == whole
        assert lines[3] == "refused: rank 0, and no other, passes an update to broadcast()"
        if rank:
            assert lines[4:6] == [
                "told: rank 0 has no update: the optimizer diverged",
                "bounded: rank 0 sent 3000000 bytes, more than max_nbytes = 1000",
            ]
        assert (lines[-1] == "in a group: bytes of any kind") == (rank in (0, 3))


def test_a_killed_sender_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    ended = ranks(tmp_path, 3, "killed")
    assert [code for code, _ in ended] == [9, 0, 0]
    for rank, (_, lines) in enumerate(ended[1:], 1):
        assert lines[0].startswith(f"lost: rank {rank - 1} died, or did not answer within 3 s")
        assert lines[1].startswith("again: the group failed before: rank")


def test_a_silent_sender_does_not_hang_the_others(tmp_path: Path) -> None:
    ended = ranks(tmp_path, 2, "silent")
    assert ended[1][1][0].startswith("lost: rank 0 died, or did not answer within 1 s")


def test_mistakes_of_a_caller(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no process group"):
        GroupTransport()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="src is 1; the group has ranks 0 to 0"):
            GroupTransport(src=1)
        with pytest.raises(ValueError, match="fanout is 0"):
            GroupTransport(fanout=0)
        assert GroupTransport().broadcast(b"alone") == b"alone"
    finally:
        dist.destroy_process_group()
