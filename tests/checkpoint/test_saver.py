"""Saving pauses for a copy, writes behind, and survives a disk that does not take it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from threading import Event, Thread, current_thread

import pytest
import torch
from lines import Lines, exchanges
from saved_state import about, full, names, read_all, same, tensors
from torch import Tensor

from vpipe.checkpoint import shards
from vpipe.checkpoint.directory import LATEST, Checkpoints
from vpipe.checkpoint.manifest import Manifest
from vpipe.checkpoint.save import Saver
from vpipe.distributed.value_exchange import Exchange
from vpipe.errors import RunError, UserError

WAIT_S = 30.0


def alone(root: Path, keep: int | None = None) -> Saver:
    return Saver(root, keep, Exchange())


# -- alone --------------------------------------------------------------------------------------------------------


def test_the_saved_state_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, state, go = alone(tmp_path), tensors(), Event()
    write = shards.save_file

    def later(*arguments: object) -> None:
        assert current_thread().name == "vpipe-saver"
        assert go.wait(WAIT_S)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(shards, "save_file", later)
    saver.save(about(20), state)
    with torch.no_grad():
        state["model.a.weight"].add_(1.0)  # training goes on
    assert saver.results == []
    go.set()
    saver.wait()
    assert same(read_all(tmp_path / "step-20"), tensors())
    fact, = saver.results
    assert (fact.step, fact.error) == (20, None)
    assert fact.bytes == Manifest.load(tmp_path / "step-20").bytes
    assert 0 < fact.pause_s < fact.seconds
    assert saver.warnings() == []


@pytest.mark.parametrize("reserved", [[48], [1 << 60]], ids=["less than it needs", "more than there is"])
def test_memory_that_was_taken_before_need_not_suffice(tmp_path: Path, reserved: list[int]) -> None:
    saver = alone(tmp_path)
    saver.reserve(reserved)
    saver.save(about(1), tensors())
    saver.wait()
    assert same(read_all(tmp_path / "step-1"), tensors())


def test_files_of_an_interrupted_save_are_not_reused(tmp_path: Path) -> None:
    partial = Checkpoints(tmp_path).partial(5)
    partial.mkdir()
    (partial / "rank7.safetensors").write_bytes(b"half")
    saver = alone(tmp_path)
    saver.save(about(5), tensors())
    saver.wait()
    assert names(tmp_path / "step-5") == {"checkpoint.json", "rank0.safetensors"}


def test_the_disk_has_everything_before_it_has_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(handle: int) -> None:
        fsync(handle)
        name = str(Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path))
        done.append("sync " + re.sub(r"\.\d+\.\d+\.tmp$", ".tmp", name))

    def renamed(self: Path, target: Path) -> Path:
        done.append(f"rename {self.relative_to(tmp_path)}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    saver = alone(tmp_path)
    saver.save(about(5), tensors())
    saver.wait()
    assert done == ["sync step-5.tmp/rank0.safetensors", "sync step-5.tmp/checkpoint.json.tmp", "sync step-5.tmp",
                    "sync step-5.tmp", "rename step-5.tmp", "sync .", "sync latest.tmp", "sync ."]


def test_a_full_disk_gives_the_save_up_and_the_next_one_is_made(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    saver = alone(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shards, "save_file", full)
        saver.save(about(10), tensors())
        saver.wait()
    assert saver.warnings() == ["could not save step 10: No space left on device (rank 0); training goes on, "
                                "there is no checkpoint yet"]
    assert saver.warnings() == []
    saver.save(about(20), tensors())
    saver.wait()
    for place in (Manifest, "save"), (Path, "rename"):  # it may also run full at the very end
        with monkeypatch.context() as patched:
            patched.setattr(*place, lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"."))
            saver.save(about(30), tensors())
            saver.wait()
        assert saver.warnings() == ["could not save step 30: No space left on device (rank 0); training goes on, "
                                    "the latest checkpoint is step 20"]
        assert names(tmp_path) == {"step-20", LATEST}
    assert [fact.error for fact in saver.results] == ["No space left on device (rank 0)", None,
                                                    *["No space left on device (rank 0)"] * 2]
    assert same(read_all(tmp_path / "step-20"), tensors())


def test_too_little_memory_gives_the_save_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = alone(tmp_path)
    huge = torch.zeros(1).expand(1 << 60)
    saver.save(about(10), {"model.a": huge})
    saver.wait()

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(shards, "save_file", out_of_memory)
        saver.save(about(10), tensors())
        saver.wait()
    assert [fact.error for fact in saver.results] == ["Cannot allocate memory (rank 0)", "out of memory (rank 0)"]
    saver.save(about(20), tensors())
    saver.wait()
    assert same(read_all(tmp_path / "step-20"), tensors())


def test_folders_that_cannot_be_removed_do_not_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    saver = alone(tmp_path, keep=1)
    saver.save(about(10), tensors())
    saver.wait()
    for method in ("update_latest", "prune"):
        monkeypatch.setattr(Checkpoints, method, fail)
        saver.save(about(len(method)), tensors())
        saver.save(about(20 + len(method)), tensors())
        saver.wait()
    assert {fact.error for fact in saver.results} == {None}
    warnings = saver.warnings()
    assert warnings[0] == "saved step 13, but could not write the file 'latest': No space left on device"
    assert warnings[-1] == "saved step 25, but could not remove older checkpoints: No space left on device"
    assert names(tmp_path) == {"step-33", "step-5", "step-25", LATEST}  # room was made without `latest`, too


@pytest.mark.parametrize(("value", "optimizer", "says"), [
    (float("nan"), False, "'model.b.w' has values that are not numbers"),
    (float("-inf"), True, "'model.b.w' has values that are infinite"), (float("inf"), False, None)])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, value: float, optimizer: bool,
                                                   says: str | None) -> None:
    """Infinities may be in what is not stepped: a mask."""
    saver = alone(tmp_path, keep=1)
    saver.save(about(10), tensors())
    state = {**tensors(), "model.b.w": torch.tensor([1.0, value, 2.0]), "model.b.count": torch.tensor(3)}
    if optimizer:
        state["optim.b.w.exp_avg"] = torch.zeros(3)
    saver.save(about(20), state)
    saver.wait()
    assert saver.results[-1].error == (f"{says} (rank 0)" if says else None)
    assert names(tmp_path) == {"step-10" if says else "step-20", LATEST}
    assert saver.warnings() == ([f"could not save step 20: {says} (rank 0); training goes on, the latest checkpoint is "
                                 "step 10"] if says else [])


def test_a_mistake_of_ours_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mistake(*_: object) -> None:
        raise KeyError("model.a")

    monkeypatch.setattr(shards, "save_file", mistake)
    saver = alone(tmp_path)
    saver.save(about(10), tensors())
    with pytest.raises(KeyError, match=r"model\.a"):
        saver.wait()
    assert names(tmp_path) == set()


def test_a_tensor_that_no_file_holds_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'model.a' is of torch.complex128, which a checkpoint cannot hold"):
        alone(tmp_path).save(about(10), {"model.a": torch.zeros(2, dtype=torch.complex128)})


# -- several ranks ------------------------------------------------------------------------------------------------


def crew(root: Path, ranks: int = 3) -> list[Saver]:
    return [Saver(root, 2, one) for one in exchanges(ranks)]


def of_rank(rank: int, fill: float) -> dict[str, Tensor]:
    return {name.replace(".", f".{rank}.", 1): tensor for name, tensor in tensors(fill).items()}


def test_ranks_write_a_file_each_and_one_checkpoint(tmp_path: Path) -> None:
    savers = crew(tmp_path)
    for step in (1, 2, 3):
        for rank, saver in enumerate(savers):
            saver.save(about(step), of_rank(rank, step))
    for saver in reversed(savers):
        saver.close()
    assert names(tmp_path) == {"step-2", "step-3", LATEST}
    assert names(tmp_path / "step-3") == {"checkpoint.json", *(f"rank{rank}.safetensors" for rank in range(3))}
    assert same(read_all(tmp_path / "step-3"),
                {name: tensor for rank in range(3) for name, tensor in of_rank(rank, 3).items()})
    assert {(fact.step, fact.bytes) for saver in savers for fact in saver.results} == {
        (step, Manifest.load(tmp_path / "step-3").bytes) for step in (1, 2, 3)}


def test_a_full_disk_of_one_rank_gives_the_save_up_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    savers = crew(tmp_path)
    write = shards.save_file

    def write_but_2(state: dict[str, Tensor], path: Path) -> None:
        (full if path.name == "rank2.safetensors" and "step-2" in str(path) else write)(state, path)

    monkeypatch.setattr(shards, "save_file", write_but_2)
    for step in (1, 2, 3):
        for rank, saver in enumerate(savers):
            saver.save(about(step), of_rank(rank, step))
        if step == 2:
            for saver in savers:
                saver.wait()
            assert names(tmp_path) == {"step-1", LATEST}
    for saver in reversed(savers):
        saver.close()
    assert {tuple(fact.error for fact in saver.results) for saver in savers} == {
        (None, "No space left on device (rank 2)", None)}
    assert [saver.warnings() for saver in savers] == [
        ["could not save step 2: No space left on device (rank 2); training goes on, the latest checkpoint is step 1"],
        [], []]
    assert names(tmp_path) == {"step-1", "step-3", LATEST}


def test_a_folder_that_fails_altogether_gives_the_save_up_on_all(tmp_path: Path) -> None:
    """As of a network that is gone: nothing in it can be asked any more."""
    root = tmp_path / "checkpoints"
    root.symlink_to(root)
    savers = crew(root, ranks=2)
    for rank, saver in enumerate(savers):
        saver.save(about(1), of_rank(rank, 1))
    for saver in reversed(savers):
        saver.close()
    assert {saver.results[0].error for saver in savers} == {
        ", ".join(f"Too many levels of symbolic links (rank {rank})" for rank in (0, 1))}
    [warning] = savers[0].warnings()
    assert warning.endswith("the folder of checkpoints cannot be read: Too many levels of symbolic links")


def test_a_rank_writes_the_next_only_when_all_know_of_the_last(tmp_path: Path) -> None:
    first, second = crew(tmp_path, ranks=2)
    second.save(about(1), of_rank(1, 1))
    waiting = Thread(target=second.save, args=(about(2), of_rank(1, 2)), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    first.save(about(1), of_rank(0, 1))
    first.save(about(2), of_rank(0, 2))
    waiting.join(WAIT_S)
    for saver in (second, first):
        saver.close()
    assert names(tmp_path) == {"step-1", "step-2", LATEST}


def test_a_rank_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    first, second = crew(tmp_path, ranks=2)
    first.save(about(1), of_rank(0, 1))
    assert first._thread is not None
    first._thread.join(0.1)
    assert first.results == []
    second.save(about(1), of_rank(1, 1))
    for saver in (second, first):
        saver.close()
    assert first.results[0].error is None


def test_without_rank_0_the_others_say_so(tmp_path: Path) -> None:
    lines = Lines(2)
    saver = Saver(tmp_path, None, Exchange(lines.of_rank[1]))
    saver.save(about(1), {})
    lines.leave(0)
    with pytest.raises(RunError, match=r"rank 0 has ended; step 1 could not be saved \(rank 1\)\nhint: see there"):
        saver.wait()
    assert saver.results[0].error == "a rank is gone"
    saver.close()
