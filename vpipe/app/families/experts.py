"""A mixture of experts in place of the MLP of a decoder's block (Shazeer et al. 2017, arXiv:1701.06538).

A router scores E experts for every token. Its K best compute it, and their outputs are added with the softmax over
these K scores as weights, as in Mixtral (Jiang et al. 2024, arXiv:2401.04088). No token is dropped. The loss of balance
is that of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6): E times the sum over the
experts of the share of tokens that chose one and the mean of its probability, K for a router that is fair. Its weighted
mean over the blocks travels beside ``h`` as the tensor :data:`BALANCE`, and the head adds it to the loss of training.

Shapes, as names end: b batch (samples), s sequence (tokens), h hidden size, n all tokens, k experts of a token, e
experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vpipe.app.families import tensor_parallel as tp
from vpipe.app.families.registry import ModelSettings
from vpipe.errors import UserError

BALANCE = "balance"
"""The tensor with the sum of the blocks' weighted losses of balance so far, fp32, a scalar."""


@dataclass(frozen=True)
class Mixture:
    """The part of a family's config with its experts, under the key names of Hugging Face's ``MixtralConfig``.

    ``num_local_experts`` is None for an MLP, ``router_aux_loss_coef`` the weight of the loss of balance in [0, 1).
    """

    num_local_experts: int | None = None
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.01

    def check_experts(self) -> None:
        """Raise UserError for more experts per token than there are."""
        if self.num_local_experts is not None and self.num_experts_per_tok > self.num_local_experts:
            raise UserError(f"a token has {self.num_experts_per_tok} experts of {self.num_local_experts}",
                            hint="lower experts_per_token (num_experts_per_tok), or raise experts (num_local_experts)")

    def uses(self, expert: int, router: int, dense: int) -> int:
        """Return how many of the weights below its norm a token of an MLP is multiplied with."""
        return dense if self.num_local_experts is None else router * self.num_local_experts + \
            expert * self.num_experts_per_tok

    def written(self) -> dict[str, Any]:
        """Return all fields of the config; without experts none of theirs."""
        absent = {field.name for field in fields(Mixture)} if self.num_local_experts is None else set()
        return {name: value for name, value in vars(self).items() if name not in absent}


def mixture_from_settings(settings: ModelSettings) -> dict[str, Any]:
    """Return the fields of a :class:`Mixture` that settings give; None for those that they do not."""
    return {"num_local_experts": settings.experts, "num_experts_per_tok": settings.experts_per_token,
            "router_aux_loss_coef": settings.balance_weight}


def check_used(settings: ModelSettings, config: Mixture) -> None:
    """Raise UserError where settings tell of the experts of a model that has none."""
    given = [name for name in ("experts_per_token", "balance_weight") if getattr(settings, name) is not None]
    if given and config.num_local_experts is None:
        raise UserError(f"{' and '.join(given)} given, but the model has no experts",
                        hint="set experts to their number, or leave the others out")


def refuse_experts(architecture: str, config: Mapping[str, object]) -> None:
    """Raise UserError for experts of a kind of model that ``transformers`` has without."""
    if config.get("num_local_experts") is not None:
        raise UserError(f"{architecture} has no experts, and this model has {config['num_local_experts']}",
                        hint="train a mixtral or a qwen3_moe for a model that transformers loads, or export --format "
                             "safetensors")


class Experts(nn.Module):
    """Norm, the K best of E experts for each token, add: [B, S, H] -> [B, S, H] and :data:`BALANCE`.

    Args:
        router: H -> E, without bias.
        experts: modules [N, H] -> [N, H].
        weight: of the loss of balance of this layer.
        sum_to_one: the K scores have a softmax of their own; otherwise the weights are the probabilities among all E.
    """

    # Every expert is split as an MLP is, and every rank routes all tokens. So what reads ``x_nh`` here makes parts of
    # sums, the gradient of the router through the weights of the mix included, which are added once per layer; that of
    # the loss of balance alone is whole on each rank.
    tensor_plan: ClassVar = {"norm": tp.plain_gathered, "router": tp.plain_whole, "counted": tp.once,
                             "total": tp.added, "dropout": tp.dropout}

    def __init__(self, norm: nn.Module, router: nn.Linear, experts: Iterable[nn.Module], dropout: nn.Module, *,
                 per_token: int, weight: float, sum_to_one: bool = True) -> None:
        super().__init__()
        self.norm, self.router, self.experts, self.dropout = norm, router, nn.ModuleList(experts), dropout
        self.counted, self.total = nn.Identity(), nn.Identity()
        self.per_token, self.weight, self.sum_to_one = per_token, weight, sum_to_one

    def forward(self, h_bsh: Tensor, balance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x_bsh = self.norm(h_bsh)
        x_nh = x_bsh.flatten(0, 1)
        scores_ne = self.router(x_nh)
        odds_ne = scores_ne.softmax(-1, torch.promote_types(scores_ne.dtype, torch.float32))
        weights_nk, chosen_nk = odds_ne.topk(self.per_token, dim=-1)
        if self.sum_to_one:
            weights_nk = weights_nk / weights_nk.sum(-1, keepdim=True)
        mixed_nh = torch.zeros_like(x_nh)
        for chosen, expert in enumerate(self.experts):
            # An expert without tokens computes none, so that its weights have gradients (zeros) in every microbatch.
            place, token = torch.where(chosen == chosen_nk.T)
            output_nh = expert(x_nh[token]) * weights_nk[token, place, None]
            mixed_nh.index_add_(0, token, output_nh.to(mixed_nh.dtype))
        own = self.weight * _imbalance(self.counted(odds_ne), chosen_nk)
        return h_bsh + self.dropout(self.total(mixed_nh.view_as(x_bsh))), own if balance is None else balance + own

    def step(self, h_bsh: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        """Return the output for the new tokens; the last argument is the cache, which this layer does not need."""
        return self(h_bsh, *others[:-1])  # type: ignore[no-any-return]


def _imbalance(odds_ne: Tensor, chosen_nk: Tensor) -> Tensor:
    counts_e = odds_ne.new_zeros(odds_ne.shape[1])
    counts_e.index_add_(0, chosen_nk.flatten(), counts_e.new_ones(chosen_nk.numel()))
    return odds_ne.shape[1] * (counts_e / len(odds_ne) * odds_ne.mean(0)).sum()
