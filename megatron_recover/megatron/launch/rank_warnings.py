"""Warns of places in a user's script that go wrong with replicas because RANK counts inside one.

The dry run shows a line for each such place, for at most `MAX_LINES` of them
(docs/how_to/what_rank_means.md). Nothing is refused.

Note [What is warned of]
    A use of RANK alone is no mistake: inside a replica it means what it means under torchrun. So a
    place is named only where a value of `_VARIABLES` decides about something outside the replica:
    - an *outward* call (`_OUTWARD`: it writes a file, opens a port, reports to a service or starts
      a process) that is for one rank, or that gets RANK in an argument;
    - samples that are chosen by RANK, and a device that is chosen by RANK;
    - WORLD_SIZE that is divided by the ranks of a node, or multiplied for a batch (`_OF_BATCHES`).
    To print and to log are no outward calls, since only the writer's output is shown. Code that
    asks for `is_writer` or a variable MEGATRON_RECOVER_* knows about replicas and is not named.

Note [Which names have such a value]
    A name has the values of the expressions that it is assigned in its function, or else in those
    around it or at module level, in any order of the lines. An attribute has those that it is
    assigned anywhere in the file. Values do not cross calls, except for parameters with a name of
    `_PARAMETERS`. A function of the user's that makes an outward call is outward itself, by its
    name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from megatron_recover.megatron.launch.own_code import own_code

MAX_LINES: Final = 20
"""Maximum of places that are shown."""
_GUIDE: Final = "docs/how_to/what_rank_means.md"

Value = Literal["rank", "size", "local rank", "local size", "job"]
"""RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, or what knows about replicas."""
_VARIABLES: Final[Mapping[str, Value]] = {
    "RANK": "rank", "WORLD_SIZE": "size", "LOCAL_RANK": "local rank", "LOCAL_WORLD_SIZE": "local size",
}  # fmt: skip
_OF_THE_JOB: Final = "MEGATRON_RECOVER_"
_FUNCTIONS: Final[Mapping[str, Value]] = {
    "get_rank": "rank", "safe_get_rank": "rank", "is_rank0": "rank", "is_last_rank": "rank", "get_data_parallel_rank": "rank",
    "get_world_size": "size", "safe_get_world_size": "size", "get_node_local_rank": "local rank", "device_count": "local size",
    "is_writer": "job",
}  # fmt: skip
"""Functions that return such a value. The rank in a group that they are given is none."""
_ARGUMENTS: Final[Mapping[str, Value]] = {"rank": "rank", "world_size": "size", "local_rank": "local rank"}
"""Attributes of Megatron's arguments."""
_PARAMETERS: Final[Mapping[str, Value]] = {**_ARGUMENTS, "global_rank": "rank"}
_KEEPING: Final = frozenset({"int", "str", "bool", "abs", "min", "max", "format", "Path", "join"})
"""Functions whose result has the values of their arguments."""
_OUTWARD: Final = frozenset({
    "write", "write_text", "write_bytes", "writelines", "mkdir", "makedirs", "touch", "unlink", "rmdir", "rename", "symlink",
    "urlretrieve", "save", "savez", "savetxt", "savefig", "save_pretrained", "dump", "to_csv", "to_json", "to_parquet",
    "export_chrome_trace", "FileHandler", "RotatingFileHandler", "SummaryWriter", "add_scalar", "start_http_server",
    "HTTPServer", "bind",
})  # fmt: skip
_WITH_CONTENT: Final = frozenset({"write", "writelines", "write_text", "write_bytes", "add_scalar"})
"""Outward calls whose arguments are what is written."""
_OUTWARD_MODULES: Final = frozenset(
    {"wandb", "mlflow", "neptune", "comet_ml", "clearml", "aim", "requests", "subprocess", "shutil", "wget"}
)
"""Modules whose functions are all outward."""
_TERMINALS: Final = ("sys.stdout.", "sys.stderr.", "tqdm.")
_SHARDING: Final = frozenset({"DistributedSampler", "split_dataset_by_node", "shard", "islice"})
_DEVICES: Final = frozenset({"set_device", "device", "cuda", "to"})
_OF_BATCHES: Final = re.compile(r"batch|\blr\b|learning_rate|gpus", re.IGNORECASE)
"""Words of a statement that multiplies WORLD_SIZE to get a number for the whole job."""
_FUNCTION: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


