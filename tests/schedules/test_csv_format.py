"""CSV files: ours and PyTorch's, both ways, and what is said of files that are no schedule."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden import assert_golden, refusal
from hypothesis import given
from hypothesis import strategies as st
from proved import prove
from torch.distributed.pipelining import schedules as theirs

from vpipe.errors import CheckError, UserError
from vpipe.schedules.assignment import Layout, both_ways
from vpipe.schedules.builder import build
from vpipe.schedules.checker import check
from vpipe.schedules.csv_format import LARGEST_BYTES, CsvFile
from vpipe.schedules.kinds import Action, Op
from vpipe.schedules.lowering import lower
from vpipe.schedules.registry import RegisteredSchedule
from vpipe.schedules.schedule import Schedule

Order = Mapping[int, Sequence[Any]]

# -- PyTorch's -----------------------------------------------------------------------------------------

THEIRS = [  # class, ranks, stages per rank, microbatches
    *[(name, ranks, 1, microbatches) for name in ("ScheduleGPipe", "Schedule1F1B")
      for ranks, microbatches in ((1, 1), (2, 3), (4, 8), (5, 12))],
    *[(name, ranks, chunks, microbatches)
      for name in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble")
      for ranks, chunks, microbatches in ((1, 2, 3), (2, 1, 6), (2, 2, 4), (3, 3, 6), (4, 2, 10))],
    *[("ScheduleZBVZeroBubble", ranks, 2, microbatches) for ranks, microbatches in ((1, 2), (2, 4), (3, 2), (4, 10))],
    *[("ScheduleDualPipeV", ranks, 2, microbatches) for ranks, microbatches in ((1, 2), (2, 4), (3, 7), (4, 10))],
]


def on_one_rank(ranks: int, chunks: int) -> list[Any]:
    """What a schedule of PyTorch's asks of the stages of a rank before it runs: no process group, no module."""
    return [SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, submod=None, is_last=False,
                            has_backward=True) for _ in range(chunks)]


def runtime(ranks: int, chunks: int, microbatches: int) -> theirs._PipelineScheduleRuntime:
    return theirs._PipelineScheduleRuntime(on_one_rank(ranks, chunks), microbatches)


def first_forward_put_right(order: Order, ranks: int) -> Order:
    """torch 2.13 counts the forwards of 1F1B's last rank from 1, in the order it shows (not in what it runs)."""
    return {**order, ranks - 1: [
        action._replace(microbatch_index=action.microbatch_index - 1)
        if action is not None and action.computation_type == theirs.FORWARD else action for action in order[ranks - 1]]}


def theirs_written(name: str, ranks: int, chunks: int, microbatches: int, form: Any, path: Path) -> None:
    """PyTorch's own file of a schedule."""
    kind = getattr(theirs, name)
    if issubclass(kind, theirs.PipelineScheduleMulti):
        kind(on_one_rank(ranks, chunks), microbatches)._dump_csv(path, format=form)
        return
    order = kind(on_one_rank(ranks, 1)[0], microbatches)._get_pipeline_order()
    if name == "Schedule1F1B":
        order = first_forward_put_right(order, ranks)
    writer = runtime(ranks, 1, microbatches)
    if form == "compute_comms":  # PyTorch lowers no order that has REDUCE_GRAD
        writer._prepare_schedule_with_comms({rank: [action for action in actions if action is None
                                                    or action.is_compute_op] for rank, actions in order.items()})
    writer.pipeline_order = order
    writer._dump_csv(path, format=form)


def computed_by(order: Order) -> list[list[str]]:
    """The compute actions of PyTorch's programs, pairs one after the other."""
    return [[str(one) for action in order[rank] if action is not None
             for one in (action.sub_actions or (action,)) if one.is_compute_op] for rank in sorted(order)]


