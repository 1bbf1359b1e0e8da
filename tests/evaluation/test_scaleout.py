"""Pace on many GPUs: links and steps by hand and simulated, the tables in the docs, the order of events."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from vitkit.metrics.speed import BUCKET, H200, Links, Work, limit, scale_out

ROOT = Path(__file__).parent.parent.parent
PLAIN = Links(inside=100.0, between=10.0, inside_share=0.5, between_share=0.5, inside_hop=1e-9,
              between_hop=1e-9, node=4)  # fmt: skip
LARGE = Work(parameters=304_326_632, blocks=24, images=128, pace=829.0)


@pytest.fixture(scope="module", autouse=True)
def bench():
    sys.path.insert(0, str(ROOT / "bench"))
    yield
    sys.path.remove(str(ROOT / "bench"))


def test_bytes_go_over_nvlink_in_a_node_and_one_in_g_over_the_network_between_nodes():
    assert PLAIN.ring_seconds(1000, 1) == 0
    assert PLAIN.ring_seconds(1000, 4) == pytest.approx(750 / 50)
    # of 8 GPUs each sends 875 bytes: 656.25 inside (13.1 s) and 218.75 by its adapter (43.75 s)
    assert PLAIN.ring_seconds(1000, 8) == pytest.approx(218.75 / 5)
    assert replace(PLAIN, between=1000.0).ring_seconds(1000, 8) == pytest.approx(656.25 / 50)


def test_hops_are_those_of_rings_within_and_between_nodes():
    hops = replace(PLAIN, inside_hop=1.0, between_hop=100.0)
    assert hops.all_reduce(0, 16) == 2 * (3 * 1 + 3 * 100)
    assert hops.all_gather(0, 16) == 12 * 1 + 3 * 100  # fifteen in all, three of them between nodes
    assert hops.all_reduce(0, 1) == hops.all_gather(0, 1) == 0


def test_eight_h200_take_2_7_eighths_of_the_gradients_at_369_gigabytes_a_second():
    result = scale_out(LARGE, 8, "ddp", replace(H200, inside_hop=1e-12), bucket=1e12)
    assert result.sending == pytest.approx(2 * 7 / 8 * 4 * 304_326_632 / 369e9, rel=1e-6)
    assert result.exposed == result.sending, "one bucket has nothing to hide behind"


def simulated_ddp(work: Work, gpus: int, links: Links) -> float:
    """Seconds after the backward pass until the last bucket is there; one is sent at a time."""
    buckets = -(-4 * work.parameters // BUCKET)
    one, free = links.all_reduce(4 * work.parameters / buckets, gpus), 0.0
    for number in range(1, buckets + 1):
        free = max(free, work.backward * number / buckets) + one
    return free - work.backward


def simulated_fsdp(work: Work, gpus: int, links: Links) -> float:
    """Seconds that a step takes beyond its computation; fetches and gradients wait for each other."""
    one = links.all_gather(4 * work.parameters / work.blocks, gpus)
    now = one
    for _ in range(work.blocks - 1):
        now += max(work.forward / work.blocks, one)  # the next is fetched meanwhile
    now += work.forward / work.blocks + one
    link = now  # free from here on
    for block in reversed(range(work.blocks)):
        there = link = max(link, now) + one if block else max(link, now)
        done = now + work.backward / work.blocks
        now, link = max(done, there), max(link, done) + one  # its gradients
    return link - work.forward - work.backward


@pytest.mark.parametrize("images", [1, 4, 16, 128])
@pytest.mark.parametrize("gpus", [8, 16, 128, 1024])
def test_the_formula_is_what_a_simulation_of_the_step_finds(gpus, images):
    work = replace(LARGE, images=images)
    assert scale_out(work, gpus, "ddp").exposed == pytest.approx(simulated_ddp(work, gpus, H200))
    one, slow = H200.all_gather(4 * work.parameters / work.blocks, gpus), simulated_fsdp(work, gpus, H200)
    assert slow - 1e-9 <= scale_out(work, gpus, "fsdp").exposed <= slow + one, "on the safe side, by a block"


def test_one_gpu_waits_for_nobody_and_recomputing_costs_a_third():
    alone = scale_out(LARGE, 1, "ddp")
    assert alone.exposed == 0 and alone.efficiency == 1 and not alone.limited
    assert alone.images_per_second == pytest.approx(829) and alone.days(829 * 86400) == pytest.approx(1)
    again = scale_out(replace(LARGE, recompute=True), 1, "fsdp")
    assert again.images_per_second == pytest.approx(829 * 3 / 4)
    many = [scale_out(replace(LARGE, images=16, recompute=r), 256, "ddp").exposed for r in (False, True)]
    assert many[1] < many[0], "there is more to hide behind"


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_slower_links_and_fewer_images_never_help_and_hiding_never_harms(parallel):
    last = 1.0
    for gpus in (8, 64, 512, 1024):
        result = scale_out(LARGE, gpus, parallel)
        assert result.efficiency_without_overlap < result.efficiency <= last
        last = result.efficiency
        for field in ("inside", "between"):
            slower = replace(H200, **{field: getattr(H200, field) / 2})
            assert scale_out(LARGE, gpus, parallel, slower).efficiency <= result.efficiency
        assert scale_out(replace(LARGE, images=8), gpus, parallel).efficiency < result.efficiency


def test_the_limit_is_the_first_number_at_which_computation_does_not_hide_what_is_sent():
    counts = [8 * 2**i for i in range(8)]
    first = limit(lambda n: replace(LARGE, images=4096 / n), counts, "ddp")
    assert first and not scale_out(replace(LARGE, images=8192 / first), first // 2, "ddp").limited
    assert scale_out(replace(LARGE, images=4096 / first), first, "ddp").limited
    assert limit(lambda n: replace(LARGE, images=10**6), counts, "ddp") is None


def test_what_cannot_be_is_told():
    with refused("request.value", 12, 8):
        scale_out(LARGE, 12, "ddp")
    with refused("request.value", "ddp or fsdp", "'tp'"):
        scale_out(LARGE, 8, "tp")
    with refused("request.value", "between", 0):
        Links(between=0)
    with refused("request.value", "pace", -1):
        replace(LARGE, pace=-1)


def test_the_tables_in_the_docs_are_what_their_command_prints():
    from scale import pair, subjects, tables

    docs = (ROOT / "docs" / "lab" / "scaling.md").read_text()
    [words] = re.findall(r"`python bench/scale.py --measured ([^`]*)`", docs)
    for table in tables(subjects(dict(map(pair, words.split()))), 128, 4096, H200):
        assert table in docs, "run that command and put its tables into docs/lab/scaling.md"


@pytest.mark.slow
def test_gradients_and_weights_are_on_their_way_before_they_are_needed():
    from overlap import overlap, prefetch, profiled
    from together import together

    words = "ViT-Ti/16", 32, 2
    sent = overlap(together(2, profiled, *words, parallel="ddp")[0])
    assert sent["buckets"] >= 2 and sent["early"] == sent["buckets"] - 1
    fetched = prefetch(together(2, profiled, *words, parallel="fsdp")[0], blocks=12)
    assert fetched["backward"] == 11