class _Guard(NamedTuple):
    """A test of the rank, so that what is below it is for one rank, or a test of the replica."""

    line: int
    values: frozenset[Value]


def warnings(script: Path, folders: Sequence[Path]) -> list[str]:
    """Return lines for the console about a script: one per place, and one that names the guide.

    At most `MAX_LINES` places are shown; without a place there is no line. `folders` have the
    user's own modules. Code that is nested too deeply gets one line that says so.
    """
    code = dict(own_code(script, folders))
    try:
        outward = _outward_functions(code.values())
        places = {(file, line): text for file in code for line, text in _places(code[file], outward)}
    except RecursionError:
        return [f"{_short(script)}: code is nested too deeply to be searched for uses of RANK; see {_GUIDE}"]
    if not places:
        return []
    shown = [f"{_short(file)}:{line}: {places[file, line]}" for file, line in sorted(places)[:MAX_LINES]]
    more = f"{len(places) - MAX_LINES} more such places; " if len(places) > MAX_LINES else ""
    return [*shown, f"{more}RANK and WORLD_SIZE are those of one replica: {_GUIDE}"]


def _short(file: Path) -> Path:
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


# --- Values ---------------------------------------------------------------------------------------


class _Names:
    """The values of names in one function, and outside of it (`outer`)."""

    def __init__(self, scope: ast.AST, outer: _Names | None = None) -> None:
        self._outer, self._names = outer, dict[str, frozenset[Value]]()
        self._attributes: dict[str, frozenset[Value]] = {} if outer is None else outer._attributes
        if isinstance(scope, (*_FUNCTION, ast.Lambda)):
            given = scope.args
            for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                self._names[each.arg] = frozenset(value for name, value in _PARAMETERS.items() if name == each.arg)
        inside = [*_within(scope)]
        for _ in range(2):  # the second time with values that are assigned further below
            for node in inside:
                self._assign(node)

    def _assign(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
                self._bind(target, value)
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case ast.For(target=target) | ast.AsyncFor(target=target):
                self._bind(target, None)

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple):
            several = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
            for number, each in enumerate(target.elts):
                self._bind(each, value.elts[number] if several and isinstance(value, ast.Tuple) else None)
            return
        found = frozenset[Value]() if value is None else self.of(value)
        if isinstance(target, ast.Name):
            self._names[target.id] = self._names.get(target.id, frozenset()) | found
        elif isinstance(target, ast.Attribute):
            text = ast.unparse(target)
            self._attributes[text] = self._attributes.get(text, frozenset()) | found

    def of(self, node: ast.AST) -> frozenset[Value]:
        """Return the values that an expression has."""
        match node:
            case ast.Constant() | ast.Lambda():
                return frozenset()
            case ast.Name(id=name):
                return self._names[name] if name in self._names else self._outer.of(node) if self._outer else frozenset()
            case ast.Attribute(value=owner, attr=name):
                if (text := ast.unparse(node)) in self._attributes:
                    return self._attributes[text]
                if name in _ARGUMENTS and ast.unparse(owner) in ("args", "get_args()"):
                    return frozenset({_ARGUMENTS[name]})
                return self.of(owner)
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(name))) if _name(owner) == "environ":
                return _of_variable(name)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if _reads_environment(function):
                return _of_variable(name)
            case ast.Call(func=function, args=args, keywords=keywords):
                name = _name(function)
                if name in _FUNCTIONS and not args and all(each.arg != "group" for each in keywords):
                    return frozenset({_FUNCTIONS[name]})
                return self.of_all(ast.iter_child_nodes(node)) if name in _KEEPING else frozenset()
        return self.of_all(ast.iter_child_nodes(node))

    def of_all(self, nodes: Iterable[ast.AST]) -> frozenset[Value]:
        """Return the values that any of some expressions has."""
        return frozenset[Value]().union(*(self.of(node) for node in nodes))


def _of_variable(name: str) -> frozenset[Value]:
    return frozenset({"job"}) if name.startswith(_OF_THE_JOB) else frozenset({_VARIABLES[name]} if name in _VARIABLES else ())


