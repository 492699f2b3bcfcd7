"""mmrl: reinforcement fine-tuning of Qwen-VL models on verifiable visual rewards."""

__version__ = "0.2.0"
