"""Models by name: built in, registered by hand, from installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vpipe.app.families import registry
from vpipe.app.families.bert import bert_from_settings
from vpipe.app.families.registry import ModelSettings, family_named, model_names, register_model
from vpipe.errors import UserError
from vpipe.model.model import Model


def test_registry_finds_built_in_families_and_names_the_nearest() -> None:
    assert family_named("bert").factory is bert_from_settings
    assert "bert" in model_names()
    with pytest.raises(UserError, match=r"no model is called 'berd'\nhint: did you mean 'bert'\?"):
        family_named("berd")
    with pytest.raises(UserError, match="no model is called 'layer'"):
        family_named("layer")  # a file of the package, but no family


def test_registry_refuses_a_second_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    register_model("bert")(bert_from_settings)

    def other(settings: ModelSettings) -> Model:
        raise AssertionError

    with pytest.raises(UserError, match=r"register the model 'bert': vpipe\.app\.families\.bert and "):
        register_model("bert")(other)


def test_registry_reads_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outsider.py").write_text(
        "from vpipe.app.families.bert import bert_from_settings\n"
        "from vpipe.app.families.registry import register_model\n"
        "@register_model('outsider')\n"
        "def outsider(settings):\n"
        "    return bert_from_settings(settings)\n")
    information = tmp_path / "outsider-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[vpipe.models]\noutsider = outsider\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    assert "outsider" in model_names()
    assert "outsider" not in sys.modules, "listing names imports no foreign code"
    assert len(family_named("outsider").factory(ModelSettings(vocab_size=50, preset="tiny"))) == 5
    del sys.modules["outsider"]
