"""What a run keeps of the module that learns: the model, and the weights that did best so far."""

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import nn

from vitkit.io.atomic import replace_file
from vitkit.models.variants import Model, skeleton
from vitkit.objectives.task import Task
from vitkit.training.parts import fill
from vitkit.training.runtime import whole
from vitkit.weights.load import load
from vitkit.weights.save import save

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


def save_best(task: Task, module: nn.Module, path: Path, *, main: bool) -> None:
    """The weights as they are: a model file or, where a task has more than the model, all of its tensors."""
    if task.extract(module) is module:
        model = kept_model(task, module)
        if main:
            save(model, path)
        return
    state = {name: whole(t.detach()).cpu().contiguous() for name, t in module.state_dict().items()}
    if main:
        replace_file(path, lambda beside: save_file(state, beside))


def load_best(task: Task, module: nn.Module, path: Path) -> None:
    """Those weights back into the module, of which each process may hold its rows only."""
    fill(module, load(path).state_dict() if task.extract(module) is module else load_file(path))
