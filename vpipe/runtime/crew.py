"""The ranks of this process at work: they take turns in one thread, or there is only one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from vpipe.errors import RunError
from vpipe.runtime.compressed import Compressed
from vpipe.runtime.outcome import Outcomes
from vpipe.runtime.programs import Program
from vpipe.runtime.segment import Segment
from vpipe.runtime.trace import Recorder
from vpipe.runtime.worker import Worker
from vpipe.schedules.action import Action, Op


class Crew:
    """Carries out the programs of a segment.

    Args:
        workers: of this process, by rank.
        outcomes: what is told as soon as losses are known.
        distributed: whether there are other processes; then this one has one rank, which waits where it must.

    Attributes:
        broken: whether a segment was left before its end: the stages may be at different versions.
        recorders: of the ranks whose actions in training are noted.
    """

    def __init__(self, workers: Mapping[int, Worker], outcomes: Outcomes, distributed: bool) -> None:
        self._workers, self._outcomes, self._distributed = workers, outcomes, distributed
        self.broken = self._stepped = False
        self.recorders: Mapping[int, Recorder] = {}

    def run(self, segment: Segment, program_of: Callable[[int], Program]) -> Iterator[int]:
        """Carry out a segment; yields a step when every stage of this process has made all its updates of it."""
        if self.broken:
            raise RunError("this pipeline failed before and cannot go on", hint="build a new one")
        programs: dict[int, Iterator[Action]] = {}
        for rank, worker in self._workers.items():
            program = program_of(rank)
            programs[rank] = program.actions
            worker.begin(segment, program.version_of, program.is_split)
        rounds, here = segment.rounds, sum(len(worker.stages) for worker in self._workers.values())
        made: Counter[int] = Counter()  # stages that have made all their updates of a step
        done = 0
        self.broken = True  # until the end is reached
        at_work: Mapping[int, Worker | Recorder] = {**self._workers, **(self.recorders if segment.training else {})}
        decisive = self._outcomes.decisive
        self._stepped = False
        try:
            for rank, action in self._in_turn(programs, at_work, rounds.flush):
                if action.op is Op.STEP:
                    step, left = divmod((action.microbatch + 1) * rounds.span(action.stage), rounds.per_step)
                    made[step - 1] += not left
                    # Not one of fewer microbatches: some stages come to its end only when their programs end.
                    if made[done] == here and len(rounds.of_step(done)) == rounds.per_step:
                        self.broken = False
                        yield done
                        self.broken = True
                        del made[done]
                        done += 1
                elif action is decisive.get(rank):
                    self._outcomes.tell(segment, 0, rank)
            for worker in self._workers.values():
                worker.end()
        except (Exception, KeyboardInterrupt):
            self._abandon(segment)
            raise
        self.broken = False
        if segment.training and rounds.of_step(done):
            yield done

    def _in_turn(self, programs: Mapping[int, Iterator[Action]],
                 at_work: Mapping[int, Worker | Recorder], flush: bool) -> Iterator[tuple[int, Action]]:
        """Execute the ranks' actions, each as soon as it has what it needs; yields them when done.

        With a flush the ranks of one process step when all can: an error before that leaves the weights as they were.
        """
        together = flush and not self._distributed
        heads = {rank: action for rank, program in programs.items() if (action := next(program, None)) is not None}
        while heads:
            moved = False
            for rank in list(heads):
                worker, execute = self._workers[rank], at_work[rank].execute
                while rank in heads and (self._distributed or worker.waits_for(heads[rank]) is None):
                    if heads[rank].op is Op.STEP:
                        if together:
                            break
                        self._stepped = True
                    execute(heads[rank])
                    moved = True
                    yield rank, heads[rank]
                    following = next(programs[rank], None)
                    if following is None:
                        del heads[rank]
                    else:
                        heads[rank] = following
            if together and not moved:
                together = False
            elif not moved:
                waits = "; ".join(f"rank {rank} at {action} waits for {self._workers[rank].waits_for(action)}"
                                  for rank, action in heads.items())
                raise RunError(f"no rank can go on: {waits}", hint="the schedule deadlocks: this is a defect of vpipe")

    def _abandon(self, segment: Segment) -> None:
        """After a failure: let training go on as if the segment had not begun, where no stage has made a step of it.

        Not over processes: what others were sent cannot be called back.
        """
        feedback = any(isinstance(worker.transport, Compressed) and worker.transport.feedback
                       for worker in self._workers.values())  # keeps what coding the gradients of this batch lost
        if self._stepped or self._distributed or (feedback and segment.training):
            return
        for worker in self._workers.values():
            worker.abandon()
        for recorder in self.recorders.values():
            recorder.abandon()
        self.broken = False

    def lend(self) -> None:
        """Let every stage that borrows tied weights have them as they are now."""
        for worker in self._workers.values():
            worker.tied.exchange_first()
        for worker in self._workers.values():
            worker.tied.install_all()
        self.finish()

    def finish(self) -> None:
        """Wait until what was sent has arrived everywhere: then this process may end."""
        for worker in self._workers.values():
            worker.transport.finish()

    def check_whole(self) -> None:
        """Refuse to give away the state of a pipeline that failed.

        Raises:
            RunError: it did.
        """
        if self.broken:
            raise RunError("this pipeline failed in the middle of an update: its stages are at different versions",
                           hint="keep a state_dict() from between steps, and build a new pipeline")
