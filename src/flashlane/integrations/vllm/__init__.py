"""flashlane as vLLM's custom attention backend: ``vllm serve MODEL --attention-backend CUSTOM``.

vLLM starts processes of its own, each of which loads the plug-ins of every installed package. flashlane's entry point
in the group ``vllm.general_plugins`` is :func:`plugin`, so users call nothing. Where vLLM runs in one process,
:func:`register_vllm` does the same.

The backend's classes were tested under the abstract classes and the registry of the published vLLM 0.33.0
(``tools/vllm_interface.py``), on a CPU and on an H200. A vLLM server was not run.
"""

from __future__ import annotations

import logging

__all__ = ["CLASS", "plugin", "register_vllm"]

CLASS = "flashlane.integrations.vllm.backend.FlashlaneBackend"
"""The class that vLLM imports when the backend is selected."""
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
    """:func:`register_vllm` as vLLM calls it in each of its processes; a failure is logged at debug level."""
    try:
        register_vllm()
    except (ImportError, ValueError) as error:
        _log.debug("flashlane is not vLLM's backend CUSTOM: %s", error)
