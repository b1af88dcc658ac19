"""flashlane as vLLM's custom attention backend: ``vllm serve MODEL --attention-backend CUSTOM``.

vLLM starts processes of its own and asks every installed package for plug-ins in each, so that nothing has to be
called: flashlane's entry point in the group ``vllm.general_plugins`` is :func:`plugin`. Where vLLM runs in one process,
:func:`register_vllm` does the same.

What was run: the backend's classes under the abstract classes and the registry of vLLM 0.33.0 as published, on a CPU
(``tools/vllm_interface.py``). What was not: a vLLM server, whose own kernels need a GPU machine with vLLM installed.
"""

from __future__ import annotations

import logging

__all__ = ["CLASS", "plugin", "register_vllm"]

CLASS = "flashlane.integrations.vllm.backend.FlashlaneBackend"
"""What vLLM imports when the backend is chosen."""
_log = logging.getLogger(__name__)


def register_vllm() -> str:
    """Make flashlane vLLM's backend ``CUSTOM`` in this process.

    Returns:
        The name that ``--attention-backend`` takes.

    Raises:
        ImportError: vLLM is not installed, or it has no such registry.
        ValueError: another package has that name already.
    """
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError("register_vllm needs vLLM with its registry of attention backends (0.33)") from error
    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != CLASS:
        raise ValueError(f"vLLM's backend CUSTOM is {custom.get_path()} already; only one package may have that name")
    register_backend(custom, CLASS)
    return custom.name


def plugin() -> None:
    """:func:`register_vllm` as vLLM calls it in each of its processes; what keeps it from it is logged."""
    try:
        register_vllm()
    except (ImportError, ValueError) as error:
        _log.debug("flashlane is not vLLM's backend CUSTOM: %s", error)
