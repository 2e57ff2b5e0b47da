"""Import path of the loss of models that learn the next token, for models of users."""

from vpipe import Model
from vpipe.app.families.transformer import next_token_loss

__all__ = ["NO_LABEL", "next_token_loss"]

NO_LABEL = Model.NO_LABEL