def _reads_environment(function: ast.expr) -> bool:
    name = _name(function)
    return name == "getenv" or name == "get" and isinstance(function, ast.Attribute) and _name(function.value) == "environ"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside a module or function, without the insides of other functions."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*_FUNCTION, ast.Lambda)):
            yield from _within(child)


# --- Outward calls --------------------------------------------------------------------------------


def _outward_functions(code: Iterable[ast.Module]) -> frozenset[str]:
    """Return the names of functions and classes of the user's that make an outward call.

    One that knows about replicas is none.
    """
    calls: dict[str, list[ast.Call]] = {}
    for node in (node for module in code for node in ast.walk(module)):
        named = {each.name: each for each in node.body if isinstance(each, _FUNCTION)} if isinstance(node, ast.ClassDef) else {}
        body = named.get("__init__") if isinstance(node, ast.ClassDef) else node if isinstance(node, _FUNCTION) else None
        if body is not None and not any(_knows_replicas(each) for each in ast.walk(body)):
            calls.setdefault(node.name, []).extend(each for each in ast.walk(body) if isinstance(each, ast.Call))
    outward: set[str] = set()
    while more := {name for name in calls.keys() - outward if any(_is_outward(call, outward) for call in calls[name])}:
        outward |= more
    return frozenset(outward)


def _knows_replicas(node: ast.AST) -> bool:
    return (isinstance(node, ast.Call) and _name(node.func) == "is_writer") or (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_OF_THE_JOB)
    )


def _is_outward(call: ast.Call, functions: Collection[str]) -> bool:
    name, text = _name(call.func), ast.unparse(call.func)
    if name == "open":
        modes = [each.value for each in call.keywords if each.arg == "mode"]
        modes += call.args[1 if isinstance(call.func, ast.Name) else 0 :][:1]  # `open(path, mode)`, `path.open(mode)`
        return any(isinstance(mode, ast.Constant) and {*"wax+"} & {*str(mode.value)} for mode in modes)
    if text.startswith(_TERMINALS):
        return False
    return name in _OUTWARD or name in functions or text.partition(".")[0] in _OUTWARD_MODULES


def _naming(call: ast.Call) -> Iterator[ast.AST]:
    """Yield the parts of an outward call that may name a file or a port.

    Left out are dictionaries, and the arguments of the calls in `_WITH_CONTENT`.
    """
    yield call.func
    if _name(call.func) not in _WITH_CONTENT:
        yield from (each for each in (*call.args, *(each.value for each in call.keywords)) if not isinstance(each, ast.Dict))


# --- Places ---------------------------------------------------------------------------------------


