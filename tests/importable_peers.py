"""Makes torchvision, and with it timm and transformers, import beside a CPU build of torch.

The compiled operators of the published torchvision need a CUDA torch. Two declared names are all that
its Python code asks for at import; nothing that we compare uses the operators themselves.
"""

import torch

if torch.version.cuda is None:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
