"""``vpipe sample``: texts of small runs, of imported weights, and what is refused."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import job_of
from tokenizers import Tokenizer, models, pre_tokenizers

from vpipe import Model, Pipeline
from vpipe.app.cli import main
from vpipe.app.data.tokenizers import load_tokenizer, train_byte_bpe
from vpipe.app.train.loop import train
from vpipe.app.weights.export import make_checkpoint
from vpipe.checkpoint import Checkpoints
from vpipe.checkpoint.manifest import Manifest
from vpipe.extras.generation.continuation import texts

pytestmark = pytest.mark.jobs

Sample = Callable[..., tuple[int, str, str]]
LINE = "the cat sat on the mat and the dog sat on the log"


def run_of(folder: Path, documents: Iterable[str], steps: int, **changes: Any) -> Path:
    """A run on those texts, with checkpoints after half of the steps and all."""
    for name in ("text", "run"):
        (folder / name).mkdir()
    (folder / "text" / "a.txt").write_text("\n\n".join(documents))
    changes = {"parallel__model_parallel_size": 1, "training__num_microbatches": 1, **changes}
    job = job_of(folder, dataset__name="text", dataset__path=str(folder / "text"), dataset__samples=None,
                 dataset__cache_directory=str(folder / "cache"), model__vocab_size=-1, training__max_steps=steps,
                 checkpoint__every_steps=steps // 2, checkpoint__at_end=True, **changes)
    train(job, folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("gpt"), (f"{LINE} {number % 3}" for number in range(80)), 120,
                  model__name="gpt", model__preset=None, model__num_layers=1, model__num_heads=2,
                  model__hidden_size=32, model__dropout=0.0, training__learning_rate=0.01)


def test_it_continues_what_it_has_learned_and_prints_it_as_it_comes(gpt: Path, sample: Sample) -> None:
    status, out, err = sample(gpt, "--prompt", "the cat sat", "--temperature", 0, "--tokens", 8)
    assert status == 0
    assert LINE.startswith(out.rstrip("\n"))
    assert len(out) > len("the cat sat on the")
    assert err.startswith(f"{gpt}/checkpoints/step-120: gpt, ")
    assert re.search(r"parameters, after step 120\n8 tokens in [\d.]+ s, [\d,]+ tokens/s\n$", err)


def test_a_seed_and_a_step_decide(gpt: Path, sample: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--tokens", 30, "--temperature", 2)
    once = sample(gpt, "--prompt", "the", *words)[1]
    assert once == sample(gpt / "checkpoints" / "step-120", "--prompt", "the", *words, "--seed", 0)[1]
    assert once != sample(gpt, "--prompt", "the", *words, "--seed", 1)[1]
    assert once != sample(gpt, "--prompt", "the", *words, "--step", 60)[1]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the\n")))
    assert once == sample(gpt, "--prompt", "-", *words)[1]


@pytest.mark.parametrize(("words", "said"), [
    (["--step", "30"], "error: there is no checkpoint of step 30 in 'RUN'\nhint: give one of the steps 60, 120\n"),
    (["--tokens", "0"], "error: --tokens is 0\nhint: give a whole number, 1 or more\n"),
    (["--temperature", "-1"], "error: --temperature is -1\nhint: "),
    (["--temperature", "nan"], "error: --temperature is nan\nhint: "),
    (["--top-k", "0"], "error: --top-k is 0\nhint: "),
    (["--seed", "-1"], "error: --seed is -1\nhint: give a whole number, 0 or more\n"),
    (["--seed", str(2**63)], f"error: --seed is {2**63}\nhint: give a whole number, 0 to {2**63 - 1}\n"),
    (["--top-p", "0"], "error: --top-p is 0\nhint: give a share above 0, at most 1"),
    (["--prompt", "caf\udce9"], "error: the prompt is not UTF-8 (byte 3)\nhint: convert it: iconv -f "),
    (["--tokenizer", "nowhere.json"], "error: nowhere.json is not a tokenizer: "),
])
def test_mistakes_are_refused(gpt: Path, sample: Sample, words: list[str], said: str) -> None:
    status, out, err = sample(gpt, "--prompt", "the", *words)
    assert (status, out) == (2, "")
    assert err.replace(str(gpt), "RUN").startswith(said)


def test_a_checkpoint_of_which_four_bytes_were_changed_is_refused(gpt: Path, sample: Sample, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(gpt, tmp_path / "run"))
    [shard] = (copy / "checkpoints" / "step-120").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-400:-396] = bytes(byte ^ 1 for byte in content[-400:-396])
    shard.write_bytes(content)
    status, out, err = sample(copy, "--prompt", "the")
    assert (status, out) == (2, "")
    assert "is damaged: rank0.safetensors was changed: its SHA-256 is " in err
    assert sample(copy, "--prompt", "the", "--step", 60)[0] == 0


def test_several_prompts_give_the_texts_of_each_alone(gpt: Path, sample: Sample, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, words = ["the cat", "sat on", "the dog sat on the"], ("--tokens", 12, "--seed", 5, "--top-p", 0.9)
    alone = [sample(gpt, "--prompt", prompt, *words)[1] for prompt in prompts]
    status, out, _ = sample(gpt, *(word for prompt in prompts for word in ("--prompt", prompt)), *words)
    assert (status, out) == (0, "\n".join(alone))
    (tmp_path / "prompts.txt").write_text("\n\n".join(prompts) + "\n")
    assert sample(gpt, "--prompts", tmp_path / "prompts.txt", *words)[1] == out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(prompts).encode())))
    assert sample(gpt, "--prompts", "-", *words)[1] == out
    (tmp_path / "empty.txt").write_text("\n")
    assert "there is no prompt in" in sample(gpt, "--prompts", tmp_path / "empty.txt")[2]
    assert "cannot read the prompts in" in sample(gpt, "--prompts", tmp_path / "nowhere.txt")[2]


def test_prompts_without_an_end_are_refused(gpt: Path, sample: Sample, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    assert sample(gpt, "--prompts", "/dev/zero") == (2, "", (
        "error: the file '/dev/zero' has more than 16 MiB\nhint: a file of prompts is not that large: check that it is "
        "the right file\n"))
    with Path("/dev/urandom").open() as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        for option in ("--prompt", "--prompts"):
            assert sample(gpt, option, "-")[2].startswith("error: standard input has more than 16 MiB\nhint: ")
    for text, said in (("a\n" * 100_001, "error: there are 100,001 prompts in "),
                       ("a\n" + "b" * (2**20 + 1), "error: prompt 2 has 1,048,577 characters\nhint: give at most ")):
        (tmp_path / "prompts.txt").write_text(text)
        assert sample(gpt, "--prompts", tmp_path / "prompts.txt")[2].startswith(said)
    (tmp_path / "prompts.txt").write_text("the cat\n\ufeffthe dog\n")
    assert sample(gpt, "--prompts", tmp_path / "prompts.txt", "--tokens", 1)[1] == sample(
        gpt, "--prompt", "the cat", "--prompt", "the dog", "--tokens", 1)[1]


@pytest.mark.parametrize("option", ["--beams", "--best", "--length-penalty", "--ranks"])
def test_options_that_are_gone_say_what_to_do(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sample", "RUN", "--prompt", "the", option, "4"])
    error, hint = capsys.readouterr().err.splitlines()
    assert error == f"error: vpipe sample has no '{option}' any more"
    assert "vpipe checkpoint export RUN --format huggingface -o DIR" in hint


def test_a_checkpoint_that_the_run_removes_meanwhile_is_named(gpt: Path, tmp_path: Path, sample: Sample,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(gpt, tmp_path / "run")
    newest, once = tmp_path / "run" / "checkpoints" / "step-120", Manifest.load

    def load(folder: Path) -> Manifest:
        shutil.rmtree(newest, ignore_errors=True)
        return once(folder)

    with monkeypatch.context() as patched:
        patched.setattr("vpipe.extras.generation.command.Manifest.load", load)
        assert "after step 60" in sample(tmp_path / "run", "--prompt", "the", "--tokens", 1)[2]
    monkeypatch.setattr("vpipe.extras.generation.sampled_checkpoint.Checkpoint.weights", lambda found, *_, **__:
                        Checkpoints.find(found.folder / "gone" if shutil.rmtree(found.folder) is None else
                                         found.folder))
    status, _, err = sample(tmp_path / "run", "--prompt", "the", "--tokens", 1)
    assert status == 2
    assert "step-60' was removed while it was read, as a run does that keeps a few\nhint: do it again" in err


def test_a_tokenizer_without_a_token_for_unknown_words_is_named(gpt: Path, tmp_path: Path, sample: Sample) -> None:
    words = Tokenizer(models.WordLevel({"the": 0, "cat": 1, "<|endoftext|>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    given = ("--tokenizer", tmp_path / "words.json", "--tokens", 1)
    assert sample(gpt, "--prompt", "the cat", *given)[0] == 0
    status, _, err = sample(gpt, "--prompt", "the dog", *given)
    assert (status, "\n".join(err.splitlines()[-2:])) == (
        2, "error: the tokenizer cannot encode the text: WordLevel error: Missing [UNK] token from the vocabulary\n"
           "hint: give it a token for unknown words, or take a byte-level one, which knows every text")


def test_changed_data_have_another_tokenizer(gpt: Path, sample: Sample) -> None:
    given = next((gpt.parent / "cache").glob("tokens-*/tokenizer.json"))
    kept = given.read_bytes()
    more = gpt.parent / "text" / "b.txt"
    more.write_text("something else entirely, which is new\n\nand more")
    try:
        status, _, err = sample(gpt, "--prompt", "the cat sat")
        assert status == 2
        assert "there is no tokenizer for the checkpoint" in err
        assert "the data set is no longer what it was trained on\nhint: name a tokenizer.json with --tokenizer" in err
        path = gpt.parent / "kept.json"
        path.write_bytes(kept)
        assert sample(gpt, "--prompt", "the cat sat", "--tokenizer", path, "--temperature", 0, "--tokens", 2)[0] == 0
    finally:
        more.unlink()


def test_imported_weights_and_those_of_no_run(tmp_path: Path, gpt: Path, sample: Sample) -> None:
    """A llama without an optimizer's state, whose positions are those of its ``config.json``."""
    tokenizer = next((gpt.parent / "cache").glob("tokens-*/tokenizer.json"))
    size = load_tokenizer(tokenizer).get_vocab_size()
    job = job_of(tmp_path, model__name="llama", model__preset=None, model__num_layers=2, model__num_heads=2,
                 model__vocab_size=size)
    (tmp_path / "one").mkdir()
    train(job, tmp_path / "one")  # makes no checkpoint
    weights = job.model.materialize(0).state_dict()
    tied = {f"{layer.name}.{own}" for layer in job.model.layers for own in layer.ties}
    made = tmp_path / "made"
    make_checkpoint(made, Manifest(0, 0, 0, config=job.config.resolved_yaml()), job.model,
                    {name: tensor for name, tensor in weights.items() if name not in tied})
    assert main(["checkpoint", "export", str(made), "--format", "huggingface", "-o", str(tmp_path / "hf")]) == 0
    assert main(["checkpoint", "import", str(tmp_path / "hf"), "-o", str(tmp_path / "back")]) == 0
    words = ("--prompt", "the cat", "--tokens", 40, "--tokenizer", tokenizer)
    texts = [sample(folder, *words) for folder in (made, tmp_path / "back")]
    assert [status for status, *_ in texts] == [0, 0]
    assert texts[1][1].startswith("the cat")
    status, _, err = sample(tmp_path / "back", "--prompt", "the")
    assert (status, "no run made this checkpoint" in err) == (2, True)