def _places(module: ast.Module, outward: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of each place in a module that is warned of; a line may come again."""
    names = _Names(module)
    for node in ast.walk(module):
        if isinstance(node, _FUNCTION):
            _Names(node, names)  # for the attributes, which a method further above may use
    return _Reader(outward).body(module.body, names, None)


class _Reader:
    """Walks through code with the values of its names and the test of the rank that it is below."""

    def __init__(self, outward: frozenset[str]) -> None:
        self._outward = outward

    def body(self, statements: Sequence[ast.stmt], names: _Names, guard: _Guard | None) -> Iterator[tuple[int, str]]:
        for statement in statements:
            below = guard
            if isinstance(statement, ast.If):
                below = _guard(statement.test, names, guard)
            yield from self._inside(statement, names, guard, below)
            if below is not guard and isinstance(statement, ast.If) and _leaves(statement.body):
                guard = below  # the rest is for the ranks that have not left

    def _inside(
        self, node: ast.AST, names: _Names, guard: _Guard | None, below: _Guard | None
    ) -> Iterator[tuple[int, str]]:  # fmt: skip
        """Yield the places inside a statement, handler or case; its bodies are below `below`."""
        if isinstance(node, ast.stmt) and (place := self._judge(node, names, guard)) is not None:
            yield place
        if isinstance(node, (*_FUNCTION, ast.Lambda)):
            names, guard, below = _Names(node, names), None, None
        for _, child in ast.iter_fields(node):
            children = child if isinstance(child, list) else [child]
            if children and isinstance(children[0], ast.stmt):
                yield from self.body(children, names, below)
                continue
            for each in children:
                if isinstance(each, ast.ExceptHandler | ast.match_case):
                    yield from self._inside(each, names, guard, below)
                elif isinstance(each, ast.AST):
                    yield from self._expression(each, names, guard)

    def _expression(self, node: ast.AST, names: _Names, guard: _Guard | None) -> Iterator[tuple[int, str]]:
        if (place := self._judge(node, names, guard)) is not None:
            yield place
        if isinstance(node, ast.IfExp):
            guard = _guard(node.test, names, guard)
        elif isinstance(node, ast.BoolOp):
            guard = _guard(node, names, guard)
        elif isinstance(node, ast.Lambda):
            names, guard = _Names(node, names), None
        for child in ast.iter_child_nodes(node):
            yield from self._expression(child, names, guard)

    def _judge(self, node: ast.AST, names: _Names, guard: _Guard | None) -> tuple[int, str] | None:
        """Return line and text if a statement or expression is a place that is warned of."""
        match node:
            case ast.Call():
                return self._judge_call(node, names, guard)
            case ast.Subscript(slice=ast.Slice() as part) if "rank" in names.of(part):
                return node.lineno, _SAMPLES
            case ast.Compare(left=ast.BinOp(op=ast.Mod(), right=right)) if "size" in names.of(right):
                return (node.lineno, _SAMPLES) if "rank" in names.of(node) else None
            case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right) if "local size" in names.of(right):
                return (node.lineno, _NODES) if "size" in names.of(left) else None
            case ast.Assign(value=ast.BinOp(op=ast.Mult()) as value) | ast.AugAssign(op=ast.Mult(), value=value):
                is_of_the_job = "size" in (found := names.of(value)) and not {"rank", "job"} & found
                return (node.lineno, _SIZE) if is_of_the_job and _OF_BATCHES.search(ast.unparse(node)) else None
        return None

    def _judge_call(self, call: ast.Call, names: _Names, guard: _Guard | None) -> tuple[int, str] | None:
        name, text = _name(call.func), ast.unparse(call.func)
        found = names.of_all((*call.args, *call.keywords, call.func))
        if "job" in found | (guard.values if guard else frozenset()):
            return None
        if name == "DistributedSampler" or (name in _SHARDING and "rank" in found):
            return call.lineno, _SAMPLES
        if name in _DEVICES and "rank" in names.of_all((*call.args, *call.keywords)):
            return call.lineno, f"`{text}` {_DEVICE}"
        if _is_outward(call, ()) and "rank" in names.of_all(_naming(call)):
            return call.lineno, f"`{text}` {_NAMED}"
        if guard is not None and _is_outward(call, self._outward):
            return guard.line, f"`{text}` {_ONE_OF_REPLICA if 'rank' in guard.values else _ONE_OF_NODE}"
        return None


_ONE_OF_REPLICA = "is for one rank here, and every replica has that rank; ask is_writer() of megatron_recover.megatron as well"
_ONE_OF_NODE = (
    "is for one rank of the node here, and at a barrier the other replicas do not wait for it; do it before the job, or under "
    "a lock"
)
_NAMED = "gets RANK, and every replica has that RANK; use MEGATRON_RECOVER_GLOBAL_RANK"
_DEVICE = "chooses the device by RANK, and every replica has that RANK; use LOCAL_RANK"
_SAMPLES = "samples are chosen by RANK, which counts inside a replica; leave it to Megatron's loader, or use MEGATRON_RECOVER_*"
_NODES = "WORLD_SIZE counts the ranks of one replica, so this is not the number of nodes; use GROUP_WORLD_SIZE"
_SIZE = "WORLD_SIZE counts the ranks of one replica; multiply by MEGATRON_RECOVER_REPLICAS for those of the job"


def _guard(test: ast.expr, names: _Names, guard: _Guard | None) -> _Guard | None:
    """Return the guard below a test, `guard` being that above it."""
    found = names.of(test)
    knows_replicas = guard is not None and "job" in guard.values
    return _Guard(test.lineno, found) if {"rank", "local rank", "job"} & found and not knows_replicas else guard


def _leaves(body: Sequence[ast.stmt]) -> bool:
    last = body[-1]
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        return _name(last.value.func) in ("exit", "_exit")
    return isinstance(last, ast.Return | ast.Continue | ast.Break | ast.Raise)
