"""Actions, times and sizes as readers of a report have them."""

from __future__ import annotations

from vpipe.report.recorded import Done
from vpipe.schedules.action import PER_MICROBATCH, Op

_WHAT = {
    Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.INPUT: "input half of backward", Op.WEIGHT: "weight half",
    Op.RECOMPUTE: "recompute", Op.STEP: "optimizer step", Op.USE: "choose a weight version",
    Op.REDUCE: "sum of gradients over replicas", Op.NORM: "gradient norms", Op.SEND_F: "send activations",
    Op.RECV_F: "get ready for activations", Op.SEND_B: "send gradients", Op.RECV_B: "get ready for gradients",
    Op.SEND_W: "send tied weights", Op.RECV_W: "get ready for tied weights",
    Op.SEND_G: "send gradients of tied weights", Op.RECV_G: "get ready for gradients of tied weights"}


def describe(done: Done) -> str:
    """``forward of microbatch 17 on stage 2``."""
    counts = "microbatch" if done.op in PER_MICROBATCH else "version" if done.op in _VERSIONS else "update"
    return f"{_WHAT[done.op]}, {counts} {done.number}, stage {done.stage}"


_VERSIONS = frozenset({Op.USE, Op.SEND_W, Op.RECV_W})


def milliseconds(seconds: float) -> str:
    """``0.42 ms``, ``12.3 ms``, ``421 ms``, ``12.3 s``."""
    value = seconds * 1e3
    if value >= 9999.5:
        return f"{seconds:,.1f} s"
    return f"{value:.2f} ms" if value < 9.995 else f"{value:.1f} ms" if value < 99.95 else f"{value:.0f} ms"


def share(value: float) -> str:
    """``27 %``, one decimal below ten."""
    return f"{100 * value:.1f} %" if 0 < abs(value) < 0.0995 else f"{100 * value:.0f} %"


def compact(value: float) -> str:
    """A number in three digits or so: ``1,234``, ``12.3``, ``0.0042``."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
