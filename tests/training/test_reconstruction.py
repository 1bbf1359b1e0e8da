"""MAE and SimMIM: equal to transformers and to the written-out definition; masks are exact and uniform."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refused
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vitkit.data.order import Order
from vitkit.data.views import normalise
from vitkit.metrics.cost import forward_flops
from vitkit.models.positions import sincos2d
from vitkit.models.self_supervised.reconstruction import decoder_config, visible_patches
from vitkit.models.variants import configure, skeleton
from vitkit.tasks.mae import EPSILON, Mae, standardised, targets
from vitkit.tasks.masked import GREY
from vitkit.tasks.shared.self_supervised import feature_width
from vitkit.tasks.simmim import SimMim
from vitkit.training.step import blank

BARE = {"image_size": 32, "width": 32, "depth": 2, "heads": 2, "hidden": 64, "classes": 0}


def encoder(**options):
    config = configure("ViT-Ti/8", **(BARE | options))
    return Mae().initial(Mae().configure(config), seed=0)


def randomised(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.2, generator=generator)
    return module.eval()


def images(count: int = 3, size: int = 32) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


def batch_of(task, model, count: int = 3, size: int = 32, step: int = 2) -> dict[str, Tensor]:
    batch = {"image": images(count, size), "place": torch.arange(count)}
    return task.prepare(model, Order(100, count))(step, batch)


# ---- MAE beside transformers ----


def peer_of(module, ratio: float):
    """transformers' ViTMAE with the weights of our module."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    c, d = module.vit.config, module.decoder
    peer = ViTMAEForPreTraining(ViTMAEConfig(
        hidden_size=c.width, num_hidden_layers=c.depth, num_attention_heads=c.heads, patch_size=c.patch,
        intermediate_size=c.hidden, image_size=c.image_size[0], decoder_hidden_size=d.config.width,
        decoder_num_hidden_layers=d.config.depth, decoder_num_attention_heads=d.config.heads,
        decoder_intermediate_size=4 * d.config.width, mask_ratio=ratio, norm_pix_loss=True,
        layer_norm_eps=1e-6,
    )).eval()  # fmt: skip
    ours, state = module.state_dict(), {}
    state["vit.embeddings.cls_token"] = ours["vit.class_token"]
    state["vit.embeddings.position_embeddings"] = ours["vit.positions.table"]
    state["decoder.mask_token"] = ours["decoder.mask_token"]
    table = sincos2d(c.grid, d.config.width, kind="sincos2d-mae").float()
    state["decoder.decoder_pos_embed"] = torch.nn.functional.pad(table, (0, 0, 1, 0))
    layers = {
        "vit.embeddings.patch_embeddings.projection": "vit.project", "vit.layernorm": "vit.encoder.norm",
        "decoder.decoder_embed": "decoder.embed", "decoder.decoder_norm": "decoder.encoder.norm",
        "decoder.decoder_pred": "decoder.predict",
    }  # fmt: skip
    stacks = (("vit.layers", "vit", c.depth), ("decoder.decoder_layers", "decoder", d.config.depth))
    for theirs, own, depth in stacks:
        for i in range(depth):
            a, b = f"{theirs}.{i}", f"{own}.encoder.blocks.{i}"
            layers |= {
                f"{a}.attention.o_proj": f"{b}.attention.out", f"{a}.layernorm_before": f"{b}.norm1",
                f"{a}.layernorm_after": f"{b}.norm2", f"{a}.mlp.fc1": f"{b}.mlp.up",
                f"{a}.mlp.fc2": f"{b}.mlp.down",
            }  # fmt: skip
            for end in ("weight", "bias"):
                parts = ours[f"{b}.attention.qkv.{end}"].chunk(3)
                for name, part in zip("qkv", parts, strict=True):
                    state[f"{a}.attention.{name}_proj.{end}"] = part
    for theirs, own in layers.items():
        state |= {f"{theirs}.{end}": ours[f"{own}.{end}"] for end in ("weight", "bias")}
    peer.load_state_dict(state)
    return peer


