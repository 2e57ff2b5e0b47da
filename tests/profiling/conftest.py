"""The models that the runtime's tests train, by name, and a profile of one of them."""

import pytest
from measured import measured
from models import rich_batches, rich_model

from vpipe.plan.profile import Profile


@pytest.fixture(scope="session")
def rich() -> list[Profile]:
    """Of a model with skips, a mask and a tie, at 4 and at 2 samples."""
    batch = rich_batches(1, 4)[0]
    return measured(rich_model(), batch, {name: field[:2] for name, field in batch.items()})
