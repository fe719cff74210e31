"""A function of Megatron whose code nobody has read is refused by name and place; comments and layout do not matter."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from megatron_recover.megatron.seams import bodies, seams
from tests.system.jobs import Job, chaos_text, check, run_job, text_data

CODE = 'def f(a):\n    """Text."""\n    # a comment\n    return g(a,\n        1)\n'


def made(folder: pathlib.Path, code: str) -> Callable[..., Any]:
    folder.mkdir(exist_ok=True)
    file = folder / f"made{len(list(folder.iterdir()))}.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.f  # type: ignore[no-any-return]


def test_every_body_of_the_installed_megatron_was_read() -> None:
    functions = bodies.relied_on(seams.load(), seams.load_anchors())
    assert bodies.unknown(bodies.load(seams.folder()), functions) == []
    assert {"megatron.training.training:train_step", "megatron.core.pipeline_parallel.schedules:forward_step"} <= {*functions}
    assert "megatron.core.distributed.finalize_model_grads:finalize_model_grads" in functions


@pytest.mark.parametrize(
    ("code", "is_same"),
    [
        ('def f(a):\n    """Other text."""\n    return g(a, 1)  # another\n', True),
        ("def f(a):\n\n  return g(\n    a, 1)\n", True),
        (CODE.replace("1", "2"), False),
        (CODE.replace("return", 'x = "Text."\n    return'), False),
    ],
)
def test_a_digest_changes_with_the_code_alone(code: str, is_same: bool, tmp_path: pathlib.Path) -> None:
    found, read = bodies.digest(made(tmp_path, code)), bodies.digest(made(tmp_path, CODE))
    assert (found == read) == is_same


def test_an_unknown_body_is_named_with_its_place(tmp_path: pathlib.Path) -> None:
    function = made(tmp_path, CODE)
    known = {"m:f": ("0123456789abcdef",)}
    [line] = bodies.unknown(known, {"m:f": function})
    assert line.startswith(f"m:f ({function.__code__.co_filename}:1) has the body ")
    assert line.endswith("; read were 0123456789abcdef")
    assert bodies.unknown({"m:f": (bodies.digest(function),)}, {"m:f": function}) == []


@pytest.mark.timeout(200)
def test_a_changed_megatron_is_refused_and_trains_at_its_users_word(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is one that does no harm, which only a reader can know."""
    import megatron.core

    installed = pathlib.Path(str(megatron.core.__file__)).parents[1]
    shutil.copytree(installed, tmp_path / "checkout" / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "checkout" / "megatron" / "training" / "training.py"
    text = changed.read_text()
    changed.write_text(text.replace("    args = get_args()\n", "    args = get_args()\n    assert args is not None\n"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "checkout"))
    data, job = text_data(tmp_path), Job(steps=3)
    refused = run_job(job, tmp_path / "refused", data).expect(2)
    assert f"{changed}:" in refused.output and "megatron.training.training:train_step" in refused.output
    assert "if they do the same, add --recover-accept-unknown-megatron" in refused.output
    accepting = Job(steps=3, extra=("--recover-accept-unknown-megatron",))
    outcome = run_job(accepting, tmp_path / "run", data, chaos=chaos_text("1 0 backward step=1")).expect()
    assert "accepted although nobody has read it: megatron.training.training:train_step" in outcome.output
    assert f"of {tmp_path / 'checkout' / 'megatron'}" in outcome.output
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report
