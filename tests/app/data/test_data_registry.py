import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vpipe.app.data
from vpipe.app.data import registry
from vpipe.app.data.dataset import Dataset, DatasetSettings
from vpipe.app.data.registry import dataset_named, register_dataset
from vpipe.app.data.synthetic import synthetic_bert
from vpipe.errors import UserError

MODULES = sorted(Path(vpipe.app.data.__path__[0]).rglob("*.py"))


def test_a_data_set_is_one_decorator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    @register_dataset("mine")
    def mine(settings: DatasetSettings) -> Dataset:
        return synthetic_bert(64, settings.sequence_length, 8)

    assert dataset_named("mine") is mine
    assert dataset_named("mine")(DatasetSettings(sequence_length=16)).vocab_size == 64
    with pytest.raises(UserError, match=r"two data sets are called 'mine': .*mine and .*other"):
        @register_dataset("mine")
        def other(settings: DatasetSettings) -> Dataset:
            raise AssertionError


@pytest.mark.extras("bert_hdf5")
def test_a_factory_builds_the_cache_and_knows_the_vocabulary(text_folder: Path, tmp_path: Path) -> None:
    settings = DatasetSettings(text_folder, 32, vocab_size=120, cache_directory=tmp_path / "cache")
    assert dataset_named("text")(settings).vocab_size == 120
    assert len(list((tmp_path / "cache").glob("bert-*/manifest.json"))) == 1
    with pytest.raises(UserError, match="'bert_hdf5' has no path"):
        dataset_named("bert_hdf5")(DatasetSettings())


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_no_module_imports_torch_before_it_makes_a_tensor(module: Path) -> None:
    def imported(body: list[ast.stmt]) -> Iterator[str]:
        for statement in body:
            match statement:
                case ast.Import(names=names):
                    yield from (alias.name for alias in names)
                case ast.ImportFrom(module=str(name)):
                    yield name

    late = {"torch", "tokenizers", "h5py"}
    assert late.isdisjoint(name.split(".")[0] for name in imported(ast.parse(module.read_text()).body))
