"""The words that the training verbs share, as one frozen value; light to import."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of finetune and pretrain; what is not given, the recipe decides."""

    weights: Annotated[
        str,
        arg(
            metavar="FILE|FOLDER|NAME",
            help="The trained model to start from. It decides the architecture: not with --model.",
        ),
    ] = ""
    model: Annotated[
        str, arg(metavar="NAME", help="Train this model from scratch instead; not with --weights.")
    ] = ""
    out: Annotated[Path | None, arg(metavar="DIR", help="The run folder (runs/<data> if not given).")] = None
    recipe: Annotated[str, arg(metavar="NAME", help="See vitkit list recipes.")] = ""
    image_size: Annotated[str | None, arg(metavar="N|HxW", help="Resolution.")] = None
    batch: Annotated[int | None, arg(metavar="N", help="Images a step, over all processes.")] = None
    steps: Annotated[int | None, arg(metavar="N", help="Length of the run.")] = None
    epochs: Annotated[float | None, arg(metavar="X", help="Length in passes over the data.")] = None
    lr: Annotated[float | None, arg(metavar="X", help="Peak learning rate.")] = None
    seed: Annotated[int | None, arg(metavar="N", help="Decides every random choice.")] = None
    subset: Annotated[
        str | None, arg(metavar="N|P%|N/class", help="Train on a part: 1000 images, 10%, or 25/class.")
    ] = None
    against: Annotated[
        tuple[str, ...],
        arg(metavar="DATA...", help="Take out of train what is in these sets too, or looks like it."),
    ] = ()
    set: Annotated[tuple[str, ...], arg(metavar="FIELD=VALUE...", help="Any other field of the recipe.")] = ()
    device: Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, cuda:1, ...")] = "auto"
    precision: Annotated[str, arg(metavar="NAME", help="auto, fp32 or bf16.")] = "auto"
    workers: Annotated[int | None, arg(metavar="N", help="Processes that prepare images.")] = None
    decoded: Annotated[
        Path | None,
        arg(metavar="DIR", help="Keep decoded images there: later passes and runs read pixels."),
    ] = None
    max_bad: Annotated[float, arg(metavar="X", help="Share of unusable images that is put up with.")] = 0.05
    compile: Annotated[bool, arg(help="Compile the model (torch.compile).")] = False
    recompute: Annotated[
        bool, arg(help="Compute activations twice instead of keeping them: less memory, a third more time.")
    ] = False
    record: Annotated[
        bool, arg(help="On a GPU, launch each kernel of a step anew, and play no recording of it: slower.")
    ] = True
    deterministic: Annotated[
        bool, arg(help="On a GPU, only kernels that give the same bits every time: slower.")
    ] = False
    spread: Annotated[
        str,
        arg(
            metavar="ddp|fsdp", help="Under torchrun: whole models, or cut over processes; auto: as they fit."
        ),
    ] = "auto"
    save_aside: Annotated[bool, arg(help="Write checkpoints while the training goes on.")] = False
    track: Annotated[
        tuple[str, ...], arg(metavar="NAME...", help="wandb, mlflow, trackio; TensorBoard is always written.")
    ] = ()
    price_per_hour: Annotated[
        float | None, arg(metavar="X", help="What a device costs an hour; the result tells the price.")
    ] = None
    plan: Annotated[bool, arg(help="Say what would happen, and do nothing.")] = False

    def changes(self) -> dict[str, Any]:
        """What was given of the fields that a recipe has under the same name."""
        given = {
            name: getattr(self, name) for name in ("weights", "model", "batch", "seed", "subset", "against")
        }
        size = parse_size(self.image_size)
        return {k: v for k, v in (given | {"image_size": size}).items() if v not in (None, "", ())}


def parse_size(text: str | None) -> tuple[int, int] | None:
    """'384' or '384x256' -> (height, width)."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"--image-size {text!r}: give N or HxW, as in 384 or 384x256")
    return int(parts[0]), int(parts[-1])
