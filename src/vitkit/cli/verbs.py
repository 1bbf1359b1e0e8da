"""The command line: words to one call. Imports torch only inside the verbs that need it."""

import signal
import sys
from collections.abc import Callable

import tyro

from vitkit.cli import cost, export, frozen, inspect, learn, models, report, serve, study, suite, use

VERBS: dict[str, Callable[..., None]] = {
    "demo": models.demo,
    "doctor": learn.doctor,
    "shard": learn.shard,
    "finetune": learn.finetune,
    "pretrain": learn.pretrain,
    "suite": suite.suite,
    "study": study.study,
    "evaluate": use.evaluate,
    "fewshot": frozen.fewshot,
    "predict": use.predict,
    "serve": serve.serve,
    "inspect": inspect.inspect,
    "report": report.report,
    "list": models.list_,
    "show": models.show,
    "cost": cost.cost,
    "export": export.export,
    "convert": models.convert,
}


def main(arguments: list[str] | None = None) -> None:
    """Exit code 0: done; 1: failed; 2: a request that cannot be met. No traceback for a user's mistake."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            VERBS,
            prog="vitkit",
            description="The Vision Transformer system. vitkit VERB --help explains a verb, with examples.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff,),
        )
    except KeyboardInterrupt as stop:  # a run's Interrupted is one: its text says how to go on
        if str(stop):
            print(f"vitkit: {stop}", file=sys.stderr)
        sys.exit(128 + getattr(stop, "number", signal.SIGINT))
    except BrokenPipeError:
        sys.exit(0)
    except ValueError as error:  # WeightsError is one
        fail(error, 2)
    except OSError as error:
        fail(error, 1)


def fail(error: Exception, code: int) -> None:
    print(f"vitkit: {error}", file=sys.stderr)
    sys.exit(code)