def computed(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in program if action.op in "FBIW"] for program in schedule.programs]


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches"), THEIRS)
def test_schedules_written_by_torch_pass_the_checker(name: str, ranks: int, chunks: int, microbatches: int,
                                                     tmp_path: Path) -> None:
    read: dict[str, Schedule] = {}
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        theirs_written(name, ranks, chunks, microbatches, form, path)
        read[form] = CsvFile.read(path).schedule
        check(read[form])
        assert (read[form].name, read[form].ranks, read[form].stages, read[form].microbatches) == (
            path.name, ranks, ranks * chunks, microbatches)
        assert (read[form].flush, read[form].update_every, read[form].versions) == (
            True, microbatches, (1,) * ranks * chunks)
        with path.open(newline="") as file:
            rows = [[theirs._Action.from_str(cell) for cell in row] for row in csv.reader(file)]
        assert computed(read[form]) == computed_by(dict(enumerate(rows)))
    assert read["compute_comms"].compute_only().programs == read["compute_only"].programs
    check(lower(read["compute_only"]))


@pytest.mark.parametrize(("ranks", "chunks", "microbatches"), [(1, 2, 3), (2, 1, 6), (2, 2, 4), (3, 3, 6), (4, 2, 8)])
def test_interleaved_zb_is_the_order_of_torch(ranks: int, chunks: int, microbatches: int) -> None:
    order = theirs.ScheduleInterleavedZeroBubble(on_one_rank(ranks, chunks), microbatches).pipeline_order
    ours = build("interleaved_zb", RegisteredSchedule.named("interleaved_zb").layout(ranks, chunks), microbatches)
    assert computed(ours) == computed_by(order)


def test_the_order_that_torch_shows_of_1f1b_is_refused_here_as_it_is_there(tmp_path: Path) -> None:
    order = theirs.Schedule1F1B(on_one_rank(3, 1)[0], 4)._get_pipeline_order()
    assert order is not None
    with pytest.raises(AssertionError, match="without first running Forward"):
        theirs._validate_schedule(order, 3, 3, 4)
    writer = runtime(3, 1, 4)
    writer.pipeline_order = order
    writer._dump_csv(tmp_path / "a.csv", format="compute_only")
    with pytest.raises(UserError, match=r"2F4 \(rank 2, cell \d+\) is of microbatch 4, but .* more than 4 forwards"):
        CsvFile.read(tmp_path / "a.csv")


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch puts no receives off before 2.13")
def test_receives_that_torch_puts_off_may_deadlock(tmp_path: Path) -> None:
    """``defer_pp_recv`` counts on sends that do not wait; the checker does not, the compute order is sound."""
    theirs.ScheduleInterleaved1F1B(on_one_rank(2, 2), 4, defer_pp_recv=True)._dump_csv(tmp_path / "a.csv")
    read = CsvFile.read(tmp_path / "a.csv").schedule
    with pytest.raises(CheckError, match="deadlock when sends wait for their receive"):
        check(read)
    check(lower(read.compute_only()))


def sizes(name: str) -> Iterator[Schedule]:
    """The schedule of ours in several sizes."""
    recipe = RegisteredSchedule.named(name)
    for ranks, microbatches in ((1, 4), (2, 4), (4, 8), (4, 12)):
        for chunks in {recipe.chunks, 3} if recipe.any_chunks else {recipe.chunks}:
            try:
                yield build(name, recipe.layout(ranks, chunks), microbatches)
            except UserError:  # not of this size
                continue


@pytest.mark.parametrize("name", [one.name for one in RegisteredSchedule.imported()
                                  if one.flush and one.layout is not both_ways])