def test_mae_equals_transformers_with_the_same_noise():
    task = Mae(decoder_width=48, decoder_depth=3, decoder_heads=4)
    model = encoder(gelu="erf")
    module = randomised(task.build(model))
    assert set(dict(module.named_parameters())) == set(module.state_dict())  # nothing random is left out
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(1))
    shuffle = noise.argsort(dim=1)
    batch = {"image": images(), "shuffle": shuffle}
    loss = task.objective(model)
    pixels = normalise(batch["image"], model.preprocessing.mean, model.preprocessing.std)
    with torch.no_grad():
        peer = peer_of(module, task.mask_ratio)(pixels, noise=noise)
        prediction, _ = module(pixels, shuffle)
        assert torch.equal(peer.mask.bool(), task.hidden(shuffle))
        expected = peer.logits.gather(1, shuffle[:, 4:, None].expand(-1, -1, 192))
        assert (prediction - expected).abs().max() < 1e-5
        assert float(loss(module, batch)["loss"]) == pytest.approx(float(peer.loss), abs=1e-5)


# ---- the definition of MAE ----


def test_the_encoder_sees_only_the_visible_patches_and_in_training_all_gradients_are_right():
    task, model = Mae(mask_ratio=0.5), encoder(registers=2)
    module = randomised(task.build(model))
    batch = batch_of(task, model)
    side, first = 8, images()
    other = first.clone()
    for image, hidden in enumerate(batch["shuffle"][:, 8:].tolist()):
        for place in hidden:
            y, x = divmod(place, 4)
            other[image, :, y * side : y * side + side, x * side : x * side + side] += 77
    loss = task.objective(model)
    assert torch.equal(loss.predictions(module, batch), loss.predictions(module, batch | {"image": other}))
    # the same by hand: the whole sequence with the hidden tokens taken out
    pixels = normalise(first, (0.5,) * 3, (0.5,) * 3)
    patches, grid = model.patches(pixels)
    z = model.embed(patches, grid)
    for i in range(3):
        tokens = torch.cat([z[i, :3], z[i, 3:][batch["shuffle"][i, :8]]])[None]
        whole = model.encoder(tokens, grid, lambda z, layer: z)[0]
        part = module.encode_visible(pixels, batch["shuffle"][:, :8])[0][i]
        assert torch.allclose(part, whole[[0, *range(3, 11)]], atol=1e-6)  # registers are left out


@pytest.mark.parametrize("options", [
    {"positions": "1d"}, {"positions": "1d", "registers": 2}, {"positions": "2d"}, {"class_position": False},
    {"positions": "none", "rope": "dinov3"},
])  # fmt: skip
def test_gradients_of_the_visible_patches_are_those_of_taking_them_from_the_whole_image(options):
    model = encoder(**options).double()
    module = randomised(Mae().build(model).double())
    pixels, places = torch.randn(3, 3, 32, 32, dtype=torch.float64), torch.rand(3, 16).argsort(1)[:, :5]
    gradients = []
    for chosen in (True, False):
        module.zero_grad()
        if chosen:
            z = model.embed(*model.patches(pixels, chosen=places), chosen=places)
        else:
            z = model.embed(*model.patches(pixels))
            prefix = model.config.prefix
            picked = torch.stack([z[i, prefix:][places[i]] for i in range(3)])
            z = torch.cat([z[:, :prefix], picked], dim=1)
        (z * torch.arange(z.numel()).view_as(z).cos()).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and "project.weight" in gradients[0]
    for name, gradient in gradients[0].items():
        assert torch.allclose(gradient, gradients[1][name], atol=1e-9), name


def test_the_loss_reads_hidden_patches_alone():
    """Other pixels in a visible patch do not change the loss of a prediction, in a hidden one they do."""
    task, model = Mae(), encoder()
    batch, loss = batch_of(task, model), task.objective(model)
    prediction = torch.randn(3, 12, 192)
    before = loss.value(prediction, batch["image"], batch["shuffle"])
    for rank, changes in ((3, False), (4, True)):
        changed = batch["image"].clone()
        for image, place in enumerate(batch["shuffle"][:, rank].tolist()):
            y, x = divmod(place, 4)
            changed[image, :, 8 * y, 8 * x] ^= 255
        after = loss.value(prediction, changed, batch["shuffle"])
        assert bool((after != before).all()) == changes and torch.equal(after, before) != changes


