"""What vpipe had once, and what to do instead: refused where a config, a command or a call asks for it.

A key is what a user wrote: a key of a config (``training.name``), a key with one of its values
(``training.optimizer=soap``), a command with an option of it (``vpipe launch --print``), a public name with its module.
"""

from __future__ import annotations

__all__ = ["RETIRED"]

RETIRED: dict[str, str] = {
}
"""What is gone, and the remedy."""
