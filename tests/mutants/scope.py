"""Which files are mutated, how often, which tests are near them, and the mutants written by hand."""

SEED = 22
EXPERIMENT = "tests/test_experiment.py"
RECIPE_TESTS = (
    "tests/test_recipe*.py",
    f"{EXPERIMENT}::test_table_4_is_as_published", f"{EXPERIMENT}::test_overrides_are_checked",
    f"{EXPERIMENT}::test_overrides_reach_every_kind_of_field",
    f"{EXPERIMENT}::test_every_recipe_survives_json",
    "tests/test_pretrain.py::test_table_3_is_as_published",
    "tests/test_pretrain.py::test_augreg_and_plain_are_as_published",
    "tests/test_pretrain.py::test_a_published_model_has_its_tanh_layer",
    "tests/training/test_masked.py::test_the_papers_recipe",
    "tests/training/test_masked.py::test_recipes_say_what_has_no_use",
    "tests/test_learn.py::test_subsets_are_read", "tests/test_learn.py::test_other_subsets_are_refused",
    "tests/test_learn.py::test_the_hyperrule_follows_the_data",
)  # fmt: skip
KEPT = tuple(
    f"{EXPERIMENT}::test_{name}"
    for name in ("evaluations_are_at_even_distances_and_the_last_is_the_end",
                 "with_patience_the_best_evaluated_weights_are_kept_also_the_last",
                 "without_patience_the_last_weights_are_kept",
                 "the_average_is_evaluated_and_kept_while_the_raw_weights_go_on")
)  # fmt: skip
CHECKPOINTS = tuple(
    f"{EXPERIMENT}::test_{name}"
    for name in ("a_damaged_checkpoint_is_passed_over", "a_full_disk_leaves_the_last_good_checkpoint",
                 "a_run_stopped_by_a_signal_ends_like_the_straight_one")
)  # fmt: skip
MEMORY = tuple(
    f"tests/test_learn.py::test_{name}"
    for name in ("the_memory_formula_equals_what_autograd_keeps", "memory_shrinks_by_recomputing_and_cutting",
                 "the_largest_batch_fits_and_one_image_more_does_not")
)  # fmt: skip
TRAINING = (
    "tests/test_recipe_defaults.py",
    "tests/training/test_training.py",
    "tests/training/test_optimizer.py",
)
STEPS = ("tests/training/test_step_graph.py", "tests/training/test_low_precision.py")
VTAB = ("tests/data/vtab/test_vtab_tables.py", "tests/data/vtab/test_vtab_readers.py")
CLASSIFICATION = ("tests/evaluation/test_accuracy.py", "tests/evaluation/test_mapping.py")
FROZEN = (
    "tests/evaluation/test_fewshot.py",
    "tests/evaluation/test_neighbours.py",
    "tests/evaluation/test_probe.py",
)
PLANS = ("tests/test_studies_values.py", "tests/test_studies_plans.py")

# file -> (how many mutants, the tests that are run for each of them)
SCOPE: dict[str, tuple[int, tuple[str, ...]]] = {
    "src/vitkit/recipes/recipe.py": (5, RECIPE_TESTS),
    "src/vitkit/recipes/values.py": (10, RECIPE_TESTS),
    "src/vitkit/recipes/finetune.py": (8, RECIPE_TESTS),
    "src/vitkit/recipes/pretrain.py": (9, RECIPE_TESTS),
    "src/vitkit/training/schedule.py": (6, TRAINING),
    "src/vitkit/tasks/classify.py": (3, TRAINING),
    "src/vitkit/training/optimizer.py": (10, TRAINING),
    "src/vitkit/training/step.py": (6, (*TRAINING, *STEPS)),
    "src/vitkit/tasks/masked.py": (8, ("tests/training/test_masked.py",)),
    "src/vitkit/training/checkpoint.py": (5, ("tests/training/test_checkpoint.py", *CHECKPOINTS)),
    "src/vitkit/training/logging.py": (4, ("tests/training/test_logging.py",)),
    "src/vitkit/metrics/classification.py": (7, CLASSIFICATION),
    "src/vitkit/metrics/cost.py": (12, ("tests/evaluation/test_cost.py", *MEMORY)),
    "src/vitkit/metrics/frozen_features.py": (13, FROZEN),
    "src/vitkit/metrics/multilabel.py": (4, ("tests/evaluation/test_average_precision.py",)),
    "src/vitkit/data/views.py": (10, ("tests/data/test_views.py",)),
    "src/vitkit/datasets/vtab.py": (4, VTAB),
    "src/vitkit/datasets/pixel_files.py": (4, VTAB),
    "src/vitkit/datasets/image_files.py": (9, VTAB),
    "src/vitkit/studies/scale.py": (6, PLANS),
    "src/vitkit/studies/architecture.py": (6, PLANS),
    "src/vitkit/studies/setting.py": (7, PLANS),
    "src/vitkit/studies/prepare.py": (6, PLANS),
}
LEFT_OUT = {
    "runtime/runtime.py, runtime/processes.py, ops/cuda_graph.py, ops/low_precision.py, "
    "training/step_graph.py": "need several processes or a GPU; their tests are `make slow` and `make gpu`",
    "metrics/speed.py": "reads a GPU's own counter",
    "datasets/matlab.py, datasets/tfrecord.py": "file formats, fuzzed elsewhere",
}

