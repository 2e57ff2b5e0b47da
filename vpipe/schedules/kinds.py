"""Actions, and the table of their kinds: the only place that knows what an action needs, makes and frees.

A schedule is a list of actions per rank, which everything reads. Their text form is that of PyTorch's pipelining
(``torch.distributed.pipelining.schedules``): ``<stage><kind><index>``, so ``2F0`` is the forward of stage 2 on
microbatch 0.

A row of the table is data, with expressions of a few lines. All else is derived from the rows: which action waits for
which, in which order transfers go, what memory is held, which weights a forward uses, what a worker calls, the drawing.

A package adds a kind by :func:`register_kind`, in a module to which an entry point in the group ``vpipe.actions``
points under the kind's text (docs/add-an-action.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field, fields, replace
from typing import Any, NamedTuple

from vpipe.errors import UserError
from vpipe.plugins import PluginGroup
from vpipe.schedules.assignment import Setting
from vpipe.schedules.costs import Number, StageCosts

MICROBATCH, UPDATE, VERSION = "microbatch", "update", "version"
"""What the index of an action counts."""


@dataclass(eq=False, repr=False)
class Value:
    """Something that actions make and need, of a stage and an index.

    Attributes:
        name: for messages.
        homes: returns the ranks where it is made, for a setting, its stage and index, and the rank that needs it; None
            where that is the same rank.
        handed_over: also an owner and a borrower on one rank send and receive it.
        optional: it is needed only where something makes it.
        bytes: what one takes on its rank while it is held, where memory is predicted.
        carrier: the kind that sends it to the ranks that need it, if any: a later row.
    """

    name: str
    homes: Callable[[Setting, int, int, int], Sequence[int]] | None = None
    handed_over: bool = False
    optional: bool = False
    bytes: Callable[[StageCosts], Number] = lambda cost: 0
    carrier: Kind | None = None

    def __repr__(self) -> str:
        return self.name


def _at(offset: int) -> Callable[[Setting, int, int, int], Sequence[int]]:
    """The rank that takes the microbatch through the stage at that offset, if there is one."""
    def homes(at: Setting, stage: int, index: int, rank: int) -> Sequence[int]:
        home = at.assignment.rank_of(stage + offset, index)
        return () if home < 0 else (home,)

    return homes


def _forward_bytes(cost: StageCosts) -> Number:
    """What a forward leaves for the backward."""
    return cost.kept_bytes if cost.recompute_s else cost.activation_bytes


OUTPUT = Value("output", _at(0))
OUTPUT_GRADIENT = Value("gradient of the output", _at(1))
SAVED = Value("saved activations", bytes=_forward_bytes)
OFFLOADED = Value("saved activations on the host")
RECOMPUTED = Value("recomputed activations", optional=True,
                   bytes=lambda cost: cost.activation_bytes - _forward_bytes(cost))
KEPT = Value("inputs kept for a later stage of the rank", bytes=lambda cost: cost.waiting_bytes)
HALF = Value("inputs and gradients that the weight half needs", bytes=lambda cost: cost.weight_half_bytes)
CARRIED = Value("what a slice hands on to the next one, such as keys and values")
CARRIED_GRADIENT = Value("gradient of what the slice before has handed on")
GRADIENT = Value("weight gradient of a microbatch")
PART = Value("a replica's gradient of an update",
             lambda at, stage, index, rank: at.assignment.contributors(stage, index, stage))
SUM = Value("sum of gradients over replicas",
            lambda at, stage, index, rank: () if not at.sums(stage) else (rank,) if at.zero1 else at.placement[stage])
NORMS = Value("gradient norms",
              lambda at, stage, index, rank: at.placement[stage] if at.zero1 else
              () if rank in at.placement[stage] else at.placement[stage][:1])
UPDATED = Value("weights after an update", bytes=lambda cost: cost.version_bytes)
PACE = Value("update of the first stage that trains",
             lambda at, stage, index, rank: [home for home in at.placement[stage] if home != rank])
GATHERED = Value("gathered weights")
DIVIDED = Value("weights and gradients divided over lanes again")
STEPPED = Value("weights that a replica steps", lambda at, stage, index, rank: at.placement[stage] if at.zero1 else ())
EXCHANGED = Value("weights that the replicas have stepped")
TIED_VERSION = Value("tied weights", lambda at, stage, index, rank: at.lenders(stage, rank), handed_over=True)
TIED_GRADIENT = Value("gradient of tied weights",
                      lambda at, stage, index, rank: at.gradient_senders(stage, index), handed_over=True)

# What a package's kind may need of a stage and a microbatch: OUTPUT and SAVED, which a forward makes; GRADIENT, which a
# backward or its weight half makes and the step ends. Of a stage and an update: UPDATED, which the step makes.

Needed = tuple[Value, int, int]
"""A value with its stage and index."""

Needs = Callable[[Setting, int, int, int], Iterable[Needed]]
"""From a setting, the stage and index of an action, and its rank."""


@dataclass(frozen=True)
class Memory:
    """What an action does to the memory of its rank.

    Attributes:
        takes: values that it holds from its start on.
        leaves: values that are held from its end on.
        frees: values that are held no longer from its end on.
    """

    takes: tuple[Value, ...] = ()
    leaves: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()


@dataclass(frozen=True)
class TransferEnd:
    """One end of a transfer of ``value`` between two ranks.

    Attributes:
        value: what is sent.
        sends: this end sends it.
        other: the text of the kind at the other end.
        offset: the stage of the other end's action, less that of this one's.
        value_offset: the stage of the value, less that of this end's action.
        peers: returns the ranks of the other ends, for a setting, the action's stage and index, and its rank.
        bytes: that the sending stage sends.
        borrowed: this end stands on the ranks that borrow the weights of its stage.
        before: likewise returns the ranks that must have sent theirs before, where all transfers have one order.
    """

    value: Value
    sends: bool
    other: str
    offset: int
    value_offset: int
    peers: Callable[[Setting, int, int, int], Sequence[int]]
    bytes: Callable[[StageCosts], Number] = lambda cost: cost.tied_bytes
    borrowed: bool = False
    before: Callable[[Setting, int, int, int], Sequence[int]] = lambda at, s, i, rank: ()


def _follows(of: Callable[[Kind], Any]) -> Any:
    """A field that follows from those before it: every action is asked, so the answer is computed once."""
    return field(init=False, metadata={"of": of})


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Kind(str):
    """A row of the table. As text it is what stands between stage and index, such as the F of 2F0.

    Attributes:
        name: for people.
        counts: what its index counts: ``MICROBATCH``, ``UPDATE`` or ``VERSION``.
        runs: the name of the method of :class:`vpipe.runtime.worker.Worker` that executes it, with dots for a part of
            it; or, of a package's kind, ``module:function``, which is called with the worker, the stage and the index.
        needs: yields the values without which it cannot start, for a setting, its stage and index, and its rank.
        makes: the values that it makes, each with the stage of the value less its own.
        memory: what it does to the memory of its rank; None for nothing.
        seconds: the seconds of its rank that it takes; None where it takes none.
        host_bytes: what it copies to or from the host, for which its rank takes time; None where it does not.
        transfer: the transfer of which it is an end.
        torch: what does it where PyTorch runs the schedule; empty where PyTorch's compute-only form has it.
        colour: its fill in drawings, for dark numbers. What takes no time is not drawn.
        shades: its styles in a terminal, one per stage of a rank: foreground and background of the 256 colours.

    Raises:
        UserError: a field is of the wrong type.
    """

    text: InitVar[str]
    name: str
    counts: str
    runs: str
    _: KW_ONLY
    needs: Needs = lambda at, s, i, rank: ()
    makes: Sequence[tuple[Value, int]] = ()
    memory: Memory | None = None
    seconds: Callable[[StageCosts], Number] | None = None
    host_bytes: Callable[[StageCosts], Number] | None = None
    transfer: TransferEnd | None = None
    torch: str | None = None
    colour: str = "#aab4be"
    shades: tuple[str, ...] = ("38;5;16;48;5;248",)

    made: frozenset[Value] = _follows(lambda row: frozenset(value for value, _ in row.makes))
    # It exchanges gradients or weights with the other replicas of its stage: all do it together.
    summed: bool = _follows(lambda row: not row.made.isdisjoint((SUM, EXCHANGED)))
    # Generators yield it; others are added by lowering.
    generated: bool = _follows(lambda row: row.transfer is None and row.made.isdisjoint(
        (SUM, GATHERED, DIVIDED, NORMS, EXCHANGED)))
    # Only a run asks for it: clipping, ZeRO-1, tied weights; no file has to contain it.
    of_model: bool = _follows(lambda row: not row.made.isdisjoint((NORMS, EXCHANGED)) or (
        row.transfer is not None and row.transfer.value in (TIED_VERSION, TIED_GRADIENT)))
    is_own: bool = _follows(lambda row: ":" not in row.runs)  # vpipe's, not a package's
    per_microbatch: bool = _follows(lambda row: row.counts == MICROBATCH)
    sends: bool = _follows(lambda row: row.transfer is not None and row.transfer.sends)
    receives: bool = _follows(lambda row: row.transfer is not None and not row.transfer.sends)
    works: bool = _follows(lambda row: row.seconds is not None)
    takes_time: bool = _follows(lambda row: row.works or row.host_bytes is not None)
    computes: bool = _follows(lambda row: row.works and row.per_microbatch)
    recomputation: bool = _follows(lambda row: RECOMPUTED in row.made)
    # It takes long enough to transfer something meanwhile.
    long: bool = _follows(lambda row: row.computes and not row.recomputation)
    # A forward uses the weight version of its stage, which is held until the gradient has been made.
    uses_version: bool = _follows(lambda row: OUTPUT in row.made)
    # A backward makes the gradient of its input; what was dropped and not recomputed before, it recomputes.
    returns: bool = _follows(lambda row: OUTPUT_GRADIENT in row.made and row.computes)
    completes: bool = _follows(lambda row: GRADIENT in row.made)  # the weight gradients of a microbatch
    whole_backward: bool = _follows(lambda row: row.returns and row.completes)
    first_half: bool = _follows(lambda row: row.returns and not row.completes)
    second_half: bool = _follows(lambda row: row.completes and not row.returns)
    makes_version: bool = _follows(lambda row: UPDATED in row.made)
    # It sets the version that the next forwards use to its index.
    chooses: bool = _follows(lambda row: row.counts == VERSION and row.transfer is None)
    touches_versions: bool = _follows(
        lambda row: row.uses_version or row.makes_version or row.chooses or row.returns or row.completes)
    # It makes something for the microbatch after its forward.
    remembers: bool = _follows(lambda row: not row.made.isdisjoint((SAVED, RECOMPUTED, OFFLOADED)))
    # Actions of other ranks may wait for it.
    told: bool = _follows(lambda row: row.sends or row.completes or not row.per_microbatch or any(
        value.homes is not None and value not in (OUTPUT, OUTPUT_GRADIENT) for value in row.made))

    def __new__(cls, text: str, *_: object, **__: object) -> Kind:
        return str.__new__(cls, text)

    def __post_init__(self, text: str) -> None:
        for name, is_right, hint in (
                ("counts", self.counts in (MICROBATCH, UPDATE, VERSION), "MICROBATCH, UPDATE or VERSION"),
                ("needs", callable(self.needs), "a function of the setting, a stage, an index and a rank"),
                ("makes", all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], Value)
                              for each in self.makes), "[(VALUE, 0)]: values with the stage less that of the action"),
                ("memory", isinstance(self.memory, Memory | None), "Memory(takes=(), leaves=(), frees=())"),
                ("seconds", self.seconds is None or callable(self.seconds), "a function of the stage's costs"),
                ("colour", re.fullmatch(r"#[0-9a-fA-F]{6}", str(self.colour)), "#rrggbb")):
            if not is_right:
                raise UserError(f"{name} of the kind '{self}' is {getattr(self, name)!r}", hint=f"give {hint}")
        for each in fields(self):
            if "of" in each.metadata:
                object.__setattr__(self, each.name, each.metadata["of"](self))
        if self.torch is None:
            own = "" if self.is_own and self.long else f"{text}: PyTorch has no such action"
            object.__setattr__(self, "torch", own if self.generated else "transfers and sums: PyTorch adds its own")

    def __reduce__(self) -> tuple[Callable[[str], Kind], tuple[str]]:
        return named, (str(self),)

    @property
    def other_end(self) -> Kind:
        """Return the kind at the other end of a transfer."""
        assert self.transfer is not None, "it is one end of a transfer"
        return _KINDS[self.transfer.other]


def with_exchanges(setting: Setting, present: Collection[Kind]) -> Setting:
    """Return a setting with what updates exchange under a schedule of these kinds."""
    there = frozenset[Value]().union(*(kind.made for kind in present))
    return replace(setting, normed=NORMS in there, sharded=GATHERED in there, zero1=EXCHANGED in there)


# -- expressions that several rows share ---------------------------------------------------------------

def _gathered(at: Setting, s: int, i: int) -> list[Needed]:
    """What a computation with the weights of a stage needs where they are divided over lanes."""
    return [(GATHERED, s, at.assignment.update_of(s, i))] if at.sharded else []


def _forward_needs(at: Setting, s: int, i: int, rank: int) -> Iterable[Needed]:
    tied = [(TIED_VERSION, owner, version) for owner in at.lent_by.get(s, ())
            if (version := at.tied_version_of(owner, i))] if at.ties else ()
    before = [(CARRIED, s, i - 1)] if at.assignment.continues(i) else []
    return (OUTPUT, s - 1, i), *before, *tied, *_gathered(at, s, i)


def _backward_needs(at: Setting, s: int, i: int, rank: int) -> Iterable[Needed]:
    behind = [(CARRIED_GRADIENT, s, i + 1)] if at.assignment.continues(i + 1) else []
    return (SAVED, s, i), (RECOMPUTED, s, i), (OUTPUT_GRADIENT, s, i), *behind, *_gathered(at, s, i)


def _sums(at: Setting, s: int, i: int, rank: int) -> Iterable[Needed]:
    """What a norm or a step adds up: gradients of borrowers, replicas and lanes."""
    return (TIED_GRADIENT, s, i), (SUM if at.is_lowered else PART, s, i), *([(DIVIDED, s, i)] if at.sharded else [])


def _pace(at: Setting, s: int, i: int) -> Iterable[Needed]:
    """What the step of a stage that trains nothing waits for in a stream, where no backward holds it back: the last
    update of the first stage that trains which needs no later microbatch."""
    frozen = at.assignment.frozen
    if s >= frozen or at.assignment.flush:
        return []
    complete = at.assignment.in_update(s, i).stop // at.assignment.per_update(frozen)
    return [(PACE, frozen, complete - 1)] if complete else []


def _norms(at: Setting, s: int, i: int, rank: int) -> Iterable[Needed]:
    """The norms by which a step is clipped: of all stages; without a flush those that its own replicas have."""
    if not at.normed:
        return []
    own = [s] * (at.assignment.width(s) > 1)
    return [(NORMS, stage, i) for stage in (range(len(at.placement)) if at.norms_of_all else own)]


def gradients_of(at: Setting, s: int, i: int, rank: int) -> list[Needed]:
    """Return what a rank adds to an update, and its step ends."""
    return [(GRADIENT, s, microbatch) for microbatch in at.assignment.share(s, i, s, rank)]


def _neighbour(offset: int) -> Callable[[Setting, int, int, int], Sequence[int]]:
    """The rank that takes the microbatch through the stage at that offset, unless it is the same rank."""
    def peers(at: Setting, s: int, i: int, rank: int) -> Sequence[int]:
        peer = at.assignment.rank_of(s + offset, i)
        return () if peer in (-1, rank) else (peer,)

    return peers


class Op:
    """The kinds of vpipe itself, by name."""

    FORWARD = Kind(
        "F", "forward", MICROBATCH, "forward",
        needs=_forward_needs, makes=((OUTPUT, 0), (SAVED, 0), (CARRIED, 0)), memory=Memory(takes=(SAVED,)),
        seconds=lambda cost: cost.forward_s, colour="#6ea8fe",
        shades=("38;5;255;48;5;26", "38;5;16;48;5;75", "38;5;16;48;5;117", "38;5;16;48;5;153"))
    BACKWARD = Kind(
        "B", "backward", MICROBATCH, "backward", needs=_backward_needs,
        makes=((OUTPUT_GRADIENT, -1), (CARRIED_GRADIENT, 0), (GRADIENT, 0), (PART, 0)),
        memory=Memory(frees=(SAVED, RECOMPUTED)),
        seconds=lambda cost: cost.input_s + cost.weight_s, colour="#63c48d",
        shades=("38;5;255;48;5;28", "38;5;16;48;5;71", "38;5;16;48;5;114", "38;5;16;48;5;157"))
    INPUT = Kind(
        "I", "input half of backward", MICROBATCH, "_backward_input",
        needs=_backward_needs, makes=((OUTPUT_GRADIENT, -1), (CARRIED_GRADIENT, 0), (HALF, 0)),
        memory=Memory(frees=(SAVED, RECOMPUTED), leaves=(HALF,)), seconds=lambda cost: cost.input_s, colour="#4fc4c4",
        shades=("38;5;255;48;5;30", "38;5;16;48;5;73", "38;5;16;48;5;116", "38;5;16;48;5;152"))
    WEIGHT = Kind(
        "W", "weight half", MICROBATCH, "_backward_weight",
        needs=lambda at, s, i, rank: [(HALF, s, i), *_gathered(at, s, i)],
        makes=((GRADIENT, 0), (PART, 0)), memory=Memory(frees=(HALF,)), seconds=lambda cost: cost.weight_s,
        colour="#f4b860",
        shades=("38;5;16;48;5;172", "38;5;16;48;5;179", "38;5;16;48;5;222", "38;5;16;48;5;230"))
    RECOMPUTE = Kind(
        "R", "recompute", MICROBATCH, "_recompute",
        needs=lambda at, s, i, rank: [(SAVED, s, i), *_gathered(at, s, i)],
        makes=((RECOMPUTED, 0),), memory=Memory(takes=(RECOMPUTED,)), seconds=lambda cost: cost.recompute_s,
        torch="R: a backward recomputes where your modules use torch.utils.checkpoint",
        colour="#b79cf0",
        shades=("38;5;255;48;5;97", "38;5;16;48;5;140", "38;5;16;48;5;183", "38;5;16;48;5;189"))
    OFFLOAD = Kind(
        "OFFLOAD", "offload activations", MICROBATCH, "_offload",
        needs=lambda at, s, i, rank: [(SAVED, s, i)], makes=((OFFLOADED, 0),), memory=Memory(frees=(SAVED, RECOMPUTED)),
        host_bytes=_forward_bytes)
    FETCH = Kind(
        "FETCH", "fetch activations", MICROBATCH, "_fetch",
        needs=lambda at, s, i, rank: [(OFFLOADED, s, i)], makes=((SAVED, 0),), memory=Memory(takes=(SAVED,)),
        host_bytes=_forward_bytes)
    STEP = Kind(
        "STEP", "optimizer step", UPDATE, "optimizer_steps.step",
        needs=lambda at, s, i, rank: [*_sums(at, s, i, rank), *_norms(at, s, i, rank), *_pace(at, s, i)],
        makes=((UPDATED, 0), (STEPPED, 0), (PACE, 0)), seconds=lambda cost: cost.step_s,
        torch="STEP: step the optimizer after schedule.step()",
        colour="#d6336c", shades=("1;38;5;255;48;5;160",))
    USE = Kind("USE", "choose a weight version", VERSION, "optimizer_steps.use",
               torch="USE: with a flush there is one version of the weights")
    REDUCE = Kind(
        "REDUCE_GRAD", "sum of gradients over replicas", UPDATE, "_reduce",
        needs=lambda at, s, i, rank: [*gradients_of(at, s, i, rank), (PART, s, i),
                                      *([(GATHERED, s, i)] if at.sharded else [])],
        makes=((SUM, 0),))
    UNSHARD = Kind(
        "UNSHARD", "gather weights from lanes", UPDATE, "fully_sharded.unshard",
        needs=lambda at, s, i, rank: [(UPDATED, s, i - 1)] if i else [], makes=((GATHERED, 0),),
        memory=Memory(takes=(GATHERED,)))
    RESHARD = Kind(
        "RESHARD", "give back gathered weights", UPDATE, "fully_sharded.reshard",
        needs=lambda at, s, i, rank: [(GATHERED, s, i), (SUM, s, i)], makes=((DIVIDED, 0),),
        memory=Memory(frees=(GATHERED,)))
    NORM = Kind("NORM", "gradient norms", UPDATE, "optimizer_steps.norm", needs=_sums, makes=((NORMS, 0),))
    GATHER = Kind("GATHER_W", "weights stepped by replicas", UPDATE, "optimizer_steps.gather",
                  needs=lambda at, s, i, rank: [(STEPPED, s, i)], makes=((EXCHANGED, 0),))
    SEND_F = Kind(
        "SEND_F", "send activations", MICROBATCH, "p2p.send_activations",
        needs=lambda at, s, i, rank: [(OUTPUT, s, i)],
        transfer=TransferEnd(OUTPUT, True, "RECV_F", 1, 0, _neighbour(1), lambda cost: cost.output_bytes))
    RECV_F = Kind("RECV_F", "get ready for activations", MICROBATCH, "_post_activations",
                  transfer=TransferEnd(OUTPUT, False, "SEND_F", -1, -1, _neighbour(-1)))
    SEND_B = Kind(
        "SEND_B", "send gradients", MICROBATCH, "p2p.send_gradients",
        needs=lambda at, s, i, rank: [(OUTPUT_GRADIENT, s - 1, i)],
        transfer=TransferEnd(
            OUTPUT_GRADIENT, True, "RECV_B", -1, -1,
            lambda at, s, i, rank: _neighbour(-1)(at, s, i, rank) if at.assignment.trains(s - 1) else (),
            lambda cost: cost.gradient_bytes))
    RECV_B = Kind(  # the shapes of a gradient are known once its forward has run
        "RECV_B", "get ready for gradients", MICROBATCH, "p2p.post_gradients",
        needs=lambda at, s, i, rank: [(OUTPUT, s, i)],
        transfer=TransferEnd(OUTPUT_GRADIENT, False, "SEND_B", 1, 0, _neighbour(1)))
    # Weights tied across ranks. The stage is the one that owns the weight, on both sides.
    SEND_W = Kind("SEND_TIED_W", "send tied weights", VERSION, "tied.send_version",
                  needs=lambda at, s, i, rank: [(UPDATED, s, i - 1)],
                  transfer=TransferEnd(TIED_VERSION, True, "RECV_TIED_W", 0, 0,
                                       lambda at, s, i, rank: at.lending.get((s, rank), ())))
    RECV_W = Kind("RECV_TIED_W", "get ready for tied weights", VERSION, "tied.post_version",
                  transfer=TransferEnd(TIED_VERSION, False, "SEND_TIED_W", 0, 0,
                                       lambda at, s, i, rank: at.lenders(s, rank), borrowed=True))
    SEND_G = Kind("SEND_TIED_G", "send gradients of tied weights", UPDATE, "tied.send_gradients",
                  needs=lambda at, s, i, rank: [(GRADIENT, *each) for each in at.lent_gradients(s, i, rank)],
                  transfer=TransferEnd(TIED_GRADIENT, True, "RECV_TIED_G", 0, 0,
                                       lambda at, s, i, rank: at.placement[s], borrowed=True,
                                       before=lambda at, s, i, rank: at.gradient_senders_before(s, i, rank)))
    RECV_G = Kind("RECV_TIED_G", "get ready for gradients of tied weights", UPDATE, "tied.post_gradients",
                  transfer=TransferEnd(TIED_GRADIENT, False, "SEND_TIED_G", 0, 0,
                                       lambda at, s, i, rank: at.gradient_senders(s, i)))


# -- the table -----------------------------------------------------------------------------------------

PLUGINS = PluginGroup("vpipe.actions", "kind of action")
_OWN = tuple(kind for kind in vars(Op).values() if isinstance(kind, Kind))
_KINDS: dict[str, Kind] = {str(kind): kind for kind in _OWN}
for _kind in _OWN:
    if _kind.transfer is not None and _kind.sends:
        _kind.transfer.value.carrier = _kind


def register_kind(kind: Kind) -> Kind:
    """Add a kind to the table.

    Raises:
        UserError: another kind has its text or sends its value, it could not be told from an index, or what runs it is
            no function.
    """
    if not re.fullmatch(r"[\w.]+:[\w.]+", str(kind.runs)):
        raise UserError(f"runs of the kind '{kind}' is {kind.runs!r}",
                        hint="give module:function, such as averaging:average")
    if not kind.isidentifier() or any(character.isdigit() for character in kind):
        raise UserError(f"an action cannot be called {str(kind)!r}", hint="use letters and _, such as AVERAGE")
    known = _KINDS.get(kind)
    if known is not None and (known.name, known.counts, known.runs) != (kind.name, kind.counts, kind.runs):
        raise UserError(f"there is already a kind of action called '{kind}': {known.name}, run by {known.runs}",
                        hint="choose another name")
    if kind.transfer is not None and kind.sends:
        carrier = kind.transfer.value.carrier
        if carrier not in (None, kind):
            raise UserError(f"'{kind}' would send the {kind.transfer.value.name}, which '{carrier}' sends",
                            hint="send a Value of your own")
        kind.transfer.value.carrier = kind
    _KINDS[str(kind)] = kind
    return kind


def named(text: str) -> Kind:
    """Return the kind called ``text``, of vpipe or of an installed package.

    Raises:
        UserError: there is none, or several, or its package cannot be imported.
    """
    known = _KINDS.get(text)
    return known if known in _OWN else PLUGINS.named(text, _KINDS, lambda kind: "", names)


def find(text: str) -> Kind | None:
    """Return the kind called ``text``; None where nobody has one.

    Raises:
        UserError: several have, or its package cannot be imported.
    """
    return _KINDS.get(text) or (named(text) if text in PLUGINS.names else None)


def having(trait: str) -> Kind:
    """Return the kind of vpipe itself that has a trait, such as ``whole_backward``."""
    return next(kind for kind in _OWN if getattr(kind, trait))


def known() -> Sequence[Kind]:
    """Return the kinds that are known so far: vpipe's own, then those of imported packages."""
    return tuple(_KINDS.values())


