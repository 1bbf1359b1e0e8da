"""A small RF-DETR of transformers with random numbers in every parameter, and ours with the same weights."""

import torch

from vitkit.weights.load import load

SIZES = {"width": 64, "layers": 4, "heads": 1, "patch": 8, "image": 64}


def peer(*, taken=(1, 2, 4), windows=2, queries=10, groups=3, outputs=5, **options):
    """RfDetrForObjectDetection in evaluation mode."""
    from transformers import RfDetrConfig, RfDetrForObjectDetection

    backbone = {
        "model_type": "rf_detr_dinov2", "hidden_size": SIZES["width"], "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": SIZES["heads"], "patch_size": SIZES["patch"], "image_size": SIZES["image"],
        "num_windows": windows, "out_features": [f"stage{n}" for n in taken],
    }  # fmt: skip
    config = RfDetrConfig(
        backbone_config=backbone, d_model=32, decoder_layers=2, decoder_self_attention_heads=4,
        decoder_cross_attention_heads=8, decoder_n_points=2, num_queries=queries, group_detr=groups,
        num_labels=outputs, decoder_ffn_dim=48, dropout=0.0, **options,
    )  # fmt: skip
    model = RfDetrForObjectDetection(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def both(folder, **options):
    """The peer and our model, which reads its folder."""
    theirs = peer(**options)
    theirs.save_pretrained(folder)
    return theirs, load(folder)
