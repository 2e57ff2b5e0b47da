"""Import path of the loss of models that learn the next token, for models of users."""

from vpipe.app.families.transformer import next_token_loss
from vpipe.model.layer import NO_LABEL

__all__ = ["NO_LABEL", "next_token_loss"]
