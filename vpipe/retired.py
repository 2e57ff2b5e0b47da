"""What vpipe had once, and what to do instead: refused where a config, a command or a call asks for it.

A key is what a user wrote: a key of a config (``training.name``), a key with one of its values
(``training.optimizer=soap``), a command with an option of it (``vpipe launch --print``), a public name with its module.
"""

from __future__ import annotations

_EXPORT = "vpipe checkpoint export RUN --format huggingface -o DIR"
_SEARCH = f"export the model ({_EXPORT}) and search with transformers: model.generate(ids, num_beams=4)"

RETIRED: dict[str, str] = {
    "vpipe bench": "write vpipe compare --models NAME,...",
    "vpipe.Model.with_adapters": "from vpipe.hugging_face import with_adapters: with_adapters(model, config)",
    "vpipe.checkpoint.Manifest.no_longer_used": "leave it out: checkpoints have no error feedback of gradients",
    "vpipe.schedules.Advice": "from vpipe.schedules import delays: delays.mean_delay(schedule, stage), "
                              "delays.greatest_delay(schedule, stage); Pipeline warns where they cost much",
    "vpipe.schedules.Repeating": "vpipe schedule NAME --ranks 4 --microbatches 60000 proves and draws a schedule that "
                                 "is too long to list; outline(name, placement, microbatches) generates its programs",
    "vpipe launch": "start each rank by hand: RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=hostA MASTER_PORT=29400 "
                    "vpipe train CONFIG",
    "training.optimizer=soap": "take muon, which loses as little under delay; in Python any optimizer: Pipeline(model, "
                               "Update(lambda params: YourSoap(params, lr=3e-3)), ...)",
    "vpipe.plan.PlanRequest.with_measured": "measure the layers again: vpipe profile CONFIG --again",
    "vpipe.testing.TrainingRecipe.apply(overflow)": "leave it out: the gradients that are given tell of an overflow",
    "vpipe.testing.TrainingRecipe.weight": "say what labels count: Model(..., labels='labels', label_weights=...)",
    "vpipe.testing.ReferencePrecision.weight": "round it: master.to(precision.dtype) if precision.pure else master",
    "vpipe sample --beams": _SEARCH,
    "vpipe sample --best": _SEARCH,
    "vpipe sample --length-penalty": _SEARCH,
    "vpipe sample --ranks": f"leave it out; if one process cannot hold the model: {_EXPORT}, for transformers",
    "vpipe.runtime.Ring": "send tensors with torch.distributed.send and torch.distributed.recv",
}
"""What is gone, and the remedy."""
