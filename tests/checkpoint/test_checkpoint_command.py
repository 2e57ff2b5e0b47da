"""``vpipe checkpoint`` as a user meets it: tables, damage, and the whole model out of a run and into another."""

from __future__ import annotations

import fcntl
import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_run import job_of, write_config
from torch import Tensor

from vpipe import Model, Pipeline
from vpipe.app.cli import main
from vpipe.app.data.dataset import Tokenized
from vpipe.app.train.job import Job
from vpipe.app.train.run_folder import RUNNING
from vpipe.checkpoint import Checkpoint
from vpipe.checkpoint.manifest import Manifest
from vpipe.checkpoint.save import save_checkpoint
from vpipe.testing import InitialState, TrainingRecipe, flush_oracle

Vpipe = Callable[..., tuple[int, str, str]]


@pytest.fixture
def vpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vpipe:
    """Runs a command in ``tmp_path``: its status, what it prints, what it says of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(["checkpoint", *map(str, words)])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return job_of(tmp_path_factory.mktemp("job"))


def weights_of(job: Job) -> dict[str, Tensor]:
    modules = job.model.materialize(seed=9)
    tied = {f"{layer.name}.{own}" for layer in job.model.layers for own in layer.ties}
    return {name: tensor for name, tensor in modules.state_dict().items() if name not in tied}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, job: Job) -> Path:
    """The folder of a run with checkpoints of the steps 2 and 10, and the leftovers of a third."""
    weights = weights_of(job)
    tensors = {f"model.{name}": tensor for name, tensor in weights.items()}
    tensors |= {f"optim.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in weights.items()}
    tensors |= {f"optim.{name}.step": torch.zeros(()) for name in weights}
    folder = tmp_path_factory.mktemp("saved")
    (folder / "checkpoints" / "step-11.tmp").mkdir(parents=True)
    for step in (2, 10):
        save_checkpoint(folder / "checkpoints" / f"step-{step}", Manifest(
            step, 8 * step, seed=0, data=job.fingerprint(), config=job.config.resolved_yaml(),
            made=f"2026-11-{step:02}T10:00:00+01:00", versions={"vpipe": "0.1", "torch": "2"},
            arrangement={"schedule": "1f1b", "partition": [3, 2], "microbatches": 4}), tensors)
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of ``saved``."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_ls_has_a_line_for_each(vpipe: Vpipe, run: Path) -> None:
    status, out, _ = vpipe("ls", run)
    assert status == 0
    assert out.splitlines() == [
        "checkpoint  step  samples     size  made                 by",
        "step-2         2       16  138 KiB  2026-11-02 10:00:00  1f1b of [3, 2], 4 microbatches",
        "step-10       10       80  138 KiB  2026-11-10 10:00:00  1f1b of [3, 2], 4 microbatches",
        "step-11.tmp: a save that was cut short; it counts for nothing"]
    assert vpipe("ls", run / "checkpoints")[1] == vpipe("list", run)[1] == out
    (run / "checkpoints" / "step-2" / "checkpoint.json").write_text("{}")
    assert "step-2: the manifest of the checkpoint is damaged" in vpipe("ls", run)[1]


def test_ls_marks_the_checkpoint_with_the_lowest_evaluation_loss(vpipe: Vpipe, run: Path) -> None:
    """Of those that are there, by the evaluations of the whole run."""
    losses = {0: 3.0, 1: 4.0, 4: 1.0, 9: 4.5}  # after 1, 2, 5 and 10 updates
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "evaluation_loss": loss}) + "\n"
                                               for step, loss in losses.items()))
    for folder in (run, run / "checkpoints"):
        _, second, tenth, _ = vpipe("ls", folder)[1].splitlines()
        assert second.startswith("step-2 (best)     2  ")
        assert tenth.startswith("step-10          10  ")
    assert "(best)" in vpipe("ls", run / "checkpoints" / "step-2")[1]
    assert "(best)" not in vpipe("ls", run / "checkpoints" / "step-10")[1]


def test_ls_loads_neither_torch_nor_numpy(saved: Path) -> None:
    code = (f"import sys\nfrom vpipe.app.cli import main\nassert main(['checkpoint', 'ls', {str(saved)!r}]) == 0\n"
            "assert not {'torch', 'numpy'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_a_checkpoint_being_written_is_not_called_incomplete(vpipe: Vpipe, run: Path) -> None:
    with (run / RUNNING).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the process of rank 0 does
        for folder in (run, run / "checkpoints", run / "checkpoints" / "step-2"):
            assert vpipe("ls", folder)[1].endswith("\nstep-11.tmp: is being written\n")


def test_one_that_lost_its_manifest_is_damaged(vpipe: Vpipe, run: Path) -> None:
    folder = run / "checkpoints" / "step-10"
    (folder / "checkpoint.json").unlink()
    said = f"step-10: the checkpoint '{folder}' is damaged: checkpoint.json is missing\n"
    assert said in vpipe("ls", run)[1]
    for path in (run, folder):
        status, out, error = vpipe("verify", path)
        assert (status, said in out) == (1, True)
        assert "damaged: step-10" in error
    assert vpipe("show", run)[2].startswith(f"error: the checkpoint '{folder}' is damaged: checkpoint.json is missing")


def test_show_says_what_is_in_the_newest(vpipe: Vpipe, run: Path) -> None:
    status, out, _ = vpipe("show", run)
    lines = out.splitlines()
    assert status == 0
    assert lines[:3] == [f"{run}/checkpoints/step-10", lines[1], "by 1f1b of [3, 2], 4 microbatches"]
    assert lines[1].startswith("after step 10 and 80 samples, seed 0, data ")
    assert lines[1].endswith("made 2026-11-10 10:00:00 with vpipe 0.1, torch 2")
    layers = ["block0.attention", "block0.mlp", "block1.attention", "block1.mlp", "head"]
    start = next(number for number, line in enumerate(lines) if line.startswith("layer "))
    assert [line.split()[0] for line in lines[start + 1:start + 6]] == layers
    weights = sum(int(line.split()[1]) for line in lines[start + 1:start + 6])
    assert f"\nmodel      {weights:>7}" in out
    assert "\nrank0.safetensors  " in out
    assert "\n  learning_rate: 0.01\n" in out


def test_layers_that_are_numbers_come_in_their_order(vpipe: Vpipe, tmp_path: Path) -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12)))
    pipe = Pipeline(Model.sequential(layers, torch.nn.MSELoss()),
                    lambda parameters: torch.optim.SGD(parameters, lr=0.1), stages=2)
    pipe.save(tmp_path / "saved")
    lines = vpipe("show", tmp_path / "saved")[1].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("layer "))
    assert [line.split()[0] for line in lines[start + 1:start + 13]] == list(map(str, range(12)))


def test_verify_reads_all_and_names_what_has_changed(vpipe: Vpipe, run: Path) -> None:
    assert vpipe("verify", run)[:2] == (0, "step-2: intact, 1 file of 138 KiB\nstep-10: intact, 1 file of 138 KiB\n")
    file = run / "checkpoints" / "step-10" / "rank0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    status, out, error = vpipe("verify", run)
    assert status == 1
    assert "step-10: rank0.safetensors was changed: its SHA-256 is " in out
    assert error == f"error: 1 of 2 checkpoints damaged: step-10\nhint: resume from {run}/checkpoints/step-2\n"
    status, out, error = vpipe("export", run, "--format", "torch", "-o", "model.pt")
    assert (status, out) == (2, "")
    assert "is damaged: rank0.safetensors was changed" in error
    assert not list(Path().glob("model.pt*"))


def test_export_writes_the_whole_model(vpipe: Vpipe, run: Path, job: Job) -> None:
    weights = weights_of(job)
    Path().chmod(0o755)
    assert vpipe("export", run, "--format", "safetensors", "-o", "m.safetensors")[0] == 0
    assert Path("m.safetensors").stat().st_mode & 0o777 == 0o644, "who may look into the folder may read it, too"
    found = load_file("m.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)

    status, out, _ = vpipe("export", run / "checkpoints" / "step-2", "--format", "torch", "-o", "m.pt")
    assert status == 0
    assert out.startswith("m.pt: ")
    assert "after step 2\nload it: torch.load('m.pt')" in out
    modules = job.model.materialize(seed=1)
    found = torch.load("m.pt", weights_only=True)
    assert found.keys() == modules.state_dict().keys(), "those of tied weights too"
    assert found["head.decoder.weight"].data_ptr() == found["block0.attention.embeddings.word.weight"].data_ptr()
    assert all(torch.equal(found[name], weights[name]) for name in weights)

    assert "no late gradients were corrected\nhint: leave out --uncorrected" in vpipe(
        "export", run, "--format", "torch", "--uncorrected", "-o", "z.pt")[2]

    assert sorted(path.name for path in Path().iterdir() if path.name.startswith("m.")) == ["m.pt", "m.safetensors"]


@pytest.mark.parametrize("words", [
    ("export", "run", "--format", "safetensors"), ("export", "run", "--format", "torch"),
    ("export", "run", "--format", "huggingface"), ("import", "hf")], ids=" ".join)
def test_a_full_disk_leaves_nothing(words: tuple[str, ...], vpipe: Vpipe, run: Path, tmp_path: Path) -> None:
    if words[0] == "import":
        assert vpipe("export", "run", "--format", "huggingface", "-o", "hf")[0] == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # bytes that a file may have
    try:
        status, _, error = vpipe(*words, "-o", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, error.splitlines()[0].startswith("error: cannot write 'out': ")) == (2, True), error
    assert not list(tmp_path.glob("out*"))


def test_huggingface_there_and_back(vpipe: Vpipe, run: Path, job: Job, tmp_path: Path) -> None:
    status, out, _ = vpipe("export", run, "--format", "huggingface", "-o", "hf")
    assert status == 0
    assert "note: no tokenizer goes with it: the data set 'synthetic' has none\n" in out
    assert json.loads(Path("hf/config.json").read_text())["num_hidden_layers"] == 2

    write_config(tmp_path)
    status, out, _ = vpipe("import", "hf", "-o", "start", "--config", "c.yaml")
    assert status == 0
    assert "train it: vpipe train c.yaml --resume start" in out
    start, weights = tmp_path / "start", weights_of(job)
    manifest = Manifest.load(start)
    assert (manifest.step, manifest.arrangement["imported"]) == (0, True)
    found = Checkpoint(start, manifest).tensors(manifest.tensors)
    assert found.keys() == {f"model.{name}" for name in weights}
    assert all(torch.equal(found[f"model.{name}"], weights[name]) for name in weights)

    # A pipeline goes on from it as a sequential program does with these weights.
    pipe = Pipeline(job.model, lambda p: torch.optim.SGD(p, lr=0.1), stages=[2, 3], microbatches=4, seed=4)
    assert pipe.load(start).steps == 0
    batches = list(islice(job.training_batches(job.model.batch), 2))
    expected = flush_oracle(job.model, batches, TrainingRecipe(lambda p: torch.optim.SGD(p.values(), lr=0.1), 4,
                                                               seed=4),
                            partition=[2, 3], start=InitialState(tensors=found))
    assert [step.loss for step in pipe.train(batches)] == expected.losses

    # Without a config, the folder's own says what model it is; what comes of it can be exported again.
    assert vpipe("import", "hf", "-o", "own")[0] == 0
    assert vpipe("show", "own")[1].count("\nblock1.mlp ") == 1
    assert vpipe("export", "own", "--format", "huggingface", "-o", "again")[0] == 0
    assert Path("again/model.safetensors").read_bytes() == Path("hf/model.safetensors").read_bytes()
    assert vpipe("verify", "own")[0] == 0

    write_config(tmp_path, model__num_heads=4)
    status, _, error = vpipe("import", "hf", "-o", "other", "--config", "c.yaml")
    assert status == 2
    assert error.startswith("error: the config's model is not the one in 'hf': num_attention_heads is 4, not 2\n")
    assert not Path("other").exists()


def test_the_tokenizer_goes_along_if_the_data_are_the_same(vpipe: Vpipe, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(
        f"A fox number {n} jumps over the dog.\nIt comes again at dawn.\nThere are {n} of them." for n in range(30)))
    job = job_of(tmp_path, dataset__name="text", dataset__path=str(tmp_path / "text"), dataset__samples=16,
                 dataset__cache_directory=str(tmp_path / "cache"), dataset__batch_size=2, model__vocab_size=-1,
                 training__num_microbatches=2)
    assert isinstance(job.dataset, Tokenized)
    assert job.dataset.tokenizer_path is not None
    tensors = {f"model.{name}": tensor for name, tensor in weights_of(job).items()}
    for data, said in ((job.fingerprint(), ""), ("0123", "the data set is no longer what it was trained on")):
        info = Manifest(3, 24, seed=0, data=data, config=job.config.resolved_yaml())
        save_checkpoint(tmp_path / "one", info, tensors)
        status, out, _ = vpipe("export", "one", "--format", "huggingface", "-o", f"hf{data}")
        assert status == 0
        assert said in out
        assert ("note" in out) == bool(said)
        tokenizer = tmp_path / f"hf{data}" / "tokenizer.json"
        assert tokenizer.exists() != bool(said)
        assert said or tokenizer.read_bytes() == job.dataset.tokenizer_path.read_bytes()


def test_a_text_ends_elsewhere_as_it_did_in_training(vpipe: Vpipe, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(f"The river {number} is quiet." for number in range(600)))
    job = job_of(tmp_path, model__name="gpt", model__preset=None, model__num_layers=2, model__num_heads=2,
                 model__vocab_size=-1, dataset__name="text", dataset__path=str(tmp_path / "text"),
                 dataset__cache_directory=str(tmp_path / "cache"))
    tensors = {f"model.{name}": tensor for name, tensor in weights_of(job).items()}
    info = Manifest(3, 24, seed=0, data=job.fingerprint(), config=job.config.resolved_yaml())
    save_checkpoint(tmp_path / "one", info, tensors)
    assert vpipe("export", "one", "--format", "huggingface", "-o", "hf")[0] == 0
    said = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (said["bos_token"], said["eos_token"]) == ("<|endoftext|>", "<|endoftext|>")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 0)
    assert vpipe("import", "hf", "-o", "again")[0] == 0


@pytest.mark.extras("legacy")
def test_import_of_stages(vpipe: Vpipe, job: Job, tmp_path: Path) -> None:
    write_config(tmp_path)
    stages = tmp_path / "old"
    stages.mkdir()
    torch.save({"state_dict": {"module0": weights_of(job)}}, stages / "checkpoint.0.pth.tar")
    assert vpipe("import", "old", "-o", "start")[2] == (
        "error: the files in 'old' do not say what model they are of\nhint: name its config: --config CONFIG\n")
    status, out, _ = vpipe("import", "old", "-o", "start", "--config", "c.yaml")
    assert status == 0
    assert out.splitlines()[0] == "matched by their names:"
    assert len(Manifest.load(tmp_path / "start").tensors) == len(weights_of(job))


def broken(folder: Path, what: str) -> None:
    """A folder of Hugging Face's with one thing wrong."""
    folder.mkdir()
    config = {"model_type": "bert", "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2}
    if what == "kind":
        config["model_type"] = "berd"
    if what == "act":
        config["hidden_act"] = "relu"
    (folder / "config.json").write_text("{" if what == "json" else json.dumps(config))
    if what in ("names", "cut"):
        save_file({"encoder.layer.0.output.dense.bias": torch.zeros(16)}, folder / "model.safetensors")
    if what == "cut":
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    if what == "index":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))