def names() -> list[str]:
    """Return every text of :func:`named`, without importing the packages that announce them."""
    return [*_KINDS, *(name for name in PLUGINS.names if name not in _KINDS)]


# -- actions -------------------------------------------------------------------------------------------

_TEXT = re.compile(r"(\d+)([A-Za-z_]+)(\d+)")


class Action(NamedTuple):
    """One operation of one stage on the microbatch, the update or the version with a number, as its kind counts."""

    op: Kind
    stage: int
    index: int  # type: ignore[assignment]  # of the tuple nobody asks for a position

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.index}"

    @property
    def microbatch(self) -> int:
        """The number of the microbatch, where the kind counts these."""
        return self.index

    @classmethod
    def forward(cls, stage: int, microbatch: int) -> Action:
        """Return F."""
        return cls(Op.FORWARD, stage, microbatch)

    @classmethod
    def backward(cls, stage: int, microbatch: int) -> Action:
        """Return B, a whole backward."""
        return cls(Op.BACKWARD, stage, microbatch)

    @classmethod
    def input_half(cls, stage: int, microbatch: int) -> Action:
        """Return I, the half of a backward that makes the gradients of the inputs."""
        return cls(Op.INPUT, stage, microbatch)

    @classmethod
    def weight_half(cls, stage: int, microbatch: int) -> Action:
        """Return W, the half of a backward that makes the gradients of the weights."""
        return cls(Op.WEIGHT, stage, microbatch)

    @classmethod
    def use(cls, stage: int, version: int) -> Action:
        """Return USE: the stage's next forwards use that version of its weights."""
        return cls(Op.USE, stage, version)

    @classmethod
    def step(cls, stage: int, update: int) -> Action:
        """Return STEP, the optimizer step of an update."""
        return cls(Op.STEP, stage, update)

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action written as ``text``.

        Raises:
            UserError: ``text`` is not ``<stage><kind><index>``, or there is no such kind.
        """
        match = _TEXT.fullmatch(text.strip())
        kind = None if match is None else find(match[2])
        if match is None or kind is None:
            package = "" if match is None or len(match[2]) < 2 else \
                f"; for {match[2]} of a package install it, or name its file with --import"
            raise UserError(f"'{text}' is not an action", hint="write <stage><operation><index>, such as 2F0; "
                            f"operations: {', '.join(kind for kind in known() if not kind.of_model)}{package}")
        return cls(kind, int(match[1]), int(match[3]))


forward, backward, step, use = Action.forward, Action.backward, Action.step, Action.use
input_half, weight_half = Action.input_half, Action.weight_half
"""Short names, for generators."""
