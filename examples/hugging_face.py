"""A class of transformers, as it is, in a pipeline: a LlamaForCausalLM cut between its blocks.

    python examples/hugging_face.py
    torchrun --nproc-per-node 4 examples/hugging_face.py

Its weights are random, so that nothing is downloaded; LlamaForCausalLM.from_pretrained(...) gives trained ones.
"""

from copy import deepcopy
from functools import partial

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from vpipe import Layer, Model, Pipeline

torch.set_num_threads(1)
torch.manual_seed(0)
llama = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
                                     num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32))


# %% The layers: modules of the model, and what its forward does between them. The rotation is made once and travels.
class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.rotary = deepcopy(llama.model.embed_tokens), deepcopy(llama.model.rotary_emb)

    def forward(self, ids):
        h = self.embed_tokens(ids)
        return h, *self.rotary(h, torch.arange(ids.shape[1], device=ids.device)[None])


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.block = deepcopy(llama.model.layers[number])

    def forward(self, h, cos, sin):
        return self.block(h, position_embeddings=(cos, sin))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.lm_head = deepcopy(llama.model.norm), deepcopy(llama.lm_head)

    def forward(self, h, labels):
        logits = self.lm_head(self.norm(h))
        return llama.loss_function(logits, labels, vocab_size=logits.shape[-1])


model = Model([Layer("embed", Embed, ("ids",), ("h", "cos", "sin")),
               *(Layer(f"block{i}", partial(Block, i), ("h", "cos", "sin")) for i in range(len(llama.model.layers))),
               Layer("head", Head, ("h", "labels"), ("loss",))], batch=("ids", "labels"))

# %% Counting in steps of 1 to 3. The labels are the ids, which the loss of transformers shifts by one.
drawn = torch.Generator().manual_seed(1)
first, step = (torch.randint(low, high, (25, 16, 1), generator=drawn) for low, high in ((0, 61), (1, 4)))
batches = [{"ids": ids, "labels": ids} for ids in (first + step * torch.arange(16)) % 61]
pipe = Pipeline(model, partial(torch.optim.AdamW, lr=1e-2), stages=4, microbatches=4)
losses = [step.loss for step in pipe.train(batches)]
if pipe.rank == 0:
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
