"""A function of Megatron whose code nobody has read is refused by name and place; comments and layout do not matter."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from megatron_recover.megatron.seams import bodies, seams
from tests.system.jobs import ROOT, Job, chaos_text, check, run_job, text_data

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
        (CODE.replace("return", "return\n   "), False),
    ],
)
def test_a_digest_changes_with_the_code_alone(code: str, is_same: bool, tmp_path: pathlib.Path) -> None:
    found, read = bodies.read(made(tmp_path, code)), bodies.read(made(tmp_path, CODE))
    assert (found.digest == read.digest) == is_same


def read_once(*functions: Callable[..., Any]) -> bodies.Known:
    return {"m:f": {body.digest: "".join(body.marks) for body in map(bodies.read, functions)}}


def test_an_unknown_body_is_named_with_its_place(tmp_path: pathlib.Path) -> None:
    function, known = made(tmp_path, CODE), read_once(made(tmp_path, CODE.replace("1", "2")))
    [text] = bodies.unknown(known, {"m:f": function})
    assert text.startswith(f"m:f ({function.__code__.co_filename}:1) has the body ")
    assert text.splitlines()[0].endswith(f"; read were {next(iter(known['m:f']))}")
    assert bodies.unknown(read_once(function), {"m:f": function}) == []
    assert bodies.unknown({}, {"m:f": function}) == [f"{text.partition(';')[0]}; read were none"]
    [text] = bodies.unknown(known, {"m:f": eval("lambda: 0")})  # noqa: S307
    assert "without source" in text and "\n" not in text


LONG = """def f(a):
    b = 1
    if a:
        b = g(a)
        a = 0  # a comment
    h(b)
    return a
"""


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ("h(b)\n", "h(\n        b, 2\n    )\n", ["line 6 was not read: h( b, 2 )", "in place of line 6 one statement was"]),
        ("    h(b)", "    i(b)\n    h(b)", ["line 6 was not read: i(b)"]),
        ("    h(b)\n", "", ["behind line 5 one statement was read that is missing here"]),
        ("        b = g(a)\n        a = 0  # a comment\n", "        pass\n",
         ["line 4 was not read: pass", "in place of line 4 2 statements were read that are missing here"]),
        ("    h(b)", "        h(b)", ["line 6 was not read: h(b)", "in place of line 6 one statement was"]),
        ("    return a", "\n".join(f"    i({number})" for number in range(9)),
         [*(f"line {number + 7} was not read: i({number})" for number in range(6)), "and 4 more differences"]),
    ],
)  # fmt: skip
def test_an_unknown_body_is_named_with_its_difference(
    old: str, new: str, difference: list[str], tmp_path: pathlib.Path
) -> None:
    """And the difference is that to the most similar of the bodies that were read."""
    assert old in LONG
    known = read_once(made(tmp_path, CODE), made(tmp_path, LONG))
    [text] = bodies.unknown(known, {"m:f": made(tmp_path, LONG.replace(old, new))})
    found = text.splitlines()[1:]
    assert len(found) == len(difference) and all(a.startswith(f"  {b}") for a, b in zip(found, difference, strict=True)), found


def test_a_long_statement_is_shortened(tmp_path: pathlib.Path) -> None:
    [text] = bodies.unknown(read_once(made(tmp_path, CODE)), {"m:f": made(tmp_path, CODE.replace("1", "1" * 200))})
    assert text.splitlines()[1].endswith("1 ...") and len(text.splitlines()[1]) < 140


@pytest.mark.timeout(200)
def test_a_changed_megatron_is_refused_and_trains_at_its_users_word(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change is one that does no harm, which only a reader can know."""
    import megatron.core

    installed = pathlib.Path(str(megatron.core.__file__)).parents[1]
    shutil.copytree(installed, tmp_path / "checkout" / "megatron")  # also what is compiled: only one file has changed
    changed = tmp_path / "checkout" / "megatron" / "training" / "training.py"
    text = changed.read_text()
    changed.write_text(text.replace("    args = get_args()\n", "    args = get_args()\n    assert args is not None\n"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "checkout"))
    data, job = text_data(tmp_path), Job(steps=3)
    refused = run_job(job, tmp_path / "refused", data).expect(2)
    assert f"{changed}:" in refused.output and "megatron.training.training:train_step" in refused.output
    assert "was not read: assert args is not None" in refused.output
    assert "if they do the same, add --recover-accept-unknown-megatron" in refused.output
    monkeypatch.delenv("PYTHONPATH")  # a script's own checkout is found without
    script = shutil.copy(ROOT / "scripts" / "pretrain_gpt.py", tmp_path / "checkout")
    accepting = Job(steps=3, extra=("--recover-accept-unknown-megatron",))
    outcome = run_job(
        accepting, tmp_path / "run", data, chaos=chaos_text("1 0 backward step=1"), script=pathlib.Path(script)
    ).expect()  # fmt: skip
    assert "accepted although nobody has read it: megatron.training.training:train_step" in outcome.output
    assert f"of {tmp_path / 'checkout' / 'megatron'}" in outcome.output
    verdict, report = check(outcome.run_dir)
    assert verdict == 0, report
