"""A transformer with a padding mask that skips stages and a tied embedding: epochs, warm-up, accuracy, save and resume.

    python examples/transformer.py                              all four stages in this process
    torchrun --nproc-per-node 4 examples/transformer.py         one process per stage: the same numbers

It learns to say, for every letter of a sequence, which comes later in the alphabet: it, or the letter before it.
"""

# %% Layers: any modules. Tensors between them have names, and a layer says which it reads and writes.
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from vpipe import Cut, Layer, Model, Pipeline, Update

LETTERS, LENGTH, WIDTH, HEADS, PAD = 12, 8, 64, 4, 0
torch.set_num_threads(1)


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(LETTERS + 1, WIDTH)
        self.position = nn.Parameter(torch.empty(LENGTH, WIDTH))
        for weight in (self.token.weight, self.position):
            nn.init.normal_(weight, std=0.3)

    def forward(self, ids):  # [samples, LENGTH]
        return self.token(ids) + self.position, (ids != PAD)[:, None, None]  # two outputs: h and mask


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.05))

    def forward(self, h, mask):
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                             for part in self.qkv(self.norm1(h)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        return h + self.mlp(self.norm2(h))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(WIDTH), nn.Parameter(torch.empty(LETTERS + 1, WIDTH))

    def forward(self, h):
        return F.linear(self.norm(h), self.weight)


class Loss(nn.Module):
    def forward(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD)


# %% The model. The mask is read by every block, so it travels with h from stage to stage. The decoder's weight is the
# embedding's, which may be on another stage. "labels" is a field of the batch that only the loss reads.
model = Model([
    Layer("embed", Embed, inputs=("ids",), outputs=("h", "mask")),
    *(Layer(f"block{i}", Block, inputs=("h", "mask"), outputs=("h",)) for i in range(4)),
    Layer("decoder", Decoder, inputs=("h",), outputs=("logits",), ties={"weight": "embed.token.weight"}),
    Layer("loss", Loss, inputs=("logits", "labels"), outputs=("loss",)),
], batch=("ids", "labels"))


# %% Data. Every process reads the same batches, so whatever shuffles has a seed.
def samples(count, seed):
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, LETTERS + 1, (count, LENGTH), generator=random)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=random)
    ids[torch.arange(LENGTH) >= lengths] = PAD
    before = ids.roll(1, dims=1).index_fill(1, torch.tensor([0]), PAD)
    return ids, ids.maximum(before).masked_fill(ids == PAD, PAD)


TRAINED, HELD_OUT = samples(1024, seed=1), samples(256, seed=2)
BATCH, EPOCHS, WARM_UP = 64, 4, 10


def epoch(number):
    order = torch.randperm(len(TRAINED[0]), generator=torch.Generator().manual_seed(number))
    for chosen in order.split(BATCH):
        yield {"ids": TRAINED[0][chosen], "labels": TRAINED[1][chosen]}


held_out = [{"ids": HELD_OUT[0][at:at + BATCH], "labels": HELD_OUT[1][at:at + BATCH]} for at in range(0, 256, BATCH)]


# %% The pipeline. The factor of the learning rate is a function of the step, counted from 0 over all of training.
def pipeline():
    return Pipeline(model,
                    Update(lambda params: torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01), grad_clip=1.0,
                           learning_rate_factor=lambda step: min(1.0, (step + 1) / WARM_UP)),
                    stages=Cut(4, recompute=[0, 0.5, 0, 0]), schedule="1f1b", microbatches=4, seed=0)


# %% Accuracy: every output has a row per sample, here of each token whether it is right and whether it counts.
def rights(tensors):
    there = tensors["labels"] != PAD
    return {"right": (tensors["logits"].argmax(-1) == tensors["labels"]) & there, "there": there}


# %% Several epochs, saved half way.
folder = Path(tempfile.gettempdir()) / "vpipe-transformer"
pipe = pipeline()
for number in range(EPOCHS):
    losses = [step.loss for step in pipe.train(epoch(number))]
    held_out_loss, found = pipe.evaluate(held_out, outputs=rights)
    accuracy = found["right"].sum() / found["there"].sum()
    if pipe.rank == 0:
        print(f"epoch {number}: {pipe.position.updates} updates, {pipe.position.samples} samples, loss {losses[0]:.4f} "
              f"-> {losses[-1]:.4f}, held out {held_out_loss:.4f}, accuracy {accuracy:.1%}")
    if number == EPOCHS // 2 - 1:
        pipe.save(folder)

# %% Resume: a new pipeline loads what was saved, and goes on with the epoch that follows. The same losses to the last
# bit, also with another partition or number of stages.
resumed = pipeline()
position = resumed.load(folder)
for number in range(position.samples // len(TRAINED[0]), EPOCHS):
    again = [step.loss for step in resumed.train(epoch(number))]
if pipe.rank == 0:
    print(f"resumed after {position.updates} updates: the last epoch's losses are "
          f"{'the same' if again == losses else 'different'}")
