"""What ranks in processes of their own record, and by how much their clocks differ."""

from __future__ import annotations

import trace_jobs
from world import World


def test_ranks_record_themselves_and_find_how_their_clocks_differ(world: World) -> None:
    alone = trace_jobs.recorded()
    results = world.run(trace_jobs.recorded)
    for rank, result in enumerate(results):
        assert result["losses"] == alone["losses"]
        assert result["actions"].keys() == {str(rank)}
        assert result["actions"][str(rank)] == alone["actions"][rank], "what is done, and what is held after it"
        assert result["waits_within_actions"]
        # A clock that is an hour ahead per rank; both ways of the quickest answer take no minute.
        assert abs(result["offset_s"] + 3600 * rank) < 60
