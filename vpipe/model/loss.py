"""Import path of the loss of models that learn the next token, for models of users."""

from vpipe.model.layer import NO_LABEL
from vpipe.model.transformer import next_token_loss

__all__ = ["NO_LABEL", "next_token_loss"]
