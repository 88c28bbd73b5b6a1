"""One number for all parameters of a model, to compare them to the bit."""

from __future__ import annotations

import hashlib

import torch


def weights_digest(model: torch.nn.Module) -> str:
    """SHA-256 over names and bytes of all parameters that this rank holds."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(name.encode())
        digest.update(local.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()
