"""Imported once by the fork server of `tests.megatron.processes`, so that a rank starts in a fraction of a second."""

import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.training.training  # noqa: F401

import megatron_recover.megatron.commit  # noqa: F401
import tests.megatron.processes  # noqa: F401
