"""The model that a run keeps, out of the module that learns."""

from torch import nn

from vitkit.models.variants import Model, skeleton
from vitkit.objectives.task import Task
from vitkit.training.runtime import whole

CARD = ("labels", "task", "preprocessing", "origin")


def kept_model(task: Task, module: nn.Module) -> Model:
    """A copy of the model, whole and on the CPU; all processes must ask for it."""
    source = task.extract(module)
    model = skeleton(task.kept_config(source.config))
    names = model.state_dict()
    state = {n: whole(t.detach()).cpu() for n, t in source.state_dict().items() if n in names}
    model.load_state_dict(state, assign=True)
    for field in CARD:
        setattr(model, field, getattr(source, field))
    return model
