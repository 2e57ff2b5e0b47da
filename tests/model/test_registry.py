"""Models by name: built in, registered by hand, from installed packages."""

from __future__ import annotations

import pytest

from vpipe.app.families import registry
from vpipe.app.families.bert import bert_from_settings
from vpipe.app.families.registry import ModelSettings, register_model
from vpipe.errors import UserError
from vpipe.model.model import Model


def test_registry_refuses_a_second_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    register_model("bert")(bert_from_settings)

    def other(settings: ModelSettings) -> Model:
        raise AssertionError

    with pytest.raises(UserError, match=r"register the model 'bert': vpipe\.app\.families\.bert and "):
        register_model("bert")(other)
