"""The batches of a run on one rank, as its data set gives them."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import count

import torch

from vpipe.data.ahead import Ahead
from vpipe.errors import RunError, UserError
from vpipe.pipeline import Pipeline
from vpipe.runtime.microbatches import Batch


@contextmanager
def reading(batches: Iterable[Batch], what: str, pipe: Pipeline, ahead: int) -> Iterator[Iterator[Batch]]:
    """The batches; one that cannot be read (a file that has gone) ends the run with the place.

    Args:
        what: a batch is called, for messages.
        ahead: so many are prepared in a thread before they are asked for, from the second on; 0: each when it is asked
            for. The thread ends with the context.
    """
    with closing(_prepared(batches, ahead)) if ahead else nullcontext(iter(batches)) as source:
        yield _placed(source, what, pipe)


def _prepared(batches: Iterable[Batch], ahead: int) -> Generator[Batch]:
    """The first when it is asked for, so that it shows what making a batch does; the others in a thread.

    Raises:
        UserError: it draws from torch's default generator. That is the process's, so what a thread draws would be
            missing elsewhere, dropout for one, or come from there, as it happens.
    """
    source, before = iter(batches), torch.get_rng_state()
    first = next(source, None)
    if not torch.equal(torch.get_rng_state(), before):
        raise UserError("the data set draws random numbers from torch's default generator, or seeds it, which a thread "
                        "beside the training must not",
                        hint="give it a torch.Generator of its own, or set dataset.num_workers to 0")
    if first is not None:
        with Ahead(source, ahead) as others:
            yield first
            yield from others


def _placed(source: Iterator[Batch], what: str, pipe: Pipeline) -> Iterator[Batch]:
    stages = [stage.spec.index for stage in pipe.engine.local_stages]
    for number in count():
        try:
            batch = next(source)
        except StopIteration:
            return
        except RunError:
            raise
        except Exception as error:
            if isinstance(error, UserError):
                problem = error.problems[0]
                failed, hint = problem.what + (f" ({problem.where})" if problem.where else ""), problem.hint
            else:
                failed, hint = f"the data set raised {type(error).__name__}: {error}", "mend what raised it"
            raise RunError(failed, hint=hint, rank=pipe.rank, stage=stages[0] if len(stages) == 1 else None,
                           action=f"reading {what} {number}") from error
        yield batch
