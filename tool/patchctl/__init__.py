"""A numbered patch series for verl and vllm-ascend: apply it, prove it, read the dumps it makes."""

__version__ = "0.1.0"
