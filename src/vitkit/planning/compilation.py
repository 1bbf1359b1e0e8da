"""Whether to compile the model: `--compile auto` decides by the length of the run and the kind of device."""

import os
import shutil
from dataclasses import dataclass, replace

from vitkit.errors import Error
from vitkit.metrics.cost import forward_flops, peak_flops, training_passes
from vitkit.models.variants import Model
from vitkit.models.vit import ViTConfig
from vitkit.planning.automatic import Choice
from vitkit.planning.finetune_rules import is_fitted_head
from vitkit.planning.memory import trained_skeleton
from vitkit.recipes.recipe import Recipe
from vitkit.report.terminal import duration
from vitkit.runtime.runtime import Runtime

MEASURED = ("classify", "multilabel")  # tasks whose compiled steps were timed (docs/lab/speed.md)


@dataclass(frozen=True)
class Gain:
    """What compiling a ViT takes and saves on a kind of device (docs/lab/speed.md)."""

    seconds: float  # by which the first start is longer
    share: float  # of the time of the steps that compiling saves
    flops: float  # FLOP/s of steps that are not compiled: of a GPU's peak, or of each CPU thread


GPU = Gain(seconds=30, share=0.05, flops=0.4)
CPU = Gain(seconds=45, share=0.03, flops=50e9)


def choose_compilation(
    compile: str, recipe: Recipe, model: Model, runtime: Runtime, steps: int
) -> tuple[Runtime, Choice | None]:
    """The runtime with or without torch.compile for a run of so many steps; compile: no, yes or auto."""
    if compile == "yes" and (missing := without_compiler(runtime)):
        raise Error(
            f"--compile needs a compiler, but {missing}; install one or omit it",
            code="device.unavailable",
        )
    if compile != "auto":
        return runtime, None
    reason = obstacle(recipe, model, runtime)
    if reason:
        return runtime, Choice("not compiled", reason)
    gain = GPU if runtime.device.startswith("cuda") else CPU
    seconds = seconds_of_steps(recipe, model, runtime, steps, gain)
    if seconds is None:
        return runtime, Choice("not compiled", "how long the steps take on this GPU is not known")
    saved = gain.share * seconds
    times = f"saves about {duration(saved)} of {duration(seconds)} and takes about {duration(gain.seconds)}"
    if saved <= gain.seconds:
        return runtime, Choice("not compiled", f"compiling {times}")
    return replace(runtime, compile=True), Choice("compiled", f"compiling {times}")


def obstacle(recipe: Recipe, model: Model, runtime: Runtime) -> str:
    """Why this run is not compiled, however long it is; empty if nothing speaks against it."""
    if is_fitted_head(recipe):
        return "the head is fitted, without training steps"
    if recipe.patch_sizes:
        return "each patch size would be compiled anew"
    supported = isinstance(model.config, ViTConfig) and model.config.stem is None
    if not supported or recipe.task.name not in MEASURED or recipe.train != "all":
        return "the gain was measured only for training all weights of a ViT classifier"
    if runtime.world > 1 or runtime.recompute or runtime.device.split(":")[0] not in ("cpu", "cuda"):
        return "the gain was measured only for one CPU or NVIDIA GPU, without activation checkpointing"
    return without_compiler(runtime)


def without_compiler(runtime: Runtime) -> str:
    """Why nothing can be compiled here; empty if it can. For a GPU, Triton needs a compiler of C only."""
    from vitkit.inference.builders import compiler  # and the engines, which training does not need

    if compiler():
        return ""
    if runtime.device == "cpu":
        return "neither g++ nor clang++ is on the PATH"
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    return "" if any(map(shutil.which, names)) else "none of cc, gcc and clang is on the PATH"


def seconds_of_steps(recipe: Recipe, model: Model, runtime: Runtime, steps: int, gain: Gain) -> float | None:
    """The time of all steps by their operations, never by a measured speed; None for an unknown GPU.

    So the same command decides the same on a busy machine, and when it resumes.
    """
    passes = training_passes(trained_skeleton(recipe, model.config))
    operations = passes * forward_flops(model.config) * recipe.batch * steps
    facts = runtime.describe()
    if not runtime.device.startswith("cuda"):
        return operations / (gain.flops * facts["threads"])
    peak = peak_flops(facts["device"], runtime.precision)
    return None if peak is None else operations / (gain.flops * peak)
