"""Layers of upstream's hybrid models from modules that need no Transformer Engine: `--spec tests.system.hybrid_spec SPEC`.

Upstream's own specs, and the last norm of a hybrid stack, are Transformer Engine's.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

_WHOLE = get_gpt_layer_local_submodules()
SPEC = ModuleSpec(
    module=HybridStack,
    params={"post_layer_norm": False},
    submodules=HybridStackSubmodules(
        attention_layer=ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=_WHOLE.input_layernorm,
                self_attention=_WHOLE.self_attention,
                self_attn_bda=_WHOLE.self_attn_bda,
            ),
        ),
        mlp_layer=ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=_WHOLE.pre_mlp_layernorm, mlp=_WHOLE.mlp, mlp_bda=_WHOLE.mlp_bda
            ),
        ),
    ),
)