def test_the_loss_is_the_written_out_one():
    task, model = Mae(mask_ratio=0.5), encoder()
    batch, loss = batch_of(task, model), task.objective(model)
    prediction = torch.randn(3, 8, 192, generator=torch.Generator().manual_seed(0))
    total = 0.0
    for i, order in enumerate(batch["shuffle"].tolist()):
        for j, place in enumerate(order[8:]):
            y, x = divmod(place, 4)
            patch = batch["image"][i, :, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8].numpy().astype(np.float64)
            values = ((patch / 255 - 0.5) / 0.5).transpose(1, 2, 0).reshape(-1)  # row, column, channel
            values = (values - values.mean()) / math.sqrt(values.var(ddof=1) + 1e-6)
            total += np.square(prediction[i, j].numpy() - values).mean()
    actual = loss.value(prediction, batch["image"], batch["shuffle"]).mean()
    assert float(actual) == pytest.approx(total / 24, rel=1e-6)


def test_patches_are_normalised_as_published():
    expected = [-1.161895, -0.387298, 0.387298, 1.161895]
    assert standardised(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == pytest.approx(expected, abs=1e-6)
    flat = standardised(torch.full((5,), 0.3))
    assert EPSILON == 1e-6 and flat.abs().max() < 1e-3  # a patch of one colour is not divided by zero
    raw = targets(images(), torch.zeros(3, 1, dtype=torch.int64), 8, encoder())
    assert raw[1, 0, :4].tolist() == pytest.approx([
        float(images()[1, c, y, x]) / 127.5 - 1 for y, x, c in ((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0))
    ])  # fmt: skip


def test_the_counts_are_those_of_maes_code():
    for patches, ratio in ((196, 0.75), (256, 0.75), (64, 0.6), (49, 0.5), (7, 0.4)):
        assert visible_patches(patches, ratio) == int(patches * (1 - ratio))
    assert visible_patches(10, 0.9) == 1 and visible_patches(4, 0.99) == 1 and visible_patches(4, 0.01) == 3
    with refused("model.unsupported", "two patches"):
        Mae().configure(configure("ViT-Ti/32", **BARE))


def test_every_patch_is_hidden_equally_often_and_exactly_as_many_in_each_image():
    """Each of 16 patches is hidden with probability 3/4: the counts stay within 5 deviations of binomials."""
    task, model, draws = Mae(), encoder(), 4000
    batch = {"image": torch.zeros(draws, 3, 1, 1), "place": torch.arange(draws)}
    made = task.prepare(model, Order(10**6, draws))(7, batch)
    hidden = task.hidden(made["shuffle"])
    assert (hidden.sum(1) == 12).all()
    deviation = math.sqrt(draws * 0.75 * 0.25)
    assert (hidden.sum(0) - 0.75 * draws).abs().max() < 5 * deviation
    first = made["shuffle"][:, 0].bincount(minlength=16)  # the order itself is uniform too
    assert (first - draws / 16).abs().max() < 5 * math.sqrt(draws * 15 / 256)
    pairs = (hidden[:, :1] & hidden[:, 1:]).sum(0)  # two patches: 12/16 * 11/15
    assert (pairs - 0.55 * draws).abs().max() < 5 * math.sqrt(draws * 0.55 * 0.45)


@pytest.mark.parametrize("task", [Mae(), SimMim()])
def test_masks_depend_on_seed_step_and_place_alone(task):
    model = encoder(mask_token=True)
    key = "shuffle" if task.name == "mae" else "hidden"
    whole = batch_of(task, model, 12)[key]
    prepare = task.prepare(model, Order(100, 12))
    for places in (range(4), [11, 3, 7]):  # other processes, micro-batches, unusable images
        part = {"image": torch.zeros(len(places), 3, 1, 1), "place": torch.tensor(list(places))}
        assert torch.equal(prepare(2, part)[key], whole[list(places)])
    assert not torch.equal(batch_of(task, model, 12, step=3)[key], whole)
    part = {"image": torch.zeros(12, 3, 1, 1), "place": torch.arange(12)}
    assert not torch.equal(task.prepare(model, Order(100, 12, seed=1))(2, part)[key], whole)
    assert len({tuple(row) for row in whole.tolist()}) > 6


@pytest.mark.parametrize("options", [
    {"rope": "dinov3", "positions": "none"}, {"rope": "eva02"}, {"registers": 3}, {"head": "gap"},
    {"layer_scale": True, "mlp": "swiglu"}, {"positions": "2d"}, {"head": "token+gap"},
    {"class_position": False}, {"distilled": True}, {"input_norm": True}, {"qk_norm": True},
    {"positions": "sincos2d"}, {"stochastic_depth": 0.3},
])  # fmt: skip
def test_every_kind_of_vit_is_trained_with_a_gradient_everywhere(options):
    task, model = Mae(), encoder(**options)
    module = randomised(task.build(model)).train()
    batch = batch_of(task, model)
    task.objective(model)(module, batch)["loss"].backward()
    assert not [name for name, p in module.named_parameters() if p.grad is None]
    loss, features = task.each(module.eval(), batch)
    assert loss.shape == (3,) and features.shape == (3, feature_width(model.config))


def test_rope_turns_the_visible_patches_by_their_own_places():
    """With everything visible but one patch, in order, a class token sees what it sees of the whole image."""
    model = encoder(rope="dinov3", positions="none", depth=1)
    module = randomised(Mae(mask_ratio=0.01).build(model))
    pixels = torch.randn(2, 3, 32, 32)
    patches, grid = model.patches(pixels)
    order = torch.tensor([[5, 1, 0, 2, 3, 4, *range(6, 16)]] * 2)
    part, _ = module.encode_visible(pixels, order)
    whole = model.encode(patches, grid)
    assert torch.allclose(part[:, 0], whole[:, 0], atol=1e-6)
    assert torch.allclose(part[:, 1:], whole[:, 1:][:, order[0]], atol=1e-6)


@pytest.mark.parametrize("options, name", [
    ({"positions": "relative"}, "relative"), ({"injection": "every"}, "every"), ({"head": "map"}, "map"),
    ({"attention": "axial", "head": "gap"}, "axial"), ({"head": "gap", "final_norm": "pooled"}, "pooled"),
])  # fmt: skip
def test_what_mae_does_not_support_is_refused(options, name):
    with refused("model.unsupported", "mae", name):
        token = "token" in options.get("head", "token")
        Mae().configure(replace(configure("ViT-Ti/8", **BARE), class_token=token, **options))


def test_hybrids_and_resnets_are_refused():
    for name in ("R26+ViT-S/32", "BiT-R50x1"):
        for task in (Mae(), SimMim()):
            with refused("model.unsupported", task.name):
                task.configure(configure(name))


# ---- the decoder and the first weights ----


@pytest.mark.parametrize("name, expected", [
    ("ViT-B/16", (512, 8, 16)), ("ViT-L/16", (512, 8, 16)), ("ViT-H/14", (512, 8, 16)),
    ("ViT-S/16", (384, 4, 12)), ("ViT-Ti/16", (192, 4, 6)),
])  # fmt: skip
def test_the_decoder_is_the_published_one_or_as_wide_as_a_small_encoder(name, expected):
    d = Mae().decoder(configure(name))
    assert (d.width, d.depth, d.heads) == expected


def test_a_decoder_of_ones_own():
    config = configure("ViT-B/16")
    d = decoder_config(config, 192, 3, 6)
    assert (d.width, d.depth, d.heads) == (192, 3, 6)
    assert decoder_config(replace(config, depth=2, width=96, heads=2)).depth == 2
    for bad in ({"decoder_width": 30}, {"decoder_width": 64, "decoder_heads": 7}):
        with refused("recipe.value", "width"):
            Mae(**bad).configure(config)


def test_the_first_weights_are_maes():
    model = Mae().initial(
        Mae().configure(configure("ViT-Ti/8", **(BARE | {"width": 128, "heads": 4}))), seed=1
    )
    module = Mae(seed=4).build(model)
    d = 128
    qkv = model.encoder.blocks[0].attention.qkv
    assert float(qkv.weight.detach().abs().max()) == pytest.approx(math.sqrt(6 / (4 * d)), rel=0.01)
    assert not qkv.bias.any() and not model.encoder.blocks[1].mlp.up.bias.any()
    patch = model.project
    assert float(patch.weight.detach().abs().max()) == pytest.approx(math.sqrt(6 / (d + 192)), rel=0.01)
    assert float(patch.bias.detach().abs().max()) == pytest.approx(1 / math.sqrt(192), rel=0.1)
    for token in (model.class_token, module.decoder.mask_token):
        assert 0.012 < float(token.detach().std()) < 0.028
    assert float(module.decoder.predict.weight.detach().abs().max()) == pytest.approx(
        math.sqrt(6 / 320), rel=0.01
    )
    again = Mae(seed=4).build(model).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in module.state_dict().items())
    other = Mae(seed=5).build(model).state_dict()
    assert not torch.equal(other["decoder.mask_token"], again["decoder.mask_token"])


