"""Usage reports that other libraries send to their makers: off, unless the user's environment decides."""

import os

OFF = {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime; read when it is imported, later calls come too late
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",  # of Trackio's pages
}


def turn_off() -> None:
    """For this process and those it starts; a variable that is set already keeps its value."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