@pytest.mark.parametrize(("what", "says"), [
    ("json", "the model's config.json is not JSON: "),
    ("kind", "the model_type in 'hf/config.json' is 'berd', which is not known here\nhint: did you mean 'bert'?"),
    ("act", "'hidden_act' is 'relu', but this BERT computes 'gelu' only, as 'hf/config.json' has it"),
    ("weights", "there are no weights in 'hf'\nhint: looked for model.safetensors, "),
    ("names", "'hf' lacks 30 weights: bert.embeddings.word_embeddings.weight, "),
    ("cut", "'hf/model.safetensors' cannot be read as weights: "),
    ("index", "an index in 'hf' names the file '../b.safetensors'")])
def test_a_folder_that_is_none_of_hugging_faces_is_refused(what: str, says: str, vpipe: Vpipe, tmp_path: Path) -> None:
    broken(tmp_path / "hf", what)
    status, _, error = vpipe("import", "hf", "-o", "start")
    assert (status, error.startswith(f"error: {says}")) == (2, True), error
    assert not list(tmp_path.glob("start*"))


@pytest.mark.parametrize("words", [("ls",), ("show",), ("verify",), ("export", "--format", "torch", "-o", "m")])
def test_folders_that_are_no_checkpoint_are_refused(words: tuple[str, ...], vpipe: Vpipe, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    command, *options = words
    for folder, says in (("empty", "there is no checkpoint in 'empty'"), ("none", "there is no folder 'none'")):
        status, _, error = vpipe(command, folder, *options)
        assert (status, error.startswith(f"error: {says}")) == (2, True), error
    (tmp_path / "empty" / "checkpoint.json").write_text('{"format": 7}')
    status, out, error = vpipe(command, "empty", *options)
    assert "the checkpoint has format 7, this vpipe reads up to 1" in out + error
    assert status == {"ls": 0, "verify": 1}.get(command, 2)


@pytest.mark.parametrize("words", [("export", "--format", "torch"), ("import",)])
@pytest.mark.parametrize(("out", "says"), [("there", "'there' exists already"), ("no/x", "there is no folder 'no'")])
def test_a_place_that_is_not_free_is_refused_without_torch(words: tuple[str, ...], out: str, says: str, vpipe: Vpipe,
                                                           tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.setitem(sys.modules, "vpipe.app.commands.checkpoint_convert", None)  # as long as torch takes to import
    status, _, error = vpipe(*words, "RUN", "-o", out)
    assert (status, says in error) == (2, True), error
