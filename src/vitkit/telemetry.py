"""Turns off the telemetry of third-party libraries, unless the user's environment decides otherwise."""

import os

OFF = {
    "ORT_DISABLE_TELEMETRY": "1",  # ONNX Runtime reads it on import; later calls have no effect
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GRADIO_ANALYTICS_ENABLED": "False",  # Trackio's dashboard
}


def turn_off() -> None:
    """Set the variables for this process and its children; those that are already set keep their value."""
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
