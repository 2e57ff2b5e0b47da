"""A plan: how a model is cut and run. A file of VPipe's (``{"partition": ..., "recompute_ratio": ...}``) is one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vpipe.errors import Problem, UserError, nearest


@dataclass(frozen=True)
class Plan:
    """Where to cut, what to recompute, where the stages live, in which order they work.

    Attributes:
        partition: layers per stage.
        recompute_ratio: per stage, share of its layers, counted from its end, that are recomputed.
        stage_to_rank_map: ranks per stage; stage s on rank s when empty.
        schedule: name of the schedule; the caller's choice when None.
    """

    partition: tuple[int, ...]
    recompute_ratio: tuple[float, ...] = ()
    stage_to_rank_map: tuple[tuple[int, ...], ...] = ()
    schedule: str | None = None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file.

        Raises:
            UserError: the file is missing, is not JSON, or a value is of the wrong kind; all problems at once.
        """
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise UserError(f"cannot read the plan: {error.strerror}", where=str(path),
                            hint="give the path of a JSON file") from None
        except UnicodeDecodeError:
            raise UserError("the plan is not text in UTF-8", where=str(path), hint=_LOOKS) from None
        except json.JSONDecodeError as error:
            raise UserError(f"the plan is not JSON: {error.msg}", where=f"{path}:{error.lineno}:{error.colno}",
                            hint=_LOOKS) from None
        problems = list(_problems(content, str(path)))
        if problems:
            raise UserError.all_of(problems)
        ranks = content.get("stage_to_rank_map", {})
        return cls(tuple(content["partition"]), tuple(float(r) for r in content.get("recompute_ratio", ())),
                   tuple(tuple(ranks[str(s)]) for s in range(len(ranks))), content.get("schedule"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, at once or not at all."""
        content: dict[str, Any] = {"partition": self.partition, "recompute_ratio": self.recompute_ratio}
        if self.stage_to_rank_map:
            content["stage_to_rank_map"] = {str(s): ranks for s, ranks in enumerate(self.stage_to_rank_map)}
        if self.schedule is not None:
            content["schedule"] = self.schedule
        partial = Path(f"{os.fspath(path)}.tmp")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        partial.replace(path)


_LOOKS = 'a plan looks like {"partition": [3, 3, 3], "recompute_ratio": [0, 0, 0]}'
_KEYS = ("partition", "recompute_ratio", "stage_to_rank_map", "schedule")


def _problems(content: Any, where: str) -> list[Problem]:
    if not isinstance(content, dict) or "partition" not in content:
        return [Problem("the plan has no partition", 'write {"partition": [3, 3, 3]}: layers per stage', where)]
    problems = [Problem(f"unknown key '{key}' in the plan", nearest(key, _KEYS), where)
                for key in content if key not in _KEYS]
    partition = content["partition"]
    if not isinstance(partition, list) or not all(type(n) is int and n > 0 for n in partition) or not partition:
        problems.append(Problem(f"partition is {partition!r}",
                                "write a list of positive integers: layers per stage", where))
        return problems
    stages = len(partition)
    ratios = content.get("recompute_ratio", [])
    if not isinstance(ratios, list) or not all(type(r) in (int, float) and 0 <= r <= 1 for r in ratios):
        problems.append(Problem(f"recompute_ratio is {ratios!r}", "write a list of numbers from 0 to 1", where))
    elif ratios and len(ratios) != stages:
        problems.append(Problem(f"recompute_ratio has {len(ratios)} entries for {stages} stages",
                                "give one ratio per stage", where))
    ranks = content.get("stage_to_rank_map", {})
    every = f'give the ranks of every stage: {{"0": [0], ..., "{stages - 1}": [{stages - 1}]}}'
    if not isinstance(ranks, dict) or not all(isinstance(own, list) and all(type(r) is int for r in own)
                                              for own in ranks.values()):
        problems.append(Problem(f"stage_to_rank_map is {ranks!r}", every, where))
    elif ranks and sorted(ranks) != sorted(map(str, range(stages))):
        problems.append(Problem(f"stage_to_rank_map names {sorted(ranks)} for {stages} stages", every, where))
    schedule = content.get("schedule")
    if schedule is not None and not isinstance(schedule, str):
        problems.append(Problem(f"schedule is {schedule!r}", "give its name, such as 1f1b", where))
    return problems