def test_other_checkpoints_are_refused(tmp_path: Path, sample: Sample) -> None:
    job = job_of(tmp_path, checkpoint__at_end=True, training__max_steps=1)
    (tmp_path / "run").mkdir()
    train(job, tmp_path / "run")
    status, _, err = sample(tmp_path / "run", "--prompt", "a [MASK]")
    assert (status, "the data set 'synthetic' has none" in err) == (2, True)
    pipe = Pipeline(Model.sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.MSELoss()),
                    lambda params: torch.optim.SGD(params, lr=0.1), stages=1, schedule="1f1b", microbatches=1)
    pipe.save(tmp_path / "own")
    status, _, err = sample(tmp_path / "own", "--prompt", "a")
    assert (status, "Pipeline.save wrote it\nhint: sample a run of 'vpipe train'" in err) == (2, True)
    assert sample(tmp_path / "nowhere", "--prompt", "a")[0] == 2


def test_bert_fills_in_masks(tmp_path: Path, sample: Sample) -> None:
    sentences = "The cat sat on the mat. The dog sat on the log."
    run = run_of(tmp_path, (f"{sentences} {sentences} It is {number}." for number in range(60)), 2,
                 model__sequence_length=32, dataset__batch_size=4)
    status, out, _ = sample(run, "--prompt", "The [MASK] sat on the [MASK].", "--top-k", 3)
    assert status == 0
    first, second, filled = out.splitlines()
    assert first.startswith("[MASK] 1: ")
    assert second.startswith("[MASK] 2: ")
    assert first.count("%") == second.count("%") == 3
    assert " sat on the " in filled
    assert "the prompt has no [MASK], and BERT fills in masked words alone\nhint: write [MASK] for a word" in sample(
        run, "--prompt", "The cat")[2]
    assert "the prompt has 32 tokens" not in sample(run, "--prompt", "[MASK] " * 30)[2]
    assert "the prompt has 33 tokens with the two around it, but the model reads 32" in sample(
        run, "--prompt", "[MASK] " * 31)[2]
    assert "--seed cannot be given for BERT" in sample(run, "--prompt", "a [MASK]", "--seed", 1)[2]


def test_a_character_of_several_tokens_waits_for_the_last() -> None:
    tokenizer = train_byte_bpe(["abc"], 257)
    ids = tokenizer.encode("né €", add_special_tokens=False).ids
    pieces = list(texts(tokenizer, ids[:1], iter([*ids[1:], 0, *ids]), 0))
    assert pieces == ["é", " ", "€", ""]