def test_the_first_loss_is_that_of_chance_and_it_falls():
    """Normalised targets have variance (n - 1) / n; small predictions add little."""
    task, model = Mae(), encoder()
    module, batch, loss = task.build(model), batch_of(task, model, 8), task.objective(model)
    with torch.no_grad():
        module.decoder.predict.weight.zero_()
    assert float(loss(module, batch)["loss"].detach()) == pytest.approx(191 / 192, abs=1e-3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(30):
        loss(module, batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss(module, batch)["loss"].detach()) < 0.9


# ---- SimMIM ----


def test_simmim_hides_whole_units_of_32_pixels():
    task = SimMim()
    for name, expected in (("ViT-B/16", (2, 49, 30)), ("ViT-B/32", (1, 49, 30)), ("ViT-L/14", (2, 64, 39))):
        assert task.counts(configure(name)) == expected
    assert task.counts(configure("ViT-Ti/4", image_size=32)) == (1, 64, 39)  # 1/7 of 32 pixels is a patch
    assert SimMim(mask_unit=16).counts(configure("ViT-Ti/4", image_size=32)) == (4, 4, 3)
    assert SimMim(mask_unit=24).counts(configure("ViT-Ti/4", image_size=32)) == (
        4,
        4,
        3,
    )  # 6 does not divide 8
    model = skeleton(task.configure(configure("ViT-B/16")))
    batch = {"image": torch.zeros(400, 3, 1, 1), "place": torch.arange(400)}
    hidden = task.hide(model, Order(10**6, 400), 3, batch)["hidden"]
    assert (hidden.sum(1) == 4 * 30).all()
    units = hidden.view(400, 7, 2, 7, 2)
    assert (units == units[:, :, :1, :, :1]).all()  # a unit is hidden as a whole
    counts, share = units[:, :, 0, :, 0].sum(0), 30 / 49
    assert (counts - 400 * share).abs().max() < 5 * math.sqrt(400 * share * (1 - share))
    with refused("model.unsupported", "mask_unit"):
        SimMim(mask_unit=32).configure(configure("ViT-Ti/4", image_size=32))


def test_simmim_is_the_mean_absolute_error_of_hidden_pixels():
    task = SimMim()
    model = task.initial(task.configure(configure("ViT-Ti/8", **BARE)), 0)
    module = randomised(task.build(model))
    batch, loss = batch_of(task, model), task.objective(model)
    pixels = normalise(batch["image"], (0.5,) * 3, (0.5,) * 3)
    with torch.no_grad():
        z = model.tokens(pixels, batch["hidden"])[:, 1:]
        predicted = module.predict(z).unflatten(-1, (8, 8, 3)).unflatten(1, (4, 4))  # (B, h, w, P, P, C)
        drawn = predicted.permute(0, 5, 1, 3, 2, 4).reshape(3, 3, 32, 32)
        mask = batch["hidden"].view(3, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
        official = ((pixels - drawn).abs() * mask).sum() / (mask.sum() + 1e-5) / 3
        assert float(loss(module, batch)["loss"]) == pytest.approx(float(official), rel=1e-5)
        visible = torch.where(mask, batch["image"], batch["image"] ^ 255)
        value = loss.value(torch.zeros(3, 16, 192), batch["image"], batch["hidden"])
        assert torch.equal(value, loss.value(torch.zeros(3, 16, 192), visible, batch["hidden"]))


@pytest.mark.parametrize("options", [
    {}, {"positions": "relative"}, {"rope": "dinov3"}, {"head": "gap", "attention": "axial"},
    {"registers": 2},
])  # fmt: skip
def test_simmim_trains_every_parameter(options):
    task = SimMim()
    options = {"class_token": options.get("head") != "gap"} | options
    model = task.initial(task.configure(replace(configure("ViT-Ti/8", **BARE), **options)), 0)
    module = task.build(model)
    task.objective(model)(module, batch_of(task, model))["loss"].backward()
    assert not [name for name, p in module.named_parameters() if p.grad is None]
    assert float(model.mask_token.detach().std()) > 0.01
    assert task.saved_config(model.config).mask_token is False


# ---- what both have ----


@pytest.mark.parametrize("task", [Mae(decoder_width=64, decoder_depth=3), SimMim()])
@pytest.mark.parametrize("options", [{}, {"head": "gap"}, {"registers": 2}])
def test_the_cost_is_what_is_computed(task, options):
    config = task.configure(replace(configure("ViT-Ti/8", **BARE), class_token=None, **options))
    model = task.initial(config, 0)
    batch = batch_of(task, model, 1)
    module = task.build(model).eval().to("meta")  # where attention is counted, too
    on_meta = {name: tensor.to("meta") for name, tensor in batch.items()}
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        task.objective(model)(module, on_meta)
    assert task.passes(model) == pytest.approx(
        3 * counter.get_total_flops() / forward_flops(config), rel=1e-6
    )


def test_what_mae_costs_at_full_size():
    """In forward passes of the encoder, of which a supervised step has 3."""
    costs = {
        name: Mae().passes(skeleton(Mae().configure(configure(name)))) for name in ("ViT-B/16", "ViT-L/16")
    }
    assert costs["ViT-B/16"] == pytest.approx(1.628, abs=0.001)  # 1.8 times as fast
    assert costs["ViT-L/16"] == pytest.approx(0.998, abs=0.001)


@pytest.mark.parametrize("task", [Mae(), Mae(norm_pix=False), SimMim()])
def test_reconstructions_of_a_perfect_model_are_the_images(task, monkeypatch):
    model = task.initial(task.configure(configure("ViT-Ti/8", **BARE)), 0)
    module, pictures = task.build(model).eval(), images()

    def perfect(images, *masks):
        patches = targets(pictures, torch.arange(16).expand(3, -1), 8, model)
        patches = standardised(patches) if task.name == "mae" and task.norm_pix else patches
        chosen = masks[0][:, 4:] if task.name == "mae" else torch.arange(16).expand(3, -1)
        return patches[torch.arange(3)[:, None], chosen], None

    monkeypatch.setattr(module, "forward", perfect)
    made = task.reconstructions(module, pictures)
    assert list(made) == ["original", "visible", "reconstruction"]
    assert all(t.dtype == torch.uint8 and t.shape == pictures.shape for t in made.values())
    assert torch.equal(made["original"], pictures) and torch.equal(made["reconstruction"], pictures)
    grey = (made["visible"] == GREY).all(1).view(3, 4, 8, 4, 8).all(-1).all(2)
    assert (grey.sum((1, 2)) == (12 if task.name == "mae" else 10)).all()
    covered = ~grey.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None]
    assert torch.equal(made["visible"] * covered, pictures * covered)


@pytest.mark.parametrize("task", [Mae(), SimMim()])
def test_a_blank_batch_has_a_finite_loss_and_gradients_for_every_parameter(task):
    model = task.initial(task.configure(configure("ViT-Ti/8", **BARE)), 0)
    module = task.build(model)
    task.objective(model)(module, blank(batch_of(task, model)))["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("task", [Mae(), SimMim()])
def test_a_pretrained_model_keeps_its_weights(task, small):
    old = small(mask_token=True, representation=16, classes=3)
    new = task.extend(old)
    assert new.head is None and (new.mask_token is not None) == (task.name == "simmim")
    module = task.build(new)
    kept = task.extract(module).state_dict()
    assert all(torch.equal(kept[name], old.state_dict()[name]) for name in kept)
    task.objective(new)(module, batch_of(task, new))["loss"].backward()


@pytest.mark.parametrize("bad", [
    {"mask_ratio": 0.0}, {"mask_ratio": 1.0}, {"mask_ratio": float("nan")}, {"decoder_depth": -1},
])  # fmt: skip
def test_numbers_out_of_range_are_refused(bad):
    with refused("recipe.value", next(iter(bad))):
        Mae(**bad)
