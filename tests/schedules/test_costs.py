"""Costs of stages and links."""

from __future__ import annotations

from fractions import Fraction

from vpipe.schedules.costs import Costs, Link, StageCosts
from vpipe.schedules.size import Size


def test_a_transfer_takes_the_latency_and_the_bytes_through_the_bandwidth() -> None:
    assert Link().transfer_s(1000) == 0
    assert Link(2).transfer_s(1000) == 2
    assert Link(latency_s=2, bytes_per_s=400).transfer_s(1000) == Fraction(9, 2)
    assert Link(latency_s=0.5, bytes_per_s=400.0).transfer_s(1000) == 3.0


def test_exact_numbers_stay_exact() -> None:
    assert isinstance(Link(2).transfer_s(1000.0), int)
    assert isinstance(Link(2, 500).transfer_s(1000), int)
    assert isinstance(Link(Fraction(1, 3), 3).transfer_s(1), Fraction)
    assert isinstance(Link(2, 500.0).transfer_s(1000), float)


def test_uniform_costs_share_a_rank_among_its_chunks() -> None:
    costs = Costs.uniform(Size(ranks=3, microbatches=6, chunks=2, update_every=6), 1, 2, 3, transfer=4, step=5)
    assert costs.stages == (StageCosts(Fraction(1, 2), 1, Fraction(3, 2), step_s=Fraction(5, 2)),) * 6
    assert costs.link(0, 1) == Link(4)