# Name, file (a pattern; the one that has the old text), old text, new text, tests: mistakes that an audit put
# into the code and that the tests nearest to them did not notice, and their like
BY_HAND: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    (
        "MLP dropout removed", "src/vitkit/ops/fused.py",
        "return F.dropout(down(F.dropout(hidden, dropout)), dropout)",
        "return F.dropout(down(hidden), dropout)", ("tests/models/test_choices.py",),
    ),
    (
        "Table 4's grid begins at 0.002", "src/vitkit/recipes/finetune.py",
        "RATES = (0.001, ", "RATES = (0.002, ", RECIPE_TESTS,
    ),
    (
        "CIFAR's dev split is 5 %", "src/vitkit/recipes/finetune.py",
        '"cifar10", 10_000, 500, 0.03, 0.02', '"cifar10", 10_000, 500, 0.03, 0.05', RECIPE_TESTS,
    ),
    (
        "the protocol ignores 0.06", "src/vitkit/*/protocol.py",
        "rates += recipe.convolution_rates if convolutional else ()", "rates += ()",
        ("tests/test_recipes.py", "tests/test_learn.py"),
    ),
    (
        "the last weights are kept and not the best", "src/vitkit/runs/finish.py",
        "if keeps_best(run.recipe, run.progress) and best.exists():", "if False:", KEPT,
    ),
    (
        "the end of a run is no candidate", "src/vitkit/runs/run.py",
        "if self.validator.is_due_at_end():", "if False:", KEPT,
    ),
    (
        "BiT's rate times 10", "src/vitkit/recipes/finetune.py",
        "Schedule(rate=0.003, ", "Schedule(rate=0.03, ",
        RECIPE_TESTS,
    ),
    ("BiT resizes to 512", "src/vitkit/recipes/finetune.py", "resize=448", "resize=512", RECIPE_TESTS),
    (
        "AugReg's weight decay doubled", "src/vitkit/recipes/pretrain.py",
        'optimizer=adam(0.1, clip=1.0, moment="bf16")', 'optimizer=adam(0.2, clip=1.0, moment="bf16")',
        RECIPE_TESTS,
    ),
    (
        "the SGD study's weight decay times 100", "src/vitkit/studies/setting.py",
        "weight_decay=1e-4", "weight_decay=1e-2", PLANS,
    ),
    (
        "label smoothing is dropped with a sigmoid", "src/vitkit/tasks/classify.py",
        "cross_entropy_with_logits(logits, smooth,", "cross_entropy_with_logits(logits, targets,",
        TRAINING,
    ),
    ("CLEVR's edge at 9.1", "src/vitkit/datasets/image_files.py", "8.5, 9.0, 9.5", "8.5, 9.1, 9.5", VTAB),
    (
        "the average keeps its initial weights", "src/vitkit/training/optimizer.py",
        "share = (1 - keep) / (1 - keep**step)", "share = 1 - keep", TRAINING,
    ),
    (
        "the raw weights are evaluated and not the average", "src/vitkit/runs/validator.py",
        "with state.averaged():", "if True:", KEPT,
    ),
    (
        "biases and norms decay", "src/vitkit/training/optimizer.py",
        "return parameter.ndim >= 2 and (name.endswith(\".weight\") or \".lora_\" in name)", "return True",
        TRAINING,
    ),
    (
        "no dropout after the positions", "src/vitkit/models/vit.py",
        "z = self.dropout(z)", "pass",
        ("tests/models/test_choices.py",),
    ),
)  # fmt: skip