def test_torch_loads_each_of_ours_that_has_a_flush(name: str, tmp_path: Path) -> None:
    made = list(sizes(name))
    assert made
    for schedule in made:
        path = tmp_path / "a.csv"
        path.write_text(lower(schedule).to_torch_csv())
        reader = runtime(schedule.ranks, schedule.stages // schedule.ranks, schedule.microbatches)
        reader._load_csv(str(path))
        assert computed_by(reader.pipeline_order_with_comms) == computed(schedule)
        assert reader.stage_index_to_group_rank == {stage: rank for stage, (rank,) in enumerate(schedule.placement)}
        simulated(reader, schedule.stages)


@pytest.mark.parametrize(("schedule", "what"), [
    (build("pipedream", Layout.LOOP(2), 4), "'pipedream' updates weights before its pipeline is empty"),
    (build("1f1b", ((0, 1), (2,)), 4), "stage 0 has 2 replicas, ranks 0, 1, but in PyTorch's runtime a stage has one"),
    (build("dualpipe", both_ways(4), 8), "hint: take a schedule that places every stage once, such as zb_v, or "
     "dualpipe_v in place of dualpipe; vpipe train runs this one"),
])
def test_a_schedule_that_torch_cannot_run_is_not_written_for_it(schedule: Schedule, what: str) -> None:
    assert what in refusal(schedule.to_torch_csv)


def test_torch_takes_losses_in_the_order_of_their_forwards(tmp_path: Path) -> None:
    """So a last stage that begins with microbatch 1 is refused, and any other stage may."""
    with pytest.raises(UserError, match="stage 1, the last, takes microbatch 1 in turn 0, but PyTorch's runtime would "
                                        "take its loss for that of microbatch 0"):
        read_text("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n", tmp_path).to_torch_csv()
    text = "0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1\n"
    assert read_text(text, tmp_path).to_torch_csv() == text


def simulated(reader: theirs._PipelineScheduleRuntime, stages: int) -> None:
    """PyTorch's dry run of the order that it has lowered; raises when it cannot go on."""
    moves = {rank: [action for action in actions if action.computation_type.value not in
                    ("UNSHARD", "RESHARD", "REDUCE_GRAD")]
             for rank, actions in reader.pipeline_order_with_comms.items()}
    theirs._simulate_comms_compute(moves, lambda stage: reader.stage_index_to_group_rank[stage], stages)


# -- ours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RegisteredSchedule.names())
def test_a_written_schedule_is_read_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for schedule in sizes(name):
        for ours in (schedule, lower(schedule)):
            path.write_text(ours.to_csv())
            read = CsvFile.read(path).schedule
            check(read)
            assert (read.programs, read.placement, read.microbatches, read.update_every) == (
                ours.programs, ours.placement, ours.microbatches, ours.update_every)
            assert all(one <= other for one, other in zip(read.peak_activations, ours.peak_activations, strict=True))
            assert all(one <= other for one, other in zip(read.versions, ours.versions, strict=True))
            assert not read.stream
            assert read.compute_only().programs == schedule.programs


def read_text(text: str | bytes, folder: Path) -> Schedule:
    path = folder / "a.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return CsvFile.read(path).schedule


def test_a_stream_keeps_its_updates_and_versions(tmp_path: Path) -> None:
    read = read_text(build("pipedream", Layout.LOOP(3), 8, 2).to_csv(), tmp_path)
    assert (read.flush, read.update_every, read.versions) == (False, 2, (2, 2, 1))


def test_without_steps_every_stage_steps_at_the_end_of_its_rank(tmp_path: Path) -> None:
    read = read_text("0F0,,3F0,3B0, 0B0 \n1F0,2F0,2B0,1B0\n\n", tmp_path)
    assert [" ".join(map(str, program)) for program in read.programs] == [
        "0F0 3F0 3B0 0B0 0STEP0 3STEP0", "1F0 2F0 2B0 1B0 1STEP0 2STEP0"]
    assert read.placement == ((0,), (1,), (1,), (0,))
    assert (read.peak_activations, read.name, read.flush) == ((2, 2), "a.csv", True)
    check(read)


def test_actions_left_out_of_a_torch_file_are_named(tmp_path: Path) -> None:
    theirs_written("ScheduleDualPipeV", 2, 2, 6, "compute_comms", tmp_path / "a.csv")
    text = (tmp_path / "a.csv").read_text()
    file = CsvFile.read(tmp_path / "a.csv")
    assert set(file.left_out) == {"UNSHARD", "RESHARD", "REDUCE_GRAD"}
    assert {**file.left_out, "OVERLAP_F_B": file.pairs} == {
        name: text.count(name) for name in ("UNSHARD", "RESHARD", "REDUCE_GRAD", "OVERLAP_F_B")}


def test_transfers_of_ties_and_norms_are_left_out_of_the_file(tmp_path: Path) -> None:
    schedule = prove("1f1b", Layout.LOOP(3), 4, None, {0: (2,)}, norm=True)
    assert {action.op for program in schedule.programs for action in program} >= {Op.SEND_W, Op.RECV_G, Op.NORM}
    read = read_text(schedule.to_csv(), tmp_path)
    check(read)
    assert read.programs == lower(build("1f1b", Layout.LOOP(3), 4)).programs


def test_actions_that_torch_has_not_are_left_out_for_it() -> None:
    schedule = build("gpipe", Layout.LOOP(1), 1)
    more = schedule.with_programs([[Action(Op.USE, 0, 0), *schedule.programs[0][:1], Action(Op.RECOMPUTE, 0, 0),
                                    *schedule.programs[0][1:]]])
    assert more.to_csv() == "0USE0,0F0,0R0,0B0,0STEP0\n"
    assert more.to_torch_csv() == "0F0,0B0\n"


NO_SCHEDULES: list[str | bytes] = [
    "0F0,0X0\n", "0F0,0B0\n1F0,1b0\n", "0F0,0SENDF0\n", "0F0;0B0\n", "(0F0;0B0)OVERLAP\n", "F0\n", "-1F0\n",
    f"0F{'9' * 5000}\n", "0F0,0B0\n\n1F0,1B0\n", "", " , \n\n", "0UNSHARD,0RESHARD\n",
    "0F0,0STEP0,0B0,0STEP1\n0F1,0B1,0STEP0\n", "0F0,0B0,1B0\n", "0F0,0B0\n4000000000F0,4000000000B0\n",
    "0F0,0F4000000000,0B0,0B4000000000\n", "0F0,0F1,0F2,0B0,0STEP0,0B1,0B2,0STEP1\n", "0F0,0B0\n1F0,1B0,1STEP0\n",
    b"0F0,\xff\n", "0B0\n", '0F0,"' + "0" * 200_000, b"\0" * (LARGEST_BYTES + 1)]


def test_a_file_that_is_no_schedule(tmp_path: Path) -> None:
    texts = [refusal(read_text, text, tmp_path).replace(str(tmp_path), "FOLDER") for text in NO_SCHEDULES]
    assert_golden(__file__, "no schedules", [text.partition("; operations: ")[0] for text in texts])


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no file '.*none.csv'"):
        CsvFile.read(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"cannot be read: .*Is a directory"):
        CsvFile.read(tmp_path)


@pytest.mark.parametrize(("text", "what"), [
    ("0F0,0F0,0B0,0B0\n", "0F0 stands 2 times"),
    ("0F0\n1F0,1B0\n", "0B0 is missing: stage 0 has no backward of microbatch 0"),
    ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "1SEND_B0 on rank 1 has no 0RECV_B0"),
])
def test_an_order_that_is_wrong_is_for_the_checker_to_say(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(CheckError, match=what):
        check(read_text(text, tmp_path))


@given(st.sampled_from(["1f1b", "zb_v", "pipedream", "2bw"]), st.booleans(), st.data())
def test_a_damaged_file_is_refused_or_sound(name: str, lowered: bool, data: st.DataObject) -> None:
    recipe = RegisteredSchedule.named(name)
    schedule = build(name, recipe.layout(2, recipe.chunks), 4)
    rows = [row.split(",") for row in (lower(schedule) if lowered else schedule).to_csv().splitlines()]
    odd = ["", "0R0", "0W1", "1I0", "9F9", "0STEP1", "0USE5", "0NORM0", "0RECV_F0", "1SEND_TIED_W1",
           "(0F0;0B0)OVERLAP_F_B", "0REDUCE_GRAD", "x"]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.sampled_from(rows))
        at = data.draw(st.integers(0, len(row) - 1))
        cell = data.draw(st.sampled_from([None, *odd, *rows[0], *rows[1]]))
        row[at:at + data.draw(st.integers(0, 1))] = [] if cell is None else [cell]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.csv"
        path.write_text("\n".join(map(",".join, rows)))
        try:
            read = CsvFile.read(path).schedule
            check(read)
        except UserError:
            return
        check(lower(read.compute_only()))
