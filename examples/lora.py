"""LoRA by peft: a trained network learns another task by small adapters, all else frozen, saved in files of peft.

    python examples/lora.py
    torchrun --nproc-per-node 4 examples/lora.py
"""

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import nn

from vpipe import Model, Pipeline
from vpipe.hugging_face import with_adapters

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                    nn.Linear(64, 1))


def batches(count, turned, seed):
    """A wave over the plane, the same one or turned by 45 degrees."""
    for x in torch.randn(count, 64, 2, generator=torch.Generator().manual_seed(seed)):
        yield {"input": x, "target": (3 * (x.sum(1, keepdim=True) / 2 ** 0.5 if turned else x[:, :1])).sin()}


# %% Train all of it, then adapters in two of its layers, begun from the weights that were learned.
first = Pipeline(Model.sequential(net, loss=nn.MSELoss()), partial(torch.optim.AdamW, lr=1e-2), stages=4,
                 microbatches=4)
learned = [step.loss for step in first.train(batches(40, turned=False, seed=0))]
net.load_state_dict(first.state_dict())

lora = LoraConfig(r=4, lora_alpha=8, target_modules=["0", "2", "4"])
tuned = Pipeline(with_adapters(Model.sequential(net, loss=nn.MSELoss()), lora), partial(torch.optim.AdamW, lr=1e-2),
                 stages=4, microbatches=4)
begun = {name: value.clone() for name, value in tuned.state_dict().items() if ".lora_" in name}
losses = [step.loss for step in tuned.train(batches(40, turned=True, seed=1))]
adapters = {name: value for name, value in tuned.state_dict().items() if name in begun}
if tuned.rank == 0:
    print(f"all weights: loss {learned[0]:.4f} -> {learned[-1]:.4f}")
    print(f"{sum(value.numel() for value in adapters.values())} weights of adapters beside "
          f"{sum(value.numel() for value in net.parameters())} frozen: {losses[0]:.4f} -> {losses[-1]:.4f}")

# %% The adapters alone, in the two files of peft, which puts them into the network.
test = next(batches(1, turned=True, seed=2))
_, found = tuned.evaluate([test], outputs="output")  # all ranks
if tuned.rank == 0:
    with TemporaryDirectory() as folder:
        lora.save_pretrained(folder)
        save_file({f"base_model.model.{name.replace('.default', '')}": value for name, value in adapters.items()},
                  Path(folder, "adapter_model.safetensors"))
        loaded = PeftModel.from_pretrained(net, folder)
    print("peft gives the same from its files:", torch.allclose(loaded(test["input"]), found["output"]))
