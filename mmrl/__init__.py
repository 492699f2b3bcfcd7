"""mmrl: reinforcement fine-tuning of Qwen's vision-language models on verifiable visual rewards."""

__version__ = "0.2.0"
