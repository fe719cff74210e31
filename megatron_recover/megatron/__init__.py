"""The bindings to Megatron: what a training script may import.

Upstream's scripts import nothing from here.
"""

from megatron_recover.megatron.launch.script import is_writer
from megatron_recover.megatron.training import pretrain

__all__ = ["is_writer", "pretrain"]
