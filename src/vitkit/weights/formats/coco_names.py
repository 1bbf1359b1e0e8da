"""The categories of COCO by their numbers, for detectors with an output for every number up to 90."""

NAMES = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow",
    "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee",
    "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard",
    "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple",
    "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch",
    "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "mouse", "remote", "keyboard",
    "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book", "clock", "vase", "scissors",
    "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
UNUSED = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)


def coco_labels() -> tuple[str, ...]:
    """The names of 91 outputs; those of numbers without a category are "unused 0" and so on."""
    names = iter(NAMES)
    return tuple(f"unused {i}" if i in UNUSED else next(names) for i in range(len(NAMES) + len(UNUSED)))
