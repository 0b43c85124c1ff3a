"""The GPU that a thread works on. torch and Triton take it where a call names none; of a new thread
it is the first one."""

import torch


def use(device: torch.device) -> None:
    """Let this thread work on a device from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
