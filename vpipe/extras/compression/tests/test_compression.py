"""``parallel.compress`` in a config: what is accepted, and that ``vpipe verify`` holds it to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from small_run import job_of, write_config

from vpipe.app.config.config import load_config
from vpipe.app.config.parallel import Codec, ParallelSection
from vpipe.app.verify import references, run_in_process
from vpipe.description.transfers import CODECS
from vpipe.errors import UserError
from vpipe.testing import compare


@pytest.mark.parametrize("changes", [
    {"schedule": "1f1b", "compress": "int8"}, {"schedule": "gpipe", "compress": "bf16"},
    {"schedule": "pipedream", "compress": ["int8", "none"], "compress_rounding": "stochastic",
     "model_parallel_size": 3},
    {"schedule": "1f1b", "compress": "int8", "stage_to_rank_map": {"0": [0], "1": [1, 2]}},
    {"schedule": "turned.csv", "compress": "int8"}],
    ids=lambda changes: changes["schedule"])
def test_a_config_is_what_its_oracle_says(changes: dict[str, Any], tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("turned.csv").write_text("0F0,0F1,0F2,0F3,0B2,0B0,0B3,0B1\n1F0,1F1,1F2,1F3,1B3,1B1,1B2,1B0\n")
    late = {"training__delay_correction": "extrapolate"} if changes["schedule"] == "pipedream" else {}
    job = job_of(tmp_path, **late, **{f"parallel__{key}": value for key, value in changes.items()})
    [reference] = references(job, 2)
    assert reference.bound == 0
    differences = list(compare(run_in_process(job, 2), reference.trajectory))
    assert len(differences) >= 2
    assert all(difference.within(0) for difference in differences)


def test_without_the_codec_the_oracle_differs(tmp_path: Path) -> None:
    [reference] = references(job_of(tmp_path, parallel__compress="int8", model__tie_weights=False), 2)
    plain = run_in_process(job_of(tmp_path, model__tie_weights=False), 2)
    assert all(0 < difference.loss_difference < 1e-3 for difference in compare(plain, reference.trajectory))


@pytest.mark.parametrize(("changes", "what", "key"), [
    ({"compress": "int4"}, "must be none, bf16 or int8, got 'int4'", "compress"),
    ({"compress": True}, "must be none, bf16 or int8, got true", "compress"),
    ({"compress": ["int8", 8]}, "must be none, bf16 or int8, got 8", "compress[1]"),
    ({"compress": ["int8", "none"]}, "has 2 entries for the 1 cuts between 2 stages", "compress"),
    ({"compress": "bf16", "compress_rounding": "stochastic"}, "is 'stochastic', but nothing is sent as int8",
     "compress_rounding")])
def test_wrong_compression_is_refused(changes: dict[str, Any], what: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_config(write_config(tmp_path, **{f"parallel__{name}": value for name, value in changes.items()}))
    assert f"parallel.{key} {what}" in [problem.what for problem in caught.value.problems]


def test_names_are_those_of_the_codecs() -> None:
    assert {*get_args(Codec), "int8_stochastic"} == set(CODECS)
    section = ParallelSection(model_parallel_size=3, compress=("int8", "bf16"), compress_rounding="stochastic")
    assert section.transfers.codecs(3) == ("int8_stochastic", "bf16")
