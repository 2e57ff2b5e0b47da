"""Import path of the loss of models that learn the next token, for models of users."""

from vpipe.model.transformer import NO_LABEL, next_token_loss

__all__ = ["NO_LABEL", "next_token_loss"]
