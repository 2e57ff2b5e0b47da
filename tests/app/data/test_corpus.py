from collections.abc import Callable
from functools import partial

import pytest

from vpipe.app.data.corpus import Corpus, Document, Part, SplitCorpus
from vpipe.errors import UserError


def divided(*documents: Document) -> SplitCorpus:
    return SplitCorpus.build(Corpus("the texts", {}, lambda: documents))


def marked(**counts: int) -> list[Document]:
    parts: dict[str, Callable[[str], Document]] = {
        name: partial(Document, part=part) for name, part in (("train", "train"), ("valid", "valid"), ("test", "test"),
                                                              ("unmarked", None))}
    return [parts[name](f"{name} {number}") for name, count in counts.items() for number in range(count)]


@pytest.mark.parametrize(("counts", "held_out", "train", "left_out"), [
    ({"train": 3, "valid": 2, "test": 1}, "test", 3, 2),
    ({"train": 3, "valid": 2}, "valid", 3, 0),
    ({"train": 3, "test": 2}, "test", 3, 0),
    ({"unmarked": 2, "train": 1, "test": 1}, "test", 3, 0),
])
def test_marked_documents_are_held_out(counts: dict[str, int], held_out: Part, train: int, left_out: int) -> None:
    found = divided(*marked(**counts))
    assert len(list(found.texts("train"))) == train
    assert list(found.texts("test")) == [f"{held_out} {number}" for number in range(counts[held_out])]
    assert found.counts["left_out_documents"] == left_out
    assert found.counts["documents"] == sum(counts.values())


@pytest.mark.parametrize("name", ["train", "unmarked"])
def test_otherwise_a_twentieth_that_the_texts_alone_decide(name: str) -> None:
    documents = marked(**{name: 100})
    found = divided(*documents)
    train, test = list(found.texts("train")), list(found.texts("test"))
    assert (len(train), len(test)) == (95, 5)
    assert sorted(train + test) == sorted(document.text for document in documents)
    turned = divided(*documents[::-1], *documents)
    assert list(turned.texts("test"))[:5] == test[::-1]
    assert not set(turned.texts("test")) & set(turned.texts("train"))  # equal texts are on one side
    assert len(list(divided(*documents[:2]).texts("test"))) == 1


def test_nothing_to_train_on_is_an_error() -> None:
    with pytest.raises(UserError, match=r"the texts: 0 different documents to train on \(0 marked train, 1 marked "
                                        r"valid, 2 marked test, 0 not marked\), of the 1 that"):
        divided(*marked(valid=1, test=2))
    with pytest.raises(UserError, match=r"1 different document to train on .* of the 2"):
        divided(*marked(unmarked=1), *marked(unmarked=1))
    with pytest.raises(UserError, match="0 different documents"):
        divided()


def test_languages_are_counted() -> None:
    found = divided(Document("a", language="go"), Document("b", language="php"), Document("c", language="go"))
    assert found.languages == {"go": 2, "php": 1}
