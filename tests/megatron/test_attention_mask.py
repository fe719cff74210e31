"""`scripts/pretrain_gpt.py` builds an attention mask exactly where the model's attention uses one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import megatron.training.argument_utils as upstream
import pytest

from scripts import pretrain_gpt

TE = "transformer_engine"


def model(impl: str = TE, variant: str | None = None, modelopt: bool = False) -> Any:
    transformer = SimpleNamespace(transformer_impl=impl, experimental_attention_variant=variant)
    return SimpleNamespace(transformer=transformer, restore_modelopt_state=modelopt)


@pytest.mark.parametrize(
    ("given", "config", "resets", "kept"),
    [
        (True, model(), False, False),
        (True, model("local"), False, True),
        (True, model(), True, True),
        (True, model(variant="dsa"), False, True),
        (True, model(modelopt=True), False, True),
        (False, model(), False, False),
        (False, model("local"), False, False),
    ],
)
def test_a_mask_is_built_where_it_is_used_and_not_where_the_user_wants_none(
    given: bool, config: Any, resets: bool, kept: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = SimpleNamespace(
        create_attention_mask_in_dataloader=given, reset_attention_mask=resets, rank=0, fim_data=False, spec=None
    )
    monkeypatch.setattr(upstream, "gpt_config_from_args", lambda args: config)
    monkeypatch.setattr(upstream, "pretrain_cfg_container_from_args", lambda args, config: args)
    pretrain_gpt.configure(args)
    assert args.create_attention_mask_in_dataloader is kept
    assert ("--no-create-attention-mask-in-dataloader is set" in capsys.readouterr().out) == (given and not kept)
