"""A batch on all cores, each with images of its own: the same answers, and only where threads may ask."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from vitkit.inference.per_core import is_thread_safe, per_core, thread_pool
from vitkit.inference.predict import features, forward_features, forward_logits, logits

LARGE = {"image_size": (224, 224), "patch": 32}  # pixels enough for it, and little work


@pytest.fixture
def threads():
    """So many for PyTorch, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def image():
    return torch.rand(40, 1, 224, 224)


def each(images):
    """What is said of an image is its mean."""
    return images.mean((1, 2, 3))


@pytest.mark.parametrize("many", [2, 3])
@pytest.mark.parametrize("batch", [1, 5, 8, 13, 32])
def test_the_answers_are_those_of_the_whole_batch(small, threads, many, batch):
    threads(many)
    model = small(**LARGE).eval()
    images = torch.randint(0, 256, (batch, 3, 224, 224), dtype=torch.uint8)
    result = logits(model, images)
    torch.testing.assert_close(result, forward_logits(model, images), rtol=1e-4, atol=1e-4)
    assert torch.equal(result, logits(model, images)) and not result.requires_grad
    seen = features(model, images)
    torch.testing.assert_close(seen, forward_features(model, images), rtol=1e-4, atol=1e-4)
    assert not seen.requires_grad and not seen.is_inference()  # a probe may learn from them


def test_so_are_those_of_a_resnet(small_resnet, threads):
    threads(2)
    model = small_resnet(image_size=(224, 224)).eval()
    images = torch.randint(0, 256, (9, 3, 224, 224), dtype=torch.uint8)
    torch.testing.assert_close(logits(model, images), forward_logits(model, images), rtol=1e-4, atol=1e-4)


def test_every_image_is_computed_once_and_by_a_core_alone(small, threads, image):
    threads(3)
    seen: list[tuple[str, int, int]] = []

    def run(images):
        seen.append((threading.current_thread().name, len(images), torch.get_num_threads()))
        return each(images)

    assert torch.equal(per_core(run, small(), image), each(image))
    assert [count for _, count, _ in seen] == [4] * 10
    assert {number for _, _, number in seen} == {1} and all(name.startswith("images") for name, _, _ in seen)
    assert torch.get_num_threads() == 3  # here it is as it was


def test_what_is_little_or_cannot_be_shared_stays_together(small, threads, image):
    threads(2)
    seen: list[int] = []

    def run(images):
        seen.append(len(images))
        return each(images)

    model = small()
    per_core(run, model, image[:3])  # fewer than two for each core
    per_core(run, model, image[:, :, :32, :32])  # less work than calls
    with torch.autocast("cpu", torch.bfloat16):  # known to this thread only
        per_core(run, model, image)
    threads(1)
    per_core(run, model, image)
    assert seen == [3, 40, 40, 40]


@pytest.fixture
def processes():
    """A group of this one alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_sharded_over_processes_is_called_by_one_thread(small, processes):
    model = small()
    assert is_thread_safe(model)
    assert not is_thread_safe(fully_shard(model))


def test_a_model_that_is_sharded_over_processes_can_be_trained_after_it_was_asked(small, processes):
    """And the answers are those of before: a run that is resumed at its end asks a model it never trained."""
    model = fully_shard(small().eval())
    images = torch.randint(0, 256, (3, 3, *model.config.image_size), dtype=torch.uint8)
    before = logits(model, images)
    model(images.float()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(logits(model, images), before)


def test_an_error_is_told_and_the_next_batch_is_computed(small, threads, image):
    threads(2)

    def broken(images):
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        per_core(broken, small(), image)
    assert torch.equal(per_core(each, small(), image), each(image))


def test_many_threads_may_ask_at_once(small, threads, image):
    """The first of them starts the thread pool, and none loses its own number of threads."""
    threads(2)
    thread_pool.cache_clear()
    model, wrong = small(), []

    def ask(part):
        for _ in range(5):
            if not torch.equal(per_core(each, model, part), each(part)) or torch.get_num_threads() != 2:
                wrong.append(part)

    asking = [threading.Thread(target=ask, args=(image[n:],)) for n in range(4)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in asking)
