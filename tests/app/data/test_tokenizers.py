import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from vpipe.app.data.tokenizers import (
    END_OF_TEXT,
    SPECIAL,
    end_token,
    load_with_end,
    load_wordpiece,
    train_byte_bpe,
    train_wordpiece,
)
from vpipe.errors import UserError

DOCUMENTS = [["The quiet river runs.", "The river is quiet now."], ["Copper engines run quietly.", "They ran before."]]
TRAIN_WORDPIECE = ("from vpipe.app.data.tokenizers import train_wordpiece; "
                   f"print(train_wordpiece({DOCUMENTS!r}, 80).to_str())")
TEXTS = ["def river(stone):\n    return stone + 1\n", "def stone(river):\n    return river + 1\n"] * 3
TRAIN_BPE = f"from vpipe.app.data.tokenizers import train_byte_bpe; print(train_byte_bpe({TEXTS!r}, 300).to_str())"


def test_special_tokens_come_first_and_text_round_trips(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(DOCUMENTS, 90)
    assert [tokenizer.id_to_token(number) for number in range(5)] == list(SPECIAL)
    assert tokenizer.get_vocab_size() <= 90
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_wordpiece(tmp_path / "tokenizer.json")
    ids = loaded.encode("THE QUIET RIVER runs.").ids
    assert 1 not in ids
    assert loaded.decode(ids) == "the quiet river runs."


@pytest.mark.parametrize("program", [TRAIN_WORDPIECE, TRAIN_BPE], ids=["wordpiece", "bytes"])
def test_every_process_trains_the_same(program: str) -> None:
    texts = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                            timeout=60).stdout for _ in range(2)}
    assert len(texts) == 1


def test_a_vocabulary_smaller_than_the_alphabet_is_an_error() -> None:
    with pytest.raises(UserError, match=r"vocab_size is 12, but 5 special tokens and the \d+ characters") as caught:
        train_wordpiece(DOCUMENTS, 12)
    assert "hint: use at least" in str(caught.value)


def test_a_file_that_is_no_tokenizer_of_bert_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_wordpiece(path)
    Tokenizer(models.WordPiece(vocab={"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(path))
    with pytest.raises(UserError, match=r"tokenizer\.json has no \[CLS\], \[SEP\], \[MASK\]"):
        load_wordpiece(path)
    shifted = {token: number + 1 for number, token in enumerate(SPECIAL)}
    Tokenizer(models.WordPiece(vocab=shifted, unk_token="[UNK]")).save(str(path))
    with pytest.raises(UserError, match=r"gives \[PAD\] the id 1"):
        load_wordpiece(path)


def test_any_text_round_trips() -> None:
    tokenizer = train_byte_bpe(TEXTS, 300)
    assert 257 < tokenizer.get_vocab_size() <= 300
    assert tokenizer.to_str() == train_byte_bpe(TEXTS[::-1], 300).to_str(), "whatever the order"
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert end_token(tokenizer) == (END_OF_TEXT, 0)
    for text in (*TEXTS, "naïve ⟨λ⟩\t\x00 \r\n  end", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode(TEXTS[0]).ids) < len(TEXTS[0]) / 2


def test_chinese_round_trips_and_a_word_of_any_length_is_counted_in_pieces() -> None:
    """Chinese has no spaces: the characters between two marks are one word, without marks a whole text."""
    run = "".join(chr(0x4e00 + number * number % 331) for number in range(700))
    tokenizer = train_byte_bpe([f"{run}。"], 600)
    assert tokenizer.to_str() == train_byte_bpe([run[:256], run[256:512], f"{run[512:]}。"], 600).to_str()
    ids = tokenizer.encode(f"{run}，“全角”！").ids
    assert tokenizer.decode(ids) == f"{run}，“全角”！"
    assert len(ids) < len(run)


def test_a_vocabulary_too_small_for_the_bytes_is_an_error() -> None:
    with pytest.raises(UserError, match=r"vocab_size is 256, but 256 bytes and <.endoftext.> are 257") as seen:
        train_byte_bpe(TEXTS, 256)
    assert "hint: use at least 257, or -1" in str(seen.value)
    assert train_byte_bpe(TEXTS, 257).get_vocab_size() == 257


def test_a_tokenizer_must_know_the_end_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")).save(str(path))
    assert end_token(load_with_end(path)) == ("</s>", 1)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(UserError, match=r"tokenizer\.json has no <\|endoftext\|> or <\|end_of_text\|> or </s>"):
        load_with_end(path)
    path.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_with_end(path)
