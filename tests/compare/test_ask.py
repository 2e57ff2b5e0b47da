"""What may be asked for, and what is said to the rest."""

from __future__ import annotations

import pytest

from vpipe.compare.ask import Ask
from vpipe.compare.systems import SYSTEMS, systems_named
from vpipe.errors import UserError


def test_the_systems_are_as_their_users_ran_them() -> None:
    gpipe, pipedream, vpipe = systems_named("gpipe, pipedream,vpipe")
    assert (gpipe.schedule, gpipe.recompute) == ("gpipe", 1.0)
    assert (pipedream.schedule, pipedream.recompute) == ("pipedream", 0.0)
    assert (vpipe.schedule, vpipe.recompute) == ("pipedream", None)
    assert [system.name for system in SYSTEMS] == ["gpipe", "pipedream", "vpipe"]


@pytest.mark.parametrize("ask", [Ask.of("vpipe,gpipe", None, None), Ask.of("gpipe", None, "8GiB"),
                                 Ask.of(None, "1f1b,zb_h1", None)])
def test_ranks_are_told_what_was_asked(ask: Ask) -> None:
    assert Ask.of_words(ask.words()) == ask


def test_the_order_and_the_memory_are_the_users() -> None:
    assert Ask.of("vpipe,gpipe", None, "1.5GiB") == Ask(("vpipe", "gpipe"), (), 3 << 29)


@pytest.mark.parametrize(("systems", "schedules", "memory", "what", "hint"), [
    (None, None, None, "and there is neither", "--systems gpipe,pipedream,vpipe"),
    ("gpipe", "1f1b", None, "not both", "--schedules"),
    ("gpip,vpipe", None, None, "--systems names 'gpip', which is no system", "did you mean 'gpipe'?"),
    ("gpipe,gpipe", None, None, "--systems names 'gpipe' 2 times", "once"),
    ("gpipe,", None, None, "names ''", "known names: gpipe, pipedream, vpipe"),
    (None, "1f1c", None, "--schedules names '1f1c'", "did you mean '1f1b'?"),
    (None, "auto", None, "--schedules names 'auto'", "known names"),
    (None, "1f1b", "8GiB", "--memory decides what systems recompute", "leave it out"),
    ("gpipe", None, "8G", "--memory is '8G'", "8GiB"),
])
def test_other_words_are_refused(systems: str | None, schedules: str | None, memory: str | None, what: str,
                                 hint: str) -> None:
    with pytest.raises(UserError) as refused:
        Ask.of(systems, schedules, memory)
    assert what in refused.value.problems[0].what
    assert hint in refused.value.problems[0].hint


def test_all_unknown_names_are_told_at_once() -> None:
    with pytest.raises(UserError) as refused:
        Ask.of("gpip,vpip", None, None)
    assert len(refused.value.problems) == 2
