import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from vpipe.data.wordpiece import SPECIAL, load_wordpiece, train_wordpiece
from vpipe.errors import UserError

DOCUMENTS = [["The quiet river runs.", "The river is quiet now."], ["Copper engines run quietly.", "They ran before."]]
TRAIN = f"from vpipe.data.wordpiece import train_wordpiece; print(train_wordpiece({DOCUMENTS!r}, 80).to_str())"


def test_special_tokens_come_first_and_text_round_trips(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(DOCUMENTS, 90)
    assert [tokenizer.id_to_token(number) for number in range(5)] == list(SPECIAL)
    assert tokenizer.get_vocab_size() <= 90
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_wordpiece(tmp_path / "tokenizer.json")
    ids = loaded.encode("THE QUIET RIVER runs.").ids
    assert 1 not in ids
    assert loaded.decode(ids) == "the quiet river runs."


def test_every_process_trains_the_same() -> None:
    texts = {subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True).stdout
             for _ in range(4)}
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
