"""Configs as users of VPipe and OurGPipe write them are loaded and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import check_updates, losses, metrics

from vpipe.app.cli import main
from vpipe.app.config import formats
from vpipe.app.config.config import load_config
from vpipe.app.config.shipped import shipped_configs
from vpipe.app.train.job import Job
from vpipe.app.train.loop import train
from vpipe.errors import UserError
from vpipe.plugins import PluginGroup

pytestmark = pytest.mark.jobs

TINY = ["metrics.peak_tflops=1", "model.hidden_size=16", "model.num_heads=4", "model.sequence_length=8"]


def test_the_families_are_complete() -> None:
    names = {path.name for path in shipped_configs().values()}
    for kind in ("4gpipe", "4pipedream", "4vpipe"):
        assert f"bert_{kind}_tiny.yml" in names


WORDS = ("river", "stone", "cloud", "grass", "lantern", "window", "copper", "garden", "whisper", "mountain", "harbour",
         "silver", "thread", "candle")
AS_ITS_USERS_WRITE_IT = """\
model:    {name: gpt, hidden_size: 512, num_layers: 16, num_heads: 16, sequence_length: 128, vocab_size: -1}
dataset:  {name: code_search_net, batch_size: 4, num_workers: 0}
training: {learning_rate: 0.0001, epochs: 2, num_microbatches: 4, profile_iteration: 100, exit_after_profile: true}
parallel: {model_parallel_size: 4, data_parallel_size: 1, scheduler: async_threaded, use_orion_scheduler: false}
"""


@pytest.mark.extras("async_threaded")
def test_the_nested_form_runs_as_its_users_write_it(tmp_path: Path) -> None:
    """On a folder of CodeSearchNet's, with a scheduler by its old name, profiled at its end."""
    (tmp_path / "c.yaml").write_text(AS_ITS_USERS_WRITE_IT)
    assert load_config(tmp_path / "c.yaml").parallel.schedule == "gpipe"
    with (tmp_path / "python_train_0.jsonl").open("w") as file:
        for number in range(200):
            word, other = WORDS[number % 14], WORDS[number * number % 13]
            code = f"def {word}_{number}({other}):\n    {other} += {number}\n    return {other} * {word}\n"
            file.write(json.dumps({"code": code, "docstring": f"The {word} of a {other}.", "language": "python",
                                   "partition": "train" if number % 8 else "test"}) + "\n")
    job = Job.from_config(load_config(tmp_path / "c.yaml", [
        *TINY, f"dataset.path={tmp_path}", f"dataset.cache_directory={tmp_path / 'cache'}", "model.vocab_size=300",
        "training.profile_iteration=2", f"log_directory={tmp_path}"]))
    assert len(job.model) == 33
    train(job, tmp_path)
    assert len(losses(tmp_path)) == 2
    assert list(tmp_path.glob("profiler_async_threaded/rank0/*.json"))


def write_text(folder: Path) -> None:
    """200 documents of made-up sentences."""
    folder.mkdir()
    documents = [
        "\n".join(" ".join(["The", *(WORDS[(i * k + j * j + k) % len(WORDS)] for j in range(9)), "rests."])
                  for k in range(1, 13)) for i in range(200)]
    (folder / "story.txt").write_text("\n\n".join(documents))


@pytest.mark.skipif("bert_hdf5" not in PluginGroup("vpipe.datasets", "data set").names,
                    reason="the extra bert_hdf5 is not here")
def test_text_to_shards_to_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_text(tmp_path / "text")
    assert main(["data", "build-bert", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "data"),
                 "--vocab-size", "400"]) == 0
    assert "200 documents" in capsys.readouterr().out
    job = Job.from_config(load_config(Path("bert_4vpipe_tiny_hdf5"), [
        f"data_dir={tmp_path / 'data'}", f"log_directory={tmp_path}", "training.max_steps=4",
        "training.evaluation_batches=1"]))
    assert job.config.parallel.recompute == (0.5, 0.0, 0.0, 0.0)
    train(job, tmp_path)
    check_updates(tmp_path, 4)
    assert metrics(tmp_path)[1][0]["evaluation_loss"] > 0


def test_without_the_extra_a_flat_file_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "ADDITIONS", PluginGroup("vpipe.nothing", "addition to configs"))
    with pytest.raises(UserError) as refused:
        load_config(Path("bert_4vpipe_tiny"))
    [problem] = refused.value.problems
    assert problem.what == "the file has none of the sections model, dataset, training, parallel"
    assert problem.hint == ("vpipe configs lists examples; the flat form of VPipe is read by "
                            "vpipe/extras/legacy, which is not installed here")


def test_paths_of_a_flat_config_are_taken_from_the_current_folder(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("bert_4vpipe_tiny_hdf5"))
    assert config.dataset.path == tmp_path / "data"
    assert config.model.config_file == shipped_configs()["bert_4vpipe_tiny"].parent / "bert_tiny" / "bert_config.json"
